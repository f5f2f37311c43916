"""Read untrusted files: only regular files are opened, and only up to a limit.

A pipe might never end, a device may do anything, and gigabytes in place of a config would fill the memory. Problems are
an OSError with a readable `strerror`, or a ValueError for the content.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from difflib import get_close_matches
from io import BufferedReader
from pathlib import Path, PurePath
from typing import Any, NoReturn

TEXT_LIMIT = 16 << 20
"""Maximum bytes of a config, index or script. A tokenizer's vocabulary has one or two million."""


DEEPEST = 100
"""Maximum nesting of JSON. A tokenizer's has a dozen levels."""


def is_regular(path: Path) -> bool:
    """Whether it is a regular file, or a link to one; false for invalid names."""
    with suppress(OSError, ValueError):
        return stat.S_ISREG(path.stat().st_mode)
    return False


def is_there(path: Path) -> bool:
    """Whether anything exists under this name; false for invalid names."""
    with suppress(OSError, ValueError):
        path.stat()
        return True
    return False


def no_file(path: Path) -> str:
    """Describe a name that is neither a regular file nor a folder."""
    return "a pipe, a socket or a device, not a file" if is_there(path) else "no such file or folder"


def require_regular(path: Path) -> os.stat_result:
    """The status of a regular file. Raises OSError for anything else."""
    try:
        found = path.stat()
    except ValueError as error:
        raise OSError(errno.EINVAL, "its name holds a NUL character", str(path)) from error
    _refuse_others(found.st_mode, path)
    return found


def open_input(path: Path) -> BufferedReader:
    """Open a regular file for reading. Raises OSError for anything else, and never waits for a writer."""
    require_regular(path)  # opening a device may already have an effect
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    try:
        _refuse_others(os.fstat(descriptor).st_mode, path)
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_input(path: Path, limit: int = TEXT_LIMIT) -> bytes:
    """The content of a regular file of at most `limit` bytes. Raises OSError."""
    with open_input(path) as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit >> 20} MB", str(path))
    return content


def read_json(path: Path, limit: int = TEXT_LIMIT, *, finite: bool = True) -> Any:
    """Parse the JSON of a file.

    finite: reject NaN and Infinity, which JSON lacks. False: accept Python's spelling, as in some schedulers' configs
    saved by diffusers (`"lambda_min_clipped": -Infinity`).
    Raises OSError as `read_input` does, ValueError for content other than JSON.
    """
    return parse_json(read_input(path, limit), finite=finite)


def parse_json(content: bytes | str, *, finite: bool = True) -> Any:
    """Parse JSON like `read_json`. Raises ValueError."""
    try:
        text = (
            content if isinstance(content, str) else content.decode("utf-8-sig")
        )  # json alone would accept UTF-16 too
        value = json.loads(text, parse_constant=_no_number if finite else float, parse_float=_finite, parse_int=_whole)
        require_shallow(value)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except UnicodeDecodeError as error:
        raise ValueError("it is not UTF-8") from error
    except UnicodeEncodeError as error:
        raise ValueError("it holds half a character") from error
    return value


def require_shallow(value: Any) -> None:
    """Raises ValueError for JSON nested deeper than DEEPEST: not every Python release rejects it, and recursive code
    would fail on it."""
    level = [value]
    for _ in range(DEEPEST):
        level = [inner for each in level for inner in _within(each)]
        if not level:
            return
    raise ValueError("it is nested too deeply")


def _within(value: Any) -> list[Any]:
    """The lists and maps directly within a list or map."""
    held = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [each for each in held if isinstance(each, dict | list)]


def _finite(text: str) -> float:
    number = float(text)
    return number if abs(number) != float("inf") else _no_number(text)


def _whole(text: str) -> int:
    return int(text) if len(text) < 20 else _no_number(text)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text:.20} is not a JSON number, or out of range")


def foreign_content(path: Path) -> str | None:
    """Describe a file that commonly appears in place of weights; None for any other. Raises OSError."""
    with open_input(path) as stream:
        start = stream.read(512)
    if not start:
        return "it is empty"
    if start.startswith(b"version https://git-lfs.github.com/spec/"):
        return "it is a pointer of git-lfs, not the file itself: run git lfs pull, or download the file"
    if start.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return "it is a web page, not the file: a download that asks for a login gives one"
    return None


def _refuse_others(mode: int, path: Path) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "a folder, not a file", str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "a pipe, a socket or a device, not a file", str(path))


def alike(name: str, known: Iterable[str]) -> str | None:
    """The known file name most similar to a missing one, ignoring suffixes; None if none is similar.

    A common suffix says nothing: nope.yaml does not stand for m9.yaml.
    """
    others = [each for each in dict.fromkeys(known) if each != name]
    stems = {PurePath(each).stem.casefold(): each for each in reversed(others)}
    stem = PurePath(name[:200]).stem.casefold()
    close = get_close_matches(stem, stems, n=1, cutoff=0.6)
    if not close and len(stem) > 2:
        close = [each for each in stems if stem in each][:1]
    return stems[close[0]] if close else None
