from __future__ import annotations

from pathlib import Path

import pytest

from schemas.errors import IncompleteSourceError, OmniloomError
from schemas.fault_places import placed, placed_text
from train.config import OmniConfig

TEXT = """model:
  model_path: nowhere
data:
  sources:
    - {path: packed}
    - path: other
train:
  accelerator: {ep_size: 3}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize(
    ("line", "at"),
    [
        ("model.model_path: nowhere does not exist", "{file}:2:15: "),
        ("data.sources.1: other is no dataset", "{file}:6:7: "),
        ("data.sources.0.path: is a file", "{file}:5:14: "),
        ("train.accelerator: 2 ranks are no multiple", "{file}:8:16: "),
        ("train.accelerator.ep_size 3 does not divide 8", "{file}:8:26: "),
        ("train.checkpoint.hf_base: is not there", "{file}:8:3: "),  # not given: the section around it
        ("train.seed: of the command line", "override train.seed=7: "),
        ("model.pt: no such file", ""),
        ("torch.cuda: no key of this file", ""),
        ("a sentence about model.model_path: is left alone", ""),
        ("packed/index.json: is left alone", ""),
        ("", ""),
    ],
)
def test_a_line_that_begins_with_a_key_gets_its_place(line: str, at: str, file: Path) -> None:
    assert placed_text(line, file, ["--train.seed", "7"], OmniConfig) == at.format(file=file) + line


def test_errors_keep_their_kind_and_each_line_has_a_place(file: Path) -> None:
    with pytest.raises(IncompleteSourceError) as told, placed(file, [], OmniConfig):
        raise IncompleteSourceError("model.model_path: a\ndata.sources.0: b")
    assert str(told.value) == f"{file}:2:15: model.model_path: a\n{file}:5:7: data.sources.0: b"
    with pytest.raises(ValueError, match=r"^model\.model_path: a fault of ours$"), placed(file, [], OmniConfig):
        raise ValueError("model.model_path: a fault of ours")


def test_a_file_that_is_gone_meanwhile_hides_no_fault(tmp_path: Path) -> None:
    with pytest.raises(OmniloomError, match=r"^model\.model_path: a$"), placed(tmp_path / "gone.yaml", [], OmniConfig):
        raise OmniloomError("model.model_path: a")
