"""Operations and models do not know whether they are parallel."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TRAIN = Path(__file__).parents[3] / "train"
FORBIDDEN = ("torch.distributed", "train.mesh", "train.parallel", "train.data")


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("folder", ["ops", "models"])
def test_nothing_parallel_is_imported(folder: str) -> None:
    files = sorted((TRAIN / folder).rglob("*.py"))
    assert files
    found = [f"{path.name}: {name}" for path in files for name in imported(path) if f"{name}.".startswith(FORBIDDEN)]
    assert found == []
