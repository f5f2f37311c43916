"""An adapter's layer for one weight and its product: in float32, without torch, bit-identical on every machine.

LoRA          scale * up @ down                            Hu et al. 2021, https://arxiv.org/abs/2106.09685, section 4.1
LoHa          scale * (up1 @ down1) * (up2 @ down2)        Hyeon-Woo et al. 2022, https://arxiv.org/abs/2108.06098
LoKr          scale * kron(left, right)                    Yeh et al. 2024, https://arxiv.org/abs/2309.14859
differences   scale * difference

A convolution's Tucker decomposition is multiplied out on reading: `down` is then core times down. DoRA also changes the
norms of the merged weight: `sdflow/weights/lora.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sdflow.models.base import Original
from sdflow.sources.loras.lora_names import rows_of
from sdflow.sources.loras.products import Tiles, product, tiles_of_product
from sdflow.sources.safetensors_file import TensorEntry, float_values

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Magnitude:
    """DoRA's norms of the merged weight. values: one per row (axis 0) or per column, which is an input (axis 1).

    blends: the meaning of a scale other than 1. True for `dora_scale` of LyCORIS and OneTrainer, as applied by ComfyUI
    and A1111: W + scale * (merged at 1 - W). False for PEFT's `lora_magnitude_vector`: the product is scaled before it
    is normalized.
    """

    values: Floats
    axis: int
    blends: bool


@dataclass(frozen=True)
class LoraLayer:
    """A LoRA's layer for one weight.

    up: (out, rank). down: (rank, in * kernel height * kernel width). scale: alpha / rank.
    """

    up: Floats
    down: Floats
    scale: float
    magnitude: Magnitude | None = None

    def product(self, scale: float) -> Floats:
        """The addend at this scale, (out, in * kernel)."""
        import numpy as np

        return product(self.up, self.down, np.float32(scale * self.scale))

    def tiles(self, scale: float) -> Tiles:
        """A function that gives parts of `product`."""
        import numpy as np

        return tiles_of_product(self.up, self.down, np.float32(scale * self.scale))


@dataclass(frozen=True)
class HadamardLayer:
    """A LoHa's layer for one weight: the elementwise product of two LoRAs. up and down as in LoraLayer."""

    up: tuple[Floats, Floats]
    down: tuple[Floats, Floats]
    scale: float
    magnitude: Magnitude | None = None

    def product(self, scale: float) -> Floats:
        """See LoraLayer."""
        import numpy as np

        found = product(self.up[0], self.down[0])
        found *= product(self.up[1], self.down[1], np.float32(scale * self.scale))
        return found


@dataclass(frozen=True)
class KroneckerLayer:
    """A LoKr's layer for one weight: kron(left, right).

    right: a matrix, columns * kernel wide, or its two factors, (rows, rank) and (rank, columns * kernel). rows: the
    rows of the Kronecker product that belong to the weight, in its order; None: all.
    """

    left: Floats
    right: Floats | tuple[Floats, Floats]
    scale: float
    rows: NDArray[np.intp] | None = None
    magnitude: Magnitude | None = None

    def product(self, scale: float) -> Floats:
        """See LoraLayer."""
        import numpy as np

        left = self.left * np.float32(scale * self.scale)
        right = product(*self.right) if isinstance(self.right, tuple) else self.right
        if self.rows is None:
            whole: Floats = (left[:, None, :, None] * right[None, :, None, :]).reshape(len(left) * len(right), -1)
            return whole
        upper, lower = np.divmod(self.rows, len(right))
        some: Floats = (left[upper][:, :, None] * right[lower][:, None, :]).reshape(len(self.rows), -1)
        return some


@dataclass(frozen=True)
class DifferenceLayer:
    """A difference added to one weight or bias. Being as large as the weight, it is read on use.

    place: the weight's rows in the tensor."""

    path: Path
    name: str
    entry: TensorEntry
    place: Original
    magnitude: None = None

    def product(self, scale: float) -> Floats:
        """See LoraLayer."""
        import numpy as np

        own: Floats = rows_of(float_values(self.path, self.name, self.entry), self.place) * np.float32(scale)
        return own


Layer = LoraLayer | HadamardLayer | KroneckerLayer | DifferenceLayer


def lora_delta(layer: Layer, shape: tuple[int, ...], scale: float) -> Floats:
    """The adapter's addend for a weight of this shape at this scale, float32; for a DoRA, before the norms are
    changed."""
    return layer.product(scale).reshape(shape)
