"""What an opened file of weights is, whatever its format."""

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
    """A tensor of the model as its file stores it. dtype: the type in the format's own spelling ("F16", "Q4_K"). low_bits:
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
        """The values of these rows (entries along the first axis): float32, or float16 where they are stored so.

        Raises CheckpointError for a type that cannot be read and for a file that has become shorter."""

    def as_stored(self, rows: slice = ALL) -> NDArray[Any]:
        """The same values, but bfloat16 ones in that type (of ml_dtypes)."""
        return self.values(rows)


@dataclass(frozen=True)
class Refusal:
    """Why a format is not read, and what to do instead."""

    what: str
    remedy: str


@dataclass(frozen=True)
class WeightsFile:
    """An opened file.

    format: its name where the weights are stored in low bits or in a format that is not safetensors; None: plain safetensors.
    tensors: of the model, by their names in the file. pieces: of the file, each with its bytes. meaning: what decides the
    values besides the bytes, by the name of the tensor: JSON. architecture: what a GGUF file calls its network.
    refusal: where sdflow does not read the format. needs: the distributions that dequantize its weights.
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
        """Raises CheckpointError for a format that sdflow does not read, UsageError for one whose package is missing."""
        if self.refusal is not None:
            raise CheckpointError(self.refusal.what, where=str(self.path), remedy=self.refusal.remedy)
        require_packages(f"reading {self.path.name}", *self.needs)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should hear of weights in low bits, one sentence each."""
        if not self.low_bits:
            return ()
        types = ", ".join(f"{name} ({count})" for name, count in self.types.items())
        return (f"{self.path.name} stores its weights in low bits ({self.format}: {types}); they are dequantized.",)

    def provenance(self) -> dict[str, Any]:
        """JSON for the manifest: {"quantized": {format, types}}; empty for weights of 16 bits and more."""
        return {"quantized": {"format": self.format, "types": self.types}} if self.low_bits else {}

    def digest(self, prefix: str) -> str:
        """SHA-256 of what begins with the prefix: names, types, shapes, bytes, and what else decides the values."""
        pieces = {name: entry for name, entry in self.pieces.items() if name.startswith(prefix)}
        content = digest_tensors(self.path, pieces)
        meaning = {name: each for name, each in self.meaning.items() if name.startswith(prefix)}
        return hashlib.sha256(f"{content}{digest_json(meaning)}".encode()).hexdigest() if meaning else content

    def digest_name(self, component: str) -> str:
        """The name that `digest` of a component is remembered under (`FileDigests.value`)."""
        return f"tensors-1/{component}" if self.format is None else f"tensors-{self.format}-1/{component}"
