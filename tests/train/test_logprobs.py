"""Log-probabilities of the trainer's model: transformers' own, whatever the media, the packing and the layout."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from schemas.errors import ConfigError, UnsupportedError, VerificationError
from schemas.rollouts import Response, RolloutAbout, RolloutRow, prompt_digest
from schemas.strict import check_config
from tests import dist
from tests.train import pseudo
from tests.train.data.dataset import write_dataset
from tests.train.data.hub import TOKENIZER, omni_call, omni_processor
from tests.train.data.mixes import Mix
from tests.train.data.packed import Clip
from tests.train.logprob_cases import (
    BF16,
    FP32,
    MEDIA,
    agreement,
    dump_config,
    dumped,
    media_rows,
    write_rows,
)
from train.config import OmniConfig
from train.data.processor import load_assets
from train.data.rollout_files import write_rollouts
from train.data.transform import SampleTransform
from train.logprob_compare import LogprobAgreement
from train.logprob_files import CARD, SCHEMA
from train.logprob_read import read_dump
from train.logprobs import DumpOptions, LogprobRun
from train.logprobs_hub import HubLogprobRun
from train.mesh import Degrees
from train.models.compare import load_reference
from train.models.spec import read_model
from train.trainer import make_trainer

EXACT = 1e-5  # of float32; what must be shown is 1e-4
COARSE_MEAN = 0.02  # of bfloat16
MODALITIES = ("text", "image", "video", "audio")


@dataclass(frozen=True)
class Made:
    """A tiny Qwen3-Omni with its relatives, rows of every kind, and what transformers makes of them."""

    top: Path
    sources: list[dict[str, Any]]
    omni: Path
    vl: Path
    text: Path
    exact: Path
    coarse: Path

    def config(self, fsdp: dict[str, Any] | None = None, **accelerator: Any) -> OmniConfig:
        layout = {"fsdp_config": fsdp or FP32, **accelerator}
        return dump_config(self.omni, self.sources, self.top / "scratch", accelerator=layout)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    top = tmp_path_factory.mktemp("logprobs")
    omni = pseudo.make_omni(top / "omni", moe_intermediate_size=40)  # which kernels for 16 bits take
    sources = write_rows(top / "rows", 3)
    paths = {"exact": top / "exact", "coarse": top / "coarse"}
    vl, text = pseudo.make_pseudo(omni, top / "vl"), pseudo.make_text(omni, top / "text")
    found = Made(top, sources, omni, vl, text, **paths)
    dumped(found.config(), found.exact, hub=True, features=True)
    dumped(found.config(BF16), found.coarse, hub=True)
    return found


def assert_agrees(found: LogprobAgreement, *, exact: bool = True, kinds: tuple[str, ...] = MODALITIES) -> None:
    """Of every modality, with the same tokens on both sides."""
    assert found.only_first == found.only_second == (0, 0) and found.untold == 0
    groups = {group.name: group for group in found.groups if group.by == "modality"}
    assert groups.keys() == set(kinds)
    for group in groups.values():
        assert group.max_abs < EXACT if exact else group.mean_abs < COARSE_MEAN, group
    if exact:
        assert all(row.relative < EXACT and not row.alone for row in found.features)


def test_every_modality_equals_transformers(made: Made, tmp_path: Path) -> None:
    run = LogprobRun(made.config(), DumpOptions(tmp_path / "dump", "all", features=True))
    run.run()
    assert np.diff(run.plans.epoch(0).bounds).max() > 2  # samples stand packed beside others
    found = agreement(tmp_path / "dump", made.exact)
    assert_agrees(found)
    assert {group.name for group in found.groups if group.by == "media"} == set(MEDIA)
    parts = {(row.kind, row.part) for row in found.features}
    levels = [(kind, f"deepstack{level}") for kind in ("image", "video") for level in (0, 1)]
    assert parts == {("image", "rows"), ("video", "rows"), ("audio", "rows"), *levels}
    counts = {by: sum(group.count for group in found.groups if group.by == by) for by in ("all", "modality", "media")}
    assert counts["all"] == counts["modality"] == counts["media"] > 1000


def test_bfloat16_is_near(made: Made, tmp_path: Path) -> None:
    found = agreement(dumped(made.config(BF16), tmp_path / "dump"), made.coarse)
    assert_agrees(found, exact=False)
    assert found.groups[0].max_abs > EXACT  # it was computed in another dtype


def test_bfloat16_without_a_choice_of_experts_is_nearer(made: Made, tmp_path: Path) -> None:
    """Where near ties of a router cannot fall either way, no single token is far off."""
    model = pseudo.make_omni(tmp_path / "model", moe_intermediate_size=40, num_experts_per_tok=8)
    config = dump_config(model, made.sources, tmp_path, accelerator={"fsdp_config": BF16})
    found = agreement(dumped(config, tmp_path / "ours"), dumped(config, tmp_path / "hub", hub=True))
    assert_agrees(found, exact=False)
    assert found.groups[0].mean_abs < 0.01 and found.groups[0].max_abs < 0.1


LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "fsdp": {},
        "sp": {"ulysses_size": 2},
        "sp and ep": {"ulysses_size": 2, "ep_size": 2},
        "bf16 sp": {"ulysses_size": 2, "fsdp_config": BF16},
        "bf16 ep": {"ep_size": 2, "fsdp_config": BF16},
    },
    4: {"dp, sp and ep": {"ulysses_size": 2, "ep_size": 2}, "hsdp": {"dp_replicate_size": 2}},
}


def _all_layouts(made: Made, folder: Path, world_size: int) -> None:
    for name, layout in LAYOUTS[world_size].items():
        features = "fsdp_config" not in layout
        dumped(made.config(**{"fsdp": layout.get("fsdp_config"), **layout}), folder / name, features=features)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_divided_equals_transformers(made: Made, tmp_path: Path, world_size: int) -> None:
    dist.run(world_size, _all_layouts, made, tmp_path, world_size)
    for name, layout in LAYOUTS[world_size].items():
        exact = "fsdp_config" not in layout
        assert_agrees(agreement(tmp_path / name, made.exact if exact else made.coarse), exact=exact)
        slices = layout.get("ulysses_size", 1)
        files = {path.name for path in (tmp_path / name).iterdir()}
        ranks = [divmod(rank, slices) for rank in range(world_size)]
        expected = {CARD, *(f"logprobs-dp{dp:05d}.parquet" for dp, _ in ranks)}
        if exact:
            expected |= {f"features-dp{dp:05d}-sp{sp:05d}-00000.safetensors" for dp, sp in ranks}
        assert files == expected, name
        card = json.loads((tmp_path / name / CARD).read_text())
        assert card["degrees"]["ulysses"] == slices and card["degrees"]["ep"] == layout.get("ep_size", 1)


@pytest.mark.parametrize(("model", "ears"), [("vl", False), ("vl", True), ("text", False), ("text", True)])
def test_relatives_of_the_thinker_equal_transformers(made: Made, tmp_path: Path, model: str, ears: bool) -> None:
    """A pseudo Qwen3-VL and a text model, with a frozen audio tower beside them and without."""
    data = {} if ears else {"mm_configs": {"use_audio_in_video": False}, "processor_path": str(TOKENIZER)}
    config = dump_config(getattr(made, model), made.sources, tmp_path, data=data)
    beside = str(made.omni) if ears else None
    config = config.model_copy(update={"model": config.model.model_copy(update={"audio_tower_path": beside})})
    ours, theirs = (dumped(config, tmp_path / name, hub=name == "hub", features=True) for name in ("ours", "hub"))
    seen = ("image", "video") if model == "vl" else ()
    assert_agrees(agreement(ours, theirs), kinds=("text", *seen, *(("audio",) if ears else ())))


MIXES = [
    Mix(turns=[["user", ("text", "How?")], ["assistant", ("text", "So and so.")]]),
    Mix(
        turns=[["user", ("image", None), ("text", "Who?")], ["assistant", ("text", "The dog.")]],
        images=[np.random.default_rng(0).integers(0, 255, (64, 96, 3), np.uint8)],
    ),
    Mix(
        turns=[["user", ("audio", None), ("text", "What?")], ["assistant", ("text", "A bark.")]],
        sounds=[np.random.default_rng(1).integers(-9000, 9000, 16000 * 3).astype(np.int16)],
    ),
    Mix(
        fps=2.0,
        with_sound=True,
        turns=[["user", ("video", None), ("text", "And this?")], ["assistant", ("text", "It barks.")]],
        clips=[
            Clip(
                np.random.default_rng(2).integers(0, 255, (8, 64, 64, 3), np.uint8),
                2.0,
                np.random.default_rng(3).integers(-9000, 9000, 16000 * 4).astype(np.int16),
            )
        ],
    ),
]


def test_transformers_with_its_own_processor_and_positions(made: Made, tmp_path: Path) -> None:
    """Nothing of our data path on the other side: tokens, pixels, log-mel and positions are transformers' own."""
    rows = [mix.sample(f"mix{number}") for number, mix in enumerate(MIXES)]
    sources = [{"path": str(write_dataset(tmp_path / "mixes", rows)), "name": "mixes"}]
    found = read_dump(dumped(dump_config(made.omni, sources, tmp_path), tmp_path / "dump"))
    model: Any = load_reference(read_model(made.omni), torch.float32)
    processor = omni_processor()
    for number, mix in enumerate(MIXES):
        given = omni_call(processor, mix)
        with torch.no_grad():
            logits = model(**given, use_audio_in_video=mix.with_sound, use_cache=False).logits[0]
        ids = given["input_ids"][0]
        expected = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        lines = np.flatnonzero(found.sample == found.ids.index(f"mix{number}"))
        lines = lines[np.argsort(found.index[lines])]
        assert found.index[lines].tolist() == list(range(1, len(ids)))
        assert found.token[lines].tolist() == ids[1:].tolist()
        assert np.abs(found.logprob[lines] - expected.numpy()).max() < EXACT


def test_the_tokens_that_were_asked_for(made: Made, tmp_path: Path) -> None:
    """Against the samples as they are laid out."""
    transform = SampleTransform(load_assets(made.omni))
    samples = {row.meta.id: transform.packed(row, "media") for row in media_rows(3)}
    kinds = {key: np.zeros(len(sample), bool) for key, sample in samples.items()}
    for key, sample in samples.items():
        for unit in sample.media:
            kinds[key][unit.rows] = True
    wanted = {
        "labelled": {key: sample.labels >= 0 for key, sample in samples.items()},
        "text": {key: ~mask for key, mask in kinds.items()},
        "all": {key: np.ones(len(sample), bool) for key, sample in samples.items()},
    }
    values = {}
    for choice, masks in wanted.items():
        dump = dumped(made.config(), tmp_path / choice, tokens=choice)
        table = pq.read_table(dump / "logprobs-dp00000.parquet")
        assert table.schema == SCHEMA
        lines = [line for line in table.to_pylist() if line["source"] == "media"]
        order = [(line["id"], line["index"]) for line in lines]
        assert order == sorted(order) and len(set(order)) == len(order)
        expected = {(key, at) for key, mask in masks.items() for at in np.flatnonzero(mask).tolist() if at}
        assert set(order) == expected
        assert all(line["token"] == samples[line["id"]].ids[line["index"]] for line in lines)
        assert all((line["modality"] != "text") == kinds[line["id"]][line["index"]] for line in lines)
        values[choice] = {(line["id"], line["index"]): line["logprob"] for line in lines}
    for choice in ("labelled", "text"):  # what else has a label changes nothing
        assert all(abs(values["all"][place] - value) < EXACT for place, value in values[choice].items())


def test_chosen_rows_depend_on_nothing_but_the_seed(made: Made, tmp_path: Path) -> None:
    config = made.config()
    few = dumped(config, tmp_path / "few", max_samples=5)
    data = config.data.model_copy(update={"max_seq_len": 300, "lanes": 1, "window_rows": 3})
    other = dumped(config.model_copy(update={"data": data}), tmp_path / "other", hub=True, max_samples=5)
    found = agreement(few, other)
    assert found.only_first == found.only_second == (0, 0) and found.groups[0].max_abs < EXACT
    card = json.loads((few / CARD).read_text())
    assert card["samples"] == 5 == sum(source["chosen"] for source in card["sources"].values())
    assert card["token_count"] == found.groups[0].count == len(read_dump(few))
    seed = config.model_copy(update={"train": config.train.model_copy(update={"seed": 7})})
    assert set(read_dump(dumped(seed, tmp_path / "seed", max_samples=5)).ids) != set(read_dump(few).ids)


def test_each_row_once_whatever_the_weights(made: Made, tmp_path: Path) -> None:
    """By a worker process."""
    media, text = made.sources
    worker = {"dataloader": {"num_workers": 1}}
    config = dump_config(made.omni, [{**media, "weight": 0.4}, {**text, "weight": 3.0}], tmp_path, data=worker)
    found = agreement(dumped(config, tmp_path / "dump"), made.exact)
    assert found.only_first == found.only_second == (0, 0) and found.groups[0].max_abs < EXACT


def test_a_row_that_cannot_be_read_has_no_line(made: Made, tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "rows", media_rows(2), 5, 64 << 20)
    shard = next((folder / "parts/00000").glob("*.mds"))
    content = bytearray(shard.read_bytes())
    content[-2000] ^= 255  # of the last row: the sound that `all0` ends with
    shard.write_bytes(content)
    config = dump_config(made.omni, [{"path": str(folder)}], tmp_path, data={"dead_samples": "mask"})
    card = LogprobRun(config, DumpOptions(tmp_path / "dump", "all")).run()
    assert card.dead == 1 and card.samples == 10
    found = read_dump(tmp_path / "dump")
    assert len(found.ids) == 9 and "all0" not in found.ids


def test_weights_of_a_checkpoint(made: Made, tmp_path: Path) -> None:
    """After training the dump is of what was trained: transformers' of the export."""
    checkpoint = {"output_dir": str(tmp_path / "output"), "save_steps": 3, "save_hf_weights": True}
    config = dump_config(made.omni, made.sources, tmp_path, checkpoint=checkpoint)
    make_trainer(config).train()
    ours = dumped(config, tmp_path / "ours")
    assert json.loads((ours / CARD).read_text())["model"]["checkpoint"].endswith("step_3")
    assert agreement(ours, made.exact).groups[0].max_abs > 0.01  # it has learnt something
    with pytest.raises(ConfigError, match="load_path=null"):
        dumped(config, tmp_path / "hub", hub=True)
    export = next((tmp_path / "output/hf").rglob("config.json")).parent
    fresh = dump_config(export, made.sources, tmp_path / "fresh", data={"processor_path": str(made.omni)})
    assert_agrees(agreement(ours, dumped(fresh, tmp_path / "exported", hub=True)))


def test_adapters_are_part_of_the_model(made: Made, tmp_path: Path) -> None:
    """Of experts and of attention; they change nothing as they start, and much once they are set."""
    lora = {"rank": 2, "lora_modules": ["q_proj", "down_proj"]}
    config = made.config()
    model = check_config({"model_path": str(made.omni), "lora_config": lora}, type(config.model))
    adapted = config.model_copy(update={"model": model})
    assert_agrees(agreement(dumped(adapted, tmp_path / "fresh", features=True), made.exact))
    drawn = model.model_copy(update={"lora_config": model.lora_config.model_copy(update={"init_lora_weights": False})})
    found = agreement(dumped(adapted.model_copy(update={"model": drawn}), tmp_path / "drawn"), made.exact)
    assert found.groups[0].mean_abs > 0.01


def test_a_dump_appears_whole_and_is_never_mixed_with_another(made: Made, tmp_path: Path) -> None:
    out = tmp_path / "dump"
    out.mkdir()
    for left in (
        "logprobs-dp00007.parquet",
        ".logprobs-dp00000.parquet.0123",
        "features-dp00000-sp00000-00000.safetensors",
    ):
        (out / left).write_text("of a run that was killed")
    dumped(made.config(), out, tokens="labelled")
    assert {path.name for path in out.iterdir()} == {CARD, "logprobs-dp00000.parquet"}
    with pytest.raises(ConfigError, match="whole dump already"):
        dumped(made.config(), out)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="no folder"):
        dumped(made.config(), tmp_path / "file")


def test_a_log_probability_that_is_no_number_is_named(made: Made, tmp_path: Path) -> None:
    run = LogprobRun(made.config(), DumpOptions(tmp_path / "dump"))
    run.build()
    weight = run.model.get_parameter("lm_head.weight")
    weight.data[5] = float("nan")
    run.build = lambda: None  # type: ignore[method-assign]  # it is built
    with pytest.raises(VerificationError, match=r"row \w+: the log-probability of token \d+ at \d+ is nan"):
        run.run()
    assert not list((tmp_path / "dump").iterdir())


def test_what_transformers_cannot_be_asked_for(made: Made, tmp_path: Path) -> None:
    config = made.config()
    model, there = config.model, config.data.model_copy(update={"processor_path": str(made.omni)})
    lora = {"model_path": str(made.omni), "lora_config": {"rank": 2, "lora_modules": ["q_proj"]}}
    wrong: list[tuple[Any, type[Exception], str]] = [
        (
            model.model_copy(update={"model_path": None, "config_path": str(made.omni)}),
            ConfigError,
            r"needs model\.model_path.*hf/step_N model\.config_path=null train\.checkpoint\.load_path=null",
        ),
        (model.model_copy(update={"config_path": str(made.omni)}), ConfigError, "leave model.config_path out"),
        (check_config(lora, type(model)), UnsupportedError, "merge-lora"),
    ]
    for given, kind, said in wrong:
        with pytest.raises(kind, match=said):
            dumped(config.model_copy(update={"model": given, "data": there}), tmp_path / "hub", hub=True)
    with pytest.raises(ConfigError, match="--max-samples 0"):
        DumpOptions(tmp_path, max_samples=0)


def test_transformers_is_not_divided(made: Made, tmp_path: Path) -> None:
    run = HubLogprobRun(made.config(), DumpOptions(tmp_path / "hub"))
    run.build_distributed()
    run.mesh = replace(run.mesh, degrees=Degrees(ulysses=2))
    with pytest.raises(ConfigError, match="ulysses_size is 2 and ep_size 1; write 1"):
        run.build_model()


def test_responses_that_an_engine_drew(made: Made, tmp_path: Path) -> None:
    """Recorded rollouts are the engine's dump themselves (transformers here), held against the trainer's."""
    transform, rng = SampleTransform(load_assets(made.omni)), np.random.default_rng(5)
    packed = [transform.packed(row, "media") for row in media_rows(3)]

    def rollouts(folder: Path, logprobs: dict[str, list[float]]) -> Path:
        rows = []
        for sample in packed:
            prompt = int(np.flatnonzero(sample.labels >= 0)[0])
            drawn = [drawn_ids[sample.key, number] for number in range(2)]
            values = [logprobs.get(f"{sample.key}#{number}", [-1.0] * len(ids)) for number, ids in enumerate(drawn)]
            responses = [Response(ids, v, 1.0, "x", "length") for ids, v in zip(drawn, values, strict=True)]
            rows.append(RolloutRow(sample.key, "media", prompt, prompt_digest(sample.ids[:prompt]), responses))
        about = RolloutAbout(
            dataset="media", dataset_fingerprint="", model="tiny", engine="transformers", scorer="none", sampling={}
        )
        write_rollouts(folder, rows, about)
        return folder

    drawn_ids = {
        (s.key, n): rng.integers(300, 8000, int(rng.integers(1, 9))).tolist() for s in packed for n in range(2)
    }
    source = {**made.sources[0], "rollouts": str(rollouts(tmp_path / "blank", {}))}
    config = dump_config(made.omni, [source], tmp_path, objective={"type": "grpo"})
    engine = read_dump(dumped(config, tmp_path / "hub", hub=True, tokens="labelled"))
    values: dict[str, list[float]] = {}
    for line in np.lexsort((engine.index, engine.sample)):
        values.setdefault(engine.ids[engine.sample[line]], []).append(float(engine.logprob[line]))
    recorded = rollouts(tmp_path / "recorded", values)
    found = agreement(dumped(config, tmp_path / "ours", tokens="labelled"), recorded)
    assert found.only_first == found.only_second == (0, 0) and found.untold == 0
    assert found.groups[0].count == sum(map(len, drawn_ids.values())) and found.groups[0].max_abs < EXACT
