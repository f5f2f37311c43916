"""ConvBiasFusion: add convolution biases in the operator that follows.

ONNX Runtime's CUDA provider adds each NhwcConv's bias in a separate kernel that reads and writes the whole feature map:
9 % of a UNet's time and 17 % of a VAE decoder's on an H200. Many following operators can add it for free:

    NhwcConv(x, w, b) -> SkipGroupNorm(., skip)           SkipGroupNorm(., skip, bias=b); b1 + b2 if both are convolutions
    NhwcConv(x, w, b) -> Transpose -> Add(., residual)    BiasAdd(., b, residual) -> Transpose, for 320, 640, 1280 channels
    two of them into one Add of other widths              one keeps a bias: b1 + b2
    NhwcConv(x, w, b) -> Reshape -> LayerNormalization    SkipLayerNormalization(., skip=b), its sum for other readers
    NhwcConv(x, w, b) -> GroupNorm                        SkipGroupNorm(., skip=b for each image); option `group_norm`

SkipGroupNorm's CUDA kernel adds bias, then skip, in the activations' type
(onnxruntime/contrib_ops/cuda/diffusion/group_norm_impl_kernel.cuh, AddSkipBias), as the convolution did: if the
convolution is its first input, the result is bit-identical. Its skip may be (N, H, W, C), (N, 1, 1, C) or (N, C)
(group_norm.cc). BiasAdd takes (N, H*W, C) of these three widths only (bias_add.cc), and fails if the residual's shape
differs. SkipLayerNormalization takes (N, S, C) and a skip of (1, S, C) for all N (skip_layer_norm_helper.h): with each
position as a separate row, S is 1, and the skip can be a bias. Its kernel is also three times faster than
LayerNormalization's. A convolution with other readers keeps its bias.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

from pydantic import Field

from sdflow.artifact import Facts
from sdflow.onnx_model.nodes import attribute, attributes
from sdflow.passes.base import PassConfig
from sdflow.passes.editing import EditingPass
from sdflow.passes.graph_edit import GraphEdit
from sdflow.passes.nearest import TO_NCHW

DOMAIN = "com.microsoft"
BIAS_ADD_CHANNELS = (320, 640, 1280)
_SKIP, _BIAS = 3, 4  # inputs of SkipGroupNorm


class ConvBiasFusionConfig(PassConfig):
    """Operators that may take over a bias."""

    skip_group_norm: bool = Field(default=True, description="into SkipGroupNorm's bias")
    bias_add: bool = Field(default=True, description="Add becomes BiasAdd (320, 640 and 1280 channels)")
    layer_norm: bool = Field(default=True, description="LayerNormalization becomes SkipLayerNormalization")
    add: bool = Field(default=True, description="one bias for two convolutions that are added")
    group_norm: bool = Field(
        default=False,
        description="GroupNorm becomes SkipGroupNorm: one more write of the feature map for one less read",
    )


class ConvBiasFusion(EditingPass[ConvBiasFusionConfig]):
    """Moves NhwcConv biases into the operators that follow: CUDA, after OrtTransformersOptimization.

    Facts, besides the graph's: `folded`, operator -> number of biases it took; `kept`, convolutions that still have
    one.
    """

    name: ClassVar[str] = "ConvBiasFusion"
    version: ClassVar[int] = 2
    moves_weights: ClassVar[bool] = True
    Config: ClassVar[type[PassConfig]] = ConvBiasFusionConfig

    def edit(self, edit: GraphEdit, config: ConvBiasFusionConfig) -> Facts:
        folded = _fold(edit, config)
        return {"folded": dict(folded), "kept": _with_bias(edit.graph)} if folded else {}

    def refusal(self, edit: GraphEdit, config: ConvBiasFusionConfig) -> tuple[str, str]:
        if not (biases := _with_bias(edit.graph)):
            return (
                "there is no NhwcConv with a bias",
                "Put it after OrtTransformersOptimization with enable_nhwc_conv, or leave it out.",
            )
        return (
            f"none of {biases} biases could be folded: no operator that takes one follows",
            "Turn on enable_skip_group_norm in OrtTransformersOptimization, or leave the pass out.",
        )


def _fold(edit: GraphEdit, config: ConvBiasFusionConfig) -> Counter[str]:
    """Fold the biases; return operator -> number of biases it took."""
    folded: Counter[str] = Counter()
    for node in list(edit.graph.node):
        if node.op_type == "SkipGroupNorm" and config.skip_group_norm:
            folded["SkipGroupNorm"] += _into_skip_group_norm(edit, node)
        elif node.op_type == "LayerNormalization" and config.layer_norm:
            folded["LayerNormalization"] += _into_layer_norm(edit, node)
        elif node.op_type == "GroupNorm" and config.group_norm:
            folded["GroupNorm"] += _into_group_norm(edit, node)
        elif node.op_type == "Add":
            done = _into_bias_add(edit, node) if config.bias_add else 0
            folded["BiasAdd"] += done
            folded["Add"] += _into_one(edit, node) if config.add and not done else 0
    return +folded


def _with_bias(graph: Any) -> int:
    return sum(node.op_type == "NhwcConv" and _bias(node) != "" for node in graph.node)


def _bias(conv: Any) -> str:
    return str(conv.input[2]) if len(conv.input) > 2 else ""


def _convolution(edit: GraphEdit, value: str, reader: Any) -> Any | None:
    """Return the NhwcConv with a bias whose output `value` is read only by `reader`, if any."""
    conv = edit.producers.get(value)
    known = conv is not None and conv.op_type == "NhwcConv" and _bias(conv) in edit.weights
    return conv if known and edit.only_reader(value) is reader else None


def _into_skip_group_norm(edit: GraphEdit, node: Any) -> int:
    convs = [conv for index in (0, _SKIP) if (conv := _convolution(edit, node.input[index], node))]
    if len(convs) == 2 and convs[0] is convs[1]:
        return 0
    if not convs:
        return 0
    own = [node.input[_BIAS]] if len(node.input) > _BIAS and node.input[_BIAS] else []
    if any(name not in edit.weights for name in own):
        return 0
    total = edit.sum_of([*map(_bias, convs), *own])
    del node.input[_BIAS:]
    node.input.append(total)
    for conv in convs:
        _drop_bias(conv)
    edit.refresh()
    return len(convs)


def _into_group_norm(edit: GraphEdit, node: Any) -> int:
    """GroupNorm(conv + b) -> SkipGroupNorm(conv, skip=b expanded to (N, C)). Skipped if the sum has other readers."""
    import numpy as np
    from onnx import helper

    if attribute(node, "channels_last", 1) != 1:
        return 0
    source = node.input[0]
    conv = edit.producers.get(source)
    if conv is None or conv.op_type != "NhwcConv" or _bias(conv) not in edit.weights:
        return 0
    others = [reader for reader in edit.readers[source] if reader is not node]
    if others or source in edit.results:
        return 0
    name = node.name or node.output[0]
    (width,) = edit.weights[_bias(conv)].dims
    batch, sizes, skip = f"{name}/batch", f"{name}/sizes", f"{name}/bias_per_image"
    channels = edit.constant(f"channels_{width}", np.array([width], np.int64))
    nodes = [
        helper.make_node("Shape", [source], [batch], f"{name}/Shape", start=0, end=1),
        helper.make_node("Concat", [batch, channels], [sizes], f"{name}/Concat", axis=0),
        helper.make_node("Expand", [_bias(conv), sizes], [skip], f"{name}/Expand"),
    ]
    _drop_bias(conv)
    node.op_type = "SkipGroupNorm"
    node.input.append(skip)
    edit.insert_before(node, nodes)
    return 1


def _into_layer_norm(edit: GraphEdit, norm: Any) -> int:
    """LayerNormalization(Reshape(conv + b)) -> SkipLayerNormalization of rows (N*S, 1, C), with b as their skip (1, 1,
    C)."""
    import numpy as np
    from onnx import helper

    reshape: Any = edit.producers.get(norm.input[0])
    conv: Any = edit.producers.get(reshape.input[0]) if reshape is not None and reshape.op_type == "Reshape" else None
    if conv is None or conv.op_type != "NhwcConv" or _bias(conv) not in edit.weights or len(norm.output) != 1:
        return 0
    value, bias = conv.output[0], _bias(conv)
    others = [reader for reader in edit.readers[value] if reader is not reshape and not _reads_shape(edit, reader)]
    options = attributes(norm)
    scale = edit.weights.get(norm.input[1])
    # The scale is as wide as the bias, so the last axis still holds the channels.
    if others or value in edit.results or scale is None or list(scale.dims) != list(edit.weights[bias].dims):
        return 0
    if options.get("axis", -1) != -1:
        return 0
    (width,) = scale.dims
    name = norm.name or norm.output[0]
    shape = edit.constant(f"positions_of_{width}", np.array([-1, 1, width], np.int64))
    skip = edit.moved(bias, f"{bias}/skip", lambda values: values.reshape(1, 1, width))
    rows, normal, total = (f"{name}/{part}" for part in ("rows", "normal", "sum"))
    nodes = [
        helper.make_node("Reshape", [value, shape], [rows], f"{name}/Reshape"),
        helper.make_node(
            "SkipLayerNormalization",
            [rows, skip, *norm.input[1:]],
            [normal, "", "", total],
            f"{name}/SkipLayerNormalization",
            domain=DOMAIN,
            epsilon=options.get("epsilon", 1e-5),
        ),
    ]
    back = helper.make_node("Reshape", [normal, reshape.input[1]], [norm.output[0]], f"{name}/Reshape_1")
    back.attribute.extend(reshape.attribute)
    norm.CopyFrom(back)
    reshape.input[0] = total
    _drop_bias(conv)
    edit.insert_before(reshape, nodes)
    return 1


def _reads_shape(edit: GraphEdit, node: Any) -> bool:
    """Whether a node, or every reader of a Transpose, only reads the value's shape."""
    if node.op_type == "Transpose" and node.output[0] not in edit.results:
        return all(reader.op_type == "Shape" for reader in edit.readers[node.output[0]])
    return bool(node.op_type == "Shape")


def _residual(edit: GraphEdit, add: Any) -> list[tuple[Any, str]]:
    """For each input of an Add, return the NhwcConv with a bias behind a Transpose that only this Add reads (or None),
    and the value in NHWC ("" if there is no Transpose)."""
    found = []
    for name in add.input:
        transpose = edit.producers.get(name)
        if transpose is None or transpose.op_type != "Transpose" or list(transpose.attribute[0].ints) != TO_NCHW:
            found.append((None, ""))
            continue
        alone = edit.only_reader(name) is add
        found.append((_convolution(edit, transpose.input[0], transpose) if alone else None, transpose.input[0]))
    return found


def _channels(edit: GraphEdit, value: str) -> int:
    """Return the number of channels of an NHWC feature map, or 0 if unknown."""
    node: Any = edit.producers.get(value)
    while node is not None and node.op_type == "Reshape":  # this pass inserts it after BiasAdd
        node = edit.producers.get(node.input[0])
    place = {"NhwcConv": 1, "SkipGroupNorm": 1, "GroupNorm": 1, "BiasAdd": 1}.get(node.op_type) if node else None
    weight = edit.weights.get(node.input[place]) if place else None
    return int(weight.dims[0]) if weight is not None else 0


def _into_bias_add(edit: GraphEdit, add: Any) -> int:
    import numpy as np
    from onnx import helper

    sides = _residual(edit, add)
    convs = [conv for conv, _ in sides if conv is not None]
    values = [value for _, value in sides]
    if not convs or "" in values or values[0] == values[1]:
        return 0
    widths = {_channels(edit, value) for value in values}
    if len(widths) != 1 or not widths <= set(BIAS_ADD_CHANNELS):
        return 0
    (width,) = widths
    if sides[0][0] is None:
        values.reverse()  # convolution first
    name, result = add.name or add.output[0], add.output[0]
    rows = edit.constant(f"rows_of_{width}", np.array([0, -1, width], np.int64))
    inner = [f"{name}/{part}" for part in ("input", "residual", "sum", "shape", "nhwc")]
    bias = edit.sum_of([_bias(conv) for conv in convs])
    nodes = [
        helper.make_node("Reshape", [values[0], rows], [inner[0]], f"{name}/Reshape"),
        helper.make_node("Reshape", [values[1], rows], [inner[1]], f"{name}/Reshape_1"),
        helper.make_node("BiasAdd", [inner[0], bias, inner[1]], [inner[2]], f"{name}/BiasAdd", domain=DOMAIN),
        helper.make_node("Shape", [values[0]], [inner[3]], f"{name}/Shape"),
        helper.make_node("Reshape", [inner[2], inner[3]], [inner[4]], f"{name}/Reshape_2"),
    ]
    for conv in convs:
        _drop_bias(conv)
    add.CopyFrom(helper.make_node("Transpose", [inner[4]], [result], f"{name}/Transpose", perm=TO_NCHW))
    edit.insert_before(add, nodes)
    return len(convs)


def _into_one(edit: GraphEdit, add: Any) -> int:
    first, second = (conv for conv, _ in _residual(edit, add)) if len(add.input) == 2 else (None, None)
    if first is None or second is None or first is second:
        return 0
    first.input[2] = edit.sum_of([_bias(first), _bias(second)])
    _drop_bias(second)
    edit.refresh()
    return 1


def _drop_bias(conv: Any) -> None:
    del conv.input[2:]
