"""Sums of a file's pages: what damage shows in, at a twentieth of what SHA-256 costs.

A page of 4096 bytes is 512 numbers of 64 bits; its sum wraps around. A bit that flipped, a page that is empty, old or another's
has another sum. The sums of all pages, one after the other, are hashed. Who means to can make another page of the same sum:
so sums stand for a content only beside the SHA-256 that was taken with them, and while the file's stat is the same.
"""

from __future__ import annotations

import hashlib

PAGE = 4096

PAGE_SUMS = "page sums 1"
"""What the stat cache keeps them as. The number is that of how they are computed."""


class PageSums:
    """Takes a file in blocks of any length, as hashlib does."""

    def __init__(self) -> None:
        self._sums = hashlib.sha256()
        self._rest = b""
        self._length = 0

    def update(self, block: memoryview) -> None:
        """The next bytes of the file. The memory is contiguous and of single bytes."""
        self._length += len(block)
        if self._rest:
            missing = PAGE - len(self._rest)
            self._rest += bytes(block[:missing])
            block = block[missing:]
            if len(self._rest) < PAGE:
                return
            self._add(self._rest)
        whole = len(block) - len(block) % PAGE
        if whole:
            self._add(block[:whole])
        self._rest = bytes(block[whole:])

    def hexdigest(self) -> str:
        """64 hexadecimal digits. A file's last page counts as filled with zeros; its length counts too."""
        every = self._sums.copy()
        if self._rest:
            every.update(_sums_of(self._rest.ljust(PAGE, b"\0")))
        every.update(str(self._length).encode())
        return every.hexdigest()

    def _add(self, pages: memoryview | bytes) -> None:
        self._sums.update(_sums_of(pages))


def _sums_of(pages: memoryview | bytes) -> bytes:
    import numpy as np

    numbers = np.frombuffer(pages, "<u8").reshape(-1, PAGE // 8)
    sums: bytes = np.add.reduce(numbers, axis=1).astype("<u8").tobytes()
    return sums
