"""Bake a LoRA into a large denoiser that is already built, compared with `cp` of its weights.

    python benchmarks/build/large_lora.py PIPELINE MODEL --cache CACHE [--component FOLDER] [--rank 16] [--repeat 2]
        [--folder DIR]

PIPELINE: built with MODEL, `synthetic:NAME`, and CACHE (benchmarks/build/from_zero.py --keep). --component: the
denoiser's folder if PIPELINE was built with one (`components:`): its weights are then read from files, whereas making
synthetic ones takes about as long as merging. Writes a random LoRA for
every matrix of the denoiser's blocks under --folder, with the names of diffusers. Then measures in turns `cp` of the
denoiser's weights in PIPELINE, `cp` plus `sync`, and the whole process of `sdflow bake`, with the processor time of its
children. The weights are in the page cache beforehand. Baked entries are removed from the cache after each turn.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.build.next_component import actions, timed


def write(file: Path, model: str, component: Path | None, rank: int) -> tuple[str, int]:
    """The LoRA's file. Returns the denoiser's name, and how many matrices it changes."""
    import numpy as np
    from safetensors.numpy import save_file

    from sdflow.sources import PlainDigests, open_checkpoint
    from sdflow.sources.load import parameter_shapes

    checkpoint = open_checkpoint(model, digests=PlainDigests(), download=False)
    name = checkpoint.family.denoiser
    if component is not None:
        components = {checkpoint.family.part(name).component: str(component.absolute())}
        checkpoint = open_checkpoint(model, digests=PlainDigests(), download=False, components=components)
    part, random = checkpoint.family.part(name), np.random.default_rng(0)
    tensors: dict[str, Any] = {}
    for key, shape in parameter_shapes(name, checkpoint.submodels[name].load).items():
        if len(shape) == 2 and min(shape) > rank and "blocks." in key:
            module = f"{part.component}.{key.removesuffix('.weight')}"
            down, up = (rank, shape[1]), (shape[0], rank)
            tensors[f"{module}.lora_A.weight"] = 0.02 * random.standard_normal(down, dtype=np.float32)
            tensors[f"{module}.lora_B.weight"] = 0.02 * random.standard_normal(up, dtype=np.float32)
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: value.astype(np.float16) for key, value in tensors.items()}, str(file))
    return name, len(tensors) // 2


def processor_seconds() -> float:
    """Of all processes that have ended below this one."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", type=Path)
    parser.add_argument("model")
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--component", type=Path)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("large_lora"))
    given = parser.parse_args()
    folder: Path = given.folder.absolute()
    cache, lora = given.cache.absolute(), folder / "large.safetensors"
    denoiser, layers = write(lora, given.model, given.component, given.rank)
    weights = sorted((given.pipeline / denoiser).glob("*.data"))
    size = sum(each.stat().st_size for each in weights)
    print(
        f"{lora}: rank {given.rank} on {layers} matrices, {lora.stat().st_size / 1e6:.0f} MB; weights {size / 1e9:.2f} GB"
    )
    copied, log = folder / "copy", folder / "log"
    sdflow = [sys.executable, "-P", "-m", "sdflow"]
    for _ in range(given.repeat):
        for each in weights:
            with each.open("rb") as source:  # into memory
                while source.read(1 << 24):
                    continue
        names, row = " ".join(f"'{each}'" for each in weights), {}
        for title, sync in (("cp", ""), ("cp and sync", f" && sync '{copied}'/*")):
            copied.mkdir()
            row[title] = timed(["sh", "-c", f"cp {names} '{copied}'{sync}"], log)
            shutil.rmtree(copied)
        before, used = actions(cache), processor_seconds()
        bake = [*sdflow, "bake", "--base", str(given.pipeline), "--lora", f"{lora}:0.8", "--out", str(folder / "out")]
        row["sdflow bake"] = timed([*bake, "--cache", str(cache)], log)
        row["processor"] = processor_seconds() - used
        shutil.rmtree(folder / "out")
        for each in actions(cache) - before:
            each.unlink()
        subprocess.run([*sdflow, "cache", "gc", "--cache", str(cache)], check=False, stdout=subprocess.DEVNULL)
        print({name: round(value, 2) for name, value in row.items()}, f"load {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
