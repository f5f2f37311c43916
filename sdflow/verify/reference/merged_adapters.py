"""Merge LoHa, LoKr, DoRA, Tucker decompositions and weight differences into the reference's modules, with PEFT's
functions.

diffusers does not load all of them for every family, so it is only used to map names: it gets row numbers instead of
factors, and returns which weight they belong to and in what order. Products are PEFT's own; operations that PEFT lacks
(Tucker decompositions of LoRAs, differences) use PyTorch's einsum and sum.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sdflow.errors import VerificationError
from sdflow.families.shared.original_unet_names import KOHYA_DENOISER, KOHYA_TEXT

if TYPE_CHECKING:
    import torch

Tensors = dict[str, "torch.Tensor"]
Place = Callable[[Tensors], Tensors]
"""Factors by the names of a file -> those for the module, by PEFT's names in it."""

_ENDS: Mapping[str, str] = {
    ".lora_down.weight": "down",
    ".lora_A.weight": "down",
    ".lora_up.weight": "up",
    ".lora_B.weight": "up",
    ".lora_mid.weight": "mid",
    ".lora_magnitude_vector.weight": "magnitude",
    ".lora_magnitude_vector": "magnitude",
    **{
        f".{name}": name
        for name in (
            *("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2"),
            *("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2"),
            *("dora_scale", "diff", "diff_b", "w_norm", "b_norm", "alpha"),
        )
    },
}
_PLAIN = ("down", "up", "alpha")
_WRAPPED = "lycoris_"
_OF_TEXT = re.compile(r"lycoris_(text_model_)?encoder_layers_")
_DOWN, _UP = ".lora_down.weight", ".lora_up.weight"

Group = dict[str, "torch.Tensor"]


def is_plain(tensors: Mapping[str, Any]) -> bool:
    """Whether a file has only pairs of factors and their alphas, which diffusers merges itself."""
    ends = [end for name in tensors for end, role in _ENDS.items() if role not in _PLAIN and name.endswith(end)]
    return not ends and not any(name.startswith(_WRAPPED) for name in tensors)


def merge_adapters(
    tensors: Tensors,
    metadata: Mapping[str, Any],
    place: Place,
    module: Any,
    scale: float,
    path: Path,
    deferred: dict[str, list[Any]] | None = None,
) -> int:
    """Like `merge_lora`, for the other kinds. metadata: PEFT's fields for this module, without the module's name."""
    groups = _grouped(tensors, path)
    stems = list(groups)
    surrogates: Tensors = {}
    for index, stem in enumerate(stems):
        surrogates |= _numbered(_renamed(stem), index, _rows(groups[stem], stem, path))
    placed, changed = place(surrogates), 0
    for name, numbers in placed.items():
        if not name.endswith(".lora_B.weight"):
            continue
        target = name.removesuffix(".lora_B.weight")
        stem = stems[int(placed[f"{target}.lora_A.weight"].flatten()[0])]
        try:
            owner = module.get_submodule(target)
        except AttributeError as error:
            raise VerificationError(f"{stem} does not match the model: {error}", where=str(path)) from error
        merges = _merges(groups[stem], numbers.flatten().long(), _Config(metadata, target), scale)
        for leaf, merge in merges.items():
            values = getattr(owner, leaf, None)
            if values is None:
                raise VerificationError(f"{stem} changes {target}.{leaf}, which does not exist", where=str(path))
            if deferred is not None:
                deferred.setdefault(f"{target}.{leaf}", []).append(merge)
            else:
                setattr(owner, leaf, type(values)(merge.into(values.detach()), requires_grad=False))
        changed += len(merges)
    return changed


@dataclass
class AdapterMerge:
    """An adapter for one parameter, with the interface of PEFT's layers that `StreamedWeights` merges later. magnitude:
    DoRA's, and whether its scale blends."""

    delta: Callable[[float], torch.Tensor]
    scale: float
    magnitude: tuple[torch.Tensor, bool] | None = None
    merged_adapters: list[str] = field(default_factory=list)
    _base: Any = field(default_factory=lambda: SimpleNamespace(weight=None))

    def get_base_layer(self) -> Any:
        """The holder of the weight that `merge` changes."""
        return self._base

    def merge(self, safe_merge: bool = True) -> None:
        """Merge into the base layer's weight, in a new tensor."""
        import torch

        self._base.weight = torch.nn.Parameter(self.into(self._base.weight.detach()), requires_grad=False)

    def into(self, values: torch.Tensor) -> torch.Tensor:
        """Return the parameter with the adapter merged."""
        if self.magnitude is None:
            return values + self.delta(self.scale).reshape(values.shape)
        norms, blends = self.magnitude
        if not blends:
            return _with_norms(values, self.delta(self.scale).reshape(values.shape), norms)
        merged = _with_norms(values, self.delta(1.0).reshape(values.shape), norms)
        return merged if self.scale == 1 else values + self.scale * (merged - values)


def _with_norms(values: torch.Tensor, delta: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """Merge a DoRA like PEFT, which norms rows; column norms are row norms of the transposed weight."""
    from peft.tuners.lora.dora import DoraLinearLayer

    by_column = norms.dim() > 1 and norms.shape[0] == 1 and norms.shape[1] == values.shape[1] > 1
    flat, added = ((each.transpose(0, 1) if by_column else each).flatten(1) for each in (values, delta))
    found = DoraLinearLayer(fan_in_fan_out=False).get_weight_norm(flat, added, 1)
    factor = norms.flatten() / found
    shape = [1] * values.dim()
    shape[1 if by_column else 0] = -1
    return factor.reshape(shape) * (values + delta)


@dataclass(frozen=True)
class _Config:
    """PEFT's fields for the named module."""

    fields: Mapping[str, Any]
    module: str

    def scale(self, rank: int) -> float | None:
        """PEFT's factor; None without a configuration."""
        if not self.fields:
            return None
        alpha = self._of("alpha_pattern", self.fields.get("lora_alpha", self.fields.get("alpha", 8)))
        rank = (
            int(self._of("rank_pattern", self.fields.get("r", 8))) if self.fields.get("peft_type") == "LOKR" else rank
        )
        return float(alpha / (sqrt(rank) if self.fields.get("use_rslora") else rank))

    def _of(self, pattern: str, default: Any) -> Any:
        from peft.utils.other import get_pattern_key

        patterns = self.fields.get(pattern) or {}
        return patterns.get(get_pattern_key(patterns, self.module), default)


def _grouped(tensors: Tensors, path: Path) -> dict[str, Group]:
    groups: dict[str, Group] = {}
    for name, tensor in tensors.items():
        end = next((end for end in _ENDS if name.endswith(end)), None)
        if end is None:
            raise VerificationError(f"{name} does not belong to an adapter", where=str(path))
        groups.setdefault(name.removesuffix(end), {})[_ENDS[end]] = tensor
    return groups


def _renamed(stem: str) -> str:
    """Convert names of LyCORIS' single-model wrapper to kohya's."""
    if not stem.startswith(_WRAPPED):
        return stem
    prefix = KOHYA_TEXT if _OF_TEXT.match(stem) else KOHYA_DENOISER
    return prefix + stem.removeprefix(_WRAPPED)


def _numbered(stem: str, index: int, rows: int) -> Tensors:
    """The factors of a rank-1 LoRA: `down` holds the module's number, `up` the row numbers."""
    import torch

    up = torch.arange(rows, dtype=torch.float32)[:, None]
    return {f"{stem}{_DOWN}": torch.full((1, 1), float(index)), f"{stem}{_UP}": up}


def _rows(group: Group, stem: str, path: Path) -> int:
    """The number of outputs of the file's module."""
    tucker = {"hada_w1_a": "hada_t1", "lokr_w2_a": "lokr_t2"}
    found = {
        role: tensor.shape[1 if tucker.get(role) in group else 0] for role, tensor in group.items() if tensor.dim()
    }
    if "lokr_w1" in found or "lokr_w1_a" in found:
        return int(found.get("lokr_w1", found.get("lokr_w1_a", 0)) * found.get("lokr_w2", found.get("lokr_w2_a", 0)))
    for role in ("up", "hada_w1_a", "diff", "w_norm", "diff_b", "b_norm"):
        if role in found:
            return int(found[role])
    raise VerificationError(f"{stem} has no factors", where=str(path))


def _merges(group: Group, rows: torch.Tensor, config: _Config, scale: float) -> dict[str, AdapterMerge]:
    """The changes to the weight and bias of one module. rows: its rows in the file's module."""
    found = {}
    product = _product(group, config)
    if product is not None:
        norms = next(
            ((group[role], role == "dora_scale") for role in ("magnitude", "dora_scale") if role in group), None
        )
        if norms is not None and not (norms[0].dim() > 1 and norms[0].shape[0] == 1 and norms[1]):
            norms = norms[0].flatten()[rows], norms[1]
        found["weight"] = AdapterMerge(lambda by: by * product()[rows], scale, norms)
    for role, leaf in (("diff", "weight"), ("w_norm", "weight"), ("diff_b", "bias"), ("b_norm", "bias")):
        if role in group:
            found[leaf] = AdapterMerge(lambda by, role=role: by * group[role][rows], scale)  # type: ignore[misc]
    return found


def _product(group: Group, config: _Config) -> Callable[[], torch.Tensor] | None:
    """The product of a module's factors, all rows of it, (rows, ...)."""
    if "up" in group:
        return lambda: _by(group, config, len(group["down"])) * _pair(group)
    if "hada_w1_a" in group:
        return lambda: _loha(group, _by(group, config, len(group["hada_w1_b"])))
    if "lokr_w1" in group or "lokr_w1_a" in group:
        factor = next((role for role in ("lokr_w2_b", "lokr_w1_b") if role in group), None)
        rank = len(group[factor]) if factor else 0
        return lambda: _lokr(group, _by(group, config, rank))
    return None


def _by(group: Group, config: _Config, rank: int) -> float:
    """alpha / rank. LyCORIS has none for a LoKr of whole matrices (rank 0), PEFT always has one."""
    said = config.scale(rank)
    if "alpha" in group and rank:
        return float(group["alpha"]) / rank
    return 1.0 if said is None else said


def _pair(group: Group) -> torch.Tensor:
    import torch

    up, down = group["up"].flatten(1), group["down"]
    if "mid" in group:
        return torch.einsum("mn...,im,nj->ij...", group["mid"], up, down.flatten(1))
    return up @ down.flatten(1)


def _loha(group: Group, by: float) -> torch.Tensor:
    import torch
    from peft.tuners.loha.layer import make_weight, make_weight_cp

    first = [group["hada_w1_a"], group["hada_w1_b"]]
    second = [group["hada_w2_a"], group["hada_w2_b"]]
    scale = torch.tensor(by)
    if "hada_t1" in group:
        found: torch.Tensor = make_weight_cp(group["hada_t1"], *first, group["hada_t2"], *second, scale)
    else:
        found = make_weight(*first, *second, scale)
    return found


def _lokr(group: Group, by: float) -> torch.Tensor:
    from peft.tuners.lokr.layer import make_kron, make_weight_cp

    left = group["lokr_w1"] if "lokr_w1" in group else group["lokr_w1_a"] @ group["lokr_w1_b"]
    if "lokr_w2" in group:
        right = group["lokr_w2"]
    elif "lokr_t2" in group:
        right = make_weight_cp(group["lokr_t2"], group["lokr_w2_a"], group["lokr_w2_b"])
    else:
        right = group["lokr_w2_a"] @ group["lokr_w2_b"].flatten(1)
    found: torch.Tensor = make_kron(left, right, by)
    return found
