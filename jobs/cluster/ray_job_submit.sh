#!/usr/bin/env bash
# Runs a packing job on a Ray cluster that is up, and follows its output.
#
#   usage: RAY_ADDRESS=http://HEAD:8265 jobs/cluster/ray_job_submit.sh CONFIG [key=value ...]
#
# omniloom must be installed on every node (jobs/cluster/Dockerfile), and every node must reach the manifest, the media and
# the output under the paths of CONFIG: a shared file system or an object store. Only CONFIG is uploaded, and the files in
# OMNILOOM_FILES (space-separated), such as a module that pack.imports names. Ends with 0, or with 1 for every failure;
# `omniloom pack status OUTPUT` says more. Run it again to resume.
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }
[ -n "${RAY_ADDRESS:-}" ] || { echo "error: set RAY_ADDRESS to the cluster's job address, e.g. http://head:8265" >&2; exit 2; }
[ -f "$1" ] || { echo "error: $1 does not exist" >&2; exit 2; }
config=$1
shift

upload=$(mktemp -d)
trap 'rm -rf "$upload"' EXIT
read -r -a files <<< "${OMNILOOM_FILES:-}"
cp "$config" "${files[@]}" "$upload"

ray job submit --address "$RAY_ADDRESS" --working-dir "$upload" \
    --runtime-env-json '{"env_vars": {"PYTHONPATH": ".", "RAY_USAGE_STATS_ENABLED": "0"}}' \
    -- omniloom pack run "$(basename "$config")" pack.executor.kind=ray "$@"
