"""Count the objects that a pickle would create, before creating any.

A pickle of a few hundred bytes can hold a tuple of two tuples of two tuples, sixty deep, each the same object twice. It
needs no memory, but hashing it, as a map's key is, visits 2**60 objects, uninterruptibly. So only the number of objects
that each would expand to is tracked.
"""

from __future__ import annotations

import pickle
import pickletools
from pathlib import Path
from typing import Any, BinaryIO

from sdflow.disk.input_file import open_input

MOST_BYTES = 16 << 20
MOST_STEPS = 600_000
MOST_UNFOLDED = 1_000_000
"""Limits for a pickle without its tensors. A Stable Diffusion XL checkpoint's has 0.4 MB and 80,000 steps."""

_LEGACY_PICKLES = 5
"""Pickles at the start of files by torch before 1.6: a number, a version, the system, the weights, their keys."""

_HOLDERS = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD", "EMPTY_LIST", "EMPTY_DICT", "LIST", "DICT")
"""Operations that create unhashable objects, whose contents nothing visits."""


def require_small_pickle(path: Path) -> None:
    """Raise pickle.UnpicklingError for a pickle that needs too much, OSError if the file cannot be read."""
    import zipfile

    with open_input(path) as stream:
        if not zipfile.is_zipfile(stream):
            stream.seek(0)
            for _ in range(_LEGACY_PICKLES):
                _require_small(stream)
            return
        with zipfile.ZipFile(stream) as archive:
            for part in archive.infolist():
                if part.filename.rpartition("/")[2] != "data.pkl":
                    continue
                if part.file_size > MOST_BYTES:
                    raise pickle.UnpicklingError(f"{part.file_size >> 20} MB besides its tensors")
                with archive.open(part) as content:
                    _require_small(content)  # type: ignore[arg-type]


def _require_small(stream: BinaryIO) -> None:
    stack: list[int] = []
    marks: list[int] = []
    memo: dict[Any, int] = {}
    begun = stream.tell()
    try:
        for count, (code, argument, _) in enumerate(pickletools.genops(stream)):
            if count > MOST_STEPS or stream.tell() - begun > MOST_BYTES:
                raise pickle.UnpicklingError("too many objects besides its tensors")
            if code.name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
                memo[len(memo) if code.name == "MEMOIZE" else argument] = stack[-1]
            elif code.name in ("GET", "BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
            elif code.name == "MARK":
                marks.append(len(stack))
            elif code.name == "DUP":
                stack.append(stack[-1])
            else:
                taken = _taken(code, stack, marks)
                size = 1 if code.name in _HOLDERS else 1 + sum(taken)
                if size > MOST_UNFOLDED:
                    raise pickle.UnpicklingError("endlessly nested objects")
                stack += [size] * len(code.stack_after)
    except (IndexError, KeyError, ValueError) as error:
        raise pickle.UnpicklingError("damaged") from error


def _taken(code: pickletools.OpcodeInfo, stack: list[int], marks: list[int]) -> list[int]:
    """Pop an operation's operands from the stack."""
    before = code.stack_before
    marked = pickletools.markobject in before
    begin = marks.pop() - before.index(pickletools.markobject) if marked else len(stack) - len(before)
    if begin < 0:
        raise IndexError("nothing is left to take")
    taken = stack[begin:]
    del stack[begin:]
    return taken
