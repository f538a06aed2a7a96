"""A pickle looked at before it is loaded: what would bring down the interpreter itself is refused.

The loader of the standard library allocates its memo as large as the stream says. A tuple in a tuple in a tuple, once
it is the key of a dict, is hashed by recursion until the stack ends, and one that holds the same tuple twice on every
level takes longer than anybody waits. None of these is an exception, so they are looked for in the opcodes: one pass
that makes no object and only follows how many tuples a tuple holds.
"""

from __future__ import annotations

import pickletools

MAX_TUPLES = 2000  # within a tuple, each as often as it is met; torch and Megatron nest four

# how the argument of an opcode is found: a fixed number of bytes, or one of these
_LINE, _TWO_LINES, _BYTES_1, _BYTES_4, _BYTES_8 = -1, -2, -3, -4, -5
_TAKEN = {
    pickletools.UP_TO_NEWLINE: _LINE,
    pickletools.TAKEN_FROM_ARGUMENT1: _BYTES_1,
    pickletools.TAKEN_FROM_ARGUMENT4: _BYTES_4,
    pickletools.TAKEN_FROM_ARGUMENT4U: _BYTES_4,
    pickletools.TAKEN_FROM_ARGUMENT8U: _BYTES_8,
}
_WIDTH = {_BYTES_1: 1, _BYTES_4: 4, _BYTES_8: 8}
# what an opcode does to the stack of weights
_OTHER, _MARK, _TUPLE, _GET, _PUT, _STOP, _MEMOIZE, _DUP, _POP, _SAME, _NONE = range(11)
_ACTS = {
    "MARK": _MARK, "TUPLE": _TUPLE, "TUPLE1": _TUPLE, "TUPLE2": _TUPLE, "TUPLE3": _TUPLE, "GET": _GET, "BINGET": _GET,
    "LONG_BINGET": _GET, "PUT": _PUT, "BINPUT": _PUT, "LONG_BINPUT": _PUT, "STOP": _STOP, "MEMOIZE": _MEMOIZE,
    "DUP": _DUP, "POP": _POP, "BINPERSID": _SAME,
}  # fmt: skip


def _table() -> list[tuple[int, int, int, bool, int]]:
    """Byte -> (argument, act, values taken from the stack, whether all back to a mark are taken, values put there)."""
    table = [(0, _NONE, 0, False, 0)] * 256
    for code in pickletools.opcodes:
        size = 0 if code.arg is None else code.arg.n
        argument = _TWO_LINES if code.name in ("GLOBAL", "INST") else _TAKEN.get(size, size)
        marked = pickletools.markobject in code.stack_before
        taken = code.stack_before.index(pickletools.markobject) if marked else len(code.stack_before)
        act = _ACTS.get(code.name, _OTHER)
        table[ord(code.code)] = (argument, act, taken, marked, len(code.stack_after))
    return table


_TABLE = _table()


class TooDeepError(ValueError):
    """The pickle would harm the process that loads it."""


def check_pickle(data: bytes) -> None:  # noqa: C901 - a loop over millions of opcodes; calls would double its time
    """TooDeepError for a tuple of more than MAX_TUPLES tuples and for a memo that is larger than the stream could fill;
    ValueError for a stream that is no pickle."""
    stack: list[int] = []  # of every value: 0, for a tuple 1 and the numbers of all tuples in it
    marks: list[int] = []
    memo = _Memo(len(data))
    remembered, table = memo.weights, _TABLE
    at = 0
    try:
        while True:
            argument, act, taken, marked, put = table[data[at]]
            start = at + 1
            at = start + argument if argument >= 0 else _skip(data, start, argument)
            if act == _MEMOIZE:
                remembered.append(stack[-1])
            elif act == _OTHER:
                if marked:
                    del stack[marks.pop() - taken :]
                elif taken:
                    del stack[len(stack) - taken :]
                if put:
                    stack.append(0)
            elif act == _TUPLE:
                first = marks.pop() if marked else len(stack) - taken
                weight = 1 + sum(stack[first:])
                if weight > MAX_TUPLES:
                    raise TooDeepError(f"a tuple holds more than {MAX_TUPLES} tuples, one in another")
                stack[first:] = [weight]
            elif act == _GET:
                stack.append(memo.get(data[start:at], argument))
            elif act == _MARK:
                marks.append(len(stack))
            elif act == _PUT:
                memo.put(data[start:at], argument, stack[-1])
            elif act == _DUP:
                stack.append(stack[-1])
            elif act == _POP:
                (marks if marks and marks[-1] == len(stack) else stack).pop()
            elif act == _STOP:
                return
            elif act == _NONE:
                raise ValueError(f"byte {start - 1} is no opcode")
    except IndexError:
        raise ValueError("it ends before its end, or takes more from the stack than there is") from None


class _Memo:
    """weights: of what is remembered, in order. A stream that numbers its entries leaves none out, as every writer
    does: of the others it would not be known where the next one goes."""

    def __init__(self, size: int) -> None:
        self.weights: list[int] = []
        self._limit = size // 3 + 256  # an object and its PUT take three bytes

    def get(self, argument: bytes, kind: int) -> int:
        index = _index(argument, kind)
        return self.weights[index] if 0 <= index < len(self.weights) else 0

    def put(self, argument: bytes, kind: int, weight: int) -> None:
        index = _index(argument, kind)
        if not 0 <= index <= self._limit:
            raise TooDeepError(f"the memo is said to have {index} entries, more than the stream has objects")
        if index > len(self.weights):
            raise TooDeepError(f"entry {index} of the memo comes after entry {len(self.weights) - 1}")
        self.weights[index : index + 1] = [weight]


def _skip(data: bytes, at: int, argument: int) -> int:
    """Where an argument of variable length ends."""
    if argument == _LINE:
        return data.index(b"\n", at) + 1
    if argument == _TWO_LINES:
        return data.index(b"\n", data.index(b"\n", at) + 1) + 1
    width = _WIDTH[argument]
    return at + width + int.from_bytes(data[at : at + width], "little")


def _index(argument: bytes, kind: int) -> int:
    """The place in the memo that an opcode names, as a line of text or in bytes."""
    return int(argument) if kind == _LINE else int.from_bytes(argument, "little")
