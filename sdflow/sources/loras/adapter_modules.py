"""Check a file's tensors for one module, and build layers for that module's weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from sdflow.models.base import Original
from sdflow.sources.loras.layers import DifferenceLayer, HadamardLayer, KroneckerLayer, Layer, LoraLayer, Magnitude
from sdflow.sources.loras.lora_names import LAZY, Places, Role, rows_of
from sdflow.sources.loras.products import product, times_core

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from sdflow.sources.loras.peft_metadata import PeftConfig
    from sdflow.sources.safetensors_file import TensorEntry

    Floats = NDArray[np.float32]

_PRODUCTS: Mapping[str, str] = {
    **dict.fromkeys(("up", "down", "mid"), "LoRA"),
    **dict.fromkeys([*(f"hada_w{number}_{side}" for number in "12" for side in "ab"), "hada_t1", "hada_t2"], "LoHa"),
    **dict.fromkeys(("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2"), "LoKr"),
    **dict.fromkeys(("diff", "w_norm"), "difference"),
}
"""Role -> the kind of product it is a factor of."""
_BIASES = ("diff_b", "b_norm")


class Unfit(ValueError):
    """The problem with a module's tensors, naming one of them."""


@dataclass(frozen=True)
class AdapterModule:
    """A file's tensors for one module.

    names: the module's tensors, by role. values: those read at once. alpha: its value. places: the weights to
    change.
    shapes: of all parameters of the submodel. config: PEFT's, if any. module: PEFT's name.
    """

    path: Path
    names: Mapping[Role, str]
    values: Mapping[Role, Floats]
    entries: Mapping[str, TensorEntry]
    alpha: float | None
    places: Places
    shapes: Mapping[str, tuple[int, ...]]
    config: PeftConfig | None
    module: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight as the file sees it: all rows of a fused one."""
        return (sum(self.shapes[place.name][0] for place in self.places), *self.shapes[self.places[0].name][1:])

    @property
    def _first(self) -> str:
        return next(iter(self.names.values()))

    def layers(self) -> dict[str, Layer]:
        """Parameter -> the layer added to it. Raises Unfit."""
        kinds = sorted({_PRODUCTS[role] for role in self.names if role in _PRODUCTS})
        if len(kinds) > 1:
            raise Unfit(f"{self._first}: one module has tensors of {' and '.join(kinds)}")
        if self.config is not None and self.config.kind is not None and kinds not in ([], [self.config.kind]):
            raise Unfit(f"{self._first}: of a {kinds[0]}, but PEFT's configuration has {self.config.kind}")
        self._require_numbers()
        build = {"LoRA": self._lora, "LoHa": self._loha, "LoKr": self._lokr, "difference": self._difference}
        biases = self._biases()
        if not kinds and biases and not self._norms():
            return biases
        found = build[kinds[0] if kinds else "LoRA"]()
        return {**found, **biases}

    def rank(self) -> tuple[str, int] | None:
        """The tensor that defines the rank of the factors, and the rank; None if none does."""
        if "down" in self.values:
            return self.names["down"], len(self.values["down"])
        if "hada_w1_b" in self.values:
            return self.names["hada_w1_b"], len(self.values["hada_w1_b"])
        found = next((role for role in ("lokr_w2_b", "lokr_w1_b") if role in self.values), None)
        return None if found is None else (self.names[found], len(self.values[found]))

    def _lora(self) -> dict[str, Layer]:
        up, down = self._named("up", "down")
        rank = len(down) if down.ndim else 0
        rows, columns, *kernel = self._weight_shape()
        one = [1] * len(kernel)
        if "mid" in self.values:
            core = self._shaped("mid", (rank, rank, *kernel)).reshape(rank, rank, -1)
            flat = self._shaped("down", (rank, columns, *one))
            down = times_core(core, flat)
        else:
            down = self._shaped("down", (rank, columns, *kernel))
        up = self._shaped("up", (rows, rank, *one))
        up, down = up.reshape(-1, rank), down.reshape(rank, -1)
        scale, norms = self._scale(rank), self._magnitudes()
        return {
            place.name: LoraLayer(rows_of(up, place), down, scale, norms[index])
            for index, place in enumerate(self.places)
        }

    def _loha(self) -> dict[str, Layer]:
        self._named(*(f"hada_w{number}_{side}" for number in "12" for side in "ab"))
        rows, columns, *kernel = self._weight_shape()
        tucker = {"hada_t1", "hada_t2"} & self.values.keys()
        if len(tucker) == 1:
            raise Unfit(f"{self.names[tucker.pop()]}: the other of hada_t1 and hada_t2 is missing")
        rank = len(self.values["hada_w1_b"]) if self.values["hada_w1_b"].ndim else 0
        ups, downs = [], []
        for number in "12":
            if tucker:
                core = self._shaped(f"hada_t{number}", (rank, rank, *kernel)).reshape(rank, rank, -1)
                ups.append(self._shaped(f"hada_w{number}_a", (rank, rows)).T)
                downs.append(times_core(core, self._shaped(f"hada_w{number}_b", (rank, columns))))
            else:
                ups.append(self._shaped(f"hada_w{number}_a", (rows, rank)))
                downs.append(self._shaped(f"hada_w{number}_b", (rank, columns * prod(kernel))))
        scale, norms = self._scale(rank), self._magnitudes()
        return {
            place.name: HadamardLayer(
                (rows_of(ups[0], place), rows_of(ups[1], place)), (downs[0], downs[1]), scale, norms[index]
            )
            for index, place in enumerate(self.places)
        }

    def _lokr(self) -> dict[str, Layer]:
        import numpy as np

        rows, columns, *kernel = self._weight_shape()
        left = self._left()
        height, width = left.shape
        if not height or not width or rows % height or columns % width:
            name = self.names["lokr_w1" if "lokr_w1" in self.names else "lokr_w1_a"]
            raise Unfit(f"{name}: {height} x {width}, which does not divide a weight of {rows} x {columns}")
        right = self._right(rows // height, columns // width, kernel)
        scale, norms = self._scale_of_lokr(), self._magnitudes()
        all_rows = np.arange(rows)
        return {
            place.name: KroneckerLayer(
                left, right, scale, rows_of(all_rows, place) if len(self.places) > 1 or place.swapped else None, norms[index]
            )
            for index, place in enumerate(self.places)
        }  # fmt: skip

    def _left(self) -> Floats:
        if "lokr_w1" in self.values:
            self._alone("lokr_w1", "lokr_w1_a", "lokr_w1_b")
            whole = self.values["lokr_w1"]
            if whole.ndim != 2:
                raise Unfit(f"{self.names['lokr_w1']}: {list(whole.shape)}, expected a matrix")
            return whole
        first, second = self._pair("lokr_w1")
        if first.ndim != 2 or second.ndim != 2 or first.shape[1] != len(second) or not len(second):
            raise Unfit(
                f"{self.names['lokr_w1_b']}: {list(second.shape)} does not fit {list(first.shape)} of lokr_w1_a"
            )
        return product(first, second)

    def _right(self, rows: int, columns: int, kernel: Sequence[int]) -> Floats | tuple[Floats, Floats]:
        if "lokr_w2" in self.values:
            self._alone("lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2")
            return self._shaped("lokr_w2", (rows, columns, *kernel)).reshape(rows, -1)
        _, second = self._pair("lokr_w2")
        rank = len(second) if second.ndim else 0
        if "lokr_t2" in self.values:
            core = self._shaped("lokr_t2", (rank, rank, *kernel)).reshape(rank, rank, -1)
            down = times_core(core, self._shaped("lokr_w2_b", (rank, columns)))
            return self._shaped("lokr_w2_a", (rank, rows)).T, down
        if second.ndim > 2:
            down = self._shaped("lokr_w2_b", (rank, columns, *kernel)).reshape(rank, -1)
        else:
            down = self._shaped("lokr_w2_b", (rank, columns * prod(kernel)))
        return self._shaped("lokr_w2_a", (rows, rank)), down

    def _difference(self) -> dict[str, Layer]:
        role = "diff" if "diff" in self.names else "w_norm"
        if norms := self._norms():
            raise Unfit(f"{self.names[norms[0]]}: DoRA norms together with {role}")
        return self._read_later(role, self.shape, self.places)

    def _biases(self) -> dict[str, Layer]:
        """The layers of bias differences."""
        found: dict[str, Layer] = {}
        for role in _BIASES:
            if role in self.names:
                places = [replace(place, name=f"{place.name.removesuffix('.weight')}.bias") for place in self.places]
                if lacking := [place.name for place in places if place.name not in self.shapes]:
                    raise Unfit(f"{self.names[role]}: there is no {lacking[0]}")
                found |= self._read_later(role, self.shape[:1], places)
        return found

    def _read_later(self, role: Role, shape: tuple[int, ...], places: Sequence[Original]) -> dict[str, Layer]:
        name = self.names[role]
        entry = self.entries[name]
        if _squeezed(entry.shape) != _squeezed(shape):
            raise Unfit(f"{name}: {list(entry.shape)}, expected {list(shape)}")
        return {place.name: DifferenceLayer(self.path, name, entry, place) for place in places}

    def _norms(self) -> list[Role]:
        return [role for role in ("dora_scale", "magnitude") if role in self.names]

    def _magnitudes(self) -> list[Magnitude | None]:
        """DoRA's norms for each place; None without any."""
        if not (roles := self._norms()):
            return [None] * len(self.places)
        if len(roles) > 1:
            raise Unfit(f"{self.names[roles[0]]}: {self.names[roles[1]]} is for the same weight")
        (role,) = roles
        values, (rows, columns, *kernel) = self.values[role], self._weight_shape()
        sizes = [side for side in values.shape if side != 1]
        rest = [1] * (values.ndim - 2)
        blends = role == "dora_scale"
        by_row = [(rows,), (rows, 1, *rest)] if blends else [(rows,), (1, rows, *rest), (rows, 1, *rest)]
        if values.shape in by_row and len(sizes) < 2:
            norms = values.reshape(-1)
            return [Magnitude(rows_of(norms, place), 0, blends) for place in self.places]
        if not blends or values.shape != (1, columns, *rest):
            wanted = [rows, 1, *(1 for _ in kernel)] if blends else [rows]
            or_else = f" or {[1, columns, *(1 for _ in kernel)]}" if blends else ""
            raise Unfit(f"{self.names[role]}: {list(values.shape)}, expected {wanted}{or_else}")
        if len(self.places) > 1 or self.places[0].parts > 1:
            names = " and ".join(place.name for place in self.places)
            raise Unfit(f"{self.names[role]}: weights that are merged separately share its norms of columns: {names}")
        return [Magnitude(values.reshape(-1), 1, blends)]

    def _scale(self, rank: int) -> float:
        """alpha / rank. Without an alpha and a configuration, alpha equals the rank."""
        if self.alpha is not None:
            return self.alpha / rank
        return 1.0 if self.config is None else self.config.scale(self.module, rank)

    def _scale_of_lokr(self) -> float:
        """LyCORIS has no scale if both factors are whole; PEFT always has one."""
        if self.config is not None:
            return self.config.scale(self.module, self.config.rank(self.module))
        found = self.rank()
        return 1.0 if found is None or self.alpha is None else self.alpha / found[1]

    def _weight_shape(self) -> tuple[int, ...]:
        if len(self.shape) < 2:
            raise Unfit(f"{self._first}: {self.places[0].name} is neither a matrix nor a convolution")
        return self.shape

    def _pair(self, whole: Role) -> list[Floats]:
        """The two factors that replace a whole matrix."""
        parts = [f"{whole}_a", f"{whole}_b"]
        return self._named(*(parts if any(part in self.values for part in parts) else [whole]))

    def _named(self, *roles: Role) -> list[Floats]:
        """The tensors of these roles. Raises Unfit if one is missing."""
        if lacking := [role for role in roles if role not in self.values]:
            raise Unfit(f"{self._first}: the {' and '.join(lacking)} tensor is missing")
        return [self.values[role] for role in roles]

    def _alone(self, role: Role, *others: Role) -> None:
        if same := [other for other in others if other in self.values]:
            raise Unfit(f"{self.names[role]}: {self.names[same[0]]} is for the same factor")

    def _require_numbers(self) -> None:
        import numpy as np

        for role, tensor in self.values.items():
            if not np.isfinite(tensor).all():
                raise Unfit(f"{self.names[role]}: not all of its values are finite")
        if "alpha" in self.names and (self.alpha is None or not np.isfinite(self.alpha)):
            what = "several values" if self.alpha is None else self.alpha
            raise Unfit(f"{self.names['alpha']}: {what}, expected a number")

    def _shaped(self, role: Role, wanted: Sequence[int]) -> Floats:
        """A factor, without trailing sides of 1. Linear layers and 1x1 convolutions are equivalent, so files of one fit
        the other. DyLoRA's up is always linear."""
        tensor = self.values[role]
        flat = all(side == 1 for side in wanted[2:])
        plain = tensor.shape[:2] if flat and all(side == 1 for side in tensor.shape[2:]) else tensor.shape
        if not all(wanted) or plain != tuple(wanted[:2] if flat else wanted):
            raise Unfit(f"{self.names[role]}: {list(tensor.shape)}, expected {list(wanted)}")
        return tensor.reshape(plain)


def read_at_once(names: Mapping[Role, str]) -> list[str]:
    """The tensors of a module to read with the file: factors, but not differences, which are as large as the
    weights."""
    return [name for role, name in names.items() if role != "alpha" and role not in LAZY]


def _squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape without the kernel of a 1x1 convolution."""
    return tuple(shape[:2]) if all(side == 1 for side in shape[2:]) else tuple(shape)
