"""Run a pipeline that does not fit in memory twice as one graph and by the code of `sdflow generate`, in separate
processes.

    python benchmarks/export/one_file_full_size.py pipelines/sdxl [--steps 2] [--size 256] [--folder /tmp]

On the CPU. Prints time and peak memory of the export and of each run, and the distance of the images. The peak includes
weights mapped from files, which the system can reclaim; `heap` is the rest.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.export.one_file_feeds import graph_feeds

PROMPT, NEGATIVE, SCALE = "a red circle", "", 5.0


def noise(channels: int, rows: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((1, channels, rows, rows), np.float32)


def export(pipeline: Path, out: Path, steps: int, size: int, threads: int) -> None:
    from sdflow.export.one_file import Wanted, export_one_file

    made = export_one_file(pipeline, out, Wanted(steps=steps, guidance_scale=SCALE))
    print(f"{made.bytes / 1e9:.2f} GB, graph {out.stat().st_size / 1e6:.2f} MB")


def by_pipeline(pipeline: Path, out: Path, steps: int, size: int, threads: int) -> None:
    from sdflow.runtime.pipeline import Pipeline

    loaded = Pipeline.load(pipeline, "cpu", threads=threads)
    what = loaded.latents
    drawn = loaded(
        PROMPT, negative_prompt=NEGATIVE, guidance_scale=SCALE, num_inference_steps=steps, height=size, width=size,
        latents=noise(what.channels, size // what.scale), output_type="np",
    )  # fmt: skip
    np.save(out.with_name("pipeline.npy"), np.asarray(drawn.images))


def by_graph(pipeline: Path, out: Path, steps: int, size: int, threads: int) -> None:
    import onnxruntime
    from transformers import CLIPTokenizer

    told = json.loads(Path(f"{out}.json").read_bytes())
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    begin = time.perf_counter()
    session = onnxruntime.InferenceSession(out, options, providers=["CPUExecutionProvider"])
    print(f"session after {time.perf_counter() - begin:.1f} s")
    what = told["latents"]
    latents = noise(what["channels"], size // what["pixels"])

    def tokenizer(name: str) -> CLIPTokenizer:
        return CLIPTokenizer.from_pretrained(pipeline / name)

    feeds = graph_feeds(session, told, tokenizer, latents, PROMPT, NEGATIVE, SCALE)
    np.save(out.with_name("graph.npy"), session.run(["images"], feeds)[0])


PARTS = {"export": export, "pipeline": by_pipeline, "graph": by_graph}


def memory() -> str:
    """Of this process: VmHWM is the peak, RssAnon what is not a file's."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak, heap = (int(lines[name].split()[0]) * 1024 / 1e9 for name in ("VmHWM", "RssAnon"))
    return f"peak {peak:.2f} GB, heap at the end {heap:.2f} GB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pipeline", type=Path)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where the graph lies for a while; as large as the pipeline")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        begin = time.perf_counter()
        PARTS[given.part](given.pipeline, given.folder / "one.onnx", given.steps, given.size, given.threads)
        print(f"{given.part}: {time.perf_counter() - begin:.1f} s, {memory()}", flush=True)
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        for part in PARTS:
            told = ["--steps", given.steps, "--size", given.size, "--threads", given.threads, "--folder", folder]
            command = [sys.executable, __file__, given.pipeline, "--part", part, *told]
            subprocess.run(list(map(str, command)), check=True)
        graph, pipeline = (np.load(Path(folder) / f"{name}.npy") for name in ("graph", "pipeline"))
    far = abs(graph - pipeline).max()
    print(
        f"{graph.shape[1]}x{graph.shape[2]}, {given.steps} steps: {far:.1e} of white apart, standard deviation {graph.std():.3f}"
    )


if __name__ == "__main__":
    main()
