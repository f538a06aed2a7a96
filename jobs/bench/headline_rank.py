"""One rank of a part of the headline benchmark: `python -m jobs.bench.headline_rank RUN.json`, started by
`jobs.bench.headline`. Loader processes import this module again, so that it imports nothing slow."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

CLAIMS_FILE, STARTED = "claims.jsonl", "OMNILOOM_BENCH_STARTED"


def main(file: str) -> None:
    """Runs the function of the run's kind; claims go to a file, line by line, on rank 0."""
    import torch  # noqa: PLC0415

    from jobs.bench.claims import Claim  # noqa: PLC0415
    from jobs.bench.headline_setup import Run  # noqa: PLC0415
    from jobs.bench.headline_train import end_group, measure_phases  # noqa: PLC0415

    rank = int(os.environ.get("RANK", "0"))
    run = Run.from_json(Path(file).read_text())
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="%(message)s", stream=sys.stderr)
    lines = (Path(run.out) / CLAIMS_FILE).open("a") if rank == 0 else None

    def tell(claim: Claim) -> None:
        if lines is not None:
            lines.write(json.dumps(asdict(claim)) + "\n")
            lines.flush()

    if run.kind == "train":
        measure_phases(run, tell)
    elif run.kind == "veomni":
        from jobs.bench.headline_veomni import measure_subject  # noqa: PLC0415  # where the peer is installed

        measure_subject(run, tell)
    elif run.kind == "cold":
        from jobs.bench.headline_cold import first_step  # noqa: PLC0415

        first_step(run, float(os.environ.get(STARTED, time.time())), tell)
    else:
        raise ValueError(f"no kind {run.kind!r} of run")
    end_group()


if __name__ == "__main__":
    main(sys.argv[1])
