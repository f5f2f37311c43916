"""SubpixelConv: convolve before 2x nearest-neighbour upsampling instead of after it.

Several of the nine products of a 3x3 kernel on doubled pixels read the same pixel. An output row reads two rows of the
small image, an output column two columns; which kernel entries are combined depends on its parity:

    row 2i: small row i-1 by w0, row i by w1 + w2         row 2i+1: row i by w0 + w1, row i+1 by w2

Four 2x2 kernels suffice: 16 products per small pixel instead of 36 (Shi et al., "Is the deconvolution layer the same as
a convolutional layer?", https://arxiv.org/abs/1609.07009):

    Resize(x, nearest, 2) -> Conv(3x3, pads 1)            four Conv(2x2) of x, of even and odd rows and columns
                                                          -> Concat of columns -> Concat of rows -> Reshape

    Resize(x, nearest, 2) -> Transpose -> NhwcConv(3x3)   one NhwcConv(2x2, pads 1) of x, of all four kernels
                                                          -> interleaved (`onnx_model.phases`)

Each entry of the four kernels is a sum of the original's entries, so results differ by rounding in float32, or in the
type that the sums are converted to later. On the CPU, DepthToSpace would also interleave the pixels, but on one thread
and five times slower than the two Concats (ONNX Runtime 1.31).
"""

from __future__ import annotations

from typing import Any, ClassVar

from sdflow.artifact import Facts
from sdflow.onnx_model.nodes import attributes
from sdflow.onnx_model.phases import interleaved
from sdflow.passes.base import PassConfig
from sdflow.passes.editing import EditingPass
from sdflow.passes.graph_edit import GraphEdit
from sdflow.passes.nearest import source_in_nhwc, to_nhwc, whole_factor

FACTOR = 2
MEETING = (((0,), (1, 2)), ((0, 1), (2,)))
"""For an even row and an odd one: the kernel entries that read the first pixel, and those that read the second."""


class SubpixelConvConfig(PassConfig):
    """No options."""


class SubpixelConv(EditingPass[SubpixelConvConfig]):
    """Convolves before upsampling, with less than half the products: CPU and CUDA, before OnnxFloatToFloat16.

    Facts, besides the graph's: `replaced`, number of convolutions.
    """

    name: ClassVar[str] = "SubpixelConv"
    version: ClassVar[int] = 1
    moves_weights: ClassVar[bool] = True
    Config: ClassVar[type[PassConfig]] = SubpixelConvConfig

    def edit(self, edit: GraphEdit, config: SubpixelConvConfig) -> Facts:
        replaced = sum(_replace(edit, node) for node in list(edit.graph.node) if node.op_type == "Resize")
        return {"replaced": replaced} if replaced else {}

    def refusal(self, edit: GraphEdit, config: SubpixelConvConfig) -> tuple[str, str]:
        return (
            "there is no float32 3x3 Conv or NhwcConv after a 2x nearest-neighbour Resize",
            "Put it before NhwcResize and OnnxFloatToFloat16, or leave it out.",
        )


def _replace(edit: GraphEdit, resize: Any) -> bool:
    if whole_factor(edit, resize) != FACTOR:
        return False
    back = to_nhwc(edit, resize)
    conv = edit.only_reader((resize if back is None else back).output[0])
    if back is None and _fits(edit, conv, "Conv"):
        _replace_conv(edit, resize, conv)
        return True
    cast = conv if conv is not None and conv.op_type == "Cast" else None  # inserted by onnxruntime.transformers
    if cast is not None:
        conv = edit.only_reader(cast.output[0])
    if back is not None and _fits(edit, conv, "NhwcConv"):
        _replace_nhwc_conv(edit, resize, cast, conv)
        return True
    return False


def _replace_conv(edit: GraphEdit, resize: Any, conv: Any) -> None:
    import numpy as np
    from onnx import helper

    name, (weight, *bias) = conv.name or conv.output[0], conv.input[1:]
    axes = edit.constant("subpixel_axes", np.array([3, 5], np.int64))
    times = edit.constant("subpixel_times", np.array([1, 1, FACTOR, FACTOR], np.int64))
    made = {(row, column): f"{name}/{row}{column}" for row in range(FACTOR) for column in range(FACTOR)}
    nodes = []
    for (row, column), each in made.items():
        inputs, pads = [resize.input[0], _kernel(edit, weight, row, column), *bias], [1 - row, 1 - column, row, column]
        nodes += [
            helper.make_node("Conv", inputs, [each], f"{each}/Conv", kernel_shape=[2, 2], pads=pads),
            helper.make_node("Unsqueeze", [each, axes], [f"{each}/apart"], f"{each}/Unsqueeze"),
        ]
    rows = [f"{name}/row{row}" for row in range(FACTOR)]
    for row, result in enumerate(rows):
        columns = [f"{made[row, column]}/apart" for column in range(FACTOR)]
        nodes.append(helper.make_node("Concat", columns, [result], f"{result}/Concat", axis=5))
    together, shape, larger = (f"{name}/{part}" for part in ("rows", "shape", "larger"))
    nodes += [
        helper.make_node("Concat", rows, [together], f"{name}/Concat", axis=3),
        helper.make_node("Shape", [made[0, 0]], [shape], f"{name}/Shape"),
        helper.make_node("Mul", [shape, times], [larger], f"{name}/Mul"),
    ]
    conv.CopyFrom(helper.make_node("Reshape", [together, larger], list(conv.output), f"{name}/Reshape"))
    edit.insert_before(conv, nodes)


def _replace_nhwc_conv(edit: GraphEdit, resize: Any, cast: Any | None, conv: Any) -> None:
    from onnx import helper

    name, (weight, *bias) = conv.name or conv.output[0], conv.input[1:]
    value, nodes = source_in_nhwc(edit, resize, name)
    if cast is not None:
        nodes.append(helper.make_node("Cast", [value], [f"{name}/cast"], f"{name}/Cast", to=cast.attribute[0].i))
        value = f"{name}/cast"
    channels, together = edit.weights[weight].dims[0], f"{name}/phases"
    inputs = [value, _kernels(edit, weight), *(_four_times(edit, each) for each in bias if each)]
    options: dict[str, Any] = {"domain": conv.domain, "kernel_shape": [2, 2], "pads": [1, 1, 1, 1]}
    nodes += [
        helper.make_node("NhwcConv", inputs, [together], f"{name}/NhwcConv", **options),
        *interleaved(name, together, conv.output[0], channels, edit.constant),
    ]
    conv.CopyFrom(nodes.pop())
    edit.insert_before(conv, nodes)


def _fits(edit: GraphEdit, conv: Any | None, op_type: str) -> bool:
    from onnx import TensorProto

    if conv is None or conv.op_type != op_type:
        return False
    settings = attributes(conv)
    weight = edit.weights.get(conv.input[1])
    of_kernel = slice(2, 4) if op_type == "Conv" else slice(1, 3)
    return (
        weight is not None
        and all(not name or name in edit.weights for name in conv.input[2:])
        and weight.data_type == TensorProto.FLOAT
        and list(weight.dims[of_kernel]) == [3, 3]
        and settings.get("pads") == [1, 1, 1, 1]
        and settings.get("auto_pad", b"NOTSET") == b"NOTSET"
        and settings.get("group", 1) == 1
        and all(settings.get(name, [1, 1]) == [1, 1] for name in ("strides", "dilations"))
    )


def _kernel(edit: GraphEdit, weight: str, row: int, column: int) -> str:
    """Return one of the four kernels: (out, in, 3, 3) -> (out, in, 2, 2)."""
    from sdflow.weights.evaluate import add_along
    from sdflow.weights.recipe import SumAlong

    of_rows, of_columns = MEETING[row], MEETING[column]
    return edit.moved(
        weight,
        f"{weight}/subpixel{row}{column}",
        lambda values: add_along(add_along(values, 2, of_rows), 3, of_columns),
        lambda recipe: SumAlong(3, of_columns, SumAlong(2, of_rows, recipe)),
    )


def _kernels(edit: GraphEdit, weight: str) -> str:
    """Return all four kernels, concatenated for one NhwcConv: (out, 3, 3, in) -> (4 out, 2, 2, in)."""
    from sdflow.weights.evaluate import add_along
    from sdflow.weights.recipe import Reshape, SumAlong, Transpose

    groups = (*MEETING[0], *MEETING[1])
    out, _, _, channels = edit.weights[weight].dims
    apart, order, shape = (out, 2, 2, 2, 2, channels), (1, 3, 0, 2, 4, 5), (4 * out, 2, 2, channels)

    def of_recipe(recipe: Any) -> Any:
        sums = SumAlong(2, groups, SumAlong(1, groups, recipe))
        return Reshape(shape, Transpose(order, Reshape(apart, sums)))

    def of_values(values: Any) -> Any:
        sums = add_along(add_along(values, 1, groups), 2, groups)
        return sums.reshape(apart).transpose(order).reshape(shape)

    return edit.moved(weight, f"{weight}/subpixel", of_values, of_recipe)


def _four_times(edit: GraphEdit, bias: str) -> str:
    import numpy as np

    return edit.moved(bias, f"{bias}/subpixel", lambda values: np.concatenate([values] * 4))
