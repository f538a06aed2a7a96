#!/usr/bin/env bash
# Trains on several machines without a scheduler: run the same line on each of them.
#
#   usage: NNODES=2 RDZV=host1:29400 jobs/cluster/train_torchrun.sh CONFIG [key=value ...]
#
# RDZV: one of the machines, by a name that all of them know, and a free port on it. NPROC: ranks on this machine, default
# its GPUs. Ctrl-C or SIGTERM on any of them ends all, after the step at hand and a checkpoint; the same line goes on there.
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: NNODES=2 RDZV=host1:29400 jobs/cluster/train_torchrun.sh CONFIG [key=value ...]" >&2; exit 2; }
: "${NNODES:=1}"
if [ "$NNODES" -gt 1 ] && [ -z "${RDZV:-}" ]; then echo "error: NNODES=$NNODES needs RDZV=HOST:PORT" >&2; exit 2; fi
config=$1
shift
: "${NPROC:=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)}"
[ "$NPROC" -ge 1 ] || NPROC=1
exec omniloom train run "$config" --nproc "$NPROC" --nnodes "$NNODES" ${RDZV:+--rdzv "$RDZV"} "$@"
