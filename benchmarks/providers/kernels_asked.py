"""Query which operators MIGraphX's provider takes, on a machine without a GPU.

The provider has no kernel list: it decides by each node's operator and types, and takes whole graphs. It therefore gets
graphs of one node, and `get_provider_graph_assignment_info` of the session tells where the node goes. Dimensions stay
open, so that nothing is compiled before a first run, which never happens; the empty libraries of `kernel_tables.py`
suffice.

The source of ASK runs in a Python that fits the wheel and prints the input of `migraphx_kernels`. A provider that
creates no session without its device shows which nodes it takes by what it compiles: `rtx_without_gpu.py` replaces
`placed`.
"""

from __future__ import annotations

IN_A_SESSION = """
import onnxruntime

def placed(model):
    # whose the node of a graph is; None where no session can be made of it
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    try:
        session = onnxruntime.InferenceSession(model, options, providers=[PROVIDER])
    except Exception as error:
        return "nobody" if "NOT_IMPLEMENTED" in str(error) else None
    owners = [part.ep_name for part in session.get_provider_graph_assignment_info() for _ in part.get_nodes()]
    return owners[0] if owners else None
"""

APART = """
import json, os

def apart(question):
    # A question that ends the process costs a child and not the others: empty libraries do not survive what compiles at once.
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, json.dumps(question()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return json.loads(said) if said else None
"""

QUESTIONS = (
    APART
    + """
import sys
import onnxruntime
from onnx import TensorProto, helper
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

PROVIDER = sys.argv[1]
TYPES = dict(float16=10, float=1, int64=7, int32=6, bool=9, double=11, uint8=2, int8=3, uint16=4, int16=5, uint32=12, uint64=13)
DEFAULTS = {"INT": 1, "FLOAT": 1.0, "STRING": "x", "INTS": [1, 1], "FLOATS": [1.0], "STRINGS": ["x"]}
WORDS = {"Cast": {"to": 1}, "EyeLike": {"dtype": 1}, "BitShift": {"direction": "LEFT"}, "Einsum": {"equation": "a,b->ab"}}
RANKS = (3, 4, 2, 1)
onnxruntime.set_default_logger_severity(4)

def dimensions(rank):
    return [f"d{axis}" for axis in range(rank)]

def owner(schema, opset, elements, rank, inputs, constants=None):
    # constants: sizes of what stands for the inputs of int64, which MIGraphX wants to know; None: they are inputs
    names = {}
    for index in range(inputs):
        names[f"x{index}"] = elements[min(index, len(elements) - 1)]
    shape = dimensions(rank)
    fixed = [name for name, kind in names.items() if constants is not None and kind == "int64"]
    values = [helper.make_tensor(name, 7, constants, [1] * (constants[0] if constants else 1)) for name in fixed]
    infos = [helper.make_tensor_value_info(name, TYPES[kind], shape) for name, kind in names.items() if name not in fixed]
    outputs = ["y"] + [f"y{i}" for i in range(1, schema.min_output)]
    given = {n: DEFAULTS.get(str(a.type).split(".")[-1]) for n, a in schema.attributes.items() if a.required}
    given.update(WORDS.get(schema.name, {}))
    node = helper.make_node(schema.name, list(names), outputs, name="asked", domain=schema.domain, **given)
    graph = helper.make_graph([node], "g", infos, [helper.make_empty_tensor_value_info(name) for name in outputs], values)
    imports = [helper.make_opsetid("", opset)] + ([helper.make_opsetid(schema.domain, 1)] if schema.domain else [])
    return placed(helper.make_model(graph, opset_imports=imports, ir_version=8).SerializeToString())

FIRST = ("float16", "float", "int64", "bool", "int32", "uint8", "int8")

def asked(schema, opset, sizes, firsts=FIRST):
    refused = False
    allowed = [[t[7:-1] for t in i.types if t.startswith("tensor(")] for i in schema.inputs]
    for count in range(schema.min_input, min(schema.max_input, len(schema.inputs)) + 1):
        for first in firsts:
            if allowed and first not in allowed[0]:
                continue
            chosen = [first if first in a else next((t for t in TYPES if t in a), "float") for a in allowed] or ["float"]
            for rank in RANKS:
                for constants in (None, *sizes):
                    said = owner(schema, opset, chosen, rank, count, constants)
                    if said == PROVIDER:
                        return True
                    refused = refused or said is not None
    return False if refused else None

newest = {}
for schema in get_all_operator_schema():
    if schema.domain in ("", "com.microsoft") and not schema.deprecated and schema.since_version <= 17:
        key = f"{schema.domain}.{schema.name}".lstrip(".")
        if key not in newest or newest[key].since_version < schema.since_version:
            newest[key] = schema

def answer(schema):
    # First with constants, which some operators want; where those do not survive it, without.
    said = apart(lambda: asked(schema, 17, ([], [1], [2], [3], [4])))
    return said if said is not None else apart(lambda: asked(schema, 17, ()))

identity = newest["Identity"]
"""
)

ANSWERS = """
answers = {key: answer(schema) for key, schema in sorted(newest.items())}
types = [t for t in TYPES if apart(lambda: owner(identity, 17, [t], 2, 1)) == PROVIDER]
json.dump({"runtime": onnxruntime.__version__, "answers": answers, "types": types}, sys.stdout)
"""

ASK = IN_A_SESSION + QUESTIONS + ANSWERS

WORDS = (
    "Constant ConstantOfShape Einsum GroupNormalization If ImageScaler Loop NegativeLogLikelihoodLoss NonZero OneHot Pad "
    "RandomNormal RandomUniform Range Resize ReverseSequence Scatter Size Upsample com.microsoft.QLinearAdd"
)
READ = frozenset(WORDS.split())
"""What no graph of one node asks, or only in a later opset: read in `mgx_supported_ops` of migraphx_execution_provider.cc."""


def migraphx_kernels(answers: dict[str, bool | None], standard: set[str]) -> set[str]:
    """The operators that the provider takes. standard: every operator of ONNX, of any opset.

    answers: by operator; None where no session could be made. The provider looks at names, not at domains: an operator
    that it takes in one it takes in the other.
    """
    taken = {operator for operator, answer in answers.items() if answer} | READ
    names = {operator.rpartition(".")[2] for operator in taken}
    return taken | (names & standard) | {operator for operator in answers if operator.rpartition(".")[2] in names}
