"""Build a pipeline from one file on a machine without torch, compared with `cp` of the file.

    python benchmarks/build/light_bind.py make FILE [--model synthetic:sd15] [--float32]
    python benchmarks/build/light_bind.py run FILE ARCHIVE --python LIGHT/bin/python [--target cuda]...
        [--repeat 2] [--folder DIR]

`make` writes a checkpoint with random weights under the original names, in float16 or float32; it needs the packages of
a build. `run` imports the archive of `sdflow cache export` into a new cache, and measures the whole process of `sdflow
run` with the Python of the light installation: reading and digesting the file, planning, binding, writing to disk,
assembling the folder. Further targets reuse the file's digests. For comparison it measures `cp` of the same file with
and without `sync`: a build is on disk when it ends. Each repeat has its own cache; the file is in the page cache
beforehand.
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

WORKFLOW = """extends: base/{base}.yaml
model: {file}
target: {target}
verify: false
evaluate: {{image: null, latency: null}}
"""


def make(file: Path, model: str, dtype: str) -> None:
    """Write the checkpoint, a tensor at a time."""
    import numpy as np

    from sdflow.sources import PlainDigests, open_checkpoint
    from sdflow.sources.load import parameter_shapes
    from sdflow.sources.synthetic import tensors_for

    checkpoint = open_checkpoint(model, digests=PlainDigests(), download=False)
    tensors: dict[str, tuple[Any, dict[str, Any], str]] = {}
    for component, parts in checkpoint.family.components.items():
        part = parts[0]
        if part.name not in checkpoint.submodels or not part.layouts:
            continue
        load = checkpoint.submodels[part.name].load
        shapes = parameter_shapes(part.name, load)
        for key, original in part.model.original_names(shapes).items():
            if original.parts > 1 or original.transposed:
                raise SystemExit(f"{component}: {key} is part of a larger matrix in such files")
            tensors[part.layouts[0].prefix + original.name] = (part.model, {key: shapes[key]}, key)
    kind, size = ("F16", 2) if dtype == "float16" else ("F32", 4)
    header, place = {}, 0
    for name, (_, shape, key) in tensors.items():
        length = int(np.prod(shape[key])) * size
        header[name] = {"dtype": kind, "shape": list(shape[key]), "data_offsets": [place, place + length]}
        place += length
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with file.open("wb") as out:
        out.write(len(head).to_bytes(8, "little") + head)
        for model_of, shape, key in tensors.values():
            out.write(tensors_for(model_of, shape, 0)[key].astype(dtype).tobytes())
    print(f"{file}: {file.stat().st_size / 1e9:.2f} GB, {len(tensors)} tensors")


def run(given: argparse.Namespace) -> None:
    folder: Path = given.folder
    folder.mkdir(parents=True, exist_ok=True)
    workflows = [folder / f"light_{target}.yaml" for target in given.target]
    for target, workflow in zip(given.target, workflows, strict=True):
        workflow.write_text(WORKFLOW.format(base=given.base, file=given.file.absolute(), target=target))
    cache, copied, rows = folder / "cache", folder / "copy", []
    for _ in range(given.repeat):
        row = {"import": timed(sdflow(given, "cache", "import", str(given.archive.absolute()), "--cache", str(cache)))}
        with given.file.open("rb") as file:  # into memory
            while file.read(1 << 24):
                continue
        row["cp"] = timed(["cp", str(given.file), str(copied)])
        copied.unlink()
        row["cp and sync"] = timed(["sh", "-c", f"cp '{given.file}' '{copied}' && sync '{copied}'"])
        copied.unlink()
        for target, workflow in zip(given.target, workflows, strict=True):
            arguments = ("run", str(workflow), "--cache", str(cache), "--out", str(folder / "out"))
            row[target] = timed(sdflow(given, *arguments))
        rows.append(row)
        written = sum(path.stat().st_size for path in cache.rglob("*.data"))
        print({name: round(value, 2) for name, value in row.items()}, f"{written / 1e9:.2f} GB written", flush=True)
        for each in (cache, folder / "out"):
            shutil.rmtree(each)
    print(f"load {os.getloadavg()[0]:.1f}")
    for target in given.target:
        best = min(rows, key=lambda row: row[target])
        print(f"{target}: {best[target]:.2f} s, {best[target] / best['cp']:.1f} times cp, "
              f"{best[target] / best['cp and sync']:.1f} times cp and sync")  # fmt: skip


def sdflow(given: argparse.Namespace, *arguments: str) -> list[str]:
    return [str(given.python), "-P", "-m", "sdflow", *arguments]


def timed(command: list[str]) -> float:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ORT_DISABLE_TELEMETRY": "1"}
    begin = time.perf_counter()
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    making = commands.add_parser("make")
    making.add_argument("file", type=Path)
    making.add_argument("--model", default="synthetic:sd15")
    making.add_argument("--float32", action="store_const", const="float32", default="float16", dest="dtype")
    making.set_defaults(do=lambda given: make(given.file, given.model, given.dtype))
    running = commands.add_parser("run")
    running.add_argument("file", type=Path)
    running.add_argument("archive", type=Path)
    running.add_argument("--python", type=Path, required=True)
    running.add_argument("--target", action="append")
    running.add_argument("--base", default="sd15")
    running.add_argument("--repeat", type=int, default=2)
    running.add_argument("--folder", type=Path, default=Path("light_bind"))
    running.set_defaults(do=run)
    given = parser.parse_args()
    given.target = getattr(given, "target", None) or ["cuda"]
    given.do(given)


if __name__ == "__main__":
    main()
