"""What passes that quantize weights have in common: how they go, the limit that holds for what they make, and the layers they
leave alone.

A quantized artifact loses more than float16 does, so it is never held to float16's yardstick. How far it may be from PyTorch is
for the workflow to say, and `sdflow verify` refuses what nobody has said it for.
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
    """Options of every pass that quantizes."""

    limit: float | None = Field(
        default=None,
        gt=0,
        description="how far the outputs may be from the fp32 PyTorch model (relative L2); without it verification refuses them",
    )
    keep: tuple[str, ...] = Field(
        default=(), description="layers that stay as they are: names of nodes, or patterns like */attn2/*"
    )


class Layer(Protocol):
    """A layer that could be quantized: a NodeProto, or what a pass knows of one."""

    @property
    def name(self) -> str:
        """Of its node."""


Q = TypeVar("Q", bound=QuantizeConfig)
L = TypeVar("L", bound=Layer)


class QuantizingPass(EditingPass[Q], Generic[Q, L]):
    """A pass that quantizes layers of a graph. Subclasses find them (`layers`), and rewrite those that are not kept (`quantize`).

    Facts, besides those of the graph: `quantized`, its `layers` and those that were `kept`.
    """

    @abstractmethod
    def layers(self, edit: GraphEdit, config: Q) -> Sequence[L]:
        """All that could be quantized. Raises PassError for a graph that the pass does not take."""

    @abstractmethod
    def quantize(self, edit: GraphEdit, layers: Sequence[L], config: Q) -> None:
        """Rewrite these of the layers."""

    def edit(self, edit: GraphEdit, config: Q) -> Facts:
        """Raises PassError when `keep` does not fit the graph."""
        layers = self.layers(edit, config)
        if not layers:
            return {}
        names = [layer.name for layer in layers]
        wanted = chosen(names, config.keep, self.name)
        self.quantize(edit, [layer for layer in layers if layer.name in wanted], config)
        return quantized_facts(names, wanted)

    def refusal(self, edit: GraphEdit, config: Q) -> tuple[str, str]:
        return "the graph has no layer that it could quantize", "Leave the pass out."


def chosen(layers: Sequence[str], keep: Sequence[str], name: str) -> list[str]:
    """The layers that are quantized: all but those that one of `keep` names. name: of the pass.

    Raises PassError where there is none left, or where one of `keep` names none.
    """
    if strange := [pattern for pattern in keep if not any(fnmatchcase(layer, pattern) for layer in layers)]:
        raise PassError(
            f"keep names {strange[0]}, which is no layer that would be quantized",
            where=name,
            remedy=f"Layers are named like {layers[0]}; sdflow.json lists those of a pipeline.",
        )
    found = [layer for layer in layers if not any(fnmatchcase(layer, pattern) for pattern in keep)]
    if not found:
        raise PassError("keep names every layer", where=name, remedy="Leave the pass out.")
    return found


def quantized_facts(layers: Sequence[str], quantized: Sequence[str]) -> Facts:
    """The fact `quantized`: the layers that are, and of those that could be, the ones that are kept."""
    made = set(quantized)
    return {"quantized": {"layers": list(quantized), "kept": [layer for layer in layers if layer not in made]}}


def quantization_of(chain: Sequence[tuple[type[Pass[Any]], Mapping[str, Any], Facts]]) -> Quantization | None:
    """What a chain of passes quantized to; None for floating-point numbers throughout. chain: each pass, its options and its
    facts. A pass that does not say that it quantizes is told by its facts: by what the graph has from then on. Of several, the
    one with the fewest bits, as `quantized_to` chooses."""
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
