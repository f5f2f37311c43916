"""Parse references to checkpoints: a path, `FILE#sd21-base`, `hf:owner/name@revision`,
`hf:owner/name/FILE#sd21-base@revision`, `synthetic:sd15?seed=1`, `sample:shapes`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl

from sdflow.errors import CheckpointError
from sdflow.families import ADAPTER_ARCHITECTURES, ARCHITECTURES, COMPONENT_ARCHITECTURES

PICKLE_SUFFIXES = (".bin", ".ckpt", ".pt", ".pth", ".pkl")
FILE_SUFFIXES = (".safetensors", ".gguf")
"""Suffixes of weight files other than pickles."""
# A file and its architecture; a name with a dot is not an architecture but the rest of the file's name.
_WITH_ARCHITECTURE = re.compile(
    rf"(.+(?i:{'|'.join(map(re.escape, (*FILE_SUFFIXES, *PICKLE_SUFFIXES)))}))#([^./\\#]*)", re.DOTALL
)
_REPOSITORY = re.compile(
    rf"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)((?:/[\w][\w. ()+-]*)+(?i:{'|'.join(map(re.escape, FILE_SUFFIXES))}))?",
    re.ASCII,
)


@dataclass(frozen=True)
class HubReference:
    """A repository on the hub; `revision` is a branch, a tag or a commit. file: in it, or "". architecture: of the
    file, if the user gives it."""

    repository: str
    revision: str = "main"
    file: str = ""
    architecture: str | None = None

    def with_architecture(self, name: str) -> str:
        """The spelling of this file with an architecture."""
        at = "" if self.revision == "main" else f"@{self.revision}"
        return f"hf:{self.repository}/{self.file}#{name}{at}"


@dataclass(frozen=True)
class SyntheticReference:
    """Random weights of a shipped architecture."""

    architecture: str
    seed: int


@dataclass(frozen=True)
class SampleReference:
    """A checkpoint shipped with sdflow."""

    name: str


@dataclass(frozen=True)
class LocalReference:
    """A local folder or file. architecture: of the file, if the user gives it."""

    path: Path
    architecture: str | None = None


@dataclass(frozen=True)
class AdapterReference:
    """An IP-Adapter as written. file: its file, folder or repository, or `synthetic:ip-adapter`. weight_name: the file
    in a folder or repository. encoder: another image encoder; None: encoder_folder in the adapter's folder or
    repository (image_encoder_folder in diffusers, with its rules)."""

    file: str
    weight_name: str | None = None
    encoder: str | None = None
    encoder_folder: str | None = None

    def to_json(self) -> dict[str, str]:
        """The fields that are set."""
        return {name: value for name, value in vars(self).items() if value is not None}


Reference = HubReference | SyntheticReference | SampleReference | LocalReference

_SPELLINGS = (
    "Name a folder, a .safetensors or .gguf file, hf:owner/name[@revision], synthetic:sd15[?seed=N] or sample:NAME."
)


def parse_reference(text: str) -> Reference:
    """The kind and parts of a reference. Raises CheckpointError for any other text."""
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
    path, architecture = split_architecture(text)
    _require_known(architecture, text)
    return LocalReference(Path(path).expanduser(), architecture)


def _require_known(architecture: str | None, text: str) -> None:
    if architecture is not None and architecture not in ARCHITECTURES:
        known = ", ".join(name for name in ARCHITECTURES)
        raise CheckpointError(f"unknown architecture {architecture!r}", where=text, remedy=f"Known ones: {known}.")


def split_architecture(text: str) -> tuple[str, str | None]:
    """Split `FILE#ARCHITECTURE`; the second is None if there is none, and may be unknown."""
    found = _WITH_ARCHITECTURE.fullmatch(text)
    return (found[1], found[2]) if found else (text, None)


def _hub(text: str, rest: str) -> HubReference:
    name, at, revision = rest.partition("@")
    name, architecture = split_architecture(name)
    found = _REPOSITORY.fullmatch(name)
    if found is None or (at and not revision):
        raise CheckpointError("not of the form hf:owner/name[@revision]", where=text, remedy=_SPELLINGS)
    _require_known(architecture, text)
    return HubReference(found[1], revision or "main", (found[2] or "").removeprefix("/"), architecture)


def _synthetic(text: str, rest: str) -> SyntheticReference:
    architecture, question, query = rest.partition("?")
    if architecture not in (*ARCHITECTURES, *COMPONENT_ARCHITECTURES, *ADAPTER_ARCHITECTURES):
        known = ", ".join(f"synthetic:{name}" for name in ARCHITECTURES)
        raise CheckpointError(f"unknown architecture {architecture!r}", where=text, remedy=f"Known ones: {known}.")
    options = dict(parse_qsl(query, keep_blank_values=True))
    seed = options.pop("seed", "0" if not question else "")
    if options or not re.fullmatch(r"\d{1,18}", seed):
        raise CheckpointError("the only option is ?seed=N, N a whole number from 0", where=text, remedy=_SPELLINGS)
    return SyntheticReference(architecture, int(seed))
