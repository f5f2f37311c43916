"""The spellings of a checkpoint: a path, `hf:owner/name@revision`, `synthetic:sd15?seed=1`, `sample:shapes`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl

from sdflow.errors import CheckpointError
from sdflow.families import ARCHITECTURES

PICKLE_SUFFIXES = (".bin", ".ckpt", ".pt", ".pth", ".pkl")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class HubReference:
    """A repository on the hub; `revision` is a branch, a tag or a commit."""

    repository: str
    revision: str = "main"


@dataclass(frozen=True)
class SyntheticReference:
    """Random weights of a shipped architecture."""

    architecture: str
    seed: int


@dataclass(frozen=True)
class SampleReference:
    """A checkpoint that comes with sdflow."""

    name: str


@dataclass(frozen=True)
class LocalReference:
    """A folder or a file of this machine."""

    path: Path


Reference = HubReference | SyntheticReference | SampleReference | LocalReference

_SPELLINGS = "Write a folder, a .safetensors file, hf:owner/name[@revision], synthetic:sd15[?seed=N] or sample:NAME."


def parse_reference(text: str) -> Reference:
    """The kind and parts of a reference. Raises CheckpointError for one that fits no spelling."""
    scheme, separator, rest = text.partition(":")
    if separator and scheme == "hf":
        return _hub(text, rest)
    if separator and scheme == "synthetic":
        return _synthetic(text, rest)
    if separator and scheme == "sample":
        if not re.fullmatch(r"[\w-]+", rest):
            raise CheckpointError(f"{rest!r} is not the name of a sample", where=text, remedy=_SPELLINGS)
        return SampleReference(rest)
    if not text or (separator and re.fullmatch(r"[a-z][a-z+]+", scheme)):
        raise CheckpointError("not a reference to a checkpoint", where=text or "''", remedy=_SPELLINGS)
    return LocalReference(Path(text).expanduser())


def _hub(text: str, rest: str) -> HubReference:
    repository, at, revision = rest.partition("@")
    if not _REPOSITORY.fullmatch(repository) or (at and not revision):
        raise CheckpointError("not of the form hf:owner/name[@revision]", where=text, remedy=_SPELLINGS)
    return HubReference(repository, revision or "main")


def _synthetic(text: str, rest: str) -> SyntheticReference:
    architecture, question, query = rest.partition("?")
    if architecture not in ARCHITECTURES:
        known = ", ".join(f"synthetic:{name}" for name in ARCHITECTURES)
        raise CheckpointError(f"unknown architecture {architecture!r}", where=text, remedy=f"Known ones: {known}.")
    options = dict(parse_qsl(query, keep_blank_values=True))
    seed = options.pop("seed", "0" if not question else "")
    if options or not re.fullmatch(r"\d{1,18}", seed):
        raise CheckpointError("the only option is ?seed=N, N a whole number from 0", where=text, remedy=_SPELLINGS)
    return SyntheticReference(architecture, int(seed))
