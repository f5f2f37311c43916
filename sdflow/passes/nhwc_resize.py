"""NhwcResize: nearest-neighbour upsampling in the layout of the convolutions around it.

ONNX Runtime's CUDA provider has Resize for NCHW only, and so leaves a Transpose before and behind each Resize between
NhwcConvs; it moves others away, but not through a Resize (transpose_optimizer.cc, handler_map). In a VAE decoder those
are the largest feature maps of all. Upsampling by a whole factor k is a copy in any layout:

    Resize(x, [1, 1, k, k]) -> Transpose to NHWC        Transpose(x) -> (N, H, 1, W, 1, C) -> Expand to (N, H, k, W, k, C)
                                                        -> (N, k H, k W, C)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from sdflow.artifact import MODEL_FILE, Facts
from sdflow.errors import PassError
from sdflow.onnx_model.facts import graph_facts
from sdflow.onnx_model.files import store_proto
from sdflow.passes.base import EDITS_GRAPH, Pass, PassConfig, PassInputs
from sdflow.passes.graph_edit import GraphEdit
from sdflow.passes.nearest import whole_factor
from sdflow.passes.olive import copy_companions

TO_NCHW = [0, 3, 1, 2]
TO_NHWC = [0, 2, 3, 1]


class NhwcResizeConfig(PassConfig):
    """No options."""


class NhwcResize(Pass[NhwcResizeConfig]):
    """Upsamples in NHWC, without a Transpose on either side: CUDA, after OrtTransformersOptimization.

    Facts, besides those of the graph: `replaced`, how many Resize.
    """

    name: ClassVar[str] = "NhwcResize"
    version: ClassVar[int] = 1
    uses: ClassVar[tuple[str, ...]] = ("onnx", "numpy")
    imports = EDITS_GRAPH
    moves_weights: ClassVar[bool] = True
    Config: ClassVar[type[PassConfig]] = NhwcResizeConfig

    def run(self, inputs: PassInputs, out: Path, config: NhwcResizeConfig) -> Facts:
        """Raises PassError when no Resize could be replaced."""
        import onnx

        if inputs.model is None:
            raise PassError("needs an ONNX model", where=self.name, remedy="Put OnnxConversion before it.")
        model = onnx.load(str(inputs.model / MODEL_FILE), load_external_data=False)
        replaced = replace_resizes(model, inputs.model)
        if not replaced:
            raise PassError(
                "there is no Resize to the nearest neighbour, by a whole factor, in front of an NhwcConv",
                where=self.name,
                remedy="Put it behind OrtTransformersOptimization with enable_nhwc_conv, or leave it out.",
            )
        store_proto(model, inputs.model, out)
        copy_companions(inputs.model, out)
        return {**graph_facts(out / MODEL_FILE), "replaced": replaced}


def replace_resizes(model: Any, folder: Path) -> int:
    """Rewrite a ModelProto whose external data lies in `folder`. Returns how many Resize were replaced."""
    edit = GraphEdit(model.graph, folder)
    replaced = sum(_replace(edit, node) for node in list(model.graph.node) if node.op_type == "Resize")
    edit.clean()
    return replaced


def _replace(edit: GraphEdit, resize: Any) -> bool:
    import numpy as np
    from onnx import helper

    back = edit.only_reader(resize.output[0])
    factor = whole_factor(edit, resize)
    if not factor or back is None or not _permutes(back, TO_NHWC):
        return False
    name, source = resize.name or resize.output[0], resize.input[0]
    before, nodes = edit.producers.get(source), []
    if before is not None and _permutes(before, TO_NCHW):
        value = before.input[0]
    else:
        value = f"{name}/nhwc"
        nodes.append(helper.make_node("Transpose", [source], [value], f"{name}/Transpose", perm=TO_NHWC))
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


def _permutes(node: Any, axes: list[int]) -> bool:
    return bool(node.op_type == "Transpose" and list(node.attribute[0].ints) == axes)
