"""Time and peak memory of Olive's own passes on an ONNX model, for comparison with sdflow's.

    python bench/olive_chain.py MODEL_DIR --model-type unet [--float16 one-pass|two-passes|no] [--options JSON] [--json]

MODEL_DIR holds model.onnx. Each pass runs in a process of its own, as Olive's classes have it: no engine, no cache,
none of sdflow's mends. Peak memory is the process's maximum resident set, the imports included.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

# Olive's OnnxFloatToFloat16 keeps nothing in float32 by default; diffusers feeds the timestep as float32.
FLOAT16 = {"keep_io_types": ["timestep"]}


def run_pass(name: str, options: dict[str, Any], model: str, out: str, results: Any) -> None:
    """Run one pass in this process and put its figures into the queue `results`."""
    import onnx
    from olive.hardware import AcceleratorSpec, Device
    from olive.hardware.constants import ExecutionProvider
    from olive.model import ONNXModelHandler
    from olive.package_config import OlivePackageConfig

    imported = time.perf_counter()
    pass_class = OlivePackageConfig.load_default_config().import_pass_module(name)
    accelerator = AcceleratorSpec(Device.GPU, ExecutionProvider.CUDAExecutionProvider)
    config = pass_class.generate_config(accelerator, {**options, "save_as_external_data": True}, disable_search=True)
    result = pass_class(accelerator, config).run(ONNXModelHandler(model, onnx_file_name="model.onnx"), out)
    seconds = time.perf_counter() - imported
    graph = onnx.load(result.model_path, load_external_data=False).graph
    fused = Counter(node.op_type for node in graph.node if node.domain == "com.microsoft")
    results.put(
        {
            "pass": name,
            "seconds": round(seconds, 1),
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            "nodes": len(graph.node),
            "fused": dict(sorted(fused.items())),
        }
    )


def chain(model_type: str, float16: str, options: dict[str, bool]) -> list[tuple[str, dict[str, Any]]]:
    """The passes to run, with their options."""
    fuse: dict[str, Any] = {"model_type": model_type, "opt_level": 0}
    if options:  # Olive hands an empty dict on as it is, and fails on it.
        fuse["optimization_options"] = options
    if float16 == "one-pass":
        return [("OrtTransformersOptimization", {**fuse, "float16": True, "keep_io_types": False})]
    steps: list[tuple[str, dict[str, Any]]] = [("OrtTransformersOptimization", fuse)]
    return steps + ([("OnnxFloatToFloat16", FLOAT16)] if float16 == "two-passes" else [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder with model.onnx and its external data")
    parser.add_argument("--model-type", required=True, choices=("unet", "vae", "clip"))
    parser.add_argument("--float16", default="two-passes", choices=("one-pass", "two-passes", "no"))
    parser.add_argument("--options", type=json.loads, default={}, help="optimization_options as JSON")
    parser.add_argument("--json", action="store_true", help="one JSON object per pass")
    arguments = parser.parse_args()
    os.environ.update(OLIVE_DISABLE_TELEMETRY="1", CI="1", ORT_DISABLE_TELEMETRY="1", TQDM_DISABLE="1")
    spawn = multiprocessing.get_context("spawn")
    scratch = Path(tempfile.mkdtemp(prefix="olive-chain-"))
    try:
        model = arguments.model.resolve()
        for index, (name, options) in enumerate(chain(arguments.model_type, arguments.float16, arguments.options)):
            out, results = scratch / str(index), spawn.SimpleQueue()
            process = spawn.Process(target=run_pass, args=(name, options, str(model), str(out), results))
            process.start()
            process.join()
            if process.exitcode != 0:
                raise SystemExit(f"{name} ended with exit status {process.exitcode}")
            figures = results.get()
            model = out
            if arguments.json:
                print(json.dumps(figures), flush=True)
            else:
                print(
                    "{pass:30} {seconds:8.1f} s {peak_mb:7} MB {nodes:6} nodes  {fused}".format(**figures), flush=True
                )
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
