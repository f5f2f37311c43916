"""The licence that a model declares in its card or its file's header. Its absence implies nothing."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from sdflow.disk.input_file import read_input
from sdflow.errors import CheckpointError
from sdflow.sources.safetensors_file import read_metadata

CARD = "README.md"
MOST_OF_A_CARD = 1 << 20
_FRONT = re.compile(r"\A---\r?\n(.*?)\r?\n---", re.DOTALL)
_LINE = re.compile(r"^(license|license_name):[ \t]*[\"']?([\w.+ -]{1,100}?)[\"']?[ \t]*$", re.MULTILINE)
_KEYS = ("modelspec.license", "license")


def declared_licence(place: Path) -> str | None:
    """For a folder, `license` in the front matter of its README.md, as on the hub; for a .safetensors file,
    `modelspec.license` in its metadata."""
    with suppress(OSError, CheckpointError, UnicodeDecodeError):
        if place.is_dir():
            front = _FRONT.match(read_input(place / CARD, MOST_OF_A_CARD).decode())
            said = dict(_LINE.findall(front[1])) if front else {}
            return said.get("license_name") if said.get("license") == "other" else said.get("license")
        if place.suffix.lower() == ".safetensors":
            metadata = read_metadata(place)
            return next((metadata[key][:100] for key in _KEYS if metadata.get(key)), None)
    return None
