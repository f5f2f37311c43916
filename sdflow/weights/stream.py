"""Write a data file sequentially, from pieces computed ahead or copied from an existing file.

The same pass hashes the file and sums its pages, and those of the source file if that is verified, so nothing is read
twice. Meanwhile, written data is flushed to the disk. Each of these has a thread, since hashing, numpy and I/O release
the GIL. Memory: pieces computed ahead (`AHEAD` bytes, or a few of the largest), as much again waiting for reuse, and some
blocks. Large pieces are computed in the memory of earlier ones, because fresh memory costs the kernel as much as writing the
file.
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
from typing import IO, TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

PAGE = 4096

PAGE_SUMS = "page sums 1"
"""Key in the stat cache. The number is the version of the algorithm."""

THREADS = min(4, os.cpu_count() or 1)
BLOCK = 1 << 23
AHEAD = 1 << 27
FLUSHED = 1 << 27
"""Number of bytes written before a flush to disk."""
REUSED = 1 << 20
"""Minimum size of a piece whose memory is reused."""

_QUEUED = 4


@dataclass(frozen=True)
class Piece:
    """`length` bytes: the result of `compute` (a contiguous array or bytes), or the base's bytes if None.

    compute: called with that many bytes of memory, which it may return as its result.
    """

    length: int
    compute: Callable[[Bytes], Any] | None


@dataclass(frozen=True)
class Digests:
    """SHA-256 and `PageSums` of the written file, and of the base's as requested."""

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
    """Write the pieces in order to the new file `out`. Raises the errors of `compute`.

    base: a file at least as long as the pieces. of_base: it has the same length, and its sums, or sums and digest, are
    returned.
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
                memory, result = next(values)
                put(_bytes(result))
                memory.free_after(written.last())
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
    """Yield `length` bytes of a file from `begin` on as memory-mapped blocks, read on access."""
    import numpy as np

    for start in range(begin, begin + length, BLOCK):
        yield np.memmap(file, np.uint8, "r", start, (min(BLOCK, begin + length - start),)).data


def _write_all(target: IO[bytes], block: memoryview) -> None:
    while block:
        block = block[target.write(block) :]


class _Hash:
    """SHA-256 computed in a thread, with a bounded queue."""

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self._hash = hashlib.sha256()
        self._thread = thread
        self._waiting: deque[Future[None]] = deque()

    def update(self, block: memoryview) -> None:
        self._waiting.append(self._thread.submit(self._hash.update, block))
        while len(self._waiting) > _QUEUED:
            self._waiting.popleft().result()

    def last(self) -> Future[None]:
        """The end of the data that was queued so far."""
        return self._waiting[-1]

    def hexdigest(self) -> str:
        while self._waiting:
            self._waiting.popleft().result()
        return self._hash.hexdigest()


@contextmanager
def _hashing() -> Iterator[_Hash]:
    with ThreadPoolExecutor(1) as thread:
        yield _Hash(thread)


@dataclass(eq=False)
class _Memory:
    """Memory of a piece, free for reuse once the piece is written and hashed."""

    whole: Bytes
    hashed: Future[None] | None = None

    def free_after(self, hashed: Future[None]) -> None:
        self.hashed = hashed

    def is_free(self) -> bool:
        return self.hashed is not None and self.hashed.done()


def _memory(length: int, used: list[_Memory]) -> _Memory:
    """Return memory for a piece: free memory of about its size if there is any. Beyond `AHEAD` bytes, free memory is released."""
    import numpy as np

    if length < REUSED:
        return _Memory(np.empty(length, np.uint8))
    free = sorted((each for each in used if each.is_free()), key=lambda each: each.whole.size)
    found = next((each for each in free if length <= each.whole.size <= 2 * length), None)
    kept = 0
    for each in free:
        kept += each.whole.size
        if each is found or kept > AHEAD:
            used.remove(each)
    memory = _Memory(found.whole if found else np.empty(length, np.uint8))
    used.append(memory)
    return memory


@contextmanager
def _computed_ahead(pieces: Sequence[Piece]) -> Iterator[Iterator[tuple[_Memory, Any]]]:
    """Return an iterator over the computed pieces, in order, some computed ahead."""
    pool = ThreadPoolExecutor(THREADS)
    waiting: deque[tuple[int, _Memory, Future[Any]]] = deque()
    used: list[_Memory] = []

    def values() -> Iterator[tuple[_Memory, Any]]:
        left = deque((piece.length, piece.compute) for piece in pieces if piece.compute is not None)
        while left or waiting:
            while left and (len(waiting) <= THREADS or sum(length for length, *_ in waiting) < AHEAD):
                length, compute = left.popleft()
                memory = _memory(length, used)
                waiting.append((length, memory, pool.submit(compute, memory.whole[:length])))
            _, memory, result = waiting.popleft()
            yield memory, result.result()

    try:
        yield values()
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _flushing(target: IO[bytes]) -> Iterator[Callable[[int], None]]:
    """Return a function to call with the bytes written so far, which flushes them in the background. Raises OSError on
    failure."""
    thread = ThreadPoolExecutor(1)
    asked, last = 0, None

    def written(done: int) -> None:
        nonlocal asked, last
        if done - asked >= FLUSHED and (last is None or last.done()):
            if last is not None:
                last.result()  # fsync reports a failure only once
            asked, last = done, thread.submit(os.fsync, target.fileno())

    try:
        yield written
        if last is not None:
            last.result()
    finally:
        thread.shutdown()


class PageSums:
    """Sums of a file's pages, updated with blocks of any length like hashlib: detects damage at a twentieth of the
    cost.

    A page is 512 64-bit numbers, summed with wraparound; the sums of all pages are hashed. Sums are not
    collision-resistant, so they only identify content together with the SHA-256 computed with them, while the file's
    stat is unchanged.
    """

    def __init__(self) -> None:
        self._sums = hashlib.sha256()
        self._rest = b""
        self._length = 0

    def update(self, block: memoryview) -> None:
        """Add the next bytes of the file, from contiguous memory of single bytes."""
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
        """Return 64 hexadecimal digits. The last page is padded with zeros; the file's length is included."""
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
