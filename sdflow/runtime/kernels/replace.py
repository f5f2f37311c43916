"""Replace operators of a graph of fixed sizes with sdflow's."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from typing import Any

from sdflow.onnx_model.float8 import DOMAIN
from sdflow.onnx_model.nodes import attributes, import_domain
from sdflow.onnx_model.phases import INTERLEAVE, Interleaving, interleavings
from sdflow.runtime.kernels import rotary
from sdflow.runtime.kernels.graph_index import Known
from sdflow.runtime.kernels.transformers import with_transformer_kernels

VECTOR, MAX_GROUPS, MAX_CHANNELS = 8, 32, 4096
"""As in group_norm.cuh: channels per thread; maximum groups per block; one thread per eight channels."""
MOST_ROWS = 65535
"""As in interleave.c: maximum number of image rows, and of images."""
GEGLU_ROWS, GEGLU_WIDTH = 128, 64
"""As in geglu.cu: rows and columns of a tile of the result."""
HEAD_SIZES = (40, 64, 80, 160)
"""Head sizes supported by few_keys_attention.c."""
FEW_KEYS = 160
"""Maximum number of keys: with 231, a third text chunk, cuDNN's kernel was as fast on an H200."""


def with_own_kernels(model: Any, *, hopper: bool = False, without: Collection[str] = ()) -> Any | None:
    """Return a copy of a ModelProto that uses sdflow's kernels where possible, or None if there are none.

    model: with all shapes known, as from `specialize`. ONNX Runtime keeps group normalizations whose channels are not a
    multiple of eight, or whose groups have 5 to 7 or fewer than 4 channels (a thread handles eight adjacent channels);
    attentions with many keys, a mask, a bias, or other head sizes; and anything that is not float16 (group
    normalization: or float32) or of unknown type or shape. The phases of `SubpixelConv` are interleaved in one kernel.
    `with_transformer_kernels` handles what lies between the products of a transformer. hopper: for compute capability
    9.0, where a product that only BiasSplitGelu reads is fused with it, as Geglu. without: unusable parts
    (`sdflow.runtime.kernels.parts`).
    """
    import onnx

    known = {
        item.name: (item.type.tensor_type.elem_type, [axis.dim_value for axis in item.type.tensor_type.shape.dim])
        for item in (*model.graph.input, *model.graph.value_info)
    }
    known |= {tensor.name: (tensor.data_type, list(tensor.dims)) for tensor in model.graph.initializer}
    if "rotary_qkv" not in without and (attentions := rotary.replacements(model.graph, known)):
        surrounded = onnx.ModelProto()
        surrounded.CopyFrom(model)
        rotary.replace(surrounded.graph, attentions)
        import_domain(surrounded, DOMAIN)
        return with_own_kernels(surrounded, hopper=hopper, without=without) or surrounded
    between = with_transformer_kernels(model, known, without)
    model = model if between is None else between
    wanted = [_is_ours(node, known, without) for node in model.graph.node]
    shapes = {name: shape for name, (_, shape) in known.items()}
    apart = [each for each in interleavings(model.graph, shapes) if _interleaves(*known[each.value])]
    apart = [] if "interleave" in without else apart
    if not any(wanted) and not apart and between is None:
        return None
    result = onnx.ModelProto()
    result.CopyFrom(model)
    products = _products_of_gates(result.graph, known, without) if hopper and "geglu" not in without else {}
    for node, ours in zip(result.graph.node, wanted, strict=True):
        if not ours:
            continue
        node.domain = DOMAIN
        if product := products.get(node.input[0]):
            _replace_product(node, product)
        elif node.op_type == "MultiHeadAttention":
            _replace_attention(node, known)
        elif node.op_type != "BiasSplitGelu":
            _replace_group_norm(node, known[node.input[0]][0])
    _put_between(result.graph, apart, known)
    for product in products.values():
        result.graph.node.remove(product)
    import_domain(result, DOMAIN)
    return result


def _is_ours(node: Any, known: Known, without: Collection[str]) -> bool:
    if node.domain != "com.microsoft" or node.op_type not in _RULES:
        return False
    part, rule = _RULES[node.op_type]
    axes = known.get(node.input[0], (0, []))[1]
    return part not in without and bool(axes) and all(axes) and rule(node, known)


def _is_gelu_ours(node: Any, known: Known) -> bool:
    import onnx

    half = onnx.TensorProto.FLOAT16
    element, axes = known[node.input[0]]
    if element != half or len(axes) > 4 or axes[-1] % (2 * VECTOR):
        return False
    return known.get(node.input[1]) == (half, axes[-1:])


def _is_group_norm_ours(node: Any, known: Known) -> bool:
    import onnx

    half, single = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
    element, axes = known[node.input[0]]
    row = axes[-1:]
    if (
        element not in (half, single)
        or len(axes) != 4
        or any(known.get(name) != (single, row) for name in node.input[1:3])
    ):
        return False
    skip, bias = ((*node.input[3:], "", "")[i] for i in range(2))
    images = axes[:1]
    if skip and known.get(skip) not in [(element, shape) for shape in (axes, images + row, [*images, 1, 1, *row])]:
        return False
    if bias and known.get(bias) != (element, row):
        return False
    return _are_groups_ours(node, row[0])


def _products_of_gates(graph: Any, known: Known, without: Collection[str]) -> dict[str, Any]:
    """Return value -> MatMul for values that only a replaced BiasSplitGelu reads and where Geglu is faster than
    both."""
    import onnx

    half = onnx.TensorProto.FLOAT16
    readers = Counter(name for node in graph.node for name in node.input)
    readers.update(item.name for item in graph.output)
    gated = {node.input[0] for node in graph.node if node.op_type == "BiasSplitGelu" and _is_ours(node, known, without)}
    return {
        node.output[0]: node
        for node in graph.node
        if node.op_type == "MatMul"
        and node.domain in ("", "ai.onnx")
        and node.output[0] in gated
        and readers[node.output[0]] == 1
        and all(known.get(name, (0, []))[0] == half for name in node.input)
        and _is_geglu_quicker(*(known[name][1] for name in node.input))
    }


def _is_geglu_quicker(x: list[int], weight: list[int]) -> bool:
    """Whether Geglu is faster than a product and BiasSplitGelu: on an H200, from one tile of rows on."""
    if len(weight) != 2 or math.prod(x[:-1]) < GEGLU_ROWS:
        return False
    return weight[0] % VECTOR == 0 and weight[1] % (2 * GEGLU_WIDTH) == 0


def _replace_product(node: Any, product: Any) -> None:
    """Replace the node by Geglu, which reads the product's inputs and the bias."""
    node.op_type, node.input[:] = "Geglu", [*product.input, node.input[1]]


def _are_groups_ours(node: Any, channels: int) -> bool:
    settings = attributes(node)
    if not settings.get("channels_last", 1):
        return False
    groups = int(settings["groups"])
    if channels % groups or channels % VECTOR or groups > MAX_GROUPS or channels > MAX_CHANNELS:
        return False
    return channels // groups == 4 or channels // groups >= VECTOR


def _interleaves(element: int, shape: list[int]) -> bool:
    """Whether the kernel supports this type and shape: it interleaves 16 bytes of channels at a time."""
    import onnx

    unit = {onnx.TensorProto.FLOAT16: 8, onnx.TensorProto.FLOAT: 4}.get(element)
    return unit is not None and shape[3] % (4 * unit) == 0 and all(shape) and max(shape[:2]) <= MOST_ROWS


def _put_between(graph: Any, apart: list[Interleaving], known: Known) -> None:
    import onnx

    for each in apart:
        single = known[each.value][0] == onnx.TensorProto.FLOAT
        node = graph.node[each.nodes[-1]]
        op_type = f"{INTERLEAVE}Single" if single else INTERLEAVE
        node.CopyFrom(onnx.helper.make_node(op_type, [each.value], [each.result], node.name, domain=DOMAIN))
    for place in sorted((place for each in apart for place in each.nodes[:-1]), reverse=True):
        del graph.node[place]


def _is_attention_ours(node: Any, known: Known) -> bool:
    """Whether the kernel supports the attention. Query, key and value are (B, S, heads x size) each; key and value, or
    all three, may be packed as (B, S, heads, 2 or 3, size)."""
    import onnx

    given = [name for name in node.input if name]
    settings = attributes(node)
    if list(node.input[: len(given)]) != given or len(given) > 3 or any(node.output[1:]):
        return False  # a bias, a mask, or past keys
    if settings.get("unidirectional", 0) or settings.get("scale", 0) < 0:
        return False
    heads, size = settings["num_heads"], _head_size(node, known)
    found = [known.get(name, (0, [])) for name in given]
    shapes = [axes for _, axes in found]
    if any(element != onnx.TensorProto.FLOAT16 or len(axes) < 2 for element, axes in found) or size not in HEAD_SIZES:
        return False
    (images, queries), keys = shapes[0][:2], shapes[len(given) > 1][1]
    query, row = [images, queries, heads * size], [images, keys, heads * size]
    packed = [images, keys, heads, 4 - len(given), size]
    wanted = {3: [query, row, row], 2: [query, packed], 1: [packed]}[len(given)]
    return shapes == wanted and 0 < keys <= FEW_KEYS


def _head_size(node: Any, known: Known) -> int:
    axes = known[node.input[0]][1]
    return axes[4] if len(axes) == 5 else axes[-1] // int(attributes(node)["num_heads"])


_RULES = {
    "GroupNorm": ("group_norm", _is_group_norm_ours),
    "SkipGroupNorm": ("group_norm", _is_group_norm_ours),
    "BiasSplitGelu": ("bias_split_gelu", _is_gelu_ours),
    "MultiHeadAttention": ("few_keys_attention", _is_attention_ours),
}


def _replace_attention(node: Any, known: Known) -> None:
    import onnx

    settings = attributes(node)
    scale = settings.get("scale", 0) or 1 / math.sqrt(_head_size(node, known))
    node.op_type = "FewKeysAttention"
    given = [name for name in node.input if name]
    del node.attribute[:], node.input[:], node.output[1:]
    node.input.extend(given)
    for name, value in (("num_heads", settings["num_heads"]), ("scale", scale)):
        node.attribute.append(onnx.helper.make_attribute(name, value))


def _replace_group_norm(node: Any, element: int) -> None:
    """Replace the node; its outputs become y, the kernel's scratch memory and, if used, the sum."""
    import onnx

    node.output[:] = [node.output[0], f"{node.output[0]}_sums", *filter(None, node.output[1:])]
    node.op_type = "GroupNorm" if element == onnx.TensorProto.FLOAT16 else "GroupNormSingle"
    epsilon = [item for item in node.attribute if item.name == "epsilon"]
    if not epsilon:
        node.attribute.add(name="epsilon", type=1, f=1e-5)
    for item in [item for item in node.attribute if item.name == "channels_last"]:
        node.attribute.remove(item)
