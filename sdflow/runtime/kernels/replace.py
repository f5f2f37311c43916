"""GroupNorm and SkipGroupNorm of a graph for fixed sizes as operators of our own."""

from __future__ import annotations

from typing import Any

DOMAIN, VERSION = "sdflow", 1
REPLACED = ("GroupNorm", "SkipGroupNorm")
VECTOR, MAX_GROUPS, MAX_CHANNELS = 8, 32, 4096
"""As in group_norm.cu: a thread's channels; the groups that a block can hold; a thread for each eight channels."""


def with_own_kernels(model: Any) -> Any | None:
    """A copy of a ModelProto in which our kernels compute the group normalizations that they can; None without any.

    model: with all shapes known, as `specialize` leaves it. Statistics of a group are taken over channels that lie side
    by side, eight to a thread: a number of channels that is no multiple of eight, or has groups of 5 to 7 or below 4
    channels, stays with ONNX Runtime, and so does what is not float16.
    """
    import onnx

    types = {item.name: item.type.tensor_type for item in (*model.graph.input, *model.graph.value_info)}
    wanted = [node.op_type in REPLACED and _is_supported(node, types) for node in model.graph.node]
    if not any(wanted):
        return None
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for node, ours in zip(result.graph.node, wanted, strict=True):
        if ours:
            _replace(node)
    result.opset_import.append(onnx.helper.make_opsetid(DOMAIN, VERSION))
    return result


def _is_supported(node: Any, types: dict[str, Any]) -> bool:
    import onnx

    image = types.get(node.input[0])
    if node.domain != "com.microsoft" or image is None or image.elem_type != onnx.TensorProto.FLOAT16:
        return False
    attributes = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
    axes = [axis.dim_value for axis in image.shape.dim]
    if len(axes) != 4 or not axes[3] or not attributes.get("channels_last", 1):
        return False
    channels, groups = axes[3], int(attributes["groups"])
    if channels % groups or channels % VECTOR or groups > MAX_GROUPS or channels > MAX_CHANNELS:
        return False
    return channels // groups == 4 or channels // groups >= VECTOR


def _replace(node: Any) -> None:
    """The outputs are y, the kernel's scratch and, where it is wanted, the sum."""
    kept = [name for name in node.output[1:] if name]
    scratch = f"{node.output[0]}_sums"
    node.op_type, node.domain = "GroupNorm", DOMAIN
    outputs = [node.output[0], scratch, *kept]
    del node.output[:]
    node.output.extend(outputs)
    epsilon = [item for item in node.attribute if item.name == "epsilon"]
    if not epsilon:
        node.attribute.add(name="epsilon", type=1, f=1e-5)
    for item in [item for item in node.attribute if item.name == "channels_last"]:
        node.attribute.remove(item)
