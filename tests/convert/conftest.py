from __future__ import annotations

from pathlib import Path

import pytest

from tests.convert.models import make_omni


@pytest.fixture(scope="session")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny whole Qwen3-Omni, float32, one file. Do not write into it."""
    return make_omni(tmp_path_factory.mktemp("omni") / "Qwen3-Omni-tiny")
