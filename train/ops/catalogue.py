"""The backends that come with omniloom: for each operation its key of the configuration and, from the fastest to the
plainest, where each implementation is and what it needs. Data only."""

from __future__ import annotations

from train.ops.backend import Backend, Needs

HALF = ("bfloat16", "float16")
ANY = Needs()
TRITON = Needs(device="cuda", min_capability=(8, 0), packages=("triton",))
COMPILE = Needs(device="cuda", min_capability=(7, 0), packages=("triton",))


def _flash(package: str, low: tuple[int, int], high: tuple[int, int] | None = None) -> Needs:
    return Needs("cuda", low, high, (package,), HALF)


def _flash_package(name: str, rank: int, needs: Needs) -> Backend:
    return Backend(name, f"train.ops.attention_flash:{name}", rank, needs, check="misfit")


def _pointwise(op: str, module: str, triton_module: str) -> tuple[Backend, ...]:
    return (
        Backend("triton", f"train.ops.{triton_module}:{op}", 0, TRITON),
        Backend("compile", f"train.ops.compiled:{op}", 10, COMPILE),
        Backend("eager", f"train.ops.{module}:{op}", 20),
    )


def _tower_linear(op: str) -> tuple[Backend, ...]:
    return (
        Backend("triton", f"train.ops.triton_linear:{op}", 0, TRITON),
        # first: the kernels gain little on many rows, and their launches cost the host more on few
        Backend("eager", f"train.ops.linear:{op}", -1),
    )


# operation -> (key below model.ops_implementation, backends)
BUILT_IN: dict[str, tuple[str, tuple[Backend, ...]]] = {
    "attention": (
        "attn_implementation",
        (
            _flash_package("flash_attention_4", 0, _flash("flash_attn.cute", (9, 0))),
            _flash_package("flash_attention_3", 10, _flash("flash_attn_interface", (9, 0), (9, 9))),
            # torch refuses it where results must be the same at every run
            Backend(
                "cudnn",
                "train.ops.attention_cudnn:cudnn",
                25,
                Needs("cuda", (9, 0), packages=("torch.nn.attention.varlen", "triton"), dtypes=HALF),
                repeatable=False,
                recorded=True,
            ),
            # the first on capability 8.x; from 9.0 on behind cudnn, whose results blocks can keep
            _flash_package("flash_attention_2", 27, _flash("flash_attn.flash_attn_interface", (8, 0))),
            Backend(
                "torch_varlen",
                "train.ops.attention_varlen:torch_varlen",
                30,
                _flash("torch.nn.attention.varlen", (8, 0)),
                recorded=True,
            ),
            # full attention of short documents alone; a causal mask sends it to torch_varlen
            Backend(
                "triton",
                "train.ops.triton_attention:attention",
                35,
                Needs("cuda", (8, 0), packages=("triton", "torch.nn.attention.varlen"), dtypes=HALF),
                recorded=True,
            ),
            Backend("flex_attention", "train.ops.attention_flex:flex_attention", 40, TRITON),
            Backend("sdpa", "train.ops.attention:sdpa", 60, recorded=True),
            Backend("eager", "train.ops.attention:eager", 70),
        ),
    ),
    "moe_experts": (
        "moe_implementation",
        (
            Backend("fused_triton", "train.ops.triton_moe:moe_experts", 0, TRITON, recorded=True, asked=True),
            Backend("grouped_mm", "train.ops.moe_grouped_mm:grouped_mm", 10),
            Backend("eager", "train.ops.moe:eager", 20),
        ),
    ),
    "linear_cross_entropy": (
        "cross_entropy_loss_implementation",
        (
            Backend("fused_triton", "train.ops.triton_linear_cross_entropy:linear_cross_entropy", 0, TRITON),
            Backend("chunk_loss", "train.ops.chunk_loss:chunk_loss", 10),
            Backend("eager", "train.ops.linear_cross_entropy:eager", 20),
        ),
    ),
    "rms_norm": ("rms_norm_implementation", _pointwise("rms_norm", "norm", "triton_norm")),
    "layer_norm": (
        "layer_norm_implementation",
        _pointwise("layer_norm", "layer_norm", "triton_layer_norm"),
    ),
    "linear": ("linear_implementation", _tower_linear("linear")),
    "linear_gelu": ("linear_gelu_implementation", _tower_linear("linear_gelu")),
    "qk_norm_rope": ("rotary_pos_emb_implementation", _pointwise("qk_norm_rope", "rope", "triton_rope")),
    "vision_rope": ("rotary_pos_emb_vision_implementation", _pointwise("vision_rope", "rope", "triton_vision_rope")),
    "swiglu": ("swiglu_mlp_implementation", _pointwise("swiglu", "swiglu", "triton_swiglu")),
    # both of the router, with one key
    "topk_softmax": (
        "load_balancing_loss_implementation",
        _pointwise("topk_softmax", "router", "triton_router"),
    ),
    "router_statistics": (
        "load_balancing_loss_implementation",
        _pointwise("router_statistics", "router", "triton_router"),
    ),
}

_LIGER = "liger_kernel's counterpart here is"
_NPU = "NPUs are not supported"
# key -> name that VeOmni or transformers uses -> what to write instead
PEER_NAMES: dict[str, dict[str, str]] = {
    "attn_implementation": {
        "magi_attention": "the nearest is flex_attention",
        "native-sparse": "sparse attention is not supported; the nearest is flex_attention",
        **{
            f"veomni_{name}_with_sp": f"write {name}: sequence parallelism is set by ulysses_size alone"
            for name in ("flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
        },
    },
    "moe_implementation": {
        "fused": "write fused_triton",
        "fused_quack": "its counterpart here is fused_triton",
        "fused_npu": f"{_NPU}; grouped_mm runs anywhere",
        "batched_mm": "its counterpart here is grouped_mm",
    },
    "cross_entropy_loss_implementation": {
        "liger_kernel": f"{_LIGER} fused_triton, and chunk_loss without Triton",
        "npu": f"{_NPU}; chunk_loss runs anywhere",
    },
    "rms_norm_implementation": {"liger_kernel": f"{_LIGER} triton", "npu": f"{_NPU}; eager runs anywhere"},
    "rotary_pos_emb_implementation": {"liger_kernel": f"{_LIGER} triton", "npu": f"{_NPU}; eager runs anywhere"},
    "rotary_pos_emb_vision_implementation": {"npu": f"{_NPU}; eager runs anywhere"},
    "swiglu_mlp_implementation": {"liger_kernel": f"{_LIGER} triton"},
}
