"""Writes a data file from its first byte to its last: pieces are computed ahead, or copied from a file that is there.

In the same pass the file is hashed and its pages are summed up, and so are those of the one that is copied from, if that is
to be compared: nothing has to be read twice. What is written goes on to the disk meanwhile. Each of these has a thread:
hashing, numpy and input and output let others run. Memory: what is computed ahead (`AHEAD` bytes, or a few of the largest
pieces), and some blocks.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

PAGE = 4096

PAGE_SUMS = "page sums 1"
"""What the stat cache keeps them as. The number is that of how they are computed."""

THREADS = min(4, os.cpu_count() or 1)
BLOCK = 1 << 23
AHEAD = 1 << 27
FLUSHED = 1 << 27
"""Bytes that are written before the disk is asked to take them."""

_QUEUED = 4


@dataclass(frozen=True)
class Piece:
    """`length` bytes: what `compute` gives (a contiguous array or bytes), or None for what the base has there."""

    length: int
    compute: Callable[[], Any] | None


@dataclass(frozen=True)
class Digests:
    """SHA-256 and `PageSums` of the file that was written, and of the base's as far as they were asked for."""

    written: str
    sums: str
    base: str | None
    base_sums: str | None


def write_pieces(
    out: Path,
    pieces: Sequence[Piece],
    base: Path | None,
    *,
    of_base: Literal["digest", "sums"] | None,
    progress: Callable[[int, int], None],
) -> Digests:
    """Write the pieces, one after the other, to the new file `out`. Raises what computing one of them raises.

    base: a file at least as long as the pieces. of_base: it is as long, and its sums are wanted, or its digest too.
    """
    total, done = sum(piece.length for piece in pieces), 0
    with ExitStack() as stack:
        target = stack.enter_context(out.open("xb", buffering=0))
        written = stack.enter_context(_hashing())
        sums, base_sums = PageSums(), PageSums() if base and of_base else None
        read = stack.enter_context(_hashing()) if base and of_base == "digest" else None
        flush = stack.enter_context(_flushing(target))
        values = stack.enter_context(_computed_ahead(pieces))

        def put(block: Any) -> None:
            nonlocal done
            _write_all(target, block)
            written.update(block)
            sums.update(block)
            done += len(block)
            flush(done)
            progress(done, total)

        for piece in pieces:
            for block in _blocks(base, done, piece.length) if base and (base_sums or piece.compute is None) else ():
                if read is not None:
                    read.update(block)
                if base_sums is not None:
                    base_sums.update(block)
                if piece.compute is None:
                    put(block)
            if piece.compute is not None:
                put(_bytes(next(values)))
        return Digests(
            written.hexdigest(),
            sums.hexdigest(),
            read.hexdigest() if read is not None else None,
            base_sums.hexdigest() if base_sums is not None else None,
        )


def _bytes(values: Any) -> memoryview:
    import numpy as np

    if isinstance(values, np.ndarray):
        values = values.reshape(-1).view(np.uint8)  # Python has no buffers of float8
    view = memoryview(values)
    return view.cast("B") if view.nbytes else memoryview(b"")


def _blocks(file: Path, begin: int, length: int) -> Iterator[memoryview]:
    """`length` bytes of a file from `begin` on, mapped: they are read as they are used, and let go with the block."""
    import numpy as np

    for start in range(begin, begin + length, BLOCK):
        yield np.memmap(file, np.uint8, "r", start, (min(BLOCK, begin + length - start),)).data


def _write_all(target: IO[bytes], block: memoryview) -> None:
    while block:
        block = block[target.write(block) :]


class _Hash:
    """SHA-256, computed in a thread; a few blocks wait at most."""

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self._hash = hashlib.sha256()
        self._thread = thread
        self._waiting: deque[Future[None]] = deque()

    def update(self, block: memoryview) -> None:
        self._waiting.append(self._thread.submit(self._hash.update, block))
        while len(self._waiting) > _QUEUED:
            self._waiting.popleft().result()

    def hexdigest(self) -> str:
        while self._waiting:
            self._waiting.popleft().result()
        return self._hash.hexdigest()


@contextmanager
def _hashing() -> Iterator[_Hash]:
    with ThreadPoolExecutor(1) as thread:
        yield _Hash(thread)


@contextmanager
def _computed_ahead(pieces: Sequence[Piece]) -> Iterator[Iterator[Any]]:
    """What the pieces that are not copied compute, in order; some are computed before they are asked for."""
    pool = ThreadPoolExecutor(THREADS)
    waiting: deque[tuple[int, Future[Any]]] = deque()

    def values() -> Iterator[Any]:
        left = deque((piece.length, piece.compute) for piece in pieces if piece.compute is not None)
        while left or waiting:
            while left and (len(waiting) <= THREADS or sum(length for length, _ in waiting) < AHEAD):
                length, compute = left.popleft()
                waiting.append((length, pool.submit(compute)))
            yield waiting.popleft()[1].result()

    try:
        yield values()
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _flushing(target: IO[bytes]) -> Iterator[Callable[[int], None]]:
    """A function to call with the bytes written so far; the disk takes them meanwhile. Raises OSError if it does not."""
    thread = ThreadPoolExecutor(1)
    asked, last = 0, None

    def written(done: int) -> None:
        nonlocal asked, last
        if done - asked >= FLUSHED and (last is None or last.done()):
            if last is not None:
                last.result()  # the system tells of a failure once
            asked, last = done, thread.submit(os.fsync, target.fileno())

    try:
        yield written
        if last is not None:
            last.result()
    finally:
        thread.shutdown()


class PageSums:
    """Sums of a file's pages, in blocks of any length, as hashlib takes them: what damage shows in, at a twentieth of the cost.

    A page is 512 numbers of 64 bits, whose sum wraps around; the sums of all pages are hashed. Who means to can make another page
    of the same sum: so sums stand for a content only beside the SHA-256 that was taken with them, while the file's stat is the
    same.
    """

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
