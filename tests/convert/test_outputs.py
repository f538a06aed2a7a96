"""Outputs that cannot be, are there already, or were begun otherwise: found before any work, in a dry run, too."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from convert import write
from convert.directions import omni_to_text_conversion
from convert.job import Options, run
from convert.trainer import dcp_to_hf_conversion, hf_to_dcp_conversion
from jobs.cli import main
from tests.convert.dcp_factory import save
from tests.convert.models import make_text, read_weights, rewrite_weights


def omniloom(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["convert", *map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def a_link_to_a_directory(folder: Path) -> Path:
    (folder / "elsewhere").mkdir()
    (folder / "out").symlink_to(folder / "elsewhere")
    return folder / "out"


def a_link_to_a_full_directory(folder: Path) -> Path:
    a_link_to_a_directory(folder)
    (folder / "elsewhere" / "mine").write_text("x")
    return folder / "out"


def a_dangling_link(folder: Path) -> Path:
    (folder / "out").symlink_to(folder / "nowhere")
    return folder / "out"


def a_file(folder: Path) -> Path:
    (folder / "out").write_text("x")
    return folder / "out"


def below_a_file(folder: Path) -> Path:
    return a_file(folder) / "model"


def a_full_directory(folder: Path) -> Path:
    (folder / "out").mkdir()
    (folder / "out" / "mine").write_text("x")
    return folder / "out"


def a_partial_of_somebody_else(folder: Path) -> Path:
    (folder / "out.partial").mkdir()
    (folder / "out.partial" / "mine").write_text("x")
    return folder / "out"


def a_partial_that_is_a_file(folder: Path) -> Path:
    (folder / "out.partial").write_text("x")
    return folder / "out"


def a_partial_that_is_a_link(folder: Path) -> Path:
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "mine").write_text("x")
    (folder / "out.partial").symlink_to(folder / "elsewhere")
    return folder / "out"


def a_partial_with_a_damaged_journal(folder: Path) -> Path:
    a_partial_of_somebody_else(folder)
    (folder / "out.partial" / "journal.jsonl").write_text('[1]\n{"file": 3}\n')
    return folder / "out"


def a_name_that_is_too_long(folder: Path) -> Path:
    return folder / ("x" * 252)


REFUSED: list[Callable[[Path], Path]] = [
    a_link_to_a_directory, a_link_to_a_full_directory, a_dangling_link, a_file, below_a_file, a_full_directory,
    a_partial_of_somebody_else, a_partial_that_is_a_file, a_partial_that_is_a_link, a_partial_with_a_damaged_journal,
    a_name_that_is_too_long,
    lambda folder: Path("."), lambda folder: Path(".."), lambda folder: Path("/"), lambda folder: folder / "x" / "..",
]  # fmt: skip


def tree(folder: Path) -> dict[str, bytes | str]:
    return {
        str(path): os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_refused_before_any_work(
    omni: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    output = make(tmp_path)
    before = tree(tmp_path)
    for option in ([], ["--dry-run"]):
        assert omniloom("omni-to-text", omni, output, *option) == 2
        message = capsys.readouterr().err
        assert message.startswith("error: ") and "Errno" not in message and "fault of omniloom" not in message
    assert tree(tmp_path) == before


def test_an_output_in_the_working_directory(omni: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert omniloom("omni-to-text", omni, "out") == 0
    assert omniloom("omni-to-text", omni, "./out/", "--dry-run") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model.safetensors", "omniloom_conversion.json", "chat_template.jinja"]
)
@pytest.mark.parametrize("how", ["deleted", "changed", "cut"])
def test_a_finished_output_that_lost_a_file(
    omni: Path, tmp_path: Path, name: str, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "text"
    assert omniloom("omni-to-text", omni, output) == 0
    path = output / name
    if how == "deleted":
        path.unlink()
    elif how == "cut":
        os.truncate(path, path.stat().st_size // 2)
    elif name.endswith(".json"):
        path.write_bytes(path.read_bytes().replace(b"1", b"2").replace(b"{", b"{ ", 1)[: path.stat().st_size])
    else:
        with path.open("r+b") as file:  # in place, at the same size
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
    for option in ([], ["--dry-run"]):
        capsys.readouterr()
        assert omniloom("omni-to-text", omni, output, *option) == 2
        said = capsys.readouterr()
        assert name in said.err and "nothing to do" not in said.out


def test_a_finished_output_behind_a_link(omni: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert omniloom("omni-to-text", omni, tmp_path / "text") == 0
    (tmp_path / "link").symlink_to(tmp_path / "text")
    assert omniloom("omni-to-text", omni, tmp_path / "link") == 0
    assert "nothing to do" in capsys.readouterr().out


def test_other_options_after_a_stop(
    omni: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message says how it was begun, so that the run can be gone on with or thrown away."""
    real, left = write.write_all, [200_000]

    def full(descriptor: int, data: memoryview, offset: int) -> None:
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor, data, offset)

    monkeypatch.setattr(write, "write_all", full)
    assert omniloom("omni-to-text", omni, tmp_path / "text", "--shard-size", "60kB") == 5
    monkeypatch.undo()
    capsys.readouterr()
    for option in ([], ["--dry-run"]):
        assert omniloom("omni-to-text", omni, tmp_path / "text", "--shard-size", "70kB", *option) == 2
        message = capsys.readouterr().err
        assert "60000" in message and "70000" in message and "--no-resume" in message
    assert omniloom("omni-to-text", omni, tmp_path / "text", "--shard-size", "70kB", "--no-resume", "--dry-run") == 0
    assert omniloom("omni-to-text", omni, tmp_path / "text", "--shard-size", "60kB") == 0


@pytest.mark.parametrize(
    ("number", "code"), [(errno.EFBIG, 1), (errno.ENOSPC, 5), (errno.EDQUOT, 5), (errno.EIO, 1), (errno.EROFS, 1)]
)
def test_errors_of_the_system_are_sentences(
    omni: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    number: int, code: int,
) -> None:  # fmt: skip
    def fail(descriptor: int, data: memoryview, offset: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(write, "write_all", fail)
    assert omniloom("omni-to-text", omni, tmp_path / "text") == code
    message = capsys.readouterr().err
    assert "Errno" not in message and os.strerror(number).lower() in message.lower() and "text.partial" in message
    assert list(tmp_path.iterdir()) == ([tmp_path / "text.partial"] if code == 5 else [])


def test_a_file_larger_than_the_system_allows(omni: Path, tmp_path: Path) -> None:
    """`ulimit -f`, in a process of its own."""
    import subprocess  # noqa: PLC0415 - only this case needs it
    import sys  # noqa: PLC0415

    command = f"ulimit -f 100; exec {sys.executable} -m jobs.cli convert omni-to-text {omni} {tmp_path / 'text'}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=Path.cwd(), check=False)
    assert done.returncode == 1
    assert "file too large" in done.stderr.lower() and "Errno" not in done.stderr and "--shard-size" in done.stderr
    assert not list(tmp_path.iterdir())


def test_any_fault_leaves_nothing(omni: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int, data: memoryview, offset: int) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(write, "write_all", fail)
    with pytest.raises(ZeroDivisionError):
        run(omni_to_text_conversion(omni), tmp_path / "text", Options(), lambda count: None)
    assert not list(tmp_path.iterdir())


# --- what is finished of one source is not that of another


def test_a_replaced_training_checkpoint_is_another_one(tmp_path: Path) -> None:
    """Same names, shapes and sizes, other values: by torch, and by hf-to-dcp."""
    base = make_text(tmp_path / "hf")
    weights = read_weights(base)
    outcomes = []
    for turn in range(2):
        rewrite_weights(base, {name: tensor + turn for name, tensor in weights.items()})
        shutil.rmtree(tmp_path / "dcp", ignore_errors=True)
        run(hf_to_dcp_conversion(base), tmp_path / "dcp", Options(workers=1), lambda count: None)
        data = next((tmp_path / "dcp").glob("*.distcp"))
        outcomes.append((dcp_to_hf_conversion(tmp_path / "dcp", base).reader.fingerprint, data.stat().st_size))
        os.utime(data, ns=(0, 0))  # as a copy with its times would be
        outcomes.append((dcp_to_hf_conversion(tmp_path / "dcp", base).reader.fingerprint, data.stat().st_size))
    assert len(set(outcomes)) == 4 and len({size for _, size in outcomes}) == 1


def test_data_that_changed_under_the_same_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = make_text(tmp_path / "hf")
    state = {"model." + name: tensor for name, tensor in read_weights(base).items() if ".experts." not in name}
    for layer in range(2):
        state[f"model.model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.randn(4, 48, 32)
        state[f"model.model.layers.{layer}.mlp.experts.down_proj"] = torch.randn(4, 32, 24)
    save(tmp_path / "one", state)
    save(tmp_path / "two", {name: tensor + 1 for name, tensor in state.items()})
    assert omniloom("dcp-to-hf", tmp_path / "one", tmp_path / "out", "--base", base) == 0
    for path in (tmp_path / "two").glob("*.distcp"):
        shutil.copyfile(path, tmp_path / "one" / path.name)
    assert omniloom("dcp-to-hf", tmp_path / "one", tmp_path / "out", "--base", base) == 2
    assert "not the result of this conversion" in capsys.readouterr().err


def test_the_record_names_every_file(omni: Path, tmp_path: Path) -> None:
    run(omni_to_text_conversion(omni), tmp_path / "text", Options(), lambda count: None)
    record = json.loads((tmp_path / "text" / "omniloom_conversion.json").read_text())
    names = {path.name for path in (tmp_path / "text").iterdir()} - {"omniloom_conversion.json"}
    assert record["files"].keys() | record["small_files"].keys() == names
