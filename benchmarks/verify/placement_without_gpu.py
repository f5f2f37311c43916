"""Check the kernel table of CUDA against ONNX Runtime itself, on a machine without a GPU.

    python benchmarks/verify/placement_without_gpu.py onnxruntime_gpu-1.31.1-*.whl PIPELINE ... [--python PYTHON]

Every graph of the pipelines, whatever their target, is loaded in a CUDA session in a process with empty CUDA libraries
(`benchmarks/providers/kernel_tables.py`). ONNX Runtime assigns nodes to providers as usual and reports it; nothing is
run. The nodes left to the CPU, except those that only compute shapes, must be those for which
`sdflow.verify.artifact.unsupported_nodes` finds no kernel. Nodes created by ONNX Runtime's own optimizations are
counted separately. Needs gcc and readelf; the Python must fit the wheel and have sdflow's dependencies.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.providers.kernel_tables import unpacked

ROOT = Path(__file__).parents[2]
COMPARE = """
import json, sys
from pathlib import Path
import onnx, onnxruntime as ort
from sdflow.runtime.sessions.placement import shape_computation
from sdflow.targets import TARGETS
from sdflow.verify.artifact.unsupported_nodes import _graph, _opsets, kernel_table

ort.set_default_logger_severity(4)
path = Path(sys.argv[1])
model = onnx.load(path, load_external_data=False)
options = ort.SessionOptions()
options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
table = kernel_table(TARGETS["cuda"].providers[0][0])
session = ort.InferenceSession(str(path), options, providers=["CUDAExecutionProvider"])
placed = [(node.name, part.ep_name) for part in session.get_provider_graph_assignment_info() for node in part.get_nodes()]
own = {node.name for node in model.graph.node}
left = {name for name, provider in placed if provider != "CUDAExecutionProvider"} - shape_computation(path)
print(json.dumps({
    "nodes": len(placed),
    "left": sorted(left & own),
    "made": len(left - own),
    "table": sorted({each.node for each in _graph(model.graph, _opsets(model), table, {}) if each.check == "kernel"}),
}))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("pipelines", type=Path, nargs="+")
    parser.add_argument("--python", default=sys.executable, help="an interpreter that fits the wheel")
    given = parser.parse_args()
    differ = 0
    with tempfile.TemporaryDirectory() as folder:
        environment = unpacked(given.wheel, Path(folder))
        environment["PYTHONPATH"] += os.pathsep + str(ROOT)
        environment |= {"ORT_DISABLE_TELEMETRY": "1", "CI": "1"}
        for path in [path for pipeline in given.pipelines for path in sorted(pipeline.glob("*/model.onnx"))]:
            command = [given.python, "-c", COMPARE, str(path)]
            done = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, check=False)
            where = "/".join(path.parts[-3:-1])
            if done.returncode:
                print(f"{where}: no session could be made", flush=True)
                differ += 1
                continue
            said = json.loads(done.stdout)
            agree = said["left"] == said["table"]
            differ += not agree
            print(
                f"{where}: {said['nodes']} nodes; left to the CPU {said['left']}, without a kernel {said['table']}: "
                f"{'agree' if agree else 'DIFFER'}; {said['made']} nodes of ONNX Runtime's own on the CPU",
                flush=True,
            )
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
