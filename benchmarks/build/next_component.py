"""Bind a fine-tuned denoiser into a pipeline that is already built, compared with `cp` of its file.

    python benchmarks/build/next_component.py BASE MODEL COMPONENT --cache CACHE [--target cuda] [--repeat 2]
        [--folder DIR] [--dtype float16|bfloat16|float32]

CACHE: cache in which BASE was built with MODEL, `synthetic:NAME` (benchmarks/build/from_zero.py --keep), so that only
weights remain to be bound. Writes a safetensors file of COMPONENT with other random weights under --folder, with the
names of diffusers. Then measures in turns `cp` of the file, `cp` plus `sync`, and the whole process of `sdflow run`
with that component. The file is in the page cache beforehand, and new to sdflow in each turn: hashing it is part of the
time. Bound entries are removed from the cache after each turn.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def write(folder: Path, model: str, component: str, dtype: str) -> Path:
    """A component's folder as diffusers saves one, a tensor at a time."""
    import ml_dtypes
    import numpy as np

    from sdflow.sources import PlainDigests, open_checkpoint
    from sdflow.sources.load import parameter_shapes
    from sdflow.sources.synthetic import tensors_for

    checkpoint = open_checkpoint(model, digests=PlainDigests(), download=False)
    part = checkpoint.family.components[component][0]
    load = checkpoint.submodels[part.name].load
    shapes = parameter_shapes(part.name, load)
    as_numpy = np.dtype({"bfloat16": ml_dtypes.bfloat16}.get(dtype, dtype))
    header, place, size = {}, 0, as_numpy.itemsize
    kind = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}[dtype]
    for key, shape in shapes.items():
        length = int(np.prod(shape)) * size
        header[key] = {"dtype": kind, "shape": list(shape), "data_offsets": [place, place + length]}
        place += length
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(load["config"]))
    file = folder / "diffusion_pytorch_model.safetensors"
    with file.open("wb") as out:
        out.write(len(head).to_bytes(8, "little") + head)
        for key, shape in shapes.items():
            out.write(tensors_for(part.model, {key: shape}, 1)[key].astype(as_numpy).tobytes())
    print(f"{file}: {file.stat().st_size / 1e9:.2f} GB, {len(shapes)} tensors")
    return file


def timed(command: list[str], log: Path) -> float:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ORT_DISABLE_TELEMETRY": "1"}
    begin = time.perf_counter()
    with log.open("wb") as out:
        subprocess.run(command, check=True, env=environment, stdout=out, stderr=subprocess.STDOUT)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("model")
    parser.add_argument("component")
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--target", default="cuda")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("next_component"))
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="float16")
    given = parser.parse_args()
    folder: Path = given.folder.absolute()
    file = write(folder / given.component, given.model, given.component, given.dtype)
    workflow = folder / "next.yaml"
    workflow.write_text(
        f"extends: base/{given.base}.yaml\nmodel: {given.model}\ncomponents: {{{given.component}: {file.parent}}}\n"
        f"target: {given.target}\nverify: false\nevaluate: {{image: null, latency: null}}\n"
    )
    rows: list[dict[str, Any]] = []
    for _ in range(given.repeat):
        file.touch()  # with the old time, sdflow would know its digest from the turn before
        with file.open("rb") as source:  # into memory
            while source.read(1 << 24):
                continue
        copied, row = folder / "copy", {}
        row["cp"] = timed(["cp", str(file), str(copied)], folder / "log")
        copied.unlink()
        row["cp and sync"] = timed(["sh", "-c", f"cp '{file}' '{copied}' && sync '{copied}'"], folder / "log")
        copied.unlink()
        before = actions(given.cache)
        command = [sys.executable, "-P", "-m", "sdflow", "run", str(workflow), "--cache", str(given.cache.absolute())]
        row["sdflow run"] = timed([*command, "--out", str(folder / "out")], folder / "log")
        shutil.rmtree(folder / "out")
        for each in actions(given.cache) - before:
            each.unlink()
        subprocess.run([*command[:4], "cache", "gc", "--cache", str(given.cache.absolute())], check=False)
        rows.append(row)
        print({name: round(value, 2) for name, value in row.items()}, flush=True)
    best = min(rows, key=lambda row: row["sdflow run"] / row["cp"])
    print(f"{best['sdflow run'] / best['cp']:.1f} times cp, {best['sdflow run'] / best['cp and sync']:.1f} times cp and sync, "
          f"load {os.getloadavg()[0]:.1f}")  # fmt: skip


def actions(cache: Path) -> set[Path]:
    return set((cache / "v1/actions").glob("*/*.json"))


if __name__ == "__main__":
    main()
