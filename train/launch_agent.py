"""torchrun without its own report of a failure: the ranks and the launcher say what happened.

Takes torchrun's arguments; exit code 1 when a rank failed, 5 when a signal ended them before they watched for it. Ends
with its launcher, also when that was killed.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

from train.launch import LAUNCHER_VARIABLE, SIGNALS, STOPPED, kill_tree

_POLL_S = 0.5


def run() -> int:
    """Runs torchrun to its end."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    threading.Thread(
        target=_watch, args=(int(os.environ[LAUNCHER_VARIABLE]),), name="watch-launcher", daemon=True
    ).start()
    try:
        main(sys.argv[1:])
    except SignalException:
        return STOPPED
    except ChildFailedError as failed:
        codes = {failure.exitcode for failure in failed.failures.values()}
        return STOPPED if codes <= {-number for number in SIGNALS} else 1
    return 0


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_POLL_S)
    kill_tree(os.getpid())


if __name__ == "__main__":
    sys.exit(run())
