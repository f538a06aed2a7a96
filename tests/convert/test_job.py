"""A conversion's life: shards, resume, kills, full disks, and what is left behind."""

from __future__ import annotations

import errno
import filecmp
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from convert import write
from convert.directions import omni_to_vl_conversion, vl_to_omni_conversion
from convert.job import Conversion, Options, output_of, run
from convert.output import OutputDirectory, finished_files
from convert.safetensors_io import SafetensorsReader
from schemas.errors import ConfigError, ResumableError, VerificationError
from tests.convert.models import make_omni, read_weights

SMALL = Options(workers=2, shard_bytes=60_000)


def convert(conversion: Conversion, output: Path, options: Options = SMALL) -> None:
    run(conversion, output, options, lambda count: None)


def same_directories(one: Path, other: Path) -> bool:
    names = sorted(path.name for path in one.iterdir())
    return names == sorted(path.name for path in other.iterdir()) and all(
        filecmp.cmp(one / name, other / name, shallow=False) for name in names
    )


@pytest.fixture(scope="module")
def finished(omni: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("finished") / "vl"
    convert(omni_to_vl_conversion(omni), output)
    return output


def test_shards_have_hub_names_and_an_index(omni: Path, finished: Path) -> None:
    files = sorted(path.name for path in finished.glob("*.safetensors"))
    assert len(files) > 4
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    index = json.loads((finished / "model.safetensors.index.json").read_text())
    weights = read_weights(finished)
    assert index["weight_map"].keys() == weights.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights.values())
    for file in files:
        names = [name for name, at in index["weight_map"].items() if at == file]
        size = sum(weights[name].nbytes for name in names)
        assert size <= SMALL.shard_bytes or len(names) == 1
    assert not list(finished.glob("*.tmp"))
    assert not (finished / "journal.jsonl").exists()
    layers = [name.split(".")[3] for name in index["weight_map"] if ".layers." in name]
    assert layers == sorted(layers, key=int)  # the order of the model


def test_small_files_go_along(finished: Path, omni: Path) -> None:
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "merges.txt",
        "preprocessor_config.json",
        "chat_template.json",
    ):
        assert filecmp.cmp(finished / name, omni / name, shallow=False)
    template = json.loads((omni / "chat_template.json").read_text())["chat_template"]
    assert (finished / "chat_template.jinja").read_text() == template
    assert not (finished / "README.md").exists()


def test_finished_output_is_not_made_again(omni: Path, finished: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in finished.iterdir()}
    result = run(omni_to_vl_conversion(omni), finished, SMALL, lambda count: None)
    assert result.done_before
    assert result.bytes_read == 0
    assert {path.name: path.stat().st_mtime_ns for path in finished.iterdir()} == before


def test_killed_after_the_directory_took_its_name(omni: Path, tmp_path: Path) -> None:
    convert(omni_to_vl_conversion(omni), tmp_path / "vl")
    (tmp_path / "vl" / "journal.jsonl").write_text("{}\n")
    assert run(omni_to_vl_conversion(omni), tmp_path / "vl", SMALL, lambda count: None).done_before
    assert not (tmp_path / "vl" / "journal.jsonl").exists()


def test_other_output_is_not_overwritten(omni: Path, finished: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exists and is not the result of this conversion"):
        convert(omni_to_vl_conversion(omni), finished, Options(shard_bytes=70_000))
    (tmp_path / "out").mkdir()
    convert(omni_to_vl_conversion(omni), tmp_path / "out")  # an empty directory is no obstacle
    (tmp_path / "out" / "model-00001-of-00009.safetensors").unlink(missing_ok=True)
    next((tmp_path / "out").glob("*.safetensors")).unlink()
    with pytest.raises(ConfigError, match="exists and is not"):
        convert(omni_to_vl_conversion(omni), tmp_path / "out")


class StopAfter(BaseException):
    pass


def stop_after(count: int):  # type: ignore[no-untyped-def]
    """A progress function that ends the run after so many calls."""
    calls = [0]

    def progress(_bytes: int) -> None:
        calls[0] += 1
        if calls[0] > count:
            raise StopAfter

    return progress


@pytest.mark.parametrize("count", [0, 1, 12, 40])
def test_stopped_run_goes_on(omni: Path, finished: Path, tmp_path: Path, count: int) -> None:
    output, options = tmp_path / "vl", Options(workers=1, shard_bytes=60_000)
    with pytest.raises(StopAfter):
        run(omni_to_vl_conversion(omni), output, options, stop_after(count))
    assert not output.exists()
    done = finished_files(output)
    stamps = {name: (tmp_path / "vl.partial" / name).stat().st_ino for name in done}
    result = run(omni_to_vl_conversion(omni), output, options, lambda count: None)
    assert {name: (output / name).stat().st_ino for name in done} == stamps
    sizes = output_of(omni_to_vl_conversion(omni), options).sizes
    assert result.bytes_written == sum(size for name, size in sizes.items() if name not in done)
    assert len(done) > 0 or count < 40
    assert same_directories(output, finished)


def test_partial_of_another_conversion_is_kept(omni: Path, tmp_path: Path) -> None:
    with pytest.raises(StopAfter):
        run(omni_to_vl_conversion(omni), tmp_path / "vl", SMALL, stop_after(20))
    with pytest.raises(ConfigError, match="unfinished conversion of other inputs"):
        convert(omni_to_vl_conversion(omni, experts="v5"), tmp_path / "vl")
    options = Options(workers=2, resume=False, shard_bytes=60_000)
    convert(omni_to_vl_conversion(omni, experts="v5"), tmp_path / "vl", options)
    assert read_weights(tmp_path / "vl")["model.language_model.layers.0.mlp.experts.down_proj"].shape == (8, 32, 24)


def test_journal_cut_in_the_middle_of_a_line(omni: Path, finished: Path, tmp_path: Path) -> None:
    with pytest.raises(StopAfter):
        run(omni_to_vl_conversion(omni), tmp_path / "vl", SMALL, stop_after(60))
    journal = tmp_path / "vl.partial" / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-7])
    convert(omni_to_vl_conversion(omni), tmp_path / "vl")
    assert same_directories(tmp_path / "vl", finished)


def test_two_processes_cannot_write_one_output(omni: Path, tmp_path: Path) -> None:
    other = OutputDirectory(tmp_path / "vl", "x")
    other.open(True)
    with pytest.raises(ConfigError, match="another process is writing"):
        convert(omni_to_vl_conversion(omni), tmp_path / "vl")
    other.close()


def test_failed_verification_leaves_nothing(omni: Path, tmp_path: Path) -> None:
    def verify(folder: Path, conversion: Conversion, progress) -> dict:  # type: ignore[no-untyped-def]
        assert SafetensorsReader(folder).tensors.keys() == {recipe.target for recipe in conversion.recipes}
        raise VerificationError("no")

    with pytest.raises(VerificationError):
        run(omni_to_vl_conversion(omni), tmp_path / "vl", SMALL, lambda count: None, verify)
    assert not list(tmp_path.iterdir())


def test_full_disk_can_be_resumed(omni: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, left = write.write_all, [300_000]

    def full(descriptor: int, data: memoryview, offset: int) -> None:
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor, data, offset)

    monkeypatch.setattr(write, "write_all", full)
    with pytest.raises(ResumableError, match="no space left"):
        convert(omni_to_vl_conversion(omni), tmp_path / "vl")
    monkeypatch.undo()
    assert finished_files(tmp_path / "vl")
    convert(omni_to_vl_conversion(omni), tmp_path / "vl")
    assert same_directories(tmp_path / "vl", finished)


def test_base_tensors_are_copied_without_the_kernels_help(
    omni: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EXDEV, "other file system")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    convert(vl_to_omni_conversion(finished, omni), tmp_path / "omni")
    assert filecmp.cmp(tmp_path / "omni" / "model.safetensors", omni / "model.safetensors", shallow=False)


def test_threads_do_not_change_a_byte(omni: Path, finished: Path, tmp_path: Path) -> None:
    for workers in (1, 5):
        convert(omni_to_vl_conversion(omni), tmp_path / str(workers), Options(workers=workers, shard_bytes=60_000))
        assert same_directories(tmp_path / str(workers), finished)


CHILD = """
import sys, time
from pathlib import Path
from convert.directions import omni_to_vl_conversion
from convert.job import Options, run
def slowly(count):
    time.sleep(0.005)
run(omni_to_vl_conversion(Path(sys.argv[1])), Path(sys.argv[2]), Options(workers=2, shard_bytes=100_000), slowly)
"""


def weight_files(folder: Path) -> dict[str, int]:
    """File -> its inode: one that is made again is another."""
    return {path.name: path.stat().st_ino for path in folder.glob("*.safetensors")}


def test_kill_at_any_moment_then_run_again(tmp_path: Path) -> None:
    """SIGKILL around the end of a file, at random offsets, until the last run gets through."""
    source = make_omni(tmp_path / "omni", layers=4)
    straight, output, partial = tmp_path / "straight", tmp_path / "vl", tmp_path / "vl.partial"
    convert(omni_to_vl_conversion(source), straight, Options(workers=2, shard_bytes=100_000))
    assert len(weight_files(straight)) == 7
    chance = random.Random(5)
    for files in (0, 1, 3, 5):
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(source), str(output)], cwd=Path.cwd())
        before = weight_files(partial) if partial.exists() else {}
        while child.poll() is None and len(list(partial.glob("*.safetensors*"))) <= files:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.03))
        child.kill()
        child.wait()
        after = weight_files(output if output.exists() else partial)
        assert {name: after[name] for name in before} == before  # none was made again
        assert not output.exists() or same_directories(output, straight)
    before = weight_files(partial)
    assert len(before) >= 3
    convert(omni_to_vl_conversion(source), output, Options(workers=2, shard_bytes=100_000))
    after = weight_files(output)
    assert {name: after[name] for name in before} == before
    assert same_directories(output, straight)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_index_of_a_base_stays_as_it_is(omni: Path, finished: Path, tmp_path: Path, dtype: torch.dtype | None) -> None:
    """Its order, what else stands in it; only the size follows the dtypes."""
    base = make_omni(tmp_path / "base", shards=3)
    path = base / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"] = {"total_parameters": 7, **index["metadata"], "note": "x"}
    path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    convert(vl_to_omni_conversion(finished, base, dtype), tmp_path / "out")
    after = (tmp_path / "out" / "model.safetensors.index.json").read_bytes()
    assert (after == path.read_bytes()) == (dtype is None)
    made = json.loads(after)
    assert list(made["weight_map"].items()) == sorted(index["weight_map"].items())
    size = sum(tensor.nbytes for tensor in read_weights(tmp_path / "out").values())
    assert made["metadata"] == {"total_parameters": 7, "total_size": size, "note": "x"}
