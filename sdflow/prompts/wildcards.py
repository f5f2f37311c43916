"""Wildcards: `__name__` in a prompt is replaced by a line of `name.txt`, chosen by the seed.

As in extensions of A1111's webui, a name may include folders (`__animals/cats__`), lines may contain wildcards, and
empty lines and lines that start with # are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from hashlib import sha256
from pathlib import Path

from sdflow.errors import UsageError

_WILDCARD = re.compile(r"__([\w-]+?(?:/[\w-]+?)*)__")
MOST = 1000
"""Maximum number of replacements per prompt, including nested ones; more indicates a cycle."""


class Wildcards:
    """The text files of a folder, by name. They are reread for every prompt that names them."""

    def __init__(self, folder: Path) -> None:
        """Raises UsageError if it is not a folder."""
        if not folder.is_dir():
            raise UsageError("not a folder", where=str(folder), remedy="Use a folder of text files.")
        self.folder = folder

    def names(self) -> list[str]:
        """Return the names that prompts may use."""
        return sorted(path.relative_to(self.folder).with_suffix("").as_posix() for path in self.folder.rglob("*.txt"))

    def resolve(self, text: str, seed: int) -> str:
        """Replace each wildcard with a line. The same seed and files give the same result on every machine.

        Raises UsageError for a name without a file, a file that is empty or unreadable, and a cycle.
        """
        count = 0
        while (found := _WILDCARD.search(text)) is not None:
            if count == MOST:
                raise UsageError(
                    f"more than {MOST} wildcards in one prompt",
                    where=f"__{found[1]}__",
                    remedy="Remove the wildcard in its lines that leads back to it.",
                )
            lines = self._lines(found[1])
            chosen = int.from_bytes(sha256(f"{seed}/{count}".encode()).digest()[:8]) % len(lines)
            text = text[: found.start()] + lines[chosen] + text[found.end() :]
            count += 1
        return text

    def _lines(self, name: str) -> Sequence[str]:
        path = self.folder / f"{name}.txt"
        try:
            read = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
        except FileNotFoundError:
            near = get_close_matches(name, known := self.names(), n=1, cutoff=0.5)
            listed = (
                f"known: {', '.join(known[:10])}{', ...' if len(known) > 10 else ''}"
                if known
                else "the folder has none"
            )
            raise UsageError(
                f"there is no {name}.txt in {self.folder.name}{f'; did you mean {near[0]!r}?' if near else ''}",
                where=f"__{name}__",
                remedy=f"Create the file, or use another wildcard; {listed}.",
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise UsageError(
                f"{path.name} cannot be read: {reason}",
                where=f"__{name}__",
                remedy="Use a text file with one choice per line.",
            ) from error
        lines = [line for line in read if line and not line.startswith("#")]
        if not lines:
            raise UsageError(
                f"{path.name} has no lines to choose from", where=f"__{name}__", remedy="Write one choice per line."
            )
        return lines
