"""Compare a pipeline as one graph with the pipeline itself, on the CPU.

    python benchmarks/export/one_file_on_cpu.py pipelines/shapes_cpu

Both generate the same image from the same noise, in turns, in one process. Prints the minimum and median time of each,
their ratio, and the distance of the images.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnxruntime

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.export.one_file_feeds import graph_feeds
from sdflow.export.one_file import Wanted, export_one_file
from sdflow.runtime.pipeline import Pipeline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pipeline", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    pipeline = Pipeline.load(arguments.pipeline, "cpu", threads=arguments.threads)
    size = pipeline.latents
    noise = np.random.default_rng(0).standard_normal((1, size.channels, size.size, size.size), np.float32)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "one.onnx"
        begin = time.perf_counter()
        export_one_file(arguments.pipeline, out, Wanted(steps=arguments.steps))
        print(f"export: {time.perf_counter() - begin:.1f} s")
        told = json.loads(Path(f"{out}.json").read_bytes())
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = arguments.threads
        session = onnxruntime.InferenceSession(str(out), options, providers=["CPUExecutionProvider"])
    feeds = graph_feeds(session, told, pipeline.companions.__getitem__, noise, "a red circle")

    def by_graph() -> np.ndarray:
        return np.asarray(session.run(["images"], feeds)[0])

    def by_pipeline() -> np.ndarray:
        negative = "" if any(name.startswith("negative_") for name in feeds) else None
        drawn = pipeline(
            "a red circle",
            negative_prompt=negative,
            latents=noise,
            num_inference_steps=arguments.steps,
            output_type="np",
        )
        return np.asarray(drawn.images)

    print(f"apart: {abs(by_graph() - by_pipeline()).max():.1e} of white")
    seconds: dict[str, list[float]] = {"one file": [], "pipeline": []}
    for _ in range(arguments.rounds):
        for name, draw in (("one file", by_graph), ("pipeline", by_pipeline)):
            begin = time.process_time() if arguments.threads == 1 else time.perf_counter()
            draw()
            seconds[name].append((time.process_time() if arguments.threads == 1 else time.perf_counter()) - begin)
    for name, found in seconds.items():
        print(f"{name}: least {min(found):.3f} s, middle {statistics.median(found):.3f} s")
    ratio = min(seconds["one file"]) / min(seconds["pipeline"])
    middle = statistics.median(seconds["one file"]) / statistics.median(seconds["pipeline"])
    print(f"ratio: {ratio:.3f} of the least, {middle:.3f} of the middle")


if __name__ == "__main__":
    main()
