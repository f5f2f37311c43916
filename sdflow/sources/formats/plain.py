"""Unquantized tensors: float64, float32, float16, bfloat16, float8 without scales, and tensors other than weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from sdflow.errors import CheckpointError
from sdflow.sources.formats.mapped import mapped, row_range
from sdflow.sources.formats.stored import ALL, StoredTensor
from sdflow.sources.safetensors_file import ITEM_BYTES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FLOAT8 = {"F8_E4M3": (4, 3), "F8_E5M2": (5, 2)}
"""8-bit types -> bits of the exponent and of the mantissa."""
INDEXES = ("I64", "I32")
"""Types of tensors other than weights: position_ids, step counts."""
_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True)
class PlainTensor(StoredTensor):
    """An unquantized tensor in a file.

    begin: offset of its bytes in the file.
    """

    begin: int

    @property
    def weights(self) -> bool:
        return self.dtype in _NUMPY or self.dtype in FLOAT8

    def values(self, rows: slice = ALL) -> NDArray[Any]:
        import numpy as np

        stored = self.as_stored(rows)
        if self.dtype != "BF16":
            return stored
        # bfloat16 is the upper half of float32
        return (stored.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)

    def as_stored(self, rows: slice = ALL) -> NDArray[Any]:
        import numpy as np

        if not self.weights:
            raise CheckpointError(
                f"tensor {self.name} is of dtype {self.dtype}",
                where=str(self.path),
                remedy="Convert it to F32, F16 or BF16.",
            )
        first, count, shape = row_range(rows, self.shape)
        size = ITEM_BYTES[self.dtype]
        raw = mapped(self.path, self.begin + first * size, count * size)
        stored: NDArray[Any]
        if self.dtype in FLOAT8:
            stored = float8_values(self.dtype)[raw]
            return stored.reshape(shape)
        stored = raw.view(_NUMPY[self.dtype]).reshape(shape)
        if self.dtype == "BF16":
            import ml_dtypes

            return stored.view(ml_dtypes.bfloat16)
        return stored.astype(np.float32) if self.dtype == "F64" else stored


@cache
def float8_values(dtype: str) -> NDArray[np.float32]:
    """The float32 value of each byte. E4M3 is the "fn" variant: no infinity, NaN if all other bits are 1 (OCP 8-bit
    Floating Point Specification 1.0, which torch's float8_e4m3fn and float8_e5m2 follow)."""
    import numpy as np

    exponent_bits, mantissa_bits = FLOAT8[dtype]
    byte = np.arange(256)
    mantissa, exponent = byte & ((1 << mantissa_bits) - 1), (byte & 0x7F) >> mantissa_bits
    bias = (1 << (exponent_bits - 1)) - 1
    fraction = mantissa / (1 << mantissa_bits)
    size = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    if dtype == "F8_E4M3":
        size[(byte & 0x7F) == 0x7F] = np.nan
    else:
        top = exponent == (1 << exponent_bits) - 1
        size[top] = np.where(mantissa[top] == 0, np.inf, np.nan)
    return np.where(byte & 0x80, -size, size).astype(np.float32)
