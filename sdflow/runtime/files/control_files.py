"""`--control NAME=FILE[:SCALE[:START:END]]`: control images as files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdflow.digest import digest_file
from sdflow.errors import UsageError

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_NUMBERS = re.compile(rf"(.+?):({_NUMBER})(?::({_NUMBER}):({_NUMBER}))?", re.DOTALL)
_FORM = "Write NAME=FILE, NAME=FILE:SCALE or NAME=FILE:SCALE:START:END, for example canny=edges.png:0.8:0:0.6."


@dataclass(frozen=True)
class ControlFile:
    """An image for the ControlNet of this name. scale, start, end: see `runtime.control.Control`."""

    name: str
    path: Path
    scale: float = 1.0
    start: float = 0.0
    end: float = 1.0

    def settings(self) -> dict[str, Any]:
        """Return the settings to record in an image's file."""
        return {
            "name": self.path.name,
            "sha256": digest_file(self.path),
            "scale": self.scale,
            "start": self.start,
            "end": self.end,
        }


def parse_control(text: str) -> ControlFile:
    """Parse the option. An existing file whose name ends in such numbers takes precedence. Raises UsageError if
    malformed."""
    name, equals, rest = text.partition("=")
    if not equals or not name or not rest:
        raise UsageError(f"{text!r} does not name a ControlNet and a file", where="--control", remedy=_FORM)
    found = None if Path(rest).exists() else _NUMBERS.fullmatch(rest)
    if found is None:
        return ControlFile(name, Path(rest))
    scale, start, end = (None if each is None else float(each) for each in found.groups()[1:])
    assert scale is not None
    if start is None or end is None:
        return ControlFile(name, Path(found[1]), scale)
    return ControlFile(name, Path(found[1]), scale, start, end)


def require_distinct(controls: Sequence[ControlFile]) -> None:
    """Raise UsageError if a ControlNet has two images."""
    names = [each.name for each in controls]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(
            f"the ControlNet {twice!r} has two images", where="--control", remedy="Pass one image per ControlNet."
        )
