"""The output of a step: a directory of regular files, named by its content, and the facts measured on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdflow.digest import FileEntry, digest_json

MODEL_FILE = "model.onnx"
WEIGHTS_FILE = "model.onnx.data"
CONFIG_FILE = "config.json"
INDEX_FILE = "model_index.json"

Facts = Mapping[str, Any]
"""Small JSON that a pass measures on its output: `nodes`, `operators` (type -> count), `dtypes`, `bytes`, ..."""


@dataclass(frozen=True)
class Artifact:
    """A directory of files in the cache. `path` is that directory, `digest` its tree digest."""

    digest: str
    path: Path
    files: tuple[FileEntry, ...]

    @property
    def bytes(self) -> int:
        return sum(entry.size for entry in self.files)


@dataclass(frozen=True)
class Action:
    """Everything that determines a step's output, as JSON. Its digest is the cache key.

    `content` holds digests, options and versions only: no paths, no file names outside the artifact, no dates.
    """

    content: Mapping[str, Any]
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", digest_json(self.content))

    @property
    def of_step(self) -> bool:
        """Whether this is a build step, not a verdict or the basis of one: those are specific to the machine."""
        return "user_scripts" in self.content


@dataclass(frozen=True)
class Record:
    """The cache's entry for a finished action: its output, the facts, and how it was built (seconds, bytes)."""

    action: Action
    artifact: Artifact
    facts: Facts
    built: Mapping[str, Any]
