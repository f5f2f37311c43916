"""Run each distinct node of a graph alone on ONNX Runtime's WebGPU provider, and compare it with the CPU's in float32.

    python benchmarks/providers/webgpu_nodes.py MODEL.onnx [NAME=SIZE ...] [--seconds N] [--json FILE]

A pipeline stops at the first operator that fails on an adapter; this lists them all. MODEL.onnx needs no weights:
structures of benchmarks/gpu/structures.py will do. NAME=SIZE sets a free dimension; default: 2 for `batch`, 64 for
others. Nodes are equal if operator, attributes, types and shapes are. The first node of each operator is tried first,
then the others until --seconds have passed. Inputs are random, and float16 ones are rounded before the CPU computes in
float32. Error: the largest difference, relative to the largest value. Status 1 if a node fails or its error is larger
than 0.01 in float16, 0.001 in float32.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from sdflow.machine.onnx_runtime import import_onnxruntime
from sdflow.machine.plugins import plugins_of
from sdflow.onnx_model.reading import load_graph
from sdflow.runtime.sessions.dimensions import folded
from sdflow.runtime.sessions.webgpu_angles import with_right_angles
from sdflow.runtime.sessions.webgpu_norms import with_centered_norms
from sdflow.targets import TARGETS, WEBGPU_PROVIDER

WIDER = {TensorProto.FLOAT16: TensorProto.FLOAT}
LIMITS = {TensorProto.FLOAT16: 1e-2, TensorProto.FLOAT: 1e-3}
DEFAULTS = {"batch": 2}
LARGEST_VALUE = 1 << 16
"""Bytes of an initializer that a node keeps: shapes, axes, scales. Larger ones are weights, which become random inputs."""


class Graph:
    """A graph for one size, as sdflow's sessions run it; types, shapes and constants of its values."""

    def __init__(self, path: Path, sizes: dict[str, int]) -> None:
        model = load_graph(path)
        free = {
            item.name: tuple(
                axis.dim_value or sizes.get(axis.dim_param) or DEFAULTS.get(axis.dim_param, 64)
                for axis in item.type.tensor_type.shape.dim
            )
            for item in model.graph.input
        }
        model = folded(model, free, str(path))
        with_right_angles(model)
        with_centered_norms(model)
        if all(entry.domain != "com.microsoft" for entry in model.opset_import):
            model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
        self.model = model = onnx.shape_inference.infer_shapes(model)  # of the values that these two add
        self.opsets = list(model.opset_import)
        self.values: dict[str, tuple[int, tuple[int, ...]]] = {}
        self.constants: dict[str, Any] = {}
        for tensor in model.graph.initializer:
            self.values[tensor.name] = tensor.data_type, tuple(tensor.dims)
            inline = tensor.data_location != TensorProto.EXTERNAL
            if inline and np.prod(tensor.dims) * 4 <= LARGEST_VALUE:
                self.constants[tensor.name] = numpy_helper.to_array(tensor)
        for item in (*model.graph.input, *model.graph.output, *model.graph.value_info):
            kind = item.type.tensor_type
            self.values[item.name] = kind.elem_type, tuple(axis.dim_value for axis in kind.shape.dim)

    def distinct(self) -> list[list[Any]]:
        """Equal nodes, in groups: the first of each operator first."""
        groups: dict[str, list[Any]] = {}
        for node in self.model.graph.node:
            key = [node.domain, node.op_type, sorted(each.SerializeToString() for each in node.attribute)]
            for name in node.input:
                constant = self.constants.get(name)
                whole = constant is not None and constant.dtype.kind in "iub"
                key.append([self.values.get(name), constant.tolist() if whole else None])
            groups.setdefault(repr(key), []).append(node)
        seen: set[str] = set()
        first, others = [], []
        for group in groups.values():
            (others if group[0].op_type in seen else first).append(group)
            seen.add(group[0].op_type)
        return first + others


def alone(graph: Graph, node: Any, given: dict[str, Any], *, wide: bool) -> onnx.ModelProto:
    """A model of one node. wide: in float32 instead of float16."""
    wider = WIDER if wide else {}
    kinds = {name: graph.values[name][0] for name in (*node.input, *node.output) if name in graph.values}
    infos = [
        helper.make_tensor_value_info(name, wider.get(kinds[name], kinds[name]), value.shape)
        for name, value in given.items()
    ]
    results = [
        helper.make_tensor_value_info(name, wider.get(kinds[name], kinds[name]), None)
        for name in node.output
        if name in kinds
    ]
    constants = []
    for name in dict.fromkeys(node.input):
        if name and name not in given:
            value = graph.constants[name]
            half = wide and value.dtype == np.float16
            constants.append(numpy_helper.from_array(value.astype(np.float32) if half else value, name))
    mine = onnx.NodeProto()
    mine.CopyFrom(node)
    for attribute in mine.attribute:
        if attribute.name == "to" and mine.op_type == "Cast":
            attribute.i = wider.get(attribute.i, attribute.i)
    made = helper.make_graph([mine], "node", infos, results, constants)
    return helper.make_model(made, opset_imports=graph.opsets, ir_version=graph.model.ir_version)


def inputs_of(graph: Graph, node: Any) -> dict[str, Any]:
    """Random values; weights are scaled so that sums stay near one."""
    random = np.random.default_rng(0)
    found = {}
    for index, name in enumerate(node.input):
        if not name or name in graph.constants:
            continue
        kind, shape = graph.values[name]
        dtype = helper.tensor_dtype_to_np_dtype(kind)
        if dtype.kind != "f":
            found[name] = random.integers(0, 2, shape).astype(dtype)
            continue
        value = random.standard_normal(shape, np.float32)
        if node.op_type in ("Conv", "MatMul", "Gemm", "Attention") and index == 1 and len(shape) > 1:
            value /= max(shape[0], float(np.prod(shape[1:]))) ** 0.5
        if node.op_type in ("Sqrt", "Log", "Pow", "Div", "Reciprocal"):
            value = np.abs(value) + 0.5
        found[name] = value.astype(dtype)
    return found


def run(ort: Any, model: onnx.ModelProto, given: dict[str, Any], devices: list[Any]) -> list[Any]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if devices:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        options.add_provider_for_devices(devices[:1], dict(TARGETS["webgpu"].session.options[WEBGPU_PROVIDER]))
        session = ort.InferenceSession(model.SerializeToString(), options, enable_fallback=0)
    else:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, given))


def error_of(ort: Any, devices: list[Any], graph: Graph, node: Any) -> float:
    given = inputs_of(graph, node)
    found = run(ort, alone(graph, node, given, wide=False), given, devices)
    wide = {name: value.astype(np.float32) if value.dtype == np.float16 else value for name, value in given.items()}
    expected = run(ort, alone(graph, node, wide, wide=True), wide, [])
    errors = []
    for ours, theirs in zip(found, expected, strict=True):
        ours, theirs = np.float64(ours), np.float64(theirs)
        error = np.abs(ours - theirs).max(initial=0) / max(np.abs(theirs).max(initial=0), 1e-9)
        errors.append(float(error) if np.isfinite(error) else float("inf"))
    return max(errors)


def tried(ort: Any, devices: list[Any], graph: Graph, end: float) -> Iterator[dict[str, Any]]:
    for group in graph.distinct():
        if time.monotonic() > end:
            return
        node = group[0]
        kinds = [graph.values[name][0] for name in (*node.input, *node.output) if name in graph.values]
        limit = LIMITS[TensorProto.FLOAT16 if TensorProto.FLOAT16 in kinds else TensorProto.FLOAT]
        shapes = [list(graph.values[name][1]) for name in node.input if name in graph.values]
        found: dict[str, Any] = {"operator": node.op_type, "node": node.name, "shapes": shapes, "count": len(group)}
        try:
            found["error"] = error_of(ort, devices, graph, node)
            found["passed"] = found["error"] <= limit
        except Exception as error:  # noqa: BLE001  the other nodes are tried all the same
            found |= {"failed": str(error)[-400:], "passed": False}
        yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("sizes", nargs="*", metavar="NAME=SIZE")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    graph = Graph(options.model, {name: int(size) for name, size in (each.split("=") for each in options.sizes)})
    target = TARGETS["webgpu"]
    ort = import_onnxruntime(target)
    devices = plugins_of(ort, target).devices[WEBGPU_PROVIDER]
    groups: dict[str, list[dict[str, Any]]] = {}
    for found in tried(ort, devices, graph, end):
        groups.setdefault(found["operator"], []).append(found)
        if not found["passed"]:
            print(f"{found['operator']} {found['shapes']}: {found.get('failed') or found['error']}", flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(groups, indent=1))
    for operator, every in groups.items():
        passed = sum(each["passed"] for each in every)
        worst = max((each["error"] for each in every if "error" in each), default=float("nan"))
        print(f"{operator}: {passed} of {len(every)} right, largest error {worst:.1e}")
    nodes = sum(each["count"] for every in groups.values() for each in every)
    print(f"{options.model}: {nodes} of {len(graph.model.graph.node)} nodes are like one that was tried")
    sys.exit(any(not each["passed"] for every in groups.values() for each in every))


if __name__ == "__main__":
    main()
