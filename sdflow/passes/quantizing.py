"""Base class of passes that quantize weights: their limit, and the layers they skip.

A quantized artifact loses more than float16 does, so float16's tolerance does not apply. The workflow sets the limit on
the distance from PyTorch; without one, `sdflow verify` fails.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Generic, Protocol, TypeVar

from pydantic import Field

from sdflow.artifact import Facts
from sdflow.errors import PassError
from sdflow.manifest import Quantization
from sdflow.onnx_model.quantized import bits_of, quantized_to
from sdflow.passes.base import Pass, PassConfig
from sdflow.passes.editing import EditingPass
from sdflow.passes.graph_edit import GraphEdit


class QuantizeConfig(PassConfig):
    """Options of all quantizing passes."""

    limit: float | None = Field(
        default=None,
        gt=0,
        description="maximum relative L2 error against the fp32 PyTorch model; without it, verification fails",
    )
    keep: tuple[str, ...] = Field(
        default=(), description="layers to leave unquantized: node names, or patterns like */attn2/*"
    )


class Layer(Protocol):
    """A layer that can be quantized: a NodeProto, or a pass's description of one."""

    @property
    def name(self) -> str:
        """Name of the layer's node."""


Q = TypeVar("Q", bound=QuantizeConfig)
L = TypeVar("L", bound=Layer)


class QuantizingPass(EditingPass[Q], Generic[Q, L]):
    """A pass that quantizes layers of a graph. Subclasses find candidates (`layers`) and rewrite the chosen ones
    (`quantize`).

    Facts, besides the graph's: `quantized`, with the quantized `layers` and those `kept`.
    """

    @abstractmethod
    def layers(self, edit: GraphEdit, config: Q) -> Sequence[L]:
        """Return all layers that can be quantized. Raises PassError if the pass does not support the graph."""

    @abstractmethod
    def quantize(self, edit: GraphEdit, layers: Sequence[L], config: Q) -> None:
        """Rewrite the given layers."""

    def edit(self, edit: GraphEdit, config: Q) -> Facts:
        """Raises PassError if `keep` does not match the graph."""
        layers = self.layers(edit, config)
        if not layers:
            return {}
        names = [layer.name for layer in layers]
        wanted = chosen(names, config.keep, self.name)
        self.quantize(edit, [layer for layer in layers if layer.name in wanted], config)
        return quantized_facts(names, wanted)

    def refusal(self, edit: GraphEdit, config: Q) -> tuple[str, str]:
        return "the graph has no layer that can be quantized", "Leave the pass out."


def chosen(layers: Sequence[str], keep: Sequence[str], name: str) -> list[str]:
    """Return the layers to quantize: all that no pattern of `keep` matches. name: the pass's name.

    Raises PassError if none is left, or if a pattern matches no layer.
    """
    if strange := [pattern for pattern in keep if not any(fnmatchcase(layer, pattern) for layer in layers)]:
        raise PassError(
            f"keep names {strange[0]}, which matches no layer that can be quantized",
            where=name,
            remedy=f"Layers are named like {layers[0]}; a pipeline's sdflow.json lists them.",
        )
    found = [layer for layer in layers if not any(fnmatchcase(layer, pattern) for pattern in keep)]
    if not found:
        raise PassError("keep names every layer", where=name, remedy="Leave the pass out.")
    return found


def quantized_facts(layers: Sequence[str], quantized: Sequence[str]) -> Facts:
    """Return the fact `quantized`: the quantized layers, and the candidates that were kept."""
    made = set(quantized)
    return {"quantized": {"layers": list(quantized), "kept": [layer for layer in layers if layer not in made]}}


def quantization_of(chain: Sequence[tuple[type[Pass[Any]], Mapping[str, Any], Facts]]) -> Quantization | None:
    """Return what a chain quantized to, or None if it stays in floating point.

    chain: each pass with its options and facts. A pass that does not declare `quantizes` is judged by its graph's
    operators and types. Of several quantizations, the one with the fewest bits counts, as in `quantized_to`.
    """
    made = [
        Quantization(
            to, implementation.name, config.get("limit"), len(found.get("layers", ())), (*found.get("kept", ()),)
        )
        for implementation, config, facts in chain
        if (to := implementation.quantizes_to(config)) is not None
        for found in (facts.get("quantized", {}),)
    ]
    if made:
        return min(made, key=lambda each: (bits_of(each.to), each.to))
    for implementation, _, facts in chain:
        if (to := quantized_to(facts.get("operators", ()), facts.get("dtypes", ()))) is not None:
            return Quantization(to, implementation.name)
    return None
