"""ActivationScaling: compute what group normalizations read at 1/64 of its size, so that it fits into float16.

A VAE's residual stream may exceed 65,504, float16's largest number; Stable Diffusion XL's does, and its images come out
black. But every value of the stream is only read by group normalizations and by operators that are linear in it, and a
normalization removes its input's scale:

    GroupNorm(x, epsilon) = GroupNorm(x / 2^k, epsilon / 2^2k)

So weights and biases of layers that enter the stream are divided by 2^k, and of layers that are already linear in it
(shortcuts, up- and downsampling), only the biases. The graph keeps its operators, and in float32 its output has the same
bits, since powers of two round nothing.

In float16, values up to 2^k times 65,504 fit. Those below 2^k times 6.1e-5 become subnormal, so they have fewer digits. For
activations, this error is far below a normalization's epsilon. For weights it was measured on FLUX.2's decoder with random
weights: relative L2 from float32 is 2.34e-3 without the pass, 2.37e-3 with 2^6, and 2.36e-3 with 2^8.

madebyollin/sdxl-vae-fp16-fix reaches the same by finetuning. Values that no normalization reads are not scaled: attention
scores, and what follows the last normalization.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import Field

from sdflow.artifact import Facts
from sdflow.errors import PassError
from sdflow.onnx_model.facts import dtype_name
from sdflow.passes.base import PassConfig
from sdflow.passes.editing import EditingPass
from sdflow.passes.graph_edit import GraphEdit
from sdflow.passes.nearest import constant_value

NORMALIZATION = "InstanceNormalization"
"""A group normalization is exported as a Reshape to one row per group, this operator, and a Reshape back."""

MOVES = frozenset({"Expand", "Flatten", "Identity", "Reshape", "Resize", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators whose output holds values of their first input, or (Resize) weighted means of them."""

ADDS = frozenset({"Add", "Concat", "Sub"})
"""Operators whose inputs all have their output's scale."""

LAYERS = {"Conv": 1, "ConvTranspose": 1, "Gemm": 1, "MatMul": 1}
"""Operators with a weight, and which of their inputs it is. They are linear in the first input but for a bias, the third."""

EPSILON = 1e-5
"""Default of ONNX's normalizations."""


class ActivationScalingConfig(PassConfig):
    """The scale."""

    power: int = Field(default=6, ge=1, le=12, description="activations are divided by 2 to the power of this")


class ActivationScaling(EditingPass[ActivationScalingConfig]):
    """Divides what group normalizations read by a power of two, which prevents overflows in float16: after OnnxConversion.

    Facts, besides the graph's: `normalizations`, number of those whose input is scaled; `layers`, number of layers whose
    weight is scaled; `biases`, number of scaled biases.
    """

    name: ClassVar[str] = "ActivationScaling"
    version: ClassVar[int] = 1
    moves_weights: ClassVar[bool] = True
    Config: ClassVar[type[PassConfig]] = ActivationScalingConfig

    def edit(self, edit: GraphEdit, config: ActivationScalingConfig) -> Facts:
        """Raises PassError for an operator that is not known to be linear."""
        normalizations = [node for node in edit.graph.node if node.op_type == NORMALIZATION]
        if not normalizations:
            return {}
        stream = _Stream(edit)
        for node in normalizations:
            stream.add(node.input[0], node)
        layers, biases = stream.scale(config.power)
        for node in normalizations:
            _scale_epsilon(node, config.power)
        return {"normalizations": len(normalizations), "layers": layers, "biases": biases}

    def refusal(self, edit: GraphEdit, config: ActivationScalingConfig) -> tuple[str, str]:
        return (
            "the graph has no group normalization as OnnxConversion exports it",
            "Put it right after OnnxConversion, or leave it out.",
        )


@dataclass
class _Stream:
    """The values to scale: what normalizations read, and all that is connected with it by linear operators."""

    edit: GraphEdit
    values: set[str] = field(default_factory=set)

    def add(self, value: str, node: Any) -> None:
        """Add a value that `node` reads or writes, and what its scale implies for others."""
        waiting = [(value, node)]
        while waiting:
            value, node = waiting.pop()
            if not value or value in self.values or value in self.edit.weights:
                continue
            if value in self.edit.results or value not in self.edit.producers:
                kind = "an output" if value in self.edit.results else "an input or a constant"
                raise _refused(node, f"{value}, {kind} of the graph, would have to be scaled")
            self.values.add(value)
            waiting += [(other, self.edit.producers[value]) for other in self._behind(self.edit.producers[value])]
            waiting += [(other, reader) for reader in self.edit.readers[value] for other in self._ahead(reader, value)]

    def _behind(self, node: Any) -> list[str]:
        """Inputs of a node that are scaled if its output is."""
        if self._moves(node):
            return [node.input[0]]
        if node.op_type in ADDS:
            return list(node.input)
        if (factor := self._other_factor(node)) is not None:
            return [name for name in node.input if name != factor]
        if node.op_type in LAYERS and self._has_weight(node):
            return []
        raise _refused(node, f"{node.output[0]} would have to be scaled")

    def _ahead(self, node: Any, value: str) -> list[str]:
        """Values that are scaled if `value`, an input of the node, is."""
        if node.op_type == "Shape":
            return []
        if node.op_type == NORMALIZATION and value == node.input[0]:
            return []
        if node.op_type in ADDS:
            return [*node.input, node.output[0]]
        first = value == node.input[0] and value not in node.input[1:]
        if first and (self._moves(node) or (node.op_type in LAYERS and self._has_weight(node))):
            return [node.output[0]]
        if (factor := self._other_factor(node)) is not None and factor != value:
            return [node.output[0]]
        raise _refused(node, f"it reads {value}, which would have to be scaled")

    def _moves(self, node: Any) -> bool:
        """Whether a node's output is linear in its first input, and depends on it alone."""
        import numpy as np

        if node.op_type == "Cast":
            return any(item.name == "to" and dtype_name(item.i) == "float32" for item in node.attribute)
        if node.op_type == "Pad":
            filling = constant_value(self.edit, node.input[2]) if len(node.input) > 2 and node.input[2] else 0
            return filling is not None and not np.any(filling)
        return node.op_type in MOVES

    def _has_weight(self, node: Any) -> bool:
        return all(name in self.edit.weights for name in node.input[LAYERS[node.op_type] :] if name)

    def _other_factor(self, node: Any) -> str | None:
        """The constant that a Mul or Div multiplies by or divides by, if any."""
        places = {"Mul": (1, 0), "Div": (1,)}.get(node.op_type, ())
        return next((node.input[place] for place in places if self._is_constant(node.input[place])), None)

    def _is_constant(self, name: str) -> bool:
        return name in self.edit.weights or constant_value(self.edit, name) is not None

    def scale(self, power: int) -> tuple[int, int]:
        """Scale the weights; return the number of layers whose weight was, and of biases."""
        layers = biases = 0
        for node in list(self.edit.graph.node):
            if not self.values.intersection(node.output):
                continue
            places: list[int] = []
            if node.op_type in LAYERS:
                enters = node.input[0] not in self.values
                layers += enters
                biases += len(node.input) > 2 and node.input[2] != ""
                places = [*([LAYERS[node.op_type]] if enters else []), *range(2, len(node.input))]
            elif node.op_type in ADDS:
                places = [place for place, name in enumerate(node.input) if name in self.edit.weights]
                biases += len(places)
            for place in places:
                if node.input[place]:
                    node.input[place] = self._scaled(node, node.input[place], power)
        self.edit.refresh()
        return layers, biases

    def _scaled(self, node: Any, name: str, power: int) -> str:
        import onnx

        from sdflow.weights.evaluate import scaled
        from sdflow.weights.recipe import Scaled

        if self.edit.weights[name].data_type != onnx.TensorProto.FLOAT:
            raise _refused(node, f"{name} is not float32", "Put it right after OnnxConversion.")
        return self.edit.moved(
            name, f"{name}/scaled", lambda values: scaled(values, -power), lambda recipe: Scaled(-power, recipe)
        )


def _scale_epsilon(node: Any, power: int) -> None:
    found = next((item for item in node.attribute if item.name == "epsilon"), None)
    if found is None:
        found = node.attribute.add(name="epsilon", type=1, f=EPSILON)  # 1: a float
    found.f *= 2.0 ** (-2 * power)


def _refused(node: Any, what: str, remedy: str = "") -> PassError:
    return PassError(
        f"{node.op_type} {node.name}: {what}",
        where=ActivationScaling.name,
        remedy=remedy or "Leave the pass out; `sdflow verify` then tells whether float16 overflows.",
    )
