"""Query which operators, versions and types a plugin provider takes, from the provider itself.

A plugin's kernels are not in `get_all_opkernel_def()`. ONNX Runtime therefore gets graphs of one node, and
`get_provider_graph_assignment_info` of the session tells where the node goes. Nothing is run. WebGPU creates a session
only with an adapter; SwiftShader suffices (docs/targets.md says how to get it), because the kernels do not depend on
it.

The source of ASK runs with the names of the provider and of the plugin's module, and the provider's options. It prints
the input of `placed_rows`.
"""

from __future__ import annotations

from typing import Any

from benchmarks.providers.kernels_asked import APART

ASK = (
    APART
    + """
import sys
from importlib import import_module
import onnxruntime
from onnx import helper
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

PROVIDER, MODULE, OPTIONS = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
TYPES = dict(float=1, float16=10, int32=6, int64=7, bool=9, uint32=12, uint8=2, int8=3, double=11, bfloat16=16)
DEFAULTS = {"INT": 1, "FLOAT": 1.0, "STRING": "x", "INTS": [1, 1], "FLOATS": [1.0], "STRINGS": ["x"]}
WORDS = {
    "Cast": {"to": 1}, "EyeLike": {"dtype": 1}, "BitShift": {"direction": "LEFT"}, "Einsum": {"equation": "ab->ba"},
    "Attention": {"num_heads": 2, "q_num_heads": 2, "kv_num_heads": 2}, "Resize": {"mode": "nearest"},
    "DepthToSpace": {"blocksize": 1}, "SpaceToDepth": {"blocksize": 1},
}
SHAPES = {"BiasSplitGelu": [[2, 4, 16], [16]]}  # of inputs that its shape inference looks at
RANKS = (3, 4, 2, 1)
onnxruntime.set_default_logger_severity(4)
onnxruntime.register_execution_provider_library(MODULE, import_module(MODULE).get_library_path())
DEVICES = [device for device in onnxruntime.get_ep_devices() if device.ep_name == PROVIDER][:1]

def placed(schema, opset, types, rank, inputs):
    infos = []
    for index in range(inputs):
        formal = schema.inputs[min(index, len(schema.inputs) - 1)]
        kind = types.get(formal.typeStr) or next((t[7:-1] for t in sorted(formal.types) if t[7:-1] in TYPES), None)
        if kind is None:
            return None
        shape = SHAPES[schema.name][index] if schema.name in SHAPES else [f"d{axis}" for axis in range(rank)]
        infos.append(helper.make_tensor_value_info(f"x{index}", TYPES[kind], shape))
    given = {n: DEFAULTS.get(str(a.type).split(".")[-1]) for n, a in schema.attributes.items() if a.required}
    given.update({name: value for name, value in WORDS.get(schema.name, {}).items() if name in schema.attributes})
    outputs = ["y"] + [f"y{i}" for i in range(1, schema.min_output)]
    names = [info.name for info in infos]
    node = helper.make_node(schema.name, names, outputs, name="asked", domain=schema.domain, **given)
    graph = helper.make_graph([node], "g", infos, [helper.make_empty_tensor_value_info(name) for name in outputs])
    imports = [helper.make_opsetid("", opset)] + ([helper.make_opsetid(schema.domain, 1)] if schema.domain else [])
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    options.add_provider_for_devices(DEVICES, OPTIONS)
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, enable_fallback=0)
    except Exception as error:
        return "nobody" if "NOT_IMPLEMENTED" in str(error) else None
    # A function that ONNX Runtime has put other operators in the place of has no kernel, whoever takes those.
    owners = {n.op_type: p.ep_name for p in session.get_provider_graph_assignment_info() for n in p.get_nodes()}
    return owners.get(schema.name, "nobody")

def taken(schema, opset):
    # Constraint -> the types that the provider takes; False where it has no kernel, None where no session could be made.
    allowed, refused = {}, False
    for formal in (*schema.inputs, *schema.outputs):
        if not formal.typeStr.startswith("tensor("):
            kinds = [t[7:-1] for t in formal.types if t.startswith("tensor(") and t[7:-1] in TYPES]
            allowed.setdefault(formal.typeStr, [kind for kind in TYPES if kind in kinds])
    counts = range(max(schema.min_input, 1), min(schema.max_input, len(schema.inputs)) + 1)
    for first in ("float", "int32", "bool", "int64", "uint32", "uint8", "float16"):
        chosen = {key: first if first in kinds else kinds[0] for key, kinds in allowed.items() if kinds}
        if chosen and first not in chosen.values():
            continue
        for count in counts:
            for rank in RANKS:
                said = placed(schema, opset, chosen, rank, count)
                refused = refused or said is not None
                if said not in (None, PROVIDER):
                    break
                if said == PROVIDER:
                    read = {formal.typeStr for formal in schema.inputs[:count]}
                    return {
                        key: [k for k in kinds if placed(schema, opset, {**chosen, key: k}, rank, count) == PROVIDER]
                        for key, kinds in allowed.items()
                        if key in read and kinds
                    }
    return False if refused else None

schemas = {}
for schema in get_all_operator_schema():
    if schema.domain in ("", "com.microsoft") and not schema.deprecated:
        schemas.setdefault((schema.domain, schema.name), {})[schema.since_version] = schema
answers = []
for (domain, name), versions in sorted(schemas.items()):
    for version, schema in sorted(versions.items()):
        later = [other for other in versions if other > version]
        opset = 21 if domain else max(version, 7)
        if later and min(later) <= opset and not domain:
            continue  # of an opset that ONNX Runtime does not load
        answers.append([domain, name, version, apart(lambda: taken(schema, opset))])
json.dump(answers, sys.stdout)
"""
)


def placed_rows(answers: list[Any]) -> tuple[dict[str, Any], str]:
    """The rows of the table, and the operators of which no session could be made. answers: [domain, name, version, {constraint:
    types}, or False or None], versions in order; those of an operator with equal types make one row."""
    rows: dict[str, list[list[Any]]] = {}
    unknown: set[str] = set()
    for domain, name, version, taken in answers:
        operator = f"{domain}.{name}".lstrip(".")
        if taken is None:
            unknown.add(operator)
        if not taken:
            continue
        types = {key: " ".join(sorted(kinds)) for key, kinds in taken.items() if kinds}
        known = rows.setdefault(operator, [])
        for row in known:
            if row[2] == types:
                row[0].append(version)
                break
        else:
            known.append([[version], None, types])
    rows["Constant"] = [[[1], "any", {}]]  # ONNX Runtime makes an initializer of each
    found = {
        name: [[v[0] if len(v) == 1 else v, last, types] for v, last, types in known] for name, known in rows.items()
    }
    return found, " ".join(sorted(unknown - rows.keys()))
