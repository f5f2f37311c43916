"""A step of the UNet and the decoder on CUDA: pipelines side by side, with our kernels and with ONNX Runtime's.

    python benchmarks/step_latency.py PIPELINE [PIPELINE ...] [--kernels ours ort] [--processes 1] [--profile]
                                 [--defines APPLY_PER_PROCESSOR=2,...] [--what step] [--turns 7] [--runs 100]

Each pipeline (built for cuda) with each choice of kernels, in turns in one process: a step with guidance and the decoder
of one image, each run many times in a row, the decoder two fifths as often; medians of the turns. What cuDNN picks for a
convolution varies from process to process: --processes repeats all that. --defines: other sizes of our kernels' blocks than
`library.DEFINES` has.
--what: the step or the decoder alone. --profile: the kernels of each. Distances are to the first row's results.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

RUNS = {"step": 1.0, "decoder": 0.4}
"""What is measured, and how often it is run for each of --runs."""


class Variant:
    """A pipeline's step and decoder, ready to run again and again."""

    def __init__(self, folder: Path, kernels: str, measured: Sequence[str]) -> None:
        import torch

        from sdflow.families.request import Request
        from sdflow.runtime.denoise import Start
        from sdflow.runtime.pipeline import Pipeline
        from sdflow.runtime.tuning import Tuning

        self.name = f"{folder.name}, {kernels}"
        self.pipeline = Pipeline.load(folder, "cuda", checker=False, tuning=Tuning(own_kernels=kernels == "ours"))
        with self.pipeline.place.current(), torch.no_grad():
            noise = torch.randn(self.pipeline.latents_shape(1, None, None), generator=torch.Generator().manual_seed(7))
            noise = noise.to(self.pipeline.place.device)
            self.unet = self.pipeline.denoiser(Start(noise, []), 2)
            size = self.pipeline.latents.image_size
            conditions = self.pipeline.condition(Request(["a horse"], None, 7.5, size, size))
            self.unet.begin(conditions.inputs, self.pipeline.schedule(50, guidance_scale=7.5))
            self.unet.sample.copy_(noise.expand_as(self.unet.sample))
            self.decoder = self.pipeline.submodels["vae_decoder"].bound(latent_sample=tuple(noise.shape))
            self.decoder.inputs["latent_sample"].copy_(noise)
            self.results = {what: self.run(what).float().clone() for what in measured}
        self.times: dict[str, list[float]] = {what: [] for what in measured}

    def run(self, what: str) -> Any:
        return self.unet.step(25) if what == "step" else self.decoder.run()["sample"]

    def measure(self, what: str, runs: int) -> None:
        import torch

        self.run(what)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(runs):
            self.run(what)
        torch.cuda.synchronize()
        self.times[what].append((time.perf_counter() - begun) / runs * 1e3)


def measure(options: argparse.Namespace) -> None:
    import torch

    from sdflow.runtime.kernels import library

    kernels, measured = options.kernels, options.what
    if "ours" in kernels:
        begun = time.perf_counter()
        if library.kernel_library() is None:
            raise SystemExit("our kernels cannot be used here")
        print(f"library ready in {time.perf_counter() - begun:.1f} s", flush=True)
    variants = []
    for folder, each in [(folder, each) for folder in options.pipelines for each in kernels]:
        before = torch.cuda.mem_get_info()[0]
        variants.append(Variant(folder, each, measured))
        print(f"{variants[-1].name}: {(before - torch.cuda.mem_get_info()[0]) / 1e9:.2f} GB of the device", flush=True)
    with variants[0].pipeline.place.current(), torch.no_grad():
        for what in measured:
            for turn in range(options.turns):
                for variant in variants[:: -1 if turn % 2 else 1]:
                    variant.measure(what, max(1, round(options.runs * RUNS[what])))
            first = variants[0].results[what]
            for variant in variants:
                distance = float((variant.results[what] - first).norm() / first.norm())
                print(
                    f"{what:8s} {statistics.median(variant.times[what]):7.3f} ms  {distance:.1e}  {variant.name}",
                    flush=True,
                )
        if options.profile:
            from ablation import profile

            for what in measured:
                for variant in variants:
                    profile(_Runs(variant, what), f"{what}, {variant.name}")


class _Runs:
    def __init__(self, variant: Variant, what: str) -> None:
        self.run = lambda: variant.run(what)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipelines", type=Path, nargs="+")
    parser.add_argument("--kernels", nargs="+", choices=["ours", "ort"], default=["ours", "ort"])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--defines", default="")
    parser.add_argument("--what", nargs="+", choices=[*RUNS], default=[*RUNS])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    if options.processes > 1:
        chosen = ["--kernels", *options.kernels, "--defines", options.defines, *["--profile"] * options.profile]
        chosen += ["--what", *options.what, "--turns", str(options.turns), "--runs", str(options.runs)]
        for _ in range(options.processes):
            subprocess.run([sys.executable, __file__, *map(str, options.pipelines), *chosen], check=True)
        return
    from sdflow.runtime.kernels import library

    library.DEFINES.update(
        {name: int(value) for name, value in (x.split("=") for x in options.defines.split(",") if x)}
    )
    measure(options)


if __name__ == "__main__":
    main()
