"""Measure time and peak memory of Olive's own passes on a checkpoint or an ONNX model, for comparison with sdflow's.

    python benchmarks/build/olive_chain.py MODEL --submodel unet [--float16 one-pass|two-passes|no] [--options JSON] [--json]

MODEL: a folder with model.onnx, or a checkpoint as in workflows, which is converted first. Each pass runs in a separate
process with Olive's unmodified classes, without engine or cache. Peak memory is the process's maximum resident set,
including imports.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

# Olive's OnnxFloatToFloat16 keeps nothing in float32 by default; diffusers feeds the timestep as float32.
FLOAT16 = {"keep_io_types": ["timestep"]}


MODEL_TYPE = {
    "text_encoder": "clip", "safety_checker": "clip", "unet": "unet", "vae_encoder": "vae", "vae_decoder": "vae",
}  # fmt: skip


def torch_model(reference: str, submodel: str) -> Any:
    """Olive's handler of a checkpoint's submodel, with the inputs that sdflow gives it too."""
    import torch
    from olive.model import PyTorchModelHandler

    from sdflow.families import part_of
    from sdflow.passes.tracing import traced_module
    from sdflow.sources import PlainDigests, load_module, open_checkpoint, submodel_config

    load = open_checkpoint(reference, digests=PlainDigests(), download=False).submodels[submodel].load
    config, network = submodel_config(load), part_of(load, submodel).model
    io = network.ports(config)
    inputs = network.dummy(config, network.smallest(config))
    return PyTorchModelHandler(
        model_loader=lambda _path: traced_module(network, load_module(submodel, load)),
        io_config={
            "input_names": [port.name for port in io.inputs],
            "output_names": [port.name for port in io.outputs],
            "dynamic_axes": io.dynamic_axes,
        },
        dummy_inputs_func=lambda _model: tuple(map(torch.from_numpy, inputs.values())),
    )


def run_pass(name: str, options: dict[str, Any], submodel: str, model: str, out: str, results: Any) -> None:
    """Run one pass in this process and put its figures into the queue `results`."""
    begun = time.perf_counter()
    import onnx
    from olive.hardware import AcceleratorSpec, Device
    from olive.hardware.constants import ExecutionProvider
    from olive.model import ONNXModelHandler
    from olive.package_config import OlivePackageConfig

    source = torch_model(model, submodel) if name == "OnnxConversion" else None
    pass_class = OlivePackageConfig.load_default_config().import_pass_module(name)
    accelerator = AcceleratorSpec(Device.GPU, ExecutionProvider.CUDAExecutionProvider)
    config = pass_class.generate_config(accelerator, {**options, "save_as_external_data": True}, disable_search=True)
    result = pass_class(accelerator, config).run(source or ONNXModelHandler(model, onnx_file_name="model.onnx"), out)
    seconds = time.perf_counter() - begun
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


def chain(submodel: str, float16: str, options: dict[str, bool], convert: bool) -> list[tuple[str, dict[str, Any]]]:
    """The passes to run, with their options."""
    opset = 14 if submodel == "safety_checker" else 17
    first: list[tuple[str, dict[str, Any]]] = [("OnnxConversion", {"target_opset": opset})] if convert else []
    fuse: dict[str, Any] = {"model_type": MODEL_TYPE[submodel], "opt_level": 0}
    if options:  # Olive hands an empty dict on as it is, and fails on it.
        fuse["optimization_options"] = options
    if float16 == "one-pass":
        return [*first, ("OrtTransformersOptimization", {**fuse, "float16": True, "keep_io_types": False})]
    steps = [*first, ("OrtTransformersOptimization", fuse)]
    return steps + ([("OnnxFloatToFloat16", FLOAT16)] if float16 == "two-passes" else [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder with model.onnx and its external data, or a checkpoint")
    parser.add_argument("--submodel", required=True, choices=tuple(MODEL_TYPE))
    parser.add_argument("--scratch", type=Path, help="where to write; a temporary folder by default")
    parser.add_argument("--float16", default="two-passes", choices=("one-pass", "two-passes", "no"))
    parser.add_argument("--options", type=json.loads, default={}, help="optimization_options as JSON")
    parser.add_argument("--json", action="store_true", help="one JSON object per pass")
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[2]))  # sdflow, where it is not installed
    os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], os.environ.get("PYTHONPATH", "")])
    os.environ.update(OLIVE_DISABLE_TELEMETRY="1", CI="1", ORT_DISABLE_TELEMETRY="1", TQDM_DISABLE="1")
    spawn = multiprocessing.get_context("spawn")
    scratch = Path(tempfile.mkdtemp(prefix="olive-chain-", dir=arguments.scratch))
    try:
        convert = not (Path(arguments.model) / "model.onnx").exists()
        model = arguments.model if convert else Path(arguments.model).resolve()
        steps = chain(arguments.submodel, arguments.float16, arguments.options, convert)
        for index, (name, options) in enumerate(steps):
            out, results = scratch / str(index), spawn.SimpleQueue()
            process = spawn.Process(
                target=run_pass, args=(name, options, arguments.submodel, str(model), str(out), results)
            )
            process.start()
            process.join()
            if process.exitcode != 0:
                peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
                raise SystemExit(f"{name} ended with exit status {process.exitcode} (-9: out of memory) at {peak} MB")
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
