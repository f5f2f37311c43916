"""Files of graphs hold what is computed and nothing else, so that equal graphs are equal files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from sdflow.onnx_model.files import write_graph


def graph(constant: str, document: str) -> onnx.ModelProto:
    """y = x + 1, with a name for the tensor of its Constant and a doc string."""
    value = numpy_helper.from_array(np.ones(3, np.float32), constant)
    nodes = [
        helper.make_node("Constant", [], ["one"], value=value, doc_string=document),
        helper.make_node("Add", ["x", "one"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in ("x", "y")]
    return helper.make_model(
        helper.make_graph(nodes, "g", ends[:1], ends[1:], doc_string=document), producer_name=document
    )


def test_names_that_mean_nothing_make_no_difference(tmp_path: Path) -> None:
    written = []
    for constant, document in (("", ""), ("onnx::Add_12", "somebody's words")):
        out = tmp_path / f"{len(written)}"
        out.mkdir()
        write_graph(graph(constant, document), out)
        written.append((out / "model.onnx").read_bytes())
    assert written[0] == written[1]
    (made,) = helper.make_model(onnx.load_from_string(written[0]).graph).graph.node[:1]
    assert numpy_helper.to_array(made.attribute[0].t).tolist() == [1, 1, 1]


def test_text_that_is_none_is_told_where_protobuf_is_the_one_in_python(tmp_path: Path) -> None:
    """Some packages choose that one for their process and those that it starts. It decodes text as it reads."""
    path = tmp_path / "model.onnx"
    path.write_bytes(graph("a", "b").SerializeToString().replace(b"one", b"\xb2ne"))
    read = (
        "import pathlib, sys\n"
        "from sdflow.errors import VerificationError\n"
        "from sdflow.runtime.sessions.session import read_graph\n"
        "try: read_graph(pathlib.Path(sys.argv[1]))\n"
        "except VerificationError as error: print(error.what)\n"
    )
    environment = {**os.environ, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}
    done = subprocess.run(
        [sys.executable, "-c", read, path], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "is not an ONNX model", done.stderr
