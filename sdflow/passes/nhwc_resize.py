"""NhwcResize: nearest-neighbour upsampling in the NHWC layout of the surrounding convolutions.

ONNX Runtime's CUDA provider has an NCHW Resize only, which leaves a Transpose before and after each Resize between
NhwcConvs: its optimizer does not move a Transpose through a Resize (transpose_optimizer.cc, handler_map). In a VAE
decoder, these are the largest feature maps. Upsampling by a whole factor k is a copy in any layout:

    Resize(x, [1, 1, k, k]) -> Transpose to NHWC        Transpose(x) -> (N, H, 1, W, 1, C) -> Expand to (N, H, k, W, k, C)
                                                        -> (N, k H, k W, C)
"""

from __future__ import annotations

from typing import Any, ClassVar

from sdflow.artifact import Facts
from sdflow.passes.base import PassConfig
from sdflow.passes.editing import EditingPass
from sdflow.passes.graph_edit import GraphEdit
from sdflow.passes.nearest import source_in_nhwc, to_nhwc, whole_factor


class NhwcResizeConfig(PassConfig):
    """No options."""


class NhwcResize(EditingPass[NhwcResizeConfig]):
    """Upsamples in NHWC, without Transposes: CUDA, after OrtTransformersOptimization.

    For what the faster SubpixelConv leaves: other factors, other convolutions.
    Facts, besides the graph's: `replaced`, number of Resize nodes.
    """

    name: ClassVar[str] = "NhwcResize"
    version: ClassVar[int] = 1
    moves_weights: ClassVar[bool] = True
    Config: ClassVar[type[PassConfig]] = NhwcResizeConfig

    def edit(self, edit: GraphEdit, config: NhwcResizeConfig) -> Facts:
        replaced = sum(_replace(edit, node) for node in list(edit.graph.node) if node.op_type == "Resize")
        return {"replaced": replaced} if replaced else {}

    def refusal(self, edit: GraphEdit, config: NhwcResizeConfig) -> tuple[str, str]:
        return (
            "there is no nearest-neighbour Resize by a whole factor in front of an NhwcConv",
            "Put it after OrtTransformersOptimization with enable_nhwc_conv, or leave it out.",
        )


def _replace(edit: GraphEdit, resize: Any) -> bool:
    import numpy as np
    from onnx import helper

    back, factor = to_nhwc(edit, resize), whole_factor(edit, resize)
    if not factor or back is None:
        return False
    name = resize.name or resize.output[0]
    value, nodes = source_in_nhwc(edit, resize, name)
    axes = edit.constant("upsampled_axes", np.array([2, 4], np.int64))
    times = edit.constant(f"upsampled_times_{factor}", np.array([1, factor, factor, 1], np.int64))
    copies = edit.constant(f"upsampled_copies_{factor}", np.array([1, 1, factor, 1, factor, 1], np.int64))
    apart, copied, sizes, larger = (f"{name}/{part}" for part in ("apart", "copied", "sizes", "larger"))
    nodes += [
        helper.make_node("Unsqueeze", [value, axes], [apart], f"{name}/Unsqueeze"),
        helper.make_node("Expand", [apart, copies], [copied], f"{name}/Expand"),
        helper.make_node("Shape", [value], [sizes], f"{name}/Shape"),
        helper.make_node("Mul", [sizes, times], [larger], f"{name}/Mul"),
    ]
    back.CopyFrom(helper.make_node("Reshape", [copied, larger], list(back.output), f"{name}/Reshape"))
    edit.insert_before(back, nodes)
    return True
