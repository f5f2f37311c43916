"""Separate group normalizations into statistics of the whole image and an elementwise operation.

Normalizing a band by its own mean and deviation would change the image. Each normalization is therefore replaced by

    y = x * scale + shift        scale = 1 / sqrt(variance + epsilon), shift = -mean * scale

per channel. scale and shift become inputs of the graph; `Statistics` computes them beforehand from all bands of x.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from sdflow.errors import PassError
from sdflow.onnx_model.nodes import attribute, refill

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]

MICROSOFT = "com.microsoft"
EPSILON = 1e-5


@dataclass(frozen=True)
class Norm:
    """A normalization that was replaced.

    source: the value that it normalizes. scale, shift: the graph's new float32 inputs, of shape `parameters`. axis: of
    the source's channels; the first axis is the batch, of size 1. groups: number of groups of adjacent channels that
    share a mean and a variance.
    """

    source: str
    scale: str
    shift: str
    parameters: Shape
    axis: int
    groups: int
    epsilon: float

    @property
    def inputs(self) -> tuple[str, str]:
        """Names of the two inputs."""
        return self.scale, self.shift


def separate_norms(model: Any) -> list[Norm]:
    """Replace all group normalizations of a specialized ModelProto in place, and return them in order.

    Supported are ONNX Runtime's GroupNorm and SkipGroupNorm with channels last, and InstanceNormalization between two
    Reshapes. Raises PassError for other forms.
    """
    edit = _Edit(model)
    norms = []
    for node in list(model.graph.node):
        if node.domain == MICROSOFT and node.op_type in ("GroupNorm", "SkipGroupNorm"):
            norms.append(edit.group_norm(node))
        elif node.op_type == "InstanceNormalization":
            norms.append(edit.instance_norm(node))
    edit.finish()
    return norms


def types_of(graph: Any) -> dict[str, Any]:
    """Return the type of each input, output and intermediate value of a specialized graph."""
    return {item.name: item.type for item in (*graph.input, *graph.value_info, *graph.output)}


def shape_of(kind: Any) -> Shape:
    """Return the sizes of a tensor type with fixed sizes."""
    return tuple(axis.dim_value for axis in kind.tensor_type.shape.dim)


class _Edit:
    """Collects replacements by the first output of the replaced node."""

    def __init__(self, model: Any) -> None:
        self.graph = model.graph
        self.types = types_of(self.graph)
        self.given = {item.name for item in self.graph.input}
        self.producers = {name: node for node in self.graph.node for name in node.output if name}
        self.constants = {tensor.name: tensor for tensor in self.graph.initializer}
        self.replaced: dict[str, list[Any]] = {}

    def group_norm(self, node: Any) -> Norm:
        """y = activation(GroupNorm(x) * gamma + beta); SkipGroupNorm normalizes and also returns x + skip + bias."""
        source, (gamma, beta), added = node.input[0], node.input[1:3], list(node.input[3:])
        if not attribute(node, "channels_last", 1):
            raise refused(node, "its layout is not channels-last")
        nodes: list[Any] = []
        if node.op_type == "SkipGroupNorm":
            total = node.output[1] if len(node.output) > 1 and node.output[1] else f"{node.output[0]}/sum"
            nodes += self._sum(total, [source, *filter(None, added)])
            source = total
        shape = shape_of(self.types[source])
        channels = shape[-1]
        norm = self._norm(node, source, len(shape) - 1, attribute(node, "groups", 32), (channels,))
        name = node.output[0]
        for given in (gamma, beta):
            nodes += self._node("Cast", [given], f"{name}/{given}", shape_like=(channels,), to=1)
        gamma, beta = f"{name}/{gamma}", f"{name}/{beta}"
        scale, moved, shift = (f"{name}/{part}" for part in ("of_channel", "moved", "bias_of_channel"))
        nodes += self._node("Mul", [norm.scale, gamma], scale, shape_like=(channels,))
        nodes += self._node("Mul", [norm.shift, gamma], moved, shape_like=(channels,))
        nodes += self._node("Add", [moved, beta], shift, shape_like=(channels,))
        nodes += self._affine(source, scale, shift, name, activation=bool(attribute(node, "activation", 0)))
        self.replaced[name] = nodes
        return norm

    def instance_norm(self, node: Any) -> Norm:
        """Reshape to (batch, groups, values) -> InstanceNormalization with scale 1 and bias 0 -> Reshape back."""
        before = self.producers.get(node.input[0])
        readers = [each for each in self.graph.node if node.output[0] in each.input]
        if before is None or before.op_type != "Reshape" or [each.op_type for each in readers] != ["Reshape"]:
            raise refused(node, "it is not between two Reshapes")
        (after,), source = readers, before.input[0]
        if sum(node.input[0] in each.input for each in self.graph.node) > 1:
            raise refused(node, "others read its input in groups")
        shape, grouped = shape_of(self.types[source]), shape_of(self.types[node.input[0]])
        if shape_of(self.types[after.output[0]]) != shape or len(grouped) != 3 or shape[1] % grouped[1]:
            raise refused(node, "its Reshapes do not separate groups of channels")
        if [self._values(name) for name in node.input[1:3]] != [{1.0}, {0.0}]:
            raise refused(node, "it has a scale or a bias")
        parameters = (shape[1], *(1 for _ in shape[2:]))
        norm = self._norm(node, source, 1, grouped[1], parameters)
        self.replaced |= {before.output[0]: [], node.output[0]: []}
        self.replaced[after.output[0]] = list(self._affine(source, norm.scale, norm.shift, after.output[0]))
        return norm

    def _values(self, name: str) -> set[float]:
        """Return the distinct values of a constant; empty if they are not in the graph."""
        import onnx

        tensor = self.constants.get(name)
        if tensor is None or tensor.data_location == onnx.TensorProto.EXTERNAL:
            return set()
        return set(onnx.numpy_helper.to_array(tensor).ravel().tolist())

    def _norm(self, node: Any, source: str, axis: int, groups: int, parameters: Shape) -> Norm:
        import onnx

        if shape_of(self.types[source])[0] != 1:
            raise refused(node, "it has several images")
        if source in self.given:
            raise refused(node, "it normalizes the graph's input")  # statistics are those of a stage's results
        scale, shift = f"{node.output[0]}/scale", f"{node.output[0]}/shift"
        for name in (scale, shift):
            self.types[name] = onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, parameters)
            self.graph.input.add(name=name).type.CopyFrom(self.types[name])
        return Norm(source, scale, shift, parameters, axis, groups, attribute(node, "epsilon", EPSILON))

    def _sum(self, result: str, values: Sequence[str]) -> Iterator[Any]:
        """Add values in float32; the first has the result's shape and type."""
        element, shape = self.types[values[0]].tensor_type.elem_type, shape_of(self.types[values[0]])
        total = ""
        for place, value in enumerate(values):
            cast = f"{result}/{place}"
            of_value = shape_of(self.types[value]) if value in self.types else tuple(self.constants[value].dims)
            yield from self._node("Cast", [value], cast, shape_like=of_value, to=1)
            if place:
                yield from self._node("Add", [total, cast], f"{cast}/sum", shape_like=shape)
            total = f"{cast}/sum" if place else cast
        yield from self._node("Cast", [total], result, shape_like=shape, element=element, to=element)

    def _affine(self, source: str, scale: str, shift: str, result: str, *, activation: bool = False) -> Iterator[Any]:
        """Compute x * scale + shift, then x * sigmoid(x) for an activation, in float32."""
        element, shape = self.types[source].tensor_type.elem_type, shape_of(self.types[source])
        wide, scaled, moved, gate, last = (f"{result}/{part}" for part in ("wide", "scaled", "affine", "gate", "last"))
        is_wide = element == 1
        if not is_wide:
            yield from self._node("Cast", [source], wide, shape_like=shape, to=1)
        scaled_by = [source if is_wide else wide, scale]
        yield from self._node("Mul", scaled_by, scaled, shape_like=shape)
        yield from self._node("Add", [scaled, shift], moved, shape_like=shape)
        if activation:
            yield from self._node("Sigmoid", [moved], gate, shape_like=shape)
            yield from self._node("Mul", [moved, gate], last, shape_like=shape)
        yield from self._node(
            "Cast", [last if activation else moved], result, shape_like=shape, element=element, to=element
        )

    def _node(
        self,
        op_type: str,
        inputs: Sequence[str],
        output: str,
        *,
        shape_like: Shape,
        element: int = 1,
        **attributes: int,
    ) -> Iterator[Any]:
        from onnx import helper

        if output not in self.types:
            self.types[output] = helper.make_tensor_type_proto(element, shape_like)
            self.graph.value_info.add(name=output).type.CopyFrom(self.types[output])
        yield helper.make_node(op_type, inputs, [output], f"{output}/{op_type}", **attributes)

    def finish(self) -> None:
        refill(self.graph.node, (new for node in self.graph.node for new in self.replaced.get(node.output[0], [node])))


def refused(node: Any, why: str) -> PassError:
    """Return the error for a node that cannot run in bands."""
    return PassError(f"{node.op_type} {node.name or node.output[0]} cannot run in bands: {why}", where="bands")


@dataclass
class Statistics:
    """Mean and variance of each channel of a value, from its bands: bands are merged by Chan's formula (Chan, Golub,
    LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979), in float64.

    axis: of the channels.
    """

    axis: int
    count: int = 0
    mean: Any = 0.0
    squares: Any = field(default=0.0)
    """Sum of the squared deviations from the mean, per channel."""

    def add(self, band: torch.Tensor) -> None:
        """Add rows of the value, of any floating type."""
        import torch

        others = [axis for axis in range(band.dim()) if axis != self.axis]
        count = band.numel() // band.shape[self.axis]
        wide = band.to(torch.float32)
        mean = wide.mean(others, keepdim=True)
        squares = (wide - mean).square_().sum(others).double()
        mean = mean.reshape(-1).double()
        apart, total = mean - self.mean, self.count + count
        self.squares = self.squares + squares + apart.square() * (self.count * count / total)
        self.mean = self.mean + apart * (count / total)
        self.count = total

    def parameters(self, norm: Norm) -> Mapping[str, torch.Tensor]:
        """Return the values of a normalization's inputs, float32."""
        size = prod(norm.parameters) // norm.groups
        means = self.mean.reshape(norm.groups, size)
        mean = means.mean(1, keepdim=True)
        squares = self.squares.reshape(norm.groups, size) + self.count * (means - mean).square()
        variance = squares.sum(1, keepdim=True) / (self.count * size)
        scale = (variance + norm.epsilon).rsqrt()
        found = {norm.scale: scale, norm.shift: -mean * scale}
        return {name: value.expand(norm.groups, size).reshape(norm.parameters).float() for name, value in found.items()}
