"""Names, needs and errors of the selection, for devices that are described, not there."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from schemas.errors import ConfigError, RegistryError
from train.ops.registry import (
    OPS,
    Backend,
    Device,
    Needs,
    OpRegistry,
    OpSlot,
    bind_ops,
    eager_ops,
    register_backend,
    resolve,
)

HERE = frozenset({"train", "torch", "triton"})
CPU = Device("cpu")
TURING = Device("cuda", (7, 5), HERE)
AMPERE = Device("cuda", (8, 0), HERE | {"flash_attn"})
HOPPER = Device("cuda", (9, 0), HERE)
HOPPER_ALL = Device("cuda", (9, 0), HERE | {"flash_attn", "flash_attn_interface"})
HOPPER_TWO = Device("cuda", (9, 0), HERE | {"flash_attn.flash_attn_interface"})
BLACKWELL_ALL = Device("cuda", (10, 0), HERE | {"flash_attn", "flash_attn_interface"})
ATTENTION = OPS["attention"]


def test_importing_the_registry_is_light() -> None:
    code = "import sys, train.ops.registry; sys.exit(' '.join({'torch', 'triton'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).stderr == b"\n"


def test_auto_on_a_cpu() -> None:
    assert resolve({}, CPU) == {
        "attention": "sdpa",
        "moe_experts": "grouped_mm",
        "linear_cross_entropy": "chunk_loss",
        "rms_norm": "eager",
        "layer_norm": "eager",
        "linear": "eager",
        "linear_gelu": "eager",
        "qk_norm_rope": "eager",
        "vision_rope": "eager",
        "swiglu": "eager",
        "topk_softmax": "eager",
        "router_statistics": "eager",
    }


@pytest.mark.parametrize(
    ("device", "dtype", "wanted"),
    [
        (CPU, None, ["sdpa", "eager"]),
        (TURING, "float16", ["sdpa", "eager"]),
        (
            AMPERE,
            "bfloat16",
            ["flash_attention_2", "torch_varlen", "triton", "flex_attention", "sdpa", "eager"],
        ),
        (HOPPER, "bfloat16", ["cudnn", "torch_varlen", "triton", "flex_attention", "sdpa", "eager"]),
        (replace(HOPPER, repeatable=True), "bfloat16", ["torch_varlen", "triton", "flex_attention", "sdpa", "eager"]),
        (HOPPER, "float32", ["flex_attention", "sdpa", "eager"]),
        (HOPPER_ALL, "bfloat16", ["flash_attention_4", "flash_attention_3", "cudnn", "flash_attention_2"]),
        (BLACKWELL_ALL, None, ["flash_attention_4", "cudnn", "flash_attention_2", "torch_varlen"]),
        (HOPPER_TWO, "bfloat16", ["cudnn", "flash_attention_2", "torch_varlen"]),
    ],
    ids=str,
)
def test_order_of_attention(device: Device, dtype: str | None, wanted: list[str]) -> None:
    found = ATTENTION.available(device, dtype)
    assert found[: len(wanted)] == wanted
    assert ATTENTION.resolve("auto", device, dtype) == wanted[0]


def test_order_of_the_others() -> None:
    on_turing, on_hopper = resolve({}, TURING), resolve({}, HOPPER)
    assert on_turing["moe_experts"] == "grouped_mm"
    assert on_turing["rms_norm"] == "compile"
    assert on_hopper["moe_experts"] == on_hopper["linear_cross_entropy"] == "fused_triton"
    pointwise = ("rms_norm", "layer_norm", "qk_norm_rope", "vision_rope", "swiglu", "router_statistics", "topk_softmax")
    assert {on_hopper[op] for op in pointwise} == {"triton"}
    assert {on_hopper[op] for op in ("linear", "linear_gelu")} == {"eager"}
    assert resolve({"linear_gelu_implementation": "triton"}, HOPPER)["linear_gelu"] == "triton"


def test_operations_of_one_key_have_the_same_backends() -> None:
    """Else a name that is right for one would be an error of the other."""
    for entry in OPS.values():
        shared = [other for other in OPS.values() if other.key == entry.key]
        needs = [{name: b.needs for name, b in other.backends.items()} for other in shared]
        assert all(found == needs[0] for found in needs), entry.key


@pytest.mark.parametrize(
    ("key", "name", "device", "dtype", "said"),
    [
        (
            "attn",
            "flash_attention_4",
            CPU,
            None,
            "flash_attention_4 is not available on cpu: it needs a CUDA device, this",
        ),
        ("attn", "flash_attention_3", TURING, None, "on cuda of capability 7.5: it needs capability 9.0, this is 7.5"),
        ("attn", "flash_attention_3", BLACKWELL_ALL, None, "it needs at most capability 9.9, this is 10.0"),
        ("attn", "flash_attention_4", HOPPER, None, "the package flash_attn.cute is not installed; available here"),
        ("attn", "torch_varlen", HOPPER, "float32", "it computes in bfloat16 or float16, not in float32"),
        ("attn", "flash_attention_4", CPU, None, "available here: sdpa, eager"),
        ("moe", "fused_triton", TURING, None, "needs capability 8.0, this is 7.5; available here: grouped_mm, eager"),
    ],
)
def test_an_unavailable_choice_says_why(key: str, name: str, device: Device, dtype: str | None, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({f"{key}_implementation": name}, device, dtype)
    assert said in str(caught.value)
    assert str(caught.value).startswith(f"model.ops_implementation.{key}_implementation: ")


@pytest.mark.parametrize(
    ("key", "name", "said"),
    [
        (
            "attn",
            "flash_attention_5",
            "is no implementation of attention; did you mean 'flash_attention_4'? known: auto,",
        ),
        ("attn", "magi_attention", "the nearest is flex_attention"),
        ("attn", "veomni_flash_attention_2_with_sp", "write flash_attention_2"),
        ("moe", "fused_quack", "its counterpart here is fused_triton; known: auto, fused_triton, grouped_mm, eager"),
        ("cross_entropy_loss", "liger_kernel", "liger_kernel's counterpart here is fused_triton, and chunk_loss"),
        ("rms_norm", "liger_kernel", "liger_kernel's counterpart here is triton"),
        ("rms_norm", "npu", "NPUs are not supported; eager runs anywhere"),
    ],
)
def test_an_unknown_name_says_which_are_known(key: str, name: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({f"{key}_implementation": name}, HOPPER)
    assert said in str(caught.value)


def test_all_faults_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({"attn_implementation": "flash", "moe_implementation": "fast", "rmsnorm_implementation": "eager"}, CPU)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert "rmsnorm_implementation: unknown key; did you mean 'rms_norm_implementation'" in lines[2]


def test_a_module_that_is_not_there_is_a_reason() -> None:
    ops = OpRegistry({"swiglu": "swiglu_mlp_implementation"})
    ops.register("swiglu", Backend("fast", "train.ops.no_such_module:swiglu", 0))
    ops.register("swiglu", Backend("other", "no_such_package.inner:swiglu", 1))
    ops.register("swiglu", Backend("eager", "train.ops.swiglu:swiglu", 2))
    assert resolve({}, CPU, ops=ops) == {"swiglu": "eager"}
    with pytest.raises(ConfigError, match=r"its module train\.ops\.no_such_module is not there"):
        resolve({"swiglu_mlp_implementation": "fast"}, CPU, ops=ops)


def test_a_package_that_does_not_load_is_an_error_at_build_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_package.py").write_text("raise ImportError('libfast.so: no such file')")
    monkeypatch.syspath_prepend(tmp_path)
    backend = Backend("fast", "train.ops.swiglu:swiglu", 0, Needs(packages=("broken_package",)))
    with pytest.raises(ConfigError, match=r"fast: the package broken_package is there but .*libfast\.so: no such file"):
        backend.load()


def test_third_parties_register_their_own() -> None:
    ops = OpRegistry({"swiglu": "swiglu_mlp_implementation"})
    ops.register("swiglu", Backend("eager", "train.ops.swiglu:swiglu", 20))
    ops.register("swiglu", Backend("mine", "train.ops.swiglu:swiglu", 5, Needs(packages=("torch",))))
    assert resolve({}, CPU, ops=ops) == {"swiglu": "mine"}
    for backend, said in (
        (Backend("mine", "a:b", 1), "has a backend 'mine' already: train.ops.swiglu:swiglu"),
        (Backend("bad", "a.b", 1), "the target is module:function, not 'a.b'"),
        (Backend("auto", "a:b", 1), "the name 'auto' is taken"),
    ):
        with pytest.raises(RegistryError, match=said):
            ops.register("swiglu", backend)
    with pytest.raises(RegistryError, match="no operation is called 'swigl'; did you mean 'swiglu'"):
        ops.register("swigl", Backend("x", "a:b", 1))
    with pytest.raises(RegistryError, match="already"):
        register_backend("swiglu", Backend("eager", "a:b", 1))


def test_a_slot_is_bound_once() -> None:
    slot = OpSlot("swiglu")
    with pytest.raises(RegistryError, match="swiglu is called before it is bound"):
        slot(1, 2)
    assert slot.bind("eager", CPU).bind("eager", CPU) is slot
    with pytest.raises(RegistryError, match="swiglu is bound to eager and cannot be bound to compile"):
        slot.bind("compile", CPU)
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        OpSlot("swiglu").bind("compile", CPU)
    with pytest.raises(RegistryError, match="did you mean 'attention'"):
        OpSlot("attentio")


def test_what_was_picked_is_described() -> None:
    lines = bind_ops(resolve({"attn_implementation": "eager"}, CPU), CPU).describe().splitlines()
    assert lines[0].split() == ["attention", "eager"]
    assert lines[1].split() == ["moe_experts", "grouped_mm"]
    assert len(lines) == len(OPS)
    assert {line.split()[1] for line in eager_ops("cpu").describe().splitlines()} == {"sdpa", "eager"}


@pytest.mark.parametrize(("op", "name"), [(op, name) for op in OPS for name in OPS[op].backends])
def test_every_backend_that_can_load_here_does(op: str, name: str) -> None:
    backend = OPS[op].backends[name]
    if find_spec(backend.module) is None or not all(map(Device("cpu").has, backend.needs.packages)):
        pytest.skip(f"{backend.module} or what it needs is not there")
    assert callable(backend.load())
