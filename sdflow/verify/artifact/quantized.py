"""Undo a quantized artifact's quantization: rebuild the graph with the original weights.

Each quantized product becomes a plain product of the value before quantization and the exact weight. The result must
compute what PyTorch computes; see `sdflow.verify.artifact.exact`. Weights and scales are checked by quantizing again in
torch, without the pass's code (`sdflow.weights.quantized`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from numpy.typing import NDArray

from sdflow.onnx_model.float8 import DOMAIN, FLOAT8_MATMUL
from sdflow.onnx_model.int8 import INT8_MATMUL, rotation_of
from sdflow.weights.blockwise import PARTS
from sdflow.weights.recipe import Blockwise, Quantized, Recipe, Scales

Producers = Mapping[str, Any]
"""Value name -> the node that outputs it."""


@dataclass(frozen=True)
class Product:
    """A quantized product, by the names of its parts.

    source: the value before quantization. weight, scales, zeros: initializers; zeros may be "". bias: an initializer or
    a value, or "". transposed: whether the weight is (out, in). half: whether surrounding values have 16 bits; None:
    they have the type of the scales. rotation: size of the Hadamard matrix that the product itself multiplies the source
    with, 0 for none.
    """

    source: str
    weight: str
    scales: str
    bias: str = ""
    transposed: bool = False
    half: bool | None = False
    zeros: str = ""
    rotation: int = 0


def _integer_to_float(node: Any, producers: Producers) -> Product | None:
    given = producers.get(node.input[0])
    if given is None or given.op_type != "DynamicQuantizeLinear":
        return None
    if [node.input[0], node.input[2], node.input[4]] != list(given.output) or (len(node.input) > 5 and node.input[5]):
        return None
    return Product(given.input[0], node.input[1], node.input[3], node.input[6] if len(node.input) > 6 else "")


def _float8(node: Any, producers: Producers) -> Product | None:
    source, weight, scales = node.input
    return Product(source, weight, scales, transposed=True, half=True)


def _int8(node: Any, producers: Producers) -> Product | None:
    source, weight, scales, *bias = node.input
    return Product(source, weight, scales, "".join(bias), transposed=True, half=True, rotation=rotation_of(node))


def _blockwise(node: Any, producers: Producers) -> Product | None:
    source, weight, scales, *others = node.input
    if any(others[1:]):  # sdflow never writes further inputs
        return None
    return Product(source, weight, scales, transposed=True, half=None, zeros="".join(others))


PRODUCTS: Mapping[tuple[str, str], Callable[[Any, Producers], Product | None]] = MappingProxyType(
    {
        ("com.microsoft", "MatMulIntegerToFloat"): _integer_to_float,
        ("com.microsoft", "MatMulNBits"): _blockwise,
        (DOMAIN, FLOAT8_MATMUL): _float8,
        (DOMAIN, INT8_MATMUL): _int8,
    }
)
"""(domain, operator) -> a function that returns its parts, or None for an unknown use."""


def take_out(model: Any, recipes: Mapping[str, Recipe]) -> tuple[list[str], list[str]]:
    """Replace each quantized product in `model` with the exact one, in place, without reading weights.

    recipes: of its weights. Returns the names of the weights to supply in float32, and the problems: a weight and
    scales of different values.
    """
    import onnx

    producers = {name: node for node in model.graph.node for name in node.output if name}
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    half = onnx.TensorProto.BFLOAT16 if _has_bfloat16(model.graph) else onnx.TensorProto.FLOAT16
    taken: dict[str, int] = {}
    wrong: list[str] = []
    nodes = []
    for node in model.graph.node:
        tell = PRODUCTS.get((node.domain, node.op_type))
        product = tell(node, producers) if tell is not None else None
        if product is None:
            nodes.append(node)
            continue
        if problem := _apart(product, recipes):
            wrong.append(f"{node.name}: {problem}")
        of_scales = weights[product.scales].data_type if product.scales in weights else onnx.TensorProto.FLOAT
        taken[product.weight] = of_scales if product.half is None else half if product.half else onnx.TensorProto.FLOAT
        nodes += _exact(node, product, half)
    del model.graph.node[:]
    model.graph.node.extend(_read(nodes, {item.name for item in model.graph.output}))
    for name, element in taken.items():
        tensor, recipe = weights[name], recipes.get(name)
        dims = list(recipe.of.shape if isinstance(recipe, Blockwise) else tensor.dims)
        tensor.Clear()
        tensor.name, tensor.data_type, tensor.data_location = name, element, onnx.TensorProto.EXTERNAL
        tensor.dims.extend(dims)
    read = {name for node in model.graph.node for name in node.input} | {item.name for item in model.graph.output}
    kept = [tensor for tensor in model.graph.initializer if tensor.name in read]
    del model.graph.initializer[:]  # scales and zeros
    model.graph.initializer.extend(kept)
    return [*taken], wrong


def _has_bfloat16(graph: Any) -> bool:
    """Whether 16-bit values of a graph are bfloat16, judged by its unquantized weights and its casts."""
    import onnx

    brain = onnx.TensorProto.BFLOAT16
    casts = (item.i for node in graph.node if node.op_type == "Cast" for item in node.attribute if item.name == "to")
    return brain in casts or any(tensor.data_type == brain for tensor in graph.initializer)


def _apart(product: Product, recipes: Mapping[str, Recipe]) -> str:
    """Why a weight and its scales do not match, or ""."""
    weight, scales = recipes.get(product.weight), recipes.get(product.scales)
    if isinstance(weight, Blockwise):
        return _blocks_apart(weight, scales, recipes.get(product.zeros) if product.zeros else None)
    if not isinstance(weight, Quantized) or not isinstance(scales, Scales):
        return "its weight or its scales have no recipe that quantizes"
    if (weight.kind, weight.axis, weight.of) != (scales.kind, scales.axis, scales.of):
        return f"its scales, {product.scales}, are not those of its weight"
    if weight.axis != (0 if product.transposed else 1):
        return "its scales are not those of its output channels"
    return ""


def _blocks_apart(weight: Blockwise, scales: Recipe | None, zeros: Recipe | None) -> str:
    wanted = [Blockwise(part, weight.how, weight.of) for part in PARTS]
    if weight != wanted[0] or scales != wanted[1]:
        return "its scales are not those of its weight"
    if zeros != (None if weight.how.symmetric else wanted[2]):
        return "its zeros are not those of its weight"
    return ""


def _exact(node: Any, product: Product, half: int) -> list[Any]:
    from onnx import helper

    made, weight = [], product.weight
    source = product.source
    if product.rotation:
        source = f"{node.output[0]}/rotated"
        made += _rotated(node, product, source, half)
    if product.transposed:
        weight = f"{node.output[0]}/weight"
        made.append(helper.make_node("Transpose", [product.weight], [weight], f"{node.name}/weight", perm=[1, 0]))
    result = f"{node.output[0]}/product" if product.bias else node.output[0]
    made.append(helper.make_node("MatMul", [source, weight], [result], node.name))
    if product.bias:
        made.append(helper.make_node("Add", [result, product.bias], [node.output[0]], f"{node.name}/bias"))
    return made


def _rotated(node: Any, product: Product, result: str, half: int) -> list[Any]:
    """The nodes that multiply a product's source by the Hadamard matrix, in float32. half: element type of both."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    turn: NDArray[Any] = np.ones((1, 1))
    while len(turn) < product.rotation:
        turn = np.kron(turn, [[1, 1], [1, -1]])
    values = {"turn": (turn / product.rotation**0.5).astype(np.float32), "size": np.array([-1, product.rotation])}
    made = [
        helper.make_node("Constant", [], [f"{result}/{name}"], value=numpy_helper.from_array(each))
        for name, each in values.items()
    ]
    made.append(helper.make_node("Shape", [product.source], [f"{result}/shape"], f"{node.name}/shape"))
    steps: tuple[tuple[str, tuple[str, ...], dict[str, int]], ...] = (
        ("Cast", (), {"to": TensorProto.FLOAT}),
        ("Reshape", (f"{result}/size",), {}),
        ("MatMul", (f"{result}/turn",), {}),
        ("Reshape", (f"{result}/shape",), {}),
        ("Cast", (), {"to": half}),
    )
    now = product.source
    for index, (op_type, others, attributes) in enumerate(steps):
        name = result if index == len(steps) - 1 else f"{result}/{index}"
        made.append(helper.make_node(op_type, [now, *others], [name], f"{name}/{op_type}", **attributes))
        now = name
    return made


def _read(nodes: list[Any], results: set[str]) -> list[Any]:
    """Drop unread nodes: those that quantized the inputs are left over."""
    while True:
        read = results | {name for node in nodes for name in node.input}
        kept = [node for node in nodes if read.intersection(node.output)]
        if len(kept) == len(nodes):
            return kept
        nodes = kept


# Quantizing the weights again


def again(kind: str, exact: NDArray[Any], axis: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Quantize values in torch. Returns them with their scales. kind: of a recipe. Raises ValueError for an unknown
    one."""
    if kind not in AGAIN:
        raise ValueError(f"unknown quantization {kind}")
    return AGAIN[kind](exact, axis)


def _whole(largest: int, exact: NDArray[Any], axis: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Round to whole multiples of the scale, up to `largest`, halves to even; the scale is float32."""
    import torch

    values = torch.from_numpy(exact).movedim(axis, 0)
    widest = values.flatten(1).abs().amax(1).double()
    scales = (widest / largest).float()
    scales = torch.where(scales < torch.finfo(torch.float32).tiny, torch.ones_like(scales), scales)
    multiples = (values / scales.reshape(-1, *[1] * (values.dim() - 1))).round().clamp(-largest, largest)
    return multiples.to(torch.int8).movedim(0, axis).contiguous().numpy(), scales.numpy()


def _e4m3(exact: NDArray[Any], axis: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Round to E4M3 multiples of the scale, halves to even; a channel's largest magnitude becomes 448."""
    import ml_dtypes
    import torch

    values = torch.from_numpy(exact).movedim(axis, 0)
    scales = values.flatten(1).abs().amax(1) / 448
    scales = torch.where(scales < torch.finfo(torch.float32).tiny, torch.ones_like(scales), scales)
    quotients = (values / scales.reshape(-1, *[1] * (values.dim() - 1))).clamp(-448, 448)
    made = quotients.to(torch.float8_e4m3fn).movedim(0, axis).contiguous()
    return made.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn), scales.numpy()


AGAIN: Mapping[str, Callable[[NDArray[Any], int], tuple[NDArray[Any], NDArray[Any]]]] = MappingProxyType(
    {"int8": partial(_whole, 127), "int8_reduced": partial(_whole, 64), "float8_e4m3": _e4m3}
)
