"""Measure the bytes of 20 LoRAs of one base in a remote cache: baked one after the other, and pushed to a folder.

    python benchmarks/cache/remote_loras.py --scratch DIR

Builds and pushes the sample pipeline first. The LoRAs have random weights and ranks from 4 to 64. In turn they change
the attention of the UNet, all of its linear layers, and those plus the text encoder's. Counts all bytes in the folder,
including manifests.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from sdflow.units import spell_bytes

ROOT = Path(__file__).parents[2]
LORAS = 20
RANKS = (4, 8, 16, 32, 64)
KINDS = {
    "attention": lambda layer: layer.startswith("lora_unet_") and "_attn" in layer,
    "UNet": lambda layer: layer.startswith("lora_unet_"),
    "UNet and text encoder": lambda layer: True,
}


def write_lora(path: Path, number: int) -> str:
    """One of the layers that the sample's `outline` changes. Which, in words."""
    import numpy as np
    from safetensors import safe_open
    from safetensors.numpy import save_file

    random, rank = np.random.default_rng(number), RANKS[number % len(RANKS)]
    kind = list(KINDS)[number % len(KINDS)]
    tensors = {}
    with safe_open(ROOT / "samples/loras/outline.safetensors", "np") as sample:
        for key in sample.keys():  # noqa: SIM118  (no mapping)
            layer, _, part = key.partition(".")
            shape = list(sample.get_slice(key).get_shape())
            if not KINDS[kind](layer):
                continue
            if part == "alpha":
                tensors[key] = np.array(float(rank), np.float32)
                continue
            shape[0 if part.startswith("lora_down") else 1] = rank
            tensors[key] = (0.01 * random.standard_normal(shape)).astype(np.float32)
    save_file(tensors, path)
    return f"{kind}, rank {rank}"


def taken(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, required=True, help="an empty folder")
    scratch = parser.parse_args().scratch.absolute()
    scratch.mkdir(parents=True, exist_ok=True)
    shared = scratch / "shared"
    environment = {**os.environ, "SDFLOW_REMOTE_CACHE": str(shared), "SDFLOW_REMOTE_CACHE_PUSH": "1"}

    def sdflow(*arguments: str) -> None:
        command = [sys.executable, "-m", "sdflow", *arguments]
        subprocess.run(command, cwd=scratch, env=environment, check=True, stdout=subprocess.DEVNULL)

    sdflow("run", str(ROOT / "workflows/shapes_cpu.yaml"), "--no-verify", "--no-evaluate")
    base = before = taken(shared)
    print(f"base: {spell_bytes(base)}", flush=True)
    for number in range(LORAS):
        lora, begun = scratch / f"lora{number}.safetensors", time.perf_counter()
        kind = write_lora(lora, number)
        sdflow("bake", "--base", "pipelines/shapes_cpu", "--lora", str(lora), "--out", f"pipelines/lora{number}")
        now = taken(shared)
        seconds = time.perf_counter() - begun
        print(f"{number + 1}: {kind}: {spell_bytes(now - before)} more, {now / base:.2f}x, {seconds:.1f} s", flush=True)
        before = now
    print(f"{LORAS} LoRAs and the base: {spell_bytes(before)}, {before / base:.2f}x the base")


if __name__ == "__main__":
    main()
