"""An opened weight file, in any format."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.digest import digest_json
from sdflow.errors import CheckpointError
from sdflow.machine.packages import require_packages
from sdflow.sources.safetensors_file import FLOATS, TensorEntry, digest_tensors

if TYPE_CHECKING:
    from numpy.typing import NDArray

ALL = slice(None)
"""Every row of a tensor."""


@dataclass(frozen=True)
class StoredTensor(ABC):
    """A tensor of the model as stored in its file. dtype: in the format's own spelling ("F16", "Q4_K"). low_bits:
    whether its values were rounded to fewer than 16 bits. weights: whether it holds floating-point numbers."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def low_bits(self) -> bool:
        return self.dtype not in FLOATS and self.weights

    @property
    def weights(self) -> bool:
        return True

    @abstractmethod
    def values(self, rows: slice = ALL) -> NDArray[Any]:
        """The values of these rows (entries along the first axis): float32, or float16 if stored as such.

        Raises CheckpointError for an unreadable type and for a file that has become shorter."""

    def as_stored(self, rows: slice = ALL) -> NDArray[Any]:
        """The same values, with bfloat16 kept as that type (of ml_dtypes)."""
        return self.values(rows)


@dataclass(frozen=True)
class Refusal:
    """Why a format is not supported, and what to do instead."""

    what: str
    remedy: str


@dataclass(frozen=True)
class WeightsFile:
    """An opened file.

    format: its name if weights are stored in low bits or not as safetensors; None for plain safetensors.
    tensors: the model's, by name in the file. pieces: the file's tensors with their byte ranges. meaning: tensor ->
    JSON that determines its values besides the bytes. architecture: a GGUF file's name for its network.
    refusal: set if the format is not supported. needs: distributions that dequantize its weights.
    """

    path: Path
    format: str | None
    tensors: Mapping[str, StoredTensor]
    pieces: Mapping[str, TensorEntry]
    metadata: Mapping[str, str] = field(default_factory=dict)
    meaning: Mapping[str, Any] = field(default_factory=dict)
    architecture: str | None = None
    refusal: Refusal | None = None
    needs: tuple[str, ...] = ()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    @property
    def low_bits(self) -> bool:
        """Whether any of its weights were rounded to fewer than 16 bits."""
        return any(tensor.low_bits for tensor in self.tensors.values())

    @property
    def types(self) -> dict[str, int]:
        """Type -> number of tensors, the most frequent first."""
        return dict(Counter(tensor.dtype for tensor in self.tensors.values()).most_common())

    def require_read(self) -> None:
        """Raises CheckpointError for an unsupported format, UsageError if its package is missing."""
        if self.refusal is not None:
            raise CheckpointError(self.refusal.what, where=str(self.path), remedy=self.refusal.remedy)
        require_packages(f"reading {self.path.name}", *self.needs)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user on low-bit weights, one sentence each."""
        if not self.low_bits:
            return ()
        types = ", ".join(f"{name} ({count})" for name, count in self.types.items())
        return (f"{self.path.name} stores its weights in low bits ({self.format}: {types}); they are dequantized.",)

    def provenance(self) -> dict[str, Any]:
        """JSON for the manifest: {"quantized": {format, types}}; empty for weights of 16 bits or more."""
        return {"quantized": {"format": self.format, "types": self.types}} if self.low_bits else {}

    def digest(self, prefix: str) -> str:
        """SHA-256 of the tensors with the prefix: names, types, shapes, bytes, and what else determines their
        values."""
        pieces = {name: entry for name, entry in self.pieces.items() if name.startswith(prefix)}
        content = digest_tensors(self.path, pieces)
        meaning = {name: each for name, each in self.meaning.items() if name.startswith(prefix)}
        return hashlib.sha256(f"{content}{digest_json(meaning)}".encode()).hexdigest() if meaning else content

    def digest_name(self, component: str) -> str:
        """The name under which a component's `digest` is cached (`FileDigests.value`)."""
        return f"tensors-1/{component}" if self.format is None else f"tensors-{self.format}-1/{component}"
