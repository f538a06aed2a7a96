"""Stand-ins for the flash-attn packages: functions with the parameters of releases, which compute by the reference."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from train.ops.attention import eager
from train.ops.attention_flash import FUNCTION, VERSION_2, VERSION_3, VERSION_4
from train.ops.segments import Segments

_BOUNDS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
_BOUNDS_4 = "cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None"
_SCALED = "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)"
_MASKED_4 = "page_table=None, softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None"
_DESCALED = "qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1)"
_PACKED_3 = "softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0"


@dataclass
class Release:
    """parameters: in Python; pair: (results, logsumexp) come back, not the results alone; calls: arguments of each."""

    package: str
    parameters: str
    pair: bool
    calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def backend(self) -> str:
        """The name of the backend that calls it."""
        numbers = {VERSION_2: 2, VERSION_3: 3, VERSION_4: 4}
        return f"flash_attention_{numbers[self.package]}"

    def function(self) -> Callable[..., Any]:
        made: dict[str, Any] = {"answer": self._answer}
        exec(f"def {FUNCTION}({self.parameters}):\n    return answer(locals())", made)
        found: Callable[..., Any] = made[FUNCTION]
        return found

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As if it were imported."""
        module = ModuleType(self.package)
        setattr(module, FUNCTION, self.function())
        monkeypatch.setitem(sys.modules, self.package, module)

    def _answer(self, given: dict[str, Any]) -> Tensor | tuple[Tensor, Tensor]:
        self.calls.append(given)
        assert torch.equal(given["cu_seqlens_q"], given["cu_seqlens_k"])
        lengths = given["cu_seqlens_q"].diff().tolist()
        assert given["max_seqlen_q"] == given["max_seqlen_k"] == max(lengths)
        left, right = given.get("window_size", (-1, -1))
        assert right in ((-1, None) if left in (-1, None) else (0,))
        out = eager(
            given["q"],
            given["k"],
            given["v"],
            Segments.from_lengths(lengths, "cpu"),
            causal=given["causal"],
            scale=given["softmax_scale"],
            window=None if left in (-1, None) else left + 1,
            softcap=given.get("softcap") or None,
        )
        return (out, out.new_zeros(out.shape[:2])) if self.pair else out


def releases() -> dict[str, Release]:
    """By what they are called here: the package and the release or the time of it."""
    return {
        "2.3": Release(VERSION_2, f"q, k, v, {_BOUNDS}, {_SCALED}, return_attn_probs=False", False),
        "2.4.1": Release(
            VERSION_2,
            f"q, k, v, {_BOUNDS}, {_SCALED}, alibi_slopes=None, deterministic=False, return_attn_probs=False",
            False,
        ),
        "2.8.3": Release(
            VERSION_2,
            f"q, k, v, {_BOUNDS}, {_SCALED}, softcap=0.0, alibi_slopes=None, deterministic=False, "
            "return_attn_probs=False, block_table=None",
            False,
        ),
        "3 of 2024": Release(VERSION_3, f"q, k, v, {_BOUNDS}, softmax_scale=None, causal=False", True),
        "3 of early 2025": Release(
            VERSION_3,
            f"q, k, v, {_BOUNDS}, seqused_q=None, seqused_k=None, softmax_scale=None, causal=False, {_DESCALED}, "
            f"{_PACKED_3}",
            True,
        ),
        "3": Release(
            VERSION_3,
            f"q, k, v, {_BOUNDS}, seqused_q=None, seqused_k=None, softmax_scale=None, causal=False, {_DESCALED}, "
            f"attention_chunk=0, {_PACKED_3}, return_attn_probs=False",
            False,
        ),
        "4 of 2.8.3": Release(
            VERSION_4,
            "q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, "
            f"{_MASKED_4}, softcap=0.0, pack_gqa=None",
            True,
        ),
        "4 beta4": Release(
            VERSION_4,
            f"q, k, v, {_BOUNDS_4}, seqused_q=None, seqused_k=None, {_MASKED_4}, softcap=0.0, num_splits=1, "
            "pack_gqa=None, deterministic=False, score_mod=None, aux_tensors=None, return_lse=False",
            True,
        ),
        "4 beta27": Release(
            VERSION_4,
            f"q, k, v, qv=None, {_BOUNDS_4}, min_seqlen_k=None, seqused_q=None, seqused_k=None, "
            f"gather_kv_indices=None, {_MASKED_4}, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, "
            "score_mod=None, score_mod_bwd=None, mask_mod=None, block_sparse_tensors=None, aux_tensors=None, "
            "aux_scalars=None, return_lse=False, scheduler_metadata=None, seqlen_k_per_split=None, "
            "disable_scheduler_metadata=False",
            True,
        ),
    }
