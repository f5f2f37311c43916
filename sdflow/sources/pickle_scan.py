"""What a pickle asks for, counted before any of it is made.

A pickle of a few hundred bytes can hold a tuple of two tuples of two tuples: sixty deep, and each the same object twice. It takes
no memory, but whoever hashes it, as the key of a map is, visits 2**60 objects, and nothing interrupts that. Nothing is made
here: only how many objects each would unfold to is followed.
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
"""Of a pickle beside its tensors. That of a Stable Diffusion XL checkpoint has 0.4 MB and 80,000 steps."""

_LEGACY_PICKLES = 5
"""What torch wrote before 1.6 begins with: a number, a version, the system, the weights, their keys."""

_HOLDERS = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD", "EMPTY_LIST", "EMPTY_DICT", "LIST", "DICT")
"""They give what cannot be hashed, so that nothing visits what is in it."""


def require_small_pickle(path: Path) -> None:
    """Raise pickle.UnpicklingError for a pickle of weights that asks for too much, OSError for what cannot be read."""
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
                    raise pickle.UnpicklingError(f"{part.file_size >> 20} MB beside its tensors")
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
                raise pickle.UnpicklingError("too many objects beside its tensors")
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
                    raise pickle.UnpicklingError("objects within objects without an end")
                stack += [size] * len(code.stack_after)
    except (IndexError, KeyError, ValueError) as error:
        raise pickle.UnpicklingError("damaged") from error


def _taken(code: pickletools.OpcodeInfo, stack: list[int], marks: list[int]) -> list[int]:
    """What a step takes from the stack."""
    before = code.stack_before
    marked = pickletools.markobject in before
    begin = marks.pop() - before.index(pickletools.markobject) if marked else len(stack) - len(before)
    if begin < 0:
        raise IndexError("nothing is left to take")
    taken = stack[begin:]
    del stack[begin:]
    return taken
