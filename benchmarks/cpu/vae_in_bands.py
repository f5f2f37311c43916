"""A VAE decoder in bands of rows, beside the whole: difference, time, and memory, each in a process of its own.

    python benchmarks/cpu/vae_in_bands.py PIPELINE [--height 512] [--width 512] [--bands 32 16] [--rounds 2]

PIPELINE: a folder that `sdflow run` assembled for the CPU, or one with its model_index.json and vae_decoder only. --bands:
rows of latents in a band. Weights may be random: the difference is of two ways to compute the same.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from sdflow.models.ports import Role
from sdflow.runtime import vae
from sdflow.runtime.files.folder import load_submodel
from sdflow.runtime.vae import Tiling
from sdflow.targets import TARGETS


def status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def one(folder: Path, height: int, width: int, band: int, rounds: int, out: Path) -> None:
    """Decode once in this process. band: 0 for the whole."""
    half = load_submodel(folder, "vae_decoder", TARGETS["cpu"], lazy=True)
    scale = half.part.model.scale(half.config)
    (port,) = half.part.model.ports(half.config).inputs
    rows, columns = height // scale, width // scale
    latents = torch.randn((1, int(port.axes[1]), rows, columns), generator=torch.Generator().manual_seed(1))
    Path("/proc/self/clear_refs").write_text("5")
    before, begin = status("VmRSS"), time.perf_counter()
    if band:
        run = vae._bands(half, port.name, 1, (rows, columns, scale), Tiling(band * scale, "cpu"))
        said = f"{len(run.parts.stages)} stages, {run.parts.stored / 1e6:.0f} MB stored, {run.parts.size / 1e6:.0f} MB in a stage"
    else:
        half.bound(**{port.name: tuple(latents.shape)})
        said = "whole"
    prepared = time.perf_counter() - begin

    def run_once() -> torch.Tensor:
        if band:
            return run(latents)
        bound = half.bound(**{port.name: tuple(latents.shape)})
        bound.inputs[port.name].copy_(latents)
        return bound.run()[half.port(Role.PIXELS)]

    times, processor = [], []
    for _ in range(rounds):
        begin, used = time.perf_counter(), time.process_time()
        image = run_once()
        times.append(time.perf_counter() - begin)
        processor.append(time.process_time() - used)
    torch.save(image, out)
    memory, seconds = (
        (status("VmHWM") - before) / 1e6,
        f"{min(times):.2f} s an image ({min(processor):.2f} s of processor time)",
    )
    print(f"{said}: prepared in {prepared:.2f} s, {seconds}, {memory:.0f} MB more at the peak", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", type=Path)
    parser.add_argument("--height", type=int, default=512)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--bands", type=int, nargs="+", default=[32, 16])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        one(given.pipeline, given.height, given.width, int(given.one[0]), given.rounds, Path(given.one[1]))
        return
    with tempfile.TemporaryDirectory() as scratch:
        images = []
        for band in (0, *given.bands):
            out = Path(scratch) / f"{band}.pt"
            sizes = ["--height", str(given.height), "--width", str(given.width), "--rounds", str(given.rounds)]
            command = [sys.executable, __file__, str(given.pipeline), *sizes, "--one", str(band), str(out)]
            print(f"bands of {band}: " if band else "", end="", flush=True)
            subprocess.run(command, check=True)
            images.append(torch.load(out))
        for band, image in zip(given.bands, images[1:], strict=True):
            print(f"bands of {band}: {(image - images[0]).abs().max():.2e} from the whole, which is in "
                  f"[{images[0].min():.2f}, {images[0].max():.2f}]")  # fmt: skip


if __name__ == "__main__":
    main()
