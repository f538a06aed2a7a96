"""The model of a configuration: built, its operations chosen, frozen where it is to be; made parallel and filled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from convert.small_files import is_carried, read_carried
from schemas.errors import ConfigError, UnsupportedError
from train.config import ModelConfig, TrainConfig
from train.data.route import RouteSpec
from train.data.serving import ModelInputs
from train.mesh import Mesh
from train.models.checkpointing import CheckpointPolicy, set_checkpointing
from train.models.foundation import FoundationModel
from train.models.hub_model import HubModel
from train.models.spec import ModelSpec, build_foundation_model, fsdp_blocks, spec_of
from train.ops.device import describe_device
from train.ops.registry import Ops, bind_ops, resolve
from train.parallel.apply import apply_parallel
from train.parallel.fsdp import needs_wrapping
from train.parallel.loading import fill_from_hub, fill_random, give_memory
from train.parallel.router import RouterReduction

AnyModel = FoundationModel | HubModel
CONFIG_FILE = "config.json"
MASTER_DTYPE = torch.float32  # of parameters; mixed precision computes with a copy


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


def choose_ops(model: ModelConfig, train: TrainConfig, device: torch.device) -> Ops:
    """The operations that the configuration names, on this device and in the dtype that is computed in."""
    dtype = train.accelerator.fsdp_config.mixed_precision.compute_dtype
    place = describe_device(device)
    return bind_ops(resolve(model.ops_implementation.model_dump(), place, dtype), place, dtype)


def build_model(config: ModelConfig, ops: Ops) -> AnyModel:
    """Without memory, on the meta device."""
    return build_foundation_model(
        ModelFiles.of(config).config_file,
        ops,
        device="meta",
        dtype=MASTER_DTYPE,
        backend=config.backend,
        trust_remote_code=config.trust_remote_code,
    )


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
    audio = getattr(model.config, "audio_config", None)
    return ModelInputs() if audio is None else ModelInputs(RouteSpec(sound_window=audio.n_window_infer))


def set_gradient_checkpointing(model: AnyModel, enable: bool) -> None:
    policy = CheckpointPolicy() if enable else None
    if isinstance(model, HubModel):
        model.set_checkpointing(policy)
    else:
        set_checkpointing(model, policy)


def share_router(model: AnyModel, mesh: Mesh) -> None:
    """The auxiliary loss of all ranks' rows."""
    if isinstance(model, FoundationModel) and mesh.world_size > 1:
        model.reduce_router = RouterReduction()


def parallelize(model: AnyModel, mesh: Mesh, train: TrainConfig, files: ModelFiles, *, fill: bool) -> None:
    """Wraps the model and gives it memory and values. fill: False when a checkpoint fills it."""
    fsdp, device = train.accelerator.fsdp_config, mesh.device
    memory = torch.device("cpu") if fsdp.offload else device
    if train.init_device == "cuda" and device.type != "cuda":
        raise ConfigError("train.init_device: cuda, but there is no GPU; write meta")
    whole_first = train.init_device != "meta"
    if whole_first:
        give_memory(model, device if train.init_device == "cuda" else torch.device("cpu"))
        _fill(model, files, train.seed, fill=fill, show=mesh.rank == 0)
    if needs_wrapping(mesh, fsdp):
        apply_parallel(model, fsdp_blocks(model), mesh, fsdp)
    elif whole_first:
        model.to(device)
    if not whole_first:
        give_memory(model, memory)
        _fill(model, files, train.seed, fill=fill, show=mesh.rank == 0)


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
