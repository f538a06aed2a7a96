"""Runs a job over fake media as a process of its own: python -m tests.pack.job_driver CONFIG.json"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pack.config import PackConfig
from pack.job import run_job
from schemas.errors import OmniloomError
from tests.pack.job_fakes import MEDIA


def main() -> int:
    config = PackConfig.model_validate(json.loads(Path(sys.argv[1]).read_text()))
    try:
        done, _ = run_job(config, MEDIA)
    except OmniloomError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    totals = done.card.totals
    print(json.dumps([totals.rows_in, totals.rows_packed, totals.rejected, done.nothing_to_do]))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
