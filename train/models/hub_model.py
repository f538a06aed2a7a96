"""Dense text models that are not among ours, `model.backend: transformers`: the body is transformers' own, on packed
documents; the head and the loss are ours, so that the logits are never whole.

The attention operation reaches the layers through the library's own hooks: a function under the name `PACKED` in its
table of attention functions, which each layer looks up by its configuration, and keyword arguments of the forward call,
which the library hands on to that function.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from schemas.errors import UnsupportedError
from train.models.checkpointing import CheckpointPolicy
from train.models.inputs import IGNORE, ModelInputs, ModelOutput
from train.ops.chunk_loss import CHUNK_BYTES, rows_per_chunk
from train.ops.label_rows import on_rows
from train.ops.linear_cross_entropy import CrossEntropy
from train.ops.registry import Ops
from train.ops.segments import Segments
from train.ops.token_objective import labelled_loss

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

PACKED = "omniloom_packed"
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# what stands behind the head: multiplied onto the logits, divided out of them, or their cap
MULTIPLIED, DIVIDED, CAPPED = "logit_scale", "logits_scaling", "final_logit_softcapping"
HEAD_KEYS = re.compile(r"(logit|lm_head|output).*(scal|cap|mult)")
# arguments of a layer that change nothing about packed training
HARMLESS = {"position_ids", "use_cache", "cache", "past_key_values", "cache_position", "output_attentions", "is_causal"}
LAYER_TYPES = {"full_attention", "sliding_attention"}


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments | None = None,
    attention: Callable[..., Tensor] | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [1, Hq, T, D], key and value [1, Hkv, T, D] -> [1, T, Hq, D], by the operation that the forward call
    brings. UnsupportedError: what that operation has no argument for."""
    name = type(module).__name__
    if segments is None or attention is None:
        raise UnsupportedError(f"{name} does not hand keyword arguments on to its attention; it cannot be packed")
    if dropout:
        raise UnsupportedError(f"{name}: attention_dropout {dropout} is not supported; set it to 0 in config.json")
    if attention_mask is not None:
        raise UnsupportedError(f"{name} brings an attention mask of its own; packed documents have theirs")
    if unknown := sorted(k for k, v in others.items() if v is not None and v is not False and k not in HARMLESS):
        raise UnsupportedError(f"{name} passes {', '.join(unknown)} to its attention, which is not supported")
    options: dict[str, Any] = {} if softcap is None else {"softcap": softcap}
    if sliding_window is not None and segments.max_seqlen > sliding_window:
        options["window"] = sliding_window
    causal = others.get("is_causal")
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]
    out = attention(
        *rows,
        segments,
        causal=getattr(module, "is_causal", True) if causal is None else causal,
        scale=scaling,
        **options,
    )
    return out[None].contiguous(), None


class HubModel(nn.Module):
    """A causal language model of transformers on packed documents. Parameters have the hub's names; a tied head has
    none of its own.

    attention, cross_entropy: the bound operations, which parallel code may replace; widen_head: as of
    `FoundationModel`; blocks: the layers, which FSDP wraps one by one.
    """

    def __init__(self, model: PreTrainedModel, ops: Ops) -> None:
        super().__init__()
        check_supported(model)
        # its modules become ours, under the hub's names; itself it is no module of ours, which would prefix them
        self._hub = (model,)
        self.config: PreTrainedConfig = model.config
        self.tied = bool(self.config.tie_word_embeddings)
        head = model.get_output_embeddings()
        for name, child in model.named_children():
            if not (self.tied and child is head):
                self.add_module(name, child)
        self.attention: Callable[..., Tensor] = ops.attention
        self.cross_entropy: Callable[..., CrossEntropy] = ops.linear_cross_entropy
        self.widen_head: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None

    @property
    def hub(self) -> PreTrainedModel:
        """The model of transformers, whose modules these are."""
        return self._hub[0]

    @property
    def blocks(self) -> list[nn.Module]:
        """The layers in order."""
        names = set(self.hub._no_split_modules or ())
        return [module for module in self.modules() if type(module).__name__ in names]

    @property
    def head_weight(self) -> Tensor:
        """[V, H]."""
        holder: Any = self.hub.get_input_embeddings() if self.tied else self.hub.get_output_embeddings()
        weight: Tensor = holder.weight
        return weight

    def decode(self, inputs: ModelInputs) -> Tensor:
        """[S, H], rows after the last norm, scaled as the model scales its logits."""
        if inputs.grids or inputs.mel_lengths:
            raise UnsupportedError(f"{type(self.hub).__name__} is a text model; this sample has pictures or sound")
        found = self.hub.get_decoder()(
            input_ids=inputs.ids[None],
            position_ids=inputs.position_ids[0].long()[None],
            attention_mask=None,
            use_cache=False,
            segments=inputs.segments,
            attention=self.attention,
        )
        rows: Tensor = found.last_hidden_state[0]
        factor = _number(self.config, MULTIPLIED, 1.0) / _number(self.config, DIVIDED, 1.0)
        return rows if factor == 1.0 else rows * factor

    def forward(self, inputs: ModelInputs, *, logits: bool = False) -> ModelOutput:
        """The loss of labelled inputs; logits [S, V] too when asked for, whole in memory."""
        hidden, cap = self.decode(inputs), _number(self.config, CAPPED, 0.0)
        output = ModelOutput()
        hidden, weight = (hidden, self.head_weight) if self.widen_head is None else self.widen_head(hidden)
        if inputs.labels is not None:
            scale = inputs.loss_scale
            if scale is None:
                scale = (inputs.labels != IGNORE).sum().clamp(min=1).float().reciprocal()
            loss = partial(capped_cross_entropy, cap=cap) if cap else self.cross_entropy
            found = labelled_loss(
                on_rows(loss, inputs.label_rows), hidden, weight, inputs.labels, scale, inputs.objective
            )
            output = ModelOutput(found.loss, found.loss, None, found.token_loss, objective_sums=found.sums)
        if not logits:
            return output
        whole = F.linear(hidden, weight)
        return output._replace(logits=cap * torch.tanh(whole / cap) if cap else whole)

    def set_checkpointing(self, policy: CheckpointPolicy | None) -> None:
        """Turns gradient checkpointing on for every layer, or off with None; it acts in training mode."""
        hub: Any = self.hub
        renamed = hasattr(hub, "activation_checkpointing_enable")  # transformers 5.24
        if policy is None:
            (hub.activation_checkpointing_disable if renamed else hub.gradient_checkpointing_disable)()
        else:
            enable = hub.activation_checkpointing_enable if renamed else hub.gradient_checkpointing_enable
            enable({"use_reentrant": False, "context_fn": policy.context_fn})

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Random parameters, as transformers draws them, of a model that has left the meta device unsharded."""
        self._mark(parameters=False)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.hub.init_weights()

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Computes what no checkpoint holds (frequencies, scales), after the model has left the meta device and its
        parameters are loaded."""
        self._mark(parameters=True)
        self.hub.initialize_weights()

    def _mark(self, *, parameters: bool) -> None:
        """Tells the library what to leave alone when it draws initial values: all parameters, or nothing."""
        if self.tied:
            self.hub.tie_weights()  # the library's head is no module of ours and has not left the meta device
        for module in self.hub.modules():
            module._is_hf_initialized = False  # type: ignore[assignment]
        for parameter in self.hub.parameters():
            parameter._is_hf_initialized = parameters  # type: ignore[attr-defined]


def build_hub_model(
    config_path: str, ops: Ops, *, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False
) -> HubModel:
    """The model of a folder with a config.json, its parameters not loaded, on torch's current default device (meta to
    build without memory). UnsupportedError: what this backend cannot train, by name."""
    # seconds to import, and of no use to models of ours
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    AttentionInterface.register(PACKED, packed_attention)
    config = AutoConfig.from_pretrained(config_path, trust_remote_code=trust_remote_code, local_files_only=True)
    check_config(config)
    try:
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=PACKED, dtype=dtype, trust_remote_code=trust_remote_code
        )
    except KeyError as error:
        if error.args != (PACKED,):
            raise
        raise UnsupportedError(f"{config.model_type} has its attention functions in a table of its own") from error
    return HubModel(model, ops)


def check_config(config: PreTrainedConfig) -> None:
    """UnsupportedError for kinds of models that would train wrongly when packed, or whose head is not understood."""
    name = config.model_type
    if config.sub_configs or config.is_encoder_decoder:
        raise UnsupportedError(f"{name}: backend transformers takes text models alone, without towers or an encoder")
    for key in EXPERT_KEYS:
        if getattr(config, key, None):
            raise UnsupportedError(
                f"{name} has experts ({key}: {getattr(config, key)}); backend transformers takes dense models only"
            )
    if strange := sorted(set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES):
        raise UnsupportedError(f"{name} has layers of type {', '.join(strange)}, which cannot be packed")
    for key, value in config.to_dict().items():
        known = key in (MULTIPLIED, DIVIDED, CAPPED, "attn_logit_softcapping")
        if HEAD_KEYS.search(key) and not known and value not in (None, False, 1, 1.0):
            raise UnsupportedError(f"{name} changes its logits by {key}: {value}, which is not supported")


def check_supported(model: PreTrainedModel) -> None:
    """UnsupportedError for a model whose attention or head does not go through the library's hooks."""
    name = type(model).__name__
    check_config(model.config)
    if getattr(model, "_is_stateful", False):
        raise UnsupportedError(f"{name} keeps a state along the sequence; packed documents would leak into each other")
    if not model._supports_attention_backend:
        raise UnsupportedError(f"{name} does not look its attention up by config._attn_implementation")
    if model.config._attn_implementation != PACKED:
        raise UnsupportedError(f"{name} was built with attention {model.config._attn_implementation}, not {PACKED}")
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise UnsupportedError(f"{name} has a head other than one matrix without bias")


def capped_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, *, scale: Tensor, cap: float) -> CrossEntropy:
    """The loss of logits cap * tanh(logits / cap), as Gemma 2 has them (arXiv:2408.00118, section 2), in chunks of rows
    whose logits are made again for the gradient."""
    chunk = rows_per_chunk(weight.shape[0], CHUNK_BYTES.get(hidden.device.type, CHUNK_BYTES["cpu"]))
    loss, token_losses = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32)), []
    scales = scale.split(chunk) if scale.ndim else repeat(scale)
    for rows, targets, by in zip(hidden.split(chunk), labels.split(chunk), scales, strict=False):
        part, token_loss = checkpoint(_capped_rows, rows, weight, targets, by, cap, use_reentrant=False)
        loss = loss + part
        token_losses.append(token_loss)
    return CrossEntropy(loss, torch.cat(token_losses))


def _capped_rows(hidden: Tensor, weight: Tensor, labels: Tensor, scale: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    logits = F.linear(hidden, weight)
    logits = cap * torch.tanh(logits.to(torch.promote_types(logits.dtype, torch.float32)) / cap)
    rows = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
    return (rows * scale).sum() if scale.ndim else rows.sum() * scale, rows.detach().float()


def _number(config: PreTrainedConfig, key: str, default: float) -> float:
    found = getattr(config, key, None)
    return default if found is None else float(found)
