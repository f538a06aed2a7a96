"""Which attention `auto` takes where packages do not load or are of other releases, and how each release is called."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import invalidate_caches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from schemas.errors import ConfigError, UnsupportedError
from tests.train.ops.flash_releases import Release, releases
from train.ops.attention import eager
from train.ops.attention_flash import VERSION_2, VERSION_3, VERSION_4
from train.ops.registry import OPS, Backend, Device, Needs, OpRegistry, OpSlot, bind_ops, resolve
from train.ops.segments import Segments

ATTENTION = OPS["attention"]
AMPERE, HOPPER = Device("cuda", (8, 0)), Device("cuda", (9, 0))
REPEATABLE = Device("cuda", (9, 0), repeatable=True)
ALL = ("2.3", "2.4.1", "2.8.3", "3 of 2024", "3 of early 2025", "3", "4 beta4", "4 beta27")
WITHOUT = ("2.3", "3 of 2024")  # without a parameter deterministic
PACKAGES = ("flash_attn", VERSION_2, VERSION_3, VERSION_4)

Writer = Callable[[Mapping[str, str]], None]

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not there")


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has; a test installs what it needs."""
    for name in PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Writer]:
    """Writes modules into a folder that is searched first."""
    monkeypatch.syspath_prepend(tmp_path)

    def written(files: Mapping[str, str]) -> None:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.parent != tmp_path:
                (path.parent / "__init__.py").touch()
            path.write_text(text)
        invalidate_caches()
        for name in PACKAGES:
            monkeypatch.delitem(sys.modules, name, raising=False)

    yield written
    for name in list(sys.modules):
        if name.split(".")[0] in ("flash_attn", VERSION_3):
            del sys.modules[name]


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def installed(name: str, monkeypatch: pytest.MonkeyPatch) -> Release:
    release = releases()[name]
    release.install(monkeypatch)
    return release


def attend(release: Release, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(by the release, by the reference)."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(12, heads, 8, generator=generator) for heads in (4, 2, 2))
    segments = Segments.from_lengths([5, 1, 6], "cpu")
    function = ATTENTION.backends[release.backend].load()
    return function(q, k, v, segments, **options), eager(q, k, v, segments, **options)


@pytest.mark.parametrize("options", [{"causal": True}, {"causal": False, "scale": 0.3}], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_every_release_takes_what_it_is_given(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    release = installed(name, monkeypatch)
    found, wanted = attend(release, **options)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert len(release.calls) == 1
    assert release.calls[0].get("deterministic", False) is False


@pytest.mark.parametrize("name", ALL)
def test_windows_and_softcap(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    release = installed(name, monkeypatch)
    for options, parameter in (({"window": 3}, "window_size"), ({"softcap": 2.0}, "softcap")):
        if parameter in release.parameters:
            found, wanted = attend(release, causal=True, **options)
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)
            assert not torch.equal(found, attend(release, causal=True)[0])
        else:
            with pytest.raises(UnsupportedError, match=f"has no parameter {parameter}; install a later release"):
                attend(release, causal=True, **options)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", ALL)
def test_deterministic_is_passed_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    release = installed(name, monkeypatch)
    if name in WITHOUT:
        with pytest.raises(UnsupportedError, match="has no parameter deterministic"):
            attend(release, causal=True)
        assert release.calls == []
    else:
        attend(release, causal=True)
        assert release.calls[0]["deterministic"] is True


@pytest.mark.parametrize("name", ALL)
def test_a_release_that_cannot_repeat_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    release = installed(name, monkeypatch)
    assert OpSlot("attention").bind(release.backend, HOPPER).name == release.backend
    if name in WITHOUT:
        said = rf"attn_implementation: {release.backend}: .* no parameter deterministic, .*train\.deterministic is true"
        with pytest.raises(ConfigError, match=said):
            ATTENTION.resolve(release.backend, REPEATABLE)
    else:
        assert ATTENTION.resolve(release.backend, REPEATABLE) == release.backend


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_a_release_that_cannot_repeat_is_passed_over(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device("cuda", capability, repeatable=True)
    installed("2.8.3", monkeypatch)
    assert ATTENTION.choose("auto", device, "bfloat16") == ("flash_attention_2", ())
    installed("2.3", monkeypatch)
    name, (why,) = ATTENTION.choose("auto", device, "bfloat16")
    assert name == "torch_varlen"
    assert why.startswith("flash_attention_2: ") and "has no parameter deterministic" in why


def test_gradients_of_version_4_cannot_be_repeated_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    installed("4 beta27", monkeypatch)
    for capability, wanted in (((10, 0), "flash_attention_4"), ((12, 0), "torch_varlen")):
        assert ATTENTION.resolve("auto", Device("cuda", capability, repeatable=True), "bfloat16") == wanted
        assert ATTENTION.resolve("auto", Device("cuda", capability), "bfloat16") == "flash_attention_4"


def test_version_4_of_the_package_of_version_2_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no backward pass for packed documents."""
    installed("4 of 2.8.3", monkeypatch)
    name, (why,) = ATTENTION.choose("auto", HOPPER, "bfloat16")
    assert name == "cudnn"
    assert (
        why.startswith("flash_attention_4: flash_attn_varlen_func of the installed flash_attn.cute") and "max_" in why
    )
    with pytest.raises(ConfigError, match="attn_implementation: flash_attention_4: flash_attn_varlen_func of the"):
        ATTENTION.resolve("flash_attention_4", HOPPER, "bfloat16")


def test_a_package_without_the_function_is_passed_over(write: Writer) -> None:
    write({"flash_attn_interface.py": "flash_attn_func = print"})
    name, (why,) = ATTENTION.choose("auto", HOPPER, "bfloat16")
    assert (name, why) == (
        "cudnn",
        "flash_attention_3: the package flash_attn_interface has no flash_attn_varlen_func",
    )


def test_auto_takes_the_best_that_loads_and_says_so(write: Writer) -> None:
    """flash-attn 2.8 brings folders of version 4 along, which need another package."""
    write(
        {
            "flash_attn/flash_attn_interface.py": "raise AssertionError('imported, and not to be chosen')",
            "flash_attn/cute/interface.py": "import no_such_cutlass",
            "flash_attn/cute/__init__.py": "from flash_attn.cute.interface import flash_attn_varlen_func",
            "flash_attn_interface.py": "raise TypeError('built for\\nanother torch')",
        }
    )
    chosen = resolve({}, HOPPER, "bfloat16")
    assert chosen["attention"] == "cudnn"
    assert VERSION_2 not in sys.modules
    first, *others = bind_ops(chosen, HOPPER, "bfloat16").describe().splitlines()
    four = (
        "flash_attention_4: the package flash_attn.cute is there but does not load: No module named 'no_such_cutlass'"
    )
    three = "flash_attention_3: the package flash_attn_interface is there but does not load: built for another torch"
    assert " ".join(first.split()) == f"attention cudnn (passed over: {four}; {three})"
    assert len(others) == len(OPS) - 1 and not any("passed over" in line for line in others)


def test_a_choice_by_name_is_never_replaced(write: Writer) -> None:
    write({"flash_attn/cute/interface.py": "", "flash_attn/cute/__init__.py": "import no_such_cutlass"})
    with pytest.raises(ConfigError) as caught:
        resolve({"attn_implementation": "flash_attention_4"}, HOPPER, "bfloat16")
    said = str(caught.value)
    assert said.startswith(
        "model.ops_implementation.attn_implementation: flash_attention_4: the package flash_attn.cute"
    )
    assert said.endswith("is there but does not load: No module named 'no_such_cutlass'")


def test_a_package_whose_parent_does_not_load_is_told(write: Writer) -> None:
    write(
        {
            "flash_attn/flash_attn_interface.py": "",
            "flash_attn/__init__.py": "raise ImportError('flash_attn_2_cuda.so: undefined symbol')",
        }
    )
    name, (why,) = ATTENTION.choose("auto", AMPERE, "bfloat16")
    assert name == "torch_varlen"
    assert why == f"flash_attention_2: the package {VERSION_2} is there but does not load: " + (
        "flash_attn_2_cuda.so: undefined symbol"
    )


def test_nothing_is_loaded_for_a_device_that_is_described(write: Writer) -> None:
    write({"flash_attn/cute/interface.py": "", "flash_attn/cute/__init__.py": "raise AssertionError('imported')"})
    described = Device("cuda", (9, 0), here=False)
    assert ATTENTION.choose("auto", described, "bfloat16") == ("flash_attention_4", ())
    assert ATTENTION.resolve("flash_attention_4", described, "bfloat16") == "flash_attention_4"
    assert not {"flash_attn", VERSION_4} & set(sys.modules)


def test_looking_for_a_module_imports_nothing(
    write: Writer, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(
        {
            "flash_attn/__init__.py": "raise AssertionError('imported')",
            "flash_attn/two.py": "",
            "flash_attn_interface.py": "",
        }
    )
    other = tmp_path_factory.mktemp("other")
    (other / "flash_attn" / "cute").mkdir(parents=True)  # as flash-attn-4 installs it: without an __init__.py above
    (other / "flash_attn" / "cute" / "__init__.py").touch()
    assert not HOPPER.has("flash_attn.cute")
    monkeypatch.syspath_prepend(other)
    found = ("flash_attn", "flash_attn.two", "flash_attn.cute", VERSION_3, "torch.nn.attention.varlen")
    gone = ("flash_attn.three", "flash_attn.three.one", "flash_attn.two.one", "no_such.cute", f"{VERSION_3}.one")
    assert all(map(HOPPER.has, found)) and not any(map(HOPPER.has, gone))
    assert not {"flash_attn", VERSION_3} & set(sys.modules)


def test_an_operation_that_nothing_loads_for_is_an_error(write: Writer) -> None:
    ops = OpRegistry({"swiglu": "swiglu_mlp_implementation"})
    cpu = Device("cpu")
    with pytest.raises(ConfigError, match="swiglu_mlp_implementation: nothing is available on cpu"):
        resolve({}, cpu, ops=ops)
    write({"flash_attn_interface.py": "import no_such_module"})
    ops.register("swiglu", Backend("fast", "train.ops.swiglu:swiglu", 0, Needs(packages=(VERSION_3,))))
    ops.register("swiglu", Backend("mine", f"{VERSION_3}:swiglu", 1))
    with pytest.raises(ConfigError, match=r"fast: the package .*; mine: its module flash_attn_interface does not load"):
        resolve({}, cpu, ops=ops)
    ops.register("swiglu", Backend("eager", "train.ops.swiglu:swiglu", 2))
    chosen = resolve({}, cpu, ops=ops)
    assert chosen == {"swiglu": "eager"}
    assert [why.partition(":")[0] for why in chosen.passed_over["swiglu"]] == ["fast", "mine"]
    assert resolve({"swiglu_mlp_implementation": "eager"}, cpu, ops=ops).passed_over == {"swiglu": ()}
