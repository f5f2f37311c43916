"""SeparateQkv: compute query, key and value of a self-attention in three matrix products where that is faster than one.

    MatMul(x, w (C, heads * 3 * size)) -> Reshape -> MultiHeadAttention(packed)
        MultiHeadAttention(MatMul(x, wq), MatMul(x, wk), MatMul(x, wv))

Before cuDNN's attention, ONNX Runtime unpacks a packed result in a separate kernel (attention_prepare_qkv.cu,
PrepareQkv_MHA_PackedQKV) that reads and writes all of it. On large feature maps, which have few channels, that costs
more than two extra products; on small ones it costs less.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field

from sdflow.artifact import Facts
from sdflow.errors import PassError
from sdflow.onnx_model.nodes import attribute
from sdflow.passes.base import PassConfig
from sdflow.passes.editing import EditingPass
from sdflow.passes.graph_edit import GraphEdit


class SeparateQkvConfig(PassConfig):
    """Which attentions are separated."""

    widest: int = Field(default=640, gt=0, description="maximum number of channels of a separated attention")


class SeparateQkv(EditingPass[SeparateQkvConfig]):
    """Three matrix products in place of a packed one on large feature maps: CUDA, after OrtTransformersOptimization.

    Facts, besides the graph's: `separated`, number of MultiHeadAttention nodes.
    """

    name: ClassVar[str] = "SeparateQkv"
    version: ClassVar[int] = 1
    moves_weights: ClassVar[bool] = True
    Config: ClassVar[type[PassConfig]] = SeparateQkvConfig

    def edit(self, edit: GraphEdit, config: SeparateQkvConfig) -> Facts:
        nodes = [node for node in edit.graph.node if node.op_type == "MultiHeadAttention"]
        separated = sum(_separate(edit, node, config.widest) for node in nodes)
        return {"separated": separated} if separated else {}

    def refusal(self, edit: GraphEdit, config: SeparateQkvConfig) -> tuple[str, str]:
        return (
            f"there is no packed self-attention of at most {config.widest} channels",
            "Put it after OrtTransformersOptimization with enable_packed_qkv, or leave it out.",
        )


def _separate(edit: GraphEdit, attention: Any, widest: int) -> bool:
    from onnx import helper

    reshape: Any = edit.producers.get(attention.input[0]) if len(attention.input) == 1 else None
    product: Any = (
        edit.producers.get(reshape.input[0]) if reshape is not None and reshape.op_type == "Reshape" else None
    )
    if product is None or product.op_type != "MatMul" or product.input[1] not in edit.weights:
        return False
    heads = attribute(attention, "num_heads", None)
    source, weight = product.input[0], edit.weights[product.input[1]]
    channels, packed = weight.dims
    if packed // 3 > widest:
        return False
    shape = (channels, heads, 3, packed // 3 // heads)
    nodes = []
    for index, which in enumerate(("query", "key", "value")):

        def part(values: Any, index: int = index) -> Any:
            return values.reshape(shape)[:, :, index].reshape(channels, packed // 3)

        def part_of_recipe(recipe: Any, index: int = index) -> Any:
            return _part(recipe, index, (channels, heads, packed // 3 // heads))

        own = edit.moved(weight.name, f"{weight.name}/{which}", part, part_of_recipe)
        name = f"{attention.name}/{which}"
        nodes.append(helper.make_node("MatMul", [source, own], [name], f"{name}/MatMul"))
    attention.input[:] = [node.output[0] for node in nodes]
    edit.insert_before(attention, nodes)
    return True


def _part(recipe: Any, index: int, by_heads: tuple[int, int, int]) -> Any:
    """Return one part of a packed weight's recipe, which must join the parts along the axis inside the heads."""
    from sdflow.weights.recipe import Join, Reshape, Rounded

    if isinstance(recipe, Rounded):
        return replace(recipe, of=_part(recipe.of, index, by_heads))
    join = recipe.of if isinstance(recipe, Reshape) else None
    if not isinstance(join, Join) or join.axis != 2 or [part.shape for part in join.parts] != [by_heads] * 3:
        raise PassError(
            "a packed weight's recipe is not a join of query, key and value",
            where="SeparateQkv",
            remedy="Set carry_weights: true.",
        )
    return Reshape((by_heads[0], by_heads[1] * by_heads[2]), join.parts[index])
