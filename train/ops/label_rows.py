"""The head and its loss on the rows that have a label alone. In a conversation about a clip they are some percent of
all, and the head of a large vocabulary is the widest product of the model.

Shapes: T rows, n of them with a label, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from train.ops.linear_cross_entropy import CrossEntropy


def on_rows(cross_entropy: Callable[..., CrossEntropy], rows: Tensor | None) -> Callable[..., CrossEntropy]:
    """The same operation, which looks at `rows` alone: int64 [n], each once, all that have a label among them; None: at
    all. Their number is known where they were found, so that nothing waits for the device."""
    if rows is None:
        return cross_entropy
    chosen = rows

    def labelled(hidden: Tensor, weight: Tensor, labels: Tensor, *, scale: Tensor, **options: float) -> CrossEntropy:
        found = cross_entropy(
            hidden.index_select(0, chosen),
            weight,
            labels.index_select(0, chosen),
            scale=scale.index_select(0, chosen) if scale.ndim else scale,
            **options,
        )
        token_loss = found.token_loss.new_zeros(hidden.shape[0]).index_copy(0, chosen, found.token_loss)
        return CrossEntropy(found.loss, token_loss)

    return labelled
