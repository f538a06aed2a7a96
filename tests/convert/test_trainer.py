"""Training checkpoints, saved and loaded by torch itself on several processes, to and from the hub's layout."""

from __future__ import annotations

import filecmp
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Qwen3OmniMoeForConditionalGeneration

from convert.directions import omni_to_vl_conversion
from convert.job import Conversion, Options, run
from convert.output import finished_files
from convert.trainer import dcp_to_hf_conversion, find_step, hf_to_dcp_conversion
from convert.verify import verify_conversion
from schemas.errors import ConfigError, IncompleteSourceError, UnsupportedError
from tests.convert.dcp_factory import grid, save
from tests.convert.models import make_omni, read_weights

WORLD_SIZE = 3  # eight experts on three ranks: uneven shards


def convert(conversion: Conversion, output: Path) -> Path:
    run(conversion, output, Options(workers=2), lambda count: None, verify_conversion)
    return output


def memory(omni: Path, style: str) -> dict[str, torch.Tensor]:
    """The thinker's parameters as transformers 5 has them in memory, or under the trainer's names."""
    thinker = Qwen3OmniMoeForConditionalGeneration.from_pretrained(omni).thinker
    state = {name: tensor.detach().clone() for name, tensor in thinker.state_dict().items()}
    if style == "transformers":
        return state
    parts = {"model.language_model.": "model.", "model.visual.": "visual.", "model.audio_tower.": "audio_tower."}
    renamed = {}
    for name, tensor in state.items():
        part = next((part for part in parts if name.startswith(part)), None)
        renamed[parts[part] + name.removeprefix(part) if part else name] = tensor
    return renamed


@pytest.fixture(scope="module")
def trained(omni: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`load/` converted from the omni and loaded by three processes, `save/` saved by them (trainer's names)."""
    folder = tmp_path_factory.mktemp("trained")
    save_file({name: t.contiguous() for name, t in memory(omni, "native").items()}, folder / "memory.safetensors")
    convert(hf_to_dcp_conversion(omni), folder / "load")
    script = Path(__file__).with_name("fsdp_worker.py")
    ranks = [
        subprocess.Popen([sys.executable, str(script), str(rank), str(WORLD_SIZE), str(folder)])
        for rank in range(WORLD_SIZE)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0] * WORLD_SIZE
    return folder


def test_sharded_checkpoint_to_hf(omni: Path, trained: Path, tmp_path: Path) -> None:
    """Optimizer and random state are left out and named; every byte of the thinker comes back."""
    conversion = dcp_to_hf_conversion(trained / "save", omni)
    output = convert(conversion, tmp_path / "out")
    assert filecmp.cmp(output / "model.safetensors", omni / "model.safetensors", shallow=False)
    weights = memory(omni, "native")
    assert sum(name.startswith("optimizer.state.") for name in conversion.reader.skipped) == 2 * len(weights)
    frames = 4096 * WORLD_SIZE * len(weights)  # a record's own directory, at most
    assert conversion.reader.bytes_read < sum(tensor.nbytes for tensor in weights.values()) + frames


@pytest.mark.parametrize("style", ["native", "transformers"])
def test_hf_to_dcp_holds_what_training_loads(omni: Path, tmp_path: Path, style: str) -> None:
    """One process here; three load the same files in the fixture `trained`."""
    output = convert(hf_to_dcp_conversion(omni, style), tmp_path / "dcp")
    wanted = memory(omni, style)
    state = {"model": {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}}
    dcp.load(state, checkpoint_id=output, no_dist=True)
    assert all(torch.equal(state["model"][name], tensor) for name, tensor in wanted.items())
    back = convert(dcp_to_hf_conversion(output, omni), tmp_path / "back")
    assert filecmp.cmp(back / "model.safetensors", omni / "model.safetensors", shallow=False)
    assert (output / "config.json").read_bytes() == (omni / "config.json").read_bytes()


@pytest.mark.parametrize("root", ["", "module.", "model.thinker.", "model.module."])
def test_names_behind_any_usual_root(omni: Path, tmp_path: Path, root: str) -> None:
    dcp.save(
        {root + name: t for name, t in memory(omni, "transformers").items()},
        checkpoint_id=tmp_path / "dcp",
        no_dist=True,
    )
    back = convert(dcp_to_hf_conversion(tmp_path / "dcp", omni), tmp_path / "back")
    assert filecmp.cmp(back / "model.safetensors", omni / "model.safetensors", shallow=False)


def test_every_expert_keeps_its_number(omni: Path, tmp_path: Path) -> None:
    """Expert e is filled with e, saved by two expert-parallel ranks; no two may end under one name."""
    numbers = torch.arange(8.0).view(8, 1, 1)
    state = {
        name: numbers.expand_as(tensor).clone() if ".experts." in name else tensor
        for name, tensor in memory(omni, "native").items()
    }
    checkpoint = save(tmp_path / "dcp", state, grid(2))
    made = read_weights(convert(dcp_to_hf_conversion(checkpoint, omni), tmp_path / "out"))
    experts = {name: tensor for name, tensor in made.items() if name.startswith("thinker.") and ".experts." in name}
    assert len(experts) == 3 * 3 * 8
    for name, tensor in experts.items():
        assert (tensor == int(name.split(".experts.")[1].split(".")[0])).all(), name


def test_experts_as_transformers_4_had_them(omni: Path, tmp_path: Path) -> None:
    """VL checkpoints of transformers 4: experts fused, input dimension first, under the names of 5."""
    vl = convert(omni_to_vl_conversion(omni), tmp_path / "vl")
    dcp.save({"model": read_weights(vl)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    back = convert(dcp_to_hf_conversion(tmp_path / "dcp", vl), tmp_path / "back")
    assert filecmp.cmp(back / "model.safetensors", vl / "model.safetensors", shallow=False)


def test_checkpoint_without_a_tower_takes_the_bases(omni: Path, tmp_path: Path) -> None:
    state = {
        f"model.{name}": t + 1 for name, t in memory(omni, "native").items() if not name.startswith("audio_tower.")
    }
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    output = read_weights(convert(dcp_to_hf_conversion(tmp_path / "dcp", omni), tmp_path / "out"))
    for name, tensor in read_weights(omni).items():
        trained = name.startswith("thinker.") and not name.startswith("thinker.audio_tower.")
        assert torch.equal(output[name], tensor + 1 if trained else tensor), name


def test_half_a_tower_is_an_error(omni: Path, tmp_path: Path) -> None:
    state = memory(omni, "native")
    state.pop("audio_tower.layers.1.fc1.weight")
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(IncompleteSourceError, match=r"thinker\.audio_tower\.layers\.1\.fc1\.weight"):
        dcp_to_hf_conversion(tmp_path / "dcp", omni)


@pytest.mark.parametrize("tied", [False, True])
def test_text_model_without_weights_of_a_base(tmp_path: Path, tied: bool) -> None:
    """config.json alone decides: names, dtype, dense layers among those with experts, a tied head."""
    sizes = {"vocab_size": 90, "hidden_size": 32, "intermediate_size": 56, "moe_intermediate_size": 24, "head_dim": 10}
    counts = {"num_hidden_layers": 3, "num_experts": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3MoeConfig(
        **sizes, **counts, num_experts_per_tok=2, mlp_only_layers=[1], tie_word_embeddings=tied, dtype="float32"
    )
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(tmp_path / "hub")
    (tmp_path / "base").mkdir()
    shutil.copy(tmp_path / "hub" / "config.json", tmp_path / "base")
    state = {name: t for name, t in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    dcp.save({"model": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    output = convert(dcp_to_hf_conversion(tmp_path / "dcp", tmp_path / "base"), tmp_path / "out")
    loaded, info = Qwen3MoeForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not any(info.values()), info
    ids = torch.arange(20).view(1, 20)
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=1e-6)


def test_adapters_are_refused(omni: Path, tmp_path: Path) -> None:
    state = {**memory(omni, "native"), "model.layers.0.self_attn.q_proj.lora_A.default.weight": torch.zeros(2, 32)}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(UnsupportedError, match=r"LoRA adapters: .*merge-lora"):
        dcp_to_hf_conversion(tmp_path / "dcp", omni)


def test_base_of_another_family(omni: Path, trained: Path, tmp_path: Path) -> None:
    vl = convert(omni_to_vl_conversion(omni), tmp_path / "vl")
    with pytest.raises(UnsupportedError, match="is not where a qwen3_vl_moe has its token embedding"):
        dcp_to_hf_conversion(trained / "save", vl)
    shutil.copytree(trained / "save", tmp_path / "step_3")
    (tmp_path / "step_3" / "COMPLETE").touch()
    (tmp_path / "step_3" / "state.json").write_text(json.dumps({"family": "qwen3_omni_moe"}))
    with pytest.raises(ConfigError, match="the checkpoint is a qwen3_omni_moe, the base a qwen3_vl_moe"):
        dcp_to_hf_conversion(tmp_path / "step_3", vl)


def test_which_step_is_taken(trained: Path, tmp_path: Path) -> None:
    for step in (3, 20):
        shutil.copytree(trained / "save", tmp_path / f"step_{step}")
        (tmp_path / f"step_{step}" / "state.json").write_text("{}")
        (tmp_path / f"step_{step}" / "COMPLETE").touch()
    with pytest.raises(ConfigError, match=r"holds 2 torch distributed checkpoints.*name one of step_20, step_3"):
        find_step(tmp_path)
    (tmp_path / "LATEST").write_text("step_20\n")
    assert find_step(tmp_path) == (tmp_path / "step_20", tmp_path / "step_20")
    (tmp_path / "step_20" / "COMPLETE").unlink()
    with pytest.raises(IncompleteSourceError, match="has no COMPLETE"):
        find_step(tmp_path)
    (tmp_path / "LATEST").write_text("../elsewhere")
    with pytest.raises(ConfigError, match="no directory beside it"):
        find_step(tmp_path)
    (tmp_path / "LATEST").write_text("step_99")
    with pytest.raises(IncompleteSourceError, match="names step_99, which does not exist"):
        find_step(tmp_path)


def test_checkpoint_in_a_folder_of_its_step(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "save", tmp_path / "step_3" / "dcp")
    assert find_step(tmp_path / "step_3") == (tmp_path / "step_3", tmp_path / "step_3" / "dcp")


def test_stopped_hf_to_dcp_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several files; what was finished is kept, and the directory is the one of a run that was never stopped."""
    monkeypatch.setattr("convert.dcp_output.FILE_BYTES", 60_000)
    source = make_omni(tmp_path / "omni")
    straight = convert(hf_to_dcp_conversion(source), tmp_path / "straight")
    calls = 0

    def stop(_bytes: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 60:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(hf_to_dcp_conversion(source), tmp_path / "dcp", Options(workers=1), stop)
    done = finished_files(tmp_path / "dcp")
    assert done
    stamps = {name: (tmp_path / "dcp.partial" / name).stat().st_ino for name in done}
    output = convert(hf_to_dcp_conversion(source), tmp_path / "dcp")
    assert {name: (output / name).stat().st_ino for name in done} == stamps
    names = sorted(path.name for path in output.iterdir())
    assert names == sorted(path.name for path in straight.iterdir())
    assert all(filecmp.cmp(output / name, straight / name, shallow=False) for name in names)
