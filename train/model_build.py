"""The model of a configuration: built, its operations chosen, frozen where it is to be; made parallel and filled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from convert.small_files import is_carried, read_carried
from schemas.errors import ConfigError, UnsupportedError
from train.config import LoraConfig, ModelConfig, TrainConfig
from train.config_trainer import GradientCheckpointingConfig, OffloadConfig
from train.data.route import RouteSpec
from train.data.serving import ModelInputs
from train.lora.plan import LoraPlan
from train.mesh import Mesh
from train.models.checkpointing import CheckpointPolicy, keeping, keeps, set_checkpointing
from train.models.foundation import FoundationModel
from train.models.frozen_audio import add_audio_tower
from train.models.hub_model import HubModel
from train.models.spec import ModelSpec, build_foundation_model, fsdp_units, spec_of
from train.ops.device import describe_device
from train.ops.registry import OPS, Ops, bind_ops, resolve
from train.parallel.apply import apply_parallel
from train.parallel.fsdp import needs_wrapping
from train.parallel.loading import fill_adapters, fill_from_hub, fill_random, give_memory
from train.parallel.offload import ActivationOffload
from train.parallel.router import RouterReduction

AnyModel = FoundationModel | HubModel
CONFIG_FILE = "config.json"
MASTER_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # of parameters; see `master_dtype`


@dataclass(frozen=True)
class ModelFiles:
    """Where a model comes from. config: folder of its config.json; weights: folder of its weights, None = random."""

    config: Path
    weights: Path | None

    @classmethod
    def of(cls, config: ModelConfig) -> ModelFiles:
        place = Path(config.config_path or config.model_path or "")
        folder = place.parent if place.name.endswith(".json") else place
        return cls(folder, None if config.model_path is None else Path(config.model_path))

    @property
    def config_file(self) -> Path:
        return self.config / CONFIG_FILE

    def small_files(self, processor: Path | None) -> dict[str, bytes]:
        """config.json, and what goes along with the weights: of the model and its processor, by name."""
        found: dict[str, bytes] = {}
        for folder in (processor, self.config):
            if folder is not None and folder.is_dir():
                carried = [path for path in sorted(folder.iterdir()) if is_carried(path.name)]
                found |= {path.name: read_carried(path) for path in carried}
        return found | {CONFIG_FILE: read_carried(self.config_file)}


def check_model_folder(config: ModelConfig) -> None:
    """ConfigError, which names the key: the folder has no config.json."""
    file = ModelFiles.of(config).config_file
    if file.is_file():
        return
    key = "model_path" if config.config_path is None else "config_path"
    hint = "; to check without the weights, set model.config_path to a folder that has the config.json alone"
    raise ConfigError(f"model.{key}: {file} does not exist" + (hint if key == "model_path" else ""))


def choose_ops(model: ModelConfig, train: TrainConfig, device: torch.device) -> Ops:
    """The operations that the configuration names, on this device and in the dtype that is computed in."""
    dtype = train.accelerator.fsdp_config.mixed_precision.compute_dtype
    place = describe_device(device, repeatable=train.deterministic)
    return bind_ops(resolve(model.ops_implementation.model_dump(), place, dtype), place, dtype)


def master_dtype(train: TrainConfig) -> torch.dtype:
    """Of the parameters; where the model computes in another, it does so with a copy."""
    return MASTER_DTYPES[train.optimizer.master_dtype]


def build_model(config: ModelConfig, ops: Ops, dtype: torch.dtype = torch.float32) -> AnyModel:
    """Without memory, on the meta device. dtype: of its parameters."""
    return build_foundation_model(
        ModelFiles.of(config).config_file,
        ops,
        device="meta",
        dtype=dtype,
        backend=config.backend,
        trust_remote_code=config.trust_remote_code,
    )


def add_hearing(model: AnyModel, config: ModelConfig, train: TrainConfig, ops: Ops) -> None:
    """The frozen audio tower of `model.audio_tower_path`, where that is given, beside the model."""
    if config.audio_tower_path is None:
        return
    assert isinstance(model, FoundationModel)  # the configuration allows no other
    dtype = getattr(torch, train.accelerator.fsdp_config.mixed_precision.compute_dtype)
    add_audio_tower(model, Path(config.audio_tower_path), ops, dtype)


def plan_lora(model: AnyModel, config: ModelConfig, train: TrainConfig, frozen: Iterable[str]) -> LoraPlan | None:
    """The adapters that a configuration asks for, None for a full training. All but modules_to_save is frozen then, in
    the dtype that is computed in; the adapters are not there yet. frozen: what train.freeze_* froze."""
    if config.lora_config is None:
        return None
    plan = LoraPlan.make(model, config.lora_config, frozen)
    plan.freeze(model, getattr(torch, train.accelerator.fsdp_config.mixed_precision.compute_dtype))
    return plan


def model_spec(model: AnyModel) -> ModelSpec | None:
    """None for a model of transformers."""
    return spec_of(model) if isinstance(model, FoundationModel) else None


def family_of(model: AnyModel) -> str:
    """The model_type, as checkpoints note it."""
    return str(model.config.model_type)


def towers_of(model: AnyModel) -> dict[str, str | None]:
    """vit, audio -> prefix of the tower's parameters, None where there is none."""
    spec = model_spec(model)
    if spec is None:
        return {"vit": None, "audio": None}
    return {"vit": spec.names.visual, "audio": spec.names.audio}


def data_inputs(model: AnyModel) -> ModelInputs:
    """What the model adds to the data path."""
    audio, beside = getattr(model.config, "audio_config", None), getattr(model, "frozen_audio", None)
    window = beside.window_frames if beside is not None else getattr(audio, "n_window_infer", None)
    return ModelInputs() if window is None else ModelInputs(RouteSpec(sound_window=window))


def set_gradient_checkpointing(model: AnyModel, policy: CheckpointPolicy | None) -> None:
    """None = blocks keep everything. UnsupportedError: what models of transformers do not do."""
    if isinstance(model, HubModel):
        if policy is not None and (policy.share < 1 or policy.shares or policy.carry is not None):
            raise UnsupportedError(
                "a model of transformers checkpoints all of its layers, with their inputs on the GPU; set "
                "train.gradient_checkpointing.share to 1, leave out vision_share and audio_share, and set "
                "train.accelerator.offload_config.enable_activation to false"
            )
        if policy is not None and keeps(policy, "projection"):
            raise UnsupportedError(
                "a model of transformers has projections of its own, whose results cannot be kept; set "
                "train.gradient_checkpointing.keep to attention or inputs"
            )
        model.set_checkpointing(policy)
    else:
        set_checkpointing(model, policy)


def checkpoint_policy(
    config: GradientCheckpointingConfig, ops: Ops, offload: OffloadConfig, *, sparse: bool = True
) -> CheckpointPolicy | None:
    """What blocks keep for the backward pass; None = everything. sparse: whether the model has experts. ConfigError:
    attention or experts whose results cannot be kept, and inputs that are to go elsewhere although nothing is computed
    again."""
    if not config.enable:
        if offload.enable_activation:
            raise ConfigError(
                "train.accelerator.offload_config.enable_activation moves the inputs of blocks that are computed "
                "again; set train.gradient_checkpointing.enable to true"
            )
        return None
    check_keeping(config, {op: getattr(ops, op).name for op in ("attention", "moe_experts")}, sparse=sparse)
    context_fn = keeping(config.keep, None if config.keep_gb is None else int(config.keep_gb * 1e9))
    carry = ActivationOffload(int(offload.activation_gpu_limit * 1e9)) if offload.enable_activation else None
    towers = {"vision": config.vision_share, "audio": config.audio_share}
    shares = {part: share for part, share in towers.items() if share is not None}
    return CheckpointPolicy(context_fn, config.share, shares, carry=carry)


def check_keeping(config: GradientCheckpointingConfig, chosen: Mapping[str, str], *, sparse: bool) -> None:
    """ConfigError where results of the chosen backends cannot be kept. chosen: operation -> backend; sparse: whether
    the model has experts."""
    if not config.enable or config.keep == "inputs":
        return
    for op in ["attention", "moe_experts"] if config.keep == "mlp" and sparse else ["attention"]:
        _check_recorded(config.keep, op, chosen[op])


def _check_recorded(keep: str, op: str, chosen: str) -> None:
    known = OPS[op]
    able = [name for name in known.by_rank() if known.backends[name].recorded]
    if chosen not in able:
        other = "projections" if op == "moe_experts" else "inputs"
        raise ConfigError(
            f"train.gradient_checkpointing.keep: {keep}, but the results of {known.key} {chosen} cannot be kept; "
            f"choose {', '.join(able)} or keep: {other}"
        )


def share_router(model: AnyModel, mesh: Mesh) -> None:
    """The auxiliary loss of all ranks' rows."""
    if isinstance(model, FoundationModel) and mesh.world_size > 1:
        model.reduce_router = RouterReduction()


def read_dtype(lora: LoraConfig | None, train: TrainConfig) -> torch.dtype:
    """In which parameters lie that the forward pass reads as they are: the masters', or that of the frozen base when
    adapters alone are trained, which are cast where they are multiplied by. An adapter that training starts from may
    bring whole modules."""
    if lora is not None and not lora.modules_to_save and lora.lora_adapter is None:
        computed: torch.dtype = getattr(torch, train.accelerator.fsdp_config.mixed_precision.compute_dtype)
        return computed
    return master_dtype(train)


def wrap(model: AnyModel, mesh: Mesh, train: TrainConfig, lora: LoraConfig | None, rows: int | None) -> bool:
    """Divides the model among ranks; whether it was wrapped. rows: see `parallelize`."""
    accelerator = train.accelerator
    fsdp = accelerator.fsdp_config
    if not needs_wrapping(mesh, fsdp, read_dtype(lora, train)):
        return False
    units = fsdp_units(model, whole_towers=fsdp.tower_units == "whole")
    apply_parallel(model, units, mesh, fsdp, dispatch=accelerator.expert_dispatch, rows=rows)
    return True


def parallelize(
    model: AnyModel,
    mesh: Mesh,
    train: TrainConfig,
    files: ModelFiles,
    *,
    fill: bool,
    lora: LoraPlan | None = None,
    rows: int | None = None,
) -> None:
    """Wraps the model and gives it memory and values. fill: False when a checkpoint fills it, or its adapters; rows:
    the most of a rank in a forward pass, None = unknown."""
    fsdp, device = train.accelerator.fsdp_config, mesh.device
    memory = torch.device("cpu") if fsdp.offload else device
    if train.init_device == "cuda" and device.type != "cuda":
        raise ConfigError("train.init_device: cuda, but there is no GPU; write meta")
    whole_first = train.init_device != "meta"
    if whole_first:
        give_memory(model, device if train.init_device == "cuda" else torch.device("cpu"))
        _fill(model, files, train.seed, fill=fill or lora is not None, show=mesh.rank == 0)
    wrapped = wrap(model, mesh, train, None if lora is None else lora.config, rows)
    if whole_first and not wrapped:
        model.to(device)
    if not whole_first:
        give_memory(model, memory)
        _fill(model, files, train.seed, fill=fill or lora is not None, show=mesh.rank == 0)
    if lora is not None and fill:
        fill_adapters(model, lora, train.seed)


def _fill(model: AnyModel, files: ModelFiles, seed: int, *, fill: bool, show: bool) -> None:
    if not fill and not isinstance(model, HubModel):
        return
    if fill and files.weights is not None:
        fill_from_hub(model, files.weights, show=show)
    elif fill and isinstance(model, HubModel):
        if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
            raise UnsupportedError(
                "a model of transformers draws its random weights whole; write train.init_device: cpu, or give "
                "model.model_path"
            )
        model.initialize(seed)
    elif fill:
        fill_random(model, seed)
    if isinstance(model, HubModel):
        model.restore_buffers()


def check_model(model: AnyModel, mesh: Mesh) -> None:
    """Degrees against what the model has."""
    text = model.config.get_text_config()
    mesh.degrees.check_experts(getattr(text, "num_experts", 0) or 0)
    mesh.degrees.check_heads(text.num_attention_heads, text.num_key_value_heads)
