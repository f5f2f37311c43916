"""What the kernels of `sdflow.runtime.kernels` save, and how their blocks are best chosen.

    python bench/own_kernels.py PIPELINE [--blocks 512,2,4 1024,1,2 ...] [--profile]

PIPELINE: built for cuda. Once with our kernels and once with ONNX Runtime's, in turns in one process: a step of the UNet
with guidance, and the decoder, each run many times in a row. --blocks: threads of a block, blocks for each
multiprocessor of the kernel that sums and of the one that normalizes; each choice in a process of its own.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

TURNS = 7


def one(folder: Path, blocks: str, profiled: bool) -> None:
    import torch

    from sdflow.runtime.denoise import Start
    from sdflow.runtime.kernels import library
    from sdflow.runtime.pipeline import Pipeline
    from sdflow.runtime.tuning import Tuning

    if blocks:
        library.THREADS, library.SUMS_PER_PROCESSOR, library.APPLY_PER_PROCESSOR = map(int, blocks.split(","))
    begun = time.perf_counter()
    if library.kernel_library() is None:
        raise SystemExit("there is no library")
    made = time.perf_counter() - begun
    runs: dict[str, dict[str, Any]] = {"step": {}, "decoder": {}}
    results: dict[str, dict[str, Any]] = {"step": {}, "decoder": {}}
    pipelines = []
    for name, ours in (("ours", True), ("ONNX Runtime's", False)):
        pipeline = Pipeline.load(folder, "cuda", safety_checker=False, tuning=Tuning(own_kernels=ours))
        with pipeline.place.current(), torch.no_grad():
            noise = torch.randn(pipeline.latents_shape(1, None, None), generator=torch.Generator().manual_seed(7))
            noise = noise.to(pipeline.place.device)
            unet = pipeline._loaded(Start(noise, []), 2)
            unet.begin(pipeline.encode(["", "a horse"]), pipeline._schedule(50, guidance_scale=7.5))
            unet.sample.copy_(noise.expand_as(unet.sample))
            runs["step"][name] = lambda unet=unet: unet.step(25)
            decoder = pipeline.submodels["vae_decoder"].bound(latent_sample=tuple(noise.shape))
            decoder.inputs["latent_sample"].copy_(noise)
            runs["decoder"][name] = decoder.run
            results["step"][name] = unet.step(25).float().clone()
            results["decoder"][name] = decoder.run()["sample"].float().clone()
        pipelines.append(pipeline)
    with pipelines[0].place.current(), torch.no_grad():
        for what, count in (("step", 100), ("decoder", 40)):
            times: dict[str, list[float]] = {name: [] for name in runs[what]}
            for turn in range(TURNS):
                for name, run in list(runs[what].items())[:: -1 if turn % 2 else 1]:
                    run()
                    torch.cuda.synchronize()
                    begun = time.perf_counter()
                    for _ in range(count):
                        run()
                    torch.cuda.synchronize()
                    times[name].append((time.perf_counter() - begun) / count * 1e3)
            ours, theirs = (statistics.median(times[name]) for name in runs[what])
            found, expected = results[what].values()
            distance = float((found - expected).norm() / expected.norm())
            print(
                f"{blocks or 'as it is':12s} {what:8s} ours {ours:6.3f} ms, ONNX Runtime's {theirs:6.3f} ms, "
                f"ratio {ours / theirs:.3f}, distance {distance:.1e}",
                flush=True,
            )
        print(f"{blocks or 'as it is':12s} library made and proved in {made:.1f} s")
        if profiled:
            from ablation import profile

            for what, both in runs.items():
                for name, run in both.items():
                    profile(_Run(run), f"{what}, {name}")


class _Run:
    def __init__(self, run: Any) -> None:
        self.run = run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", type=Path)
    parser.add_argument("--blocks", nargs="+", default=[""])
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    if len(options.blocks) == 1:
        one(options.pipeline, options.blocks[0], options.profile)
        return
    for blocks in options.blocks:
        given = ["--profile"] if options.profile else []
        subprocess.run([sys.executable, __file__, str(options.pipeline), "--blocks", blocks, *given], check=False)


if __name__ == "__main__":
    main()
