"""verify finds what is wrong with an output, and says what may be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from convert.compare import Counterpart, compare
from convert.safetensors_io import SafetensorsReader
from convert.verify import Verification, verify
from convert.verify_table import kind_of, table
from jobs.cli import main
from schemas.errors import ConfigError, VerificationError
from tests.convert.memory import MemoryReader
from tests.convert.models import edit_config, read_weights, rewrite_weights

BASE = Path(__file__).parent / "megatron" / "tp1" / "hf_ref"
Q, NORM, HEAD = "model.layers.1.self_attn.q_proj.weight", "model.layers.2.input_layernorm.weight", "lm_head.weight"


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """The base with every weight moved a little, as training does."""
    folder = Path(shutil.copytree(BASE, tmp_path / "output"))
    generator = torch.Generator().manual_seed(0)
    weights = read_weights(folder)
    moved = {name: t + 0.01 * t.std() * torch.randn(t.shape, generator=generator) for name, t in weights.items()}
    rewrite_weights(folder, moved)
    return folder


def change(folder: Path, name: str, value: torch.Tensor | None) -> None:
    weights = read_weights(folder)
    if value is None:
        del weights[name]
    else:
        weights[name] = value
    rewrite_weights(folder, weights)


def faults(result: Verification) -> str:
    return "\n".join(result.faults)


def test_numbers_are_those_of_float64(output: Path) -> None:
    result = verify(output, BASE)
    assert result.faults == [] and result.warnings == []
    ours, theirs = read_weights(output), read_weights(BASE)
    assert [tensor.name for tensor in result.tensors] == list(SafetensorsReader(output).tensors)
    for tensor in result.tensors:
        x, y = ours[tensor.name].double().flatten(), theirs[tensor.name].double().flatten()
        assert tensor.cosine == pytest.approx(float(x @ y / x.norm() / y.norm()), abs=1e-6)
        assert tensor.relative == pytest.approx(float(x.norm() / y.norm()), abs=1e-6)
        assert tensor.max_difference == pytest.approx(float((x - y).abs().max()), rel=1e-5)
        assert not tensor.unchanged and not tensor.zero


def test_head_groups_are_compared_each_alone(output: Path) -> None:
    """Two groups of query heads changed places: the whole tensor still looks half right, its groups do not."""
    weights = read_weights(output)[Q]  # [8 heads * 8, 32] in 4 groups of 16 rows
    swapped = torch.cat([weights[16:32], weights[0:16], weights[32:]])
    change(output, Q, swapped)
    result = verify(output, BASE)
    (found,) = (tensor for tensor in result.tensors if tensor.name == Q)
    base = read_weights(BASE)[Q]
    wanted = [
        float(torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0))
        for a, b in zip(swapped.split(16), base.split(16), strict=True)
    ]
    assert found.groups == pytest.approx(wanted, abs=1e-5)
    assert found.groups[0] < 0.5 < found.groups[2]
    assert any(Q in warning for warning in result.warnings) and result.faults == []


def test_missing_and_surplus_names(output: Path) -> None:
    change(output, NORM, None)
    change(output, "model.layers.9.input_layernorm.weight", torch.ones(32))
    text = faults(verify(output, BASE))
    assert f"1 tensors are missing: {NORM}" in text
    assert "1 tensors do not belong to the model: model.layers.9.input_layernorm.weight" in text


def test_shapes(output: Path) -> None:
    change(output, HEAD, torch.randn(99, 32))
    result = verify(output, BASE)
    assert HEAD in faults(result) and "[99, 32]" in faults(result)
    assert any("not compared" in warning for warning in result.warnings)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("against", [BASE, None])
def test_numbers_that_are_none(output: Path, value: float, against: Path | None) -> None:
    weights = read_weights(output)[HEAD]
    weights[3, 4] = value
    weights[5, 6] = value
    change(output, HEAD, weights)
    result = verify(output, against)
    assert faults(result) == f"1 tensors hold NaN or Inf: {HEAD} (2)"
    with pytest.raises(VerificationError, match="NaN or Inf"):
        result.check()


def test_large_numbers_are_no_infinities(output: Path) -> None:
    change(output, HEAD, torch.full((100, 32), 3e38))
    result = verify(output, BASE)
    assert result.faults == []
    (head,) = (tensor for tensor in result.tensors if tensor.name == HEAD)
    assert head.nonfinite == 0 and head.cosine is not None and abs(head.cosine) <= 1


def test_a_tensor_that_became_zero(output: Path) -> None:
    change(output, Q, torch.zeros(64, 32))
    result = verify(output, BASE)
    assert result.faults == []
    assert any(f"all zero, in the base they are not: {Q}" in warning for warning in result.warnings)
    alone = verify(output)
    assert alone.faults == [] and any(Q in warning for warning in alone.warnings)
    assert alone.as_json()["all_zero"] == [Q]


def test_dtypes_and_distance_are_warnings(output: Path) -> None:
    change(output, HEAD, torch.randn(100, 32).bfloat16())
    result = verify(output, BASE)
    assert result.faults == []
    assert any("float32 in the base, bfloat16 here" in warning for warning in result.warnings)
    assert any("cosine below" in warning and HEAD in warning for warning in result.warnings)


def test_nothing_trained(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(BASE, tmp_path / "same"))
    result = verify(folder, BASE)
    assert result.counts()["unchanged"] == len(result.tensors) == 135
    assert any("was anything trained" in warning for warning in result.warnings)


def test_bytes_that_changed_since_they_were_written(output: Path) -> None:
    record = {"xxh3_64": {tensor.name: tensor.digest for tensor in verify(output).tensors}}
    (output / "omniloom_conversion.json").write_text(json.dumps(record))
    assert verify(output).faults == []
    path = output / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    assert "1 tensors changed since they were written" in faults(verify(output))


def test_fused_experts_of_both_layouts(omni: Path, tmp_path: Path) -> None:
    for layout in ("hub", "v5"):
        run("omni-to-vl", omni, tmp_path / layout, "--layout", layout)
    result = verify(tmp_path / "v5", tmp_path / "hub")
    assert result.faults == []
    assert result.counts() == {**result.counts(), "compared": len(result.tensors), "unchanged": len(result.tensors)}


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["convert", *map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_another_family(omni: Path, tmp_path: Path) -> None:
    assert run("omni-to-vl", omni, tmp_path / "vl") == 0
    with pytest.raises(ConfigError, match="same family"):
        verify(tmp_path / "vl", omni)


def test_a_tied_head_need_not_be_there(output: Path) -> None:
    edit_config(output, tie_word_embeddings=True)
    assert verify(output).faults == []
    change(output, HEAD, None)
    assert verify(output).faults == []
    edit_config(output, tie_word_embeddings=False)
    assert HEAD in faults(verify(output))


def test_blocks_and_groups_do_not_change_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(24, 10, generator=generator), torch.randn(24, 10, generator=generator)
    reader, base = MemoryReader({"t": x}), Counterpart(MemoryReader({"t": y}), "t")
    once = compare(reader, "t", base)
    monkeypatch.setattr("convert.compare.BLOCK", 100)
    for groups in (0, 4):
        again = compare(reader, "t", base, groups)
        assert again.digest == once.digest and len(again.groups) == groups
        assert again.cosine == pytest.approx(once.cosine, abs=1e-6)
        assert again.max_difference == once.max_difference


def test_the_table_has_a_line_per_kind(output: Path) -> None:
    assert kind_of("model.layers.10.mlp.experts.3.up_proj.weight") == "model.layers.*.mlp.experts.*.up_proj.weight"
    assert kind_of("visual.merger.mlp.0.weight") == "visual.merger.mlp.*.weight"
    change(output, Q, torch.zeros(64, 32))
    lines = table(verify(output, BASE).tensors)
    assert lines.row_count == 15
    cells = list(lines.columns[0].cells)
    assert list(lines.columns[5].cells)[cells.index("model.layers.*.self_attn.q_proj.weight")] == "0.000000 at 1"


def test_the_command(output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    assert run("verify", output, "--against", BASE, "--report", report) == 0
    assert "135 compared with hf_ref" in capsys.readouterr().out
    written = json.loads(report.read_text())
    assert written["passed"] and len(written["tensors"]) == 135 and written["counts"]["bytes"] == 424320
    change(output, NORM, torch.full((32,), float("nan")))
    assert run("verify", output, "--against", BASE, "--report", report, "--json") == 4
    captured = capsys.readouterr()
    assert json.loads(captured.out)["passed"] is False and NORM in captured.err
    assert json.loads(report.read_text())["faults"]
    assert run("verify", output, "--logits") == 2
    assert run("verify", tmp_path / "nowhere") == 2
