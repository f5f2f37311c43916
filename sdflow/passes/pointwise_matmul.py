"""PointwiseMatMul: a convolution of size 1 x 1 in NHWC is a matrix product, and runs as one.

    NhwcConv(x, w (M, 1, 1, C)), without a bias        MatMul(x (N, H, W, C), w' (C, M))

cuBLAS has the faster kernels for these shapes, and ONNX Runtime gives it all leading axes of x as rows of one product
(matmul_helper.h). A convolution that has a bias keeps its operator: put this behind ConvBiasFusion.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from sdflow.artifact import MODEL_FILE, Facts
from sdflow.errors import PassError
from sdflow.passes.base import Pass, PassConfig, PassInputs
from sdflow.passes.graph_edit import GraphEdit
from sdflow.passes.graph_facts import graph_facts
from sdflow.passes.olive import copy_companions
from sdflow.passes.onnx_files import store_proto

_PLAIN = {"strides": 1, "dilations": 1, "kernel_shape": 1, "pads": 0, "group": 1}


class PointwiseMatMulConfig(PassConfig):
    """No options."""


class PointwiseMatMul(Pass[PointwiseMatMulConfig]):
    """Convolutions of size 1 x 1 become matrix products: CUDA, after ConvBiasFusion.

    Facts, besides those of the graph: `replaced`, how many NhwcConv.
    """

    name: ClassVar[str] = "PointwiseMatMul"
    version: ClassVar[int] = 1
    uses: ClassVar[tuple[str, ...]] = ("onnx", "numpy")
    Config: ClassVar[type[PassConfig]] = PointwiseMatMulConfig

    def run(self, inputs: PassInputs, out: Path, config: PointwiseMatMulConfig) -> Facts:
        """Raises PassError when there is no such convolution."""
        import onnx

        if inputs.model is None:
            raise PassError("needs an ONNX model", where=self.name, remedy="Put OnnxConversion before it.")
        model = onnx.load(str(inputs.model / MODEL_FILE), load_external_data=False)
        replaced = replace_pointwise(model, inputs.model)
        if not replaced:
            raise PassError(
                "there is no NhwcConv of size 1 x 1 without a bias",
                where=self.name,
                remedy="Put it behind ConvBiasFusion, or leave it out.",
            )
        store_proto(model, inputs.model, out)
        copy_companions(inputs.model, out)
        return {**graph_facts(out / MODEL_FILE), "replaced": replaced}


def replace_pointwise(model: Any, base: Path) -> int:
    """Rewrite a ModelProto whose external data lies in `base`. Returns how many NhwcConv were replaced."""
    edit = GraphEdit(model.graph, base)
    replaced = sum(_replace(edit, node) for node in list(model.graph.node) if node.op_type == "NhwcConv")
    edit.clean()
    return replaced


def _replace(edit: GraphEdit, conv: Any) -> bool:
    from onnx import helper

    weight = edit.weights.get(conv.input[1])
    if weight is None or len(conv.input) > 2 or list(weight.dims[1:3]) != [1, 1]:
        return False
    for item in conv.attribute:
        given = helper.get_attribute_value(item)
        expected = _PLAIN.get(item.name)
        if any(value != expected for value in (given if isinstance(given, list) else [given])):
            return False
    width, _, _, channels = weight.dims
    product = edit.moved(
        weight.name,
        f"{weight.name}/matrix",
        lambda values: values.transpose(3, 0, 1, 2).reshape(channels, width),
    )
    conv.CopyFrom(helper.make_node("MatMul", [conv.input[0], product], list(conv.output), conv.name))
    return True
