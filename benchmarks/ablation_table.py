"""The table of `benchmarks/ablation.py`: random weights, sessions bound to the device, and a row for each variant measured."""

from __future__ import annotations

import json
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

DATA = "weights.bin"
NOISE = 6e-3
"""Relative L2 distance of two float16 graphs that compute the same: each is 1.7e-3 from float32, a wrong one was 0.07."""
PROVIDER = {
    "cudnn_conv_algo_search": "EXHAUSTIVE",
    "cudnn_conv_use_max_workspace": "1",
    "enable_cuda_graph": "1",
}


@dataclass(frozen=True)
class Row:
    """What was measured of one variant. milliseconds: per run; device_mb: more device memory than before the session."""

    stage: str
    variant: str
    batch: int
    milliseconds: float
    p90: float
    device_mb: float
    first_run_s: float
    distance: float | None
    note: str = ""

    def __str__(self) -> str:
        distance = "" if self.distance is None else f"{self.distance:.2e}{' WRONG' if not self.right else ''}"
        return (
            f"{self.stage:8} {self.variant:44} batch {self.batch:2}  {self.milliseconds:8.3f} ms  p90 {self.p90:8.3f}"
            f"  {self.device_mb:7.0f} MB  first {self.first_run_s:5.1f} s  {distance:16} {self.note}"
        )

    @property
    def right(self) -> bool:
        return self.distance is None or self.distance < NOISE


# --- weights ---------------------------------------------------------------------------------------------------------


def give_weights(graphs: Mapping[str, Any], folder: Path, device: str = "cuda") -> None:
    """Write random values for every stub of the graphs into one file, each distinct recipe once, and name it in them."""
    import torch

    from sdflow.onnx_model.facts import subgraphs
    from sdflow.onnx_model.files import set_external
    from sdflow.onnx_model.stub import is_stub
    from sdflow.weights.recipe import evaluate, from_json

    places: dict[str, tuple[int, int]] = {}
    recipes: dict[str, Any] = {}
    end = 0
    for model in graphs.values():
        for graph in subgraphs(model.graph):
            for tensor in graph.initializer:
                if not is_stub(tensor):
                    continue
                text = next(entry.value for entry in tensor.external_data if entry.key == "recipe")
                if text not in places:
                    recipes[text] = from_json(json.loads(text))
                    size = int(np.prod(tensor.dims)) * np.dtype(recipes[text].dtype).itemsize
                    places[text] = end, size
                    end += -(-size // 4096) * 4096
                set_external(tensor, DATA, *places[text])
    shapes = {param.key: param.shape for recipe in recipes.values() for param in _params(recipe)}

    def read(key: str) -> Any:
        shape = shapes[key]
        generator = torch.Generator(device).manual_seed(zlib.crc32(key.encode()))
        values = torch.randn(shape, generator=generator, device=device)
        if key.endswith("bias"):
            values *= 0.1
        elif len(shape) == 1:
            values = 1 + 0.1 * values
        else:
            values *= float(np.prod(shape[1:])) ** -0.5
        return values.cpu().numpy()

    data = np.memmap(folder / DATA, np.uint8, "w+", shape=(end,))

    def write(text: str) -> None:
        offset, size = places[text]
        data[offset : offset + size] = np.ascontiguousarray(evaluate(recipes[text], read)).reshape(-1).view(np.uint8)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, recipes))


def _params(recipe: Any) -> Iterator[Any]:
    from sdflow.weights.recipe import params

    return params(recipe)


# --- sessions --------------------------------------------------------------------------------------------------------


class Bound:
    """A session with its inputs and outputs bound to tensors on the device, all on torch's current stream."""

    def __init__(self, model: Any, folder: Path, options: Mapping[str, str], inputs: Mapping[str, Any]) -> None:
        import onnxruntime as ort
        import torch

        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info()[0]
        session_options = ort.SessionOptions()
        session_options.log_severity_level = 4  # cuDNN's errors, at each engine that it tries and cannot use, are none
        session_options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
        provider = {**options, "user_compute_stream": str(torch.cuda.current_stream().cuda_stream)}
        self.graph = provider.get("enable_cuda_graph") == "1"
        self.session = ort.InferenceSession(
            model.SerializeToString(), session_options, providers=[("CUDAExecutionProvider", provider)]
        )
        self.inputs = dict(inputs)
        self.outputs: dict[str, Any] = {}
        self.binding = self.session.io_binding()
        for item in self.session.get_inputs():
            _bind(self.binding.bind_input, item.name, self.inputs[item.name])
        shapes = {o.name: [d.dim_value for d in o.type.tensor_type.shape.dim] for o in model.graph.output}
        for item in self.session.get_outputs():
            kind = {"tensor(float16)": torch.float16, "tensor(float)": torch.float32}[item.type]
            self.outputs[item.name] = torch.zeros(shapes[item.name], dtype=kind, device="cuda")
            _bind(self.binding.bind_output, item.name, self.outputs[item.name])
        self.run_options = ort.RunOptions()
        self.run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        start = time.perf_counter()
        self.run()
        torch.cuda.synchronize()
        self.first_run = time.perf_counter() - start
        self.device_mb = (before - torch.cuda.mem_get_info()[0]) / 1e6

    def run(self) -> None:
        self.session.run_with_iobinding(self.binding, self.run_options)

    def milliseconds(self, runs: int = 12, groups: int = 9) -> tuple[float, float]:
        """Median and p90 over `groups`, each the mean of `runs` runs in a row."""
        import torch

        for _ in range(3):
            self.run()
        found = []
        for _ in range(groups):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(runs):
                self.run()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) / runs)
        return statistics.median(found), sorted(found)[int(0.9 * (len(found) - 1))]


def _bind(bind: Callable[..., None], name: str, tensor: Any) -> None:
    kind = np.dtype(str(tensor.dtype).removeprefix("torch."))
    bind(name, "cuda", 0, kind, list(tensor.shape), tensor.data_ptr())


def distance(outputs: Any, reference: Any) -> float:
    """Relative L2 distance; infinite where there are values that are no numbers."""
    difference = float((outputs.float() - reference.float()).norm() / reference.float().norm())
    return difference if np.isfinite(difference) else float("inf")


# --- the table -------------------------------------------------------------------------------------------------------


class Ablation:
    """Measures variants while there is time, prints and keeps the rows."""

    def __init__(self, graphs: Mapping[str, Any], folder: Path, seconds: float) -> None:
        import onnxruntime

        from sdflow.machine.onnx_runtime import onnxruntime_errors

        self.graphs, self.folder = graphs, folder
        self.errors = onnxruntime_errors(onnxruntime)
        self.end = time.monotonic() + seconds
        self.rows: list[Row] = []
        self.skipped: list[str] = []
        self.references: dict[tuple[str, int], Any] = {}

    def measure(
        self,
        stage: str,
        variant: str,
        batch: int,
        model: Any,
        inputs: Mapping[str, Any],
        output: str,
        **changes: str,
    ) -> Bound | None:
        """Add a row. `output` is compared with that of the first variant of this stage and batch that ran."""
        import torch

        name = f"{stage} {variant} batch {batch}"
        if time.monotonic() > self.end:
            self.skipped.append(name)
            return None
        note = ""
        options = {**PROVIDER, **changes}
        try:
            try:
                bound = Bound(model, self.folder, options, inputs)
            except self.errors as error:
                if "graph capture" not in str(error):
                    raise
                note = "no CUDA graph: not all of it runs on the device"
                bound = Bound(model, self.folder, {**options, "enable_cuda_graph": "0"}, inputs)
            median, p90 = bound.milliseconds()
        except self.errors as error:  # what a provider refuses is a line of the table, not its end
            print(f"{name}: refused: {' '.join(str(error).split())[:300]}", flush=True)
            torch.cuda.synchronize()
            return None
        result = bound.outputs[output].clone()
        reference = self.references.setdefault((stage, batch), result)
        row = Row(
            stage, variant, batch, median, p90, bound.device_mb, bound.first_run, distance(result, reference), note
        )
        self.rows.append(row)
        print(row, flush=True)
        return bound
