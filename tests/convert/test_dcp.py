"""DcpReader against torch's own loader, on genuine Megatron checkpoints and on chunks of every shape."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from convert import dcp as dcp_module
from convert import open_files
from convert.dcp import DcpReader, no_weight
from convert.tensors import TensorInfo
from schemas.errors import IncompleteSourceError, UnsupportedError
from tests.convert.dcp_factory import grid, one_chunk, save

MEGATRON = Path(__file__).parent / "megatron"
ITERATIONS = sorted(MEGATRON.glob("*/iter_*"))


def as_torch_loads_it(directory: Path, reader: DcpReader) -> dict[str, torch.Tensor]:
    state = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in reader.tensors.items()}
    dcp.load(state, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
    return state


def random_box(shape: tuple[int, ...], generator: torch.Generator) -> tuple[tuple[int, int], ...]:
    box = []
    for size in shape:
        start = int(torch.randint(0, size, (1,), generator=generator))
        box.append((start, int(torch.randint(start + 1, size + 1, (1,), generator=generator))))
    return tuple(box)


@pytest.mark.parametrize("directory", ITERATIONS, ids=lambda path: path.parent.name)
def test_genuine_checkpoints_read_as_torch_reads_them(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    with DcpReader(directory) as reader:
        wanted = as_torch_loads_it(directory, reader)
        monkeypatch.setattr(dcp_module, "load_record", None)  # not one record may need torch.load
        for name, tensor in wanted.items():
            assert torch.equal(reader.read(name), tensor)
            for _ in range(4):
                box = random_box(tuple(tensor.shape), generator)
                assert torch.equal(reader.read(name, box), tensor[tuple(slice(*pair) for pair in box)])


def test_the_dump_of_a_handed_checkpoint_is_what_the_index_says() -> None:
    with DcpReader(MEGATRON / "tp2" / "iter_0000001") as reader:
        assert reader.tensors["decoder.layers.mlp.experts.experts.linear_fc1.weight"] == TensorInfo(
            (4, 8, 48, 32), torch.float32
        )
        assert len(reader.tensors) == 12
        reasons = {reason: sum(r == reason for r in reader.skipped.values()) for reason in reader.skipped.values()}
        assert reasons == {"extra state of Transformer Engine": 72, "state of the random generators": 2}


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool,
          torch.float8_e4m3fn]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_rank(tmp_path: Path, dtype: torch.dtype) -> None:
    shapes: tuple[tuple[int, ...], ...] = ((), (1,), (7,), (5, 6), (3, 4, 5), (2, 3, 4, 5), (0, 3), (4, 0))
    tensors = {
        f"t{i}": (torch.arange(torch.Size(shape).numel()) % 100).reshape(shape).to(dtype)
        for i, shape in enumerate(shapes)
    }
    save(tmp_path, tensors, lambda name, shape: one_chunk(name, shape) if 0 in shape else grid(2, 3, 2)(name, shape))
    with DcpReader(tmp_path) as reader:
        for name, tensor in tensors.items():
            found = reader.read(name)
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("parts", [(1,), (3,), (1, 3), (1, 1, 3), (2, 3, 2), (7, 5, 3)])
@pytest.mark.parametrize("block", [1, 200, 1 << 20])
def test_chunks_of_any_cut_and_boxes_across_them(
    tmp_path: Path, parts: tuple[int, ...], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp_module, "BLOCK", block)
    tensor = torch.arange(7 * 5 * 6).reshape(7, 5, 6).float()
    save(tmp_path, {"t": tensor}, grid(*parts))
    generator = torch.Generator().manual_seed(1)
    with DcpReader(tmp_path) as reader:
        for _ in range(40):
            box = random_box((7, 5, 6), generator)
            assert torch.equal(reader.read("t", box), tensor[tuple(slice(*pair) for pair in box)])


def test_uneven_chunks_that_form_no_grid(tmp_path: Path) -> None:
    tensor = torch.arange(60).reshape(6, 10).bfloat16()
    boxes = [((0, 4), (0, 7)), ((0, 1), (7, 10)), ((1, 6), (7, 10)), ((4, 6), (0, 2)), ((4, 6), (2, 7))]
    save(tmp_path, {"t": tensor}, lambda name, shape: boxes)
    generator = torch.Generator().manual_seed(1)
    with DcpReader(tmp_path) as reader:
        assert torch.equal(reader.read("t"), tensor)
        for _ in range(40):
            box = random_box((6, 10), generator)
            assert torch.equal(reader.read("t", box), tensor[tuple(slice(*pair) for pair in box)])


def test_only_the_bytes_of_the_box_are_read(tmp_path: Path) -> None:
    tensor = torch.randn(64, 1 << 14)  # 4 MiB
    save(tmp_path, {"t": tensor})
    with DcpReader(tmp_path) as reader:
        assert torch.equal(reader.read("t", ((10, 12), (0, 1 << 14))), tensor[10:12])
        first = reader.bytes_read
        assert first < 2 * (1 << 16) + 4096
        reader.read("t", ((40, 41), (0, 1 << 14)))
        assert reader.bytes_read == first + (1 << 16)  # the header is known by now


def test_what_is_stored_another_way_is_read_by_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transposed tensor keeps its strides in the record, so its bytes are not those of its rows."""
    tensor = torch.arange(24).reshape(4, 6).float()

    real_clone = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda self, **options: real_clone(self.T.contiguous()).T)
    save(tmp_path, {"t": tensor})
    monkeypatch.undo()
    calls = []
    real = dcp_module.load_record
    monkeypatch.setattr(dcp_module, "load_record", lambda *arguments: calls.append(1) or real(*arguments))
    with DcpReader(tmp_path) as reader:
        assert torch.equal(reader.read("t", ((1, 3), (2, 5))), tensor[1:3, 2:5])
    assert calls


def test_an_experts_values_come_from_its_own_rank(tmp_path: Path) -> None:
    """Two expert-parallel ranks, expert e filled with e (handed case C05)."""
    experts = torch.arange(8).float().view(1, 8, 1, 1).expand(2, 8, 6, 4).contiguous()
    save(tmp_path, {"experts.linear_fc2.weight": experts}, grid(2, 8, 2))
    with DcpReader(tmp_path) as reader:
        for layer, expert in itertools.product(range(2), range(8)):
            box = ((layer, layer + 1), (expert, expert + 1), (0, 6), (0, 4))
            assert reader.read("experts.linear_fc2.weight", box).unique().tolist() == [expert]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight", "optimizer state"),
        ("chained_0.optimizer.state.fp32_param.embedding.word_embeddings.weight", "optimizer state"),
        ("optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_x.bucket_idx_0.exp_avg", "optimizer state"),
        ("optim.model.layers.0.weight.exp_avg", "optimizer state"),
        ("decoder.layers.self_attention.linear_qkv._extra_state/shard_0_4", "extra state of Transformer Engine"),
        ("thinker.language_model.decoder.layers.0.mlp.linear_fc1._extra_state", "extra state of Transformer Engine"),
        ("rng_state/shard_0.0_1.1", "state of the random generators"),
        ("rerun_state_machine_state/shard_0_1", "state of the rerun machine"),
        ("opt_param_scheduler", "state of the learning rate schedule"),
        ("lr_scheduler.last_lr", "state of the learning rate schedule"),
        ("dataloader.step", "state of the training loop"),
        # weights whose names only look like it
        ("decoder.layers.0.my_state.weight", None),
        ("decoder.layers.0.optimizer_gate.weight", None),
        ("decoder.layers.0.state_proj.weight", None),
        ("model.rng_stateful.weight", None),
        ("model.layers.0.mlp.experts.gate_up_proj", None),
    ],
)
def test_kinds_are_told_by_whole_parts_of_a_name(name: str, reason: str | None) -> None:
    assert no_weight(name) == reason


def test_masters_take_the_place_of_their_parameters(tmp_path: Path) -> None:
    master = torch.randn(6, 4)
    tensors = {
        "a.weight": master.bfloat16(),
        "frozen.weight": torch.ones(3),
        "optimizer.state.fp32_param.a.weight": master,
        "optimizer.state.exp_avg.a.weight": torch.zeros(6, 4),
    }
    save(tmp_path, tensors, grid(2))
    with DcpReader(tmp_path) as plain, DcpReader(tmp_path, from_master=True) as reader:
        assert set(plain.tensors) == set(reader.tensors) == {"a.weight", "frozen.weight"}
        assert torch.equal(plain.read("a.weight"), master.bfloat16())
        assert torch.equal(reader.read("a.weight"), master)
        assert reader.masters == ("a.weight",)
        assert set(reader.skipped) == {"optimizer.state.exp_avg.a.weight"}
        assert plain.fingerprint != reader.fingerprint


@pytest.mark.parametrize("masters", [{}, {"optimizer.state.fp32_param.a.weight": torch.zeros(24)}])
def test_masters_that_are_not_there_or_flattened(tmp_path: Path, masters: dict[str, torch.Tensor]) -> None:
    save(tmp_path, {"a.weight": torch.zeros(6, 4), **masters})
    with pytest.raises(UnsupportedError, match="without --from-master"):
        DcpReader(tmp_path, from_master=True)


def test_the_fingerprint_follows_metadata_and_sizes(tmp_path: Path) -> None:
    def of(folder: str, value: float) -> str:
        with DcpReader(save(tmp_path / folder, {"t": torch.full((4,), value)})) as reader:
            return reader.fingerprint

    first = of("a", 1.0)
    with DcpReader(tmp_path / "a") as again:
        assert again.fingerprint == first
    with (tmp_path / "a" / "__0_0.distcp").open("ab") as file:
        file.write(b"more")
    with DcpReader(tmp_path / "a") as grown:
        assert grown.fingerprint != first


def test_many_files_stay_within_the_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"t{i}": torch.full((3,), float(i)) for i in range(12)}
    for i, (name, tensor) in enumerate(tensors.items()):
        save(tmp_path / f"part{i}", {name: tensor})
    monkeypatch.setattr(open_files, "MAX_IDLE", 2)
    files = open_files.OpenFiles()
    before = len(os.listdir("/proc/self/fd"))
    for i in range(12):
        buffer = bytearray(4)
        files.read_into(tmp_path / f"part{i}" / "__0_0.distcp", 0, memoryview(buffer))
        assert bytes(buffer) == b"PK\x03\x04"
        assert len(os.listdir("/proc/self/fd")) <= before + 2
    files.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_reading_beyond_the_tensor_is_a_fault_of_the_caller(tmp_path: Path) -> None:
    save(tmp_path, {"t": torch.zeros(3, 3)})
    with DcpReader(tmp_path) as reader:
        with pytest.raises(ValueError, match="does not lie within"):
            reader.read("t", ((0, 4), (0, 3)))
        with pytest.raises(KeyError):
            reader.read("other")


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    save(tmp_path, {"t": torch.zeros(1 << 16)})
    with DcpReader(tmp_path) as reader:
        os.truncate(tmp_path / "__0_0.distcp", 40_000)
        with pytest.raises(IncompleteSourceError, match="ends before byte"):
            reader.read("t")
