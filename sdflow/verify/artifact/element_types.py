"""Element types of every value of a graph, from the schemas of its operators, contrib operators included.

onnx's own inference stops at the first contrib operator; ONNX Runtime's symbolic one computes shapes, too, and takes a
minute for a UNet. Types alone follow from the schemas in one walk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

STANDARD = ("", "ai.onnx")
_FROM_ATTRIBUTE = {"Cast": "to", "EyeLike": "dtype", "RandomNormal": "dtype", "RandomNormalLike": "dtype"}


@cache
def schemas() -> Mapping[tuple[str, str], tuple[Any, ...]]:
    """(domain, operator) -> its schemas, the newest first, as the installed ONNX Runtime knows them."""
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

    found: dict[tuple[str, str], list[Any]] = {}
    for schema in get_all_operator_schema():
        found.setdefault((schema.domain, schema.name), []).append(schema)
    return {key: tuple(sorted(every, key=lambda one: -one.since_version)) for key, every in found.items()}


def schema_of(node: Any, opsets: Mapping[str, int]) -> Any | None:
    """The schema of a node in a model with these opsets; None for an unknown operator."""
    domain = "" if node.domain in STANDARD else node.domain
    version = opsets.get(domain, 1)
    return next((one for one in schemas().get((domain, node.op_type), ()) if one.since_version <= version), None)


def formals(parameters: Any, names: Any) -> Iterator[tuple[Any, str]]:
    """The formal parameter of each input or output name of a node; the last one may be variadic."""
    for index, name in enumerate(names):
        if name and parameters:
            yield parameters[min(index, len(parameters) - 1)], name


def element_types(graph: Any, opsets: Mapping[str, int], outer: Mapping[str, str] | None = None) -> dict[str, str]:
    """Value -> element type ("float16"), for every value whose type the graph determines."""
    from onnx import TensorProto

    def named(number: int) -> str:
        return str(TensorProto.DataType.Name(number)).lower()

    types = dict(outer or {})
    types.update((tensor.name, named(tensor.data_type)) for tensor in graph.initializer)
    for info in (*graph.input, *graph.output, *graph.value_info):
        if info.type.HasField("tensor_type") and info.type.tensor_type.elem_type:
            types[info.name] = named(info.type.tensor_type.elem_type)
    for node in graph.node:
        attributes = {attribute.name: attribute for attribute in node.attribute}
        if node.op_type == "Constant" and node.domain in STANDARD:
            types[node.output[0]] = _constant(attributes, named)
            continue
        schema = schema_of(node, opsets)
        if schema is None:
            continue
        bound = {formal.typeStr: types[name] for formal, name in formals(schema.inputs, node.input) if name in types}
        only = {one.type_param_str: one.allowed_type_strs for one in schema.type_constraints}
        for formal, name in formals(schema.outputs, node.output):
            attribute = attributes.get(_FROM_ATTRIBUTE.get(node.op_type, ""))
            if attribute is not None:
                types[name] = named(attribute.i)
            elif node.op_type == "ConstantOfShape":
                types[name] = named(attributes["value"].t.data_type) if "value" in attributes else "float"
            elif formal.typeStr in bound:
                types.setdefault(name, bound[formal.typeStr])
            else:
                allowed = only.get(formal.typeStr, [formal.typeStr])
                if len(allowed) == 1 and allowed[0].startswith("tensor("):
                    types.setdefault(name, allowed[0].removeprefix("tensor(").removesuffix(")"))
    return types


def _constant(attributes: Mapping[str, Any], named: Any) -> str:
    if "value" in attributes:
        return str(named(attributes["value"].t.data_type))
    return "int64" if {"value_int", "value_ints"} & attributes.keys() else "float"
