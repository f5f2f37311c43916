"""What somebody gives in a workflow's place, and the command that takes it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from sdflow.artifact import INDEX_FILE
from sdflow.disk.input_file import is_there
from sdflow.manifest import MANIFEST_FILE
from sdflow.sources.reference import PICKLE_SUFFIXES

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w][\w./-]*)?", re.ASCII)
"""owner/name, as the hub names a repository."""

_ZIP = b"PK\x03\x04"


def not_a_file(path: Path) -> tuple[str, str] | None:
    """What a command's argument is where it is no file that could be read, and what to do with it."""
    written = shlex.quote(str(path))
    if path.is_dir():
        if (path / MANIFEST_FILE).is_file():
            return (
                "this is a built pipeline, not a workflow",
                f'Generate with it: sdflow generate {written} --prompt "..."',
            )
        if (path / INDEX_FILE).is_file():
            return "this is a model, not a workflow", _init(written)
        return None
    if not is_there(path) and not is_there(path.parent) and (repository := hub_repository(path.as_posix())):
        return "this is no file, and a repository of the hub is not a workflow", _init(f"hf:{repository}")
    return None


def weights(path: Path, start: bytes) -> tuple[str, str] | None:
    """The same for a file of weights: by its ending, or by how safetensors and PyTorch's archives begin."""
    length = int.from_bytes(start[:8], "little")
    begins = start.startswith(_ZIP) or (start[8:9] == b"{" and 2 <= length < 1 << 40)
    if not begins and path.suffix.lower() not in (".safetensors", *PICKLE_SUFFIXES):
        return None
    return "this is a file of weights, not a workflow", _init(shlex.quote(str(path)))


def _init(model: str) -> str:
    return f"Write a workflow for it: sdflow init --model {model}"


def hub_repository(text: str) -> str | None:
    """The repository that a text is meant for: hf:owner/name, or without the hf: where it looks like no file."""
    name = text.removeprefix("hf:")
    if REPOSITORY.fullmatch(name) is None:
        return None
    looks_like_file = name.lower().endswith((".yaml", ".yml", ".safetensors", *PICKLE_SUFFIXES))
    return None if looks_like_file and name == text else name
