"""How much the results that blocks keep between their two runs may take together, and whose come first."""

from __future__ import annotations

import math
from collections import Counter


class Room:
    """Bytes that the recordings of a model may hold together; what does not fit is computed again. Results of a lower
    order, which cost more to compute for their bytes, come first although others are made before them: these take what
    those leave over by what they asked for in the pass before, and nothing in the first one."""

    def __init__(self, limit: float = math.inf) -> None:
        self.limit = self.left = limit
        self._asked = Counter[int]()  # in this pass, by order
        self._before: Counter[int] | None = None  # in the one before

    def take(self, nbytes: int, order: int = 0) -> bool:
        """Whether so much is left, which then is taken."""
        if math.isinf(self.limit):
            return True
        self._asked[order] += nbytes
        fits = nbytes <= self.left - self._due(order)
        self.left -= nbytes if fits else 0
        return fits

    def _due(self, order: int) -> float:
        """What those that come before it are still going to ask for."""
        if not order:
            return 0
        if self._before is None:
            return self.limit
        return sum(max(0, self._before[other] - self._asked[other]) for other in range(order))

    def give_back(self, nbytes: int) -> None:
        """When all is back, a pass is over."""
        if math.isinf(self.limit):
            return
        self.left += nbytes
        if nbytes and self.left == self.limit:
            self._before, self._asked = self._asked, Counter()
