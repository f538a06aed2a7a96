"""What all tests share: a local S3 server, and errors of one line."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from jobs.cli import TRACEBACK_VARIABLE

# before torch is imported, and for child processes, too: the models of tests are tiny, and threads that wait for one
# another on a machine that has other work take several times as long as one
os.environ.setdefault("OMP_NUM_THREADS", "1")
if not Path("/dev/nvidiactl").exists():  # before triton is imported: kernels run under its interpreter without a GPU
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a GPU say so and who must run them."""
    if Path("/dev/nvidiactl").exists():
        return
    why = pytest.mark.skip(reason="needs a CUDA device; whoever has one runs `pytest -m gpu`")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(why)


@pytest.fixture(scope="module", autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    """A training in the test's own process may start one of a single rank; the next file must not find it."""
    yield
    distributed = sys.modules.get("torch.distributed")  # pack's tests never import it
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def _one_line_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets this variable for its child processes; the next test must not find it."""
    monkeypatch.setenv(TRACEBACK_VARIABLE, "0")


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The URL of an empty bucket; credentials and endpoint stand in the environment, for child processes, too."""
    from moto.server import ThreadedMotoServer  # noqa: PLC0415  # machines that run GPU tests only do not have it

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # else every request is in the report of a failure
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    values = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        fsspec.filesystem("s3").mkdir("bucket")
        yield "s3://bucket"
    server.stop()
