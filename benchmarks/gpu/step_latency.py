"""Time a UNet step and the decoder on CUDA, for several pipelines with sdflow's and with ONNX Runtime's kernels.

    python benchmarks/gpu/step_latency.py PIPELINE [PIPELINE ...] [--kernels ours ort ...] [--images 1] [--processes 1]
        [--defines APPLY_PER_PROCESSOR=2,...] [--what step] [--turns 7] [--runs 100] [--profile] [--top 25] [--full FILE]
        [--target cpu]

Measures each pipeline (built for cuda) with each kernel selection, in turns in one process: a step with guidance for
this many images and the decoder for one, each many times in a row, the decoder two fifths as often. Prints medians of
the turns. A kernel selection is `ours` or `ort`, with changes after commas: `ours,-GroupNorm` leaves nodes of that type
to ONNX Runtime, `ours,cuda_graphs=off` is an option of Tuning, `ours,sdpa_kernel=2` one of the provider, and with
`ours,kernels.replace._is_group_norm_ours=off` that function of sdflow.runtime finds nothing. `PIPELINE:ours,-GroupNorm`
replaces --kernels for this pipeline. Selections that fail are reported and skipped. cuDNN's choice for a convolution
varies between processes: --processes repeats everything. --defines: other block sizes than in `compilation.DEFINES`.
--what: only the step or the decoder. --profile: profiled time, launches and memsets of all kernels; the --top kernels
of the first selection (0: none), and all kernels of all selections in FILE. Distances are to the first row's results,
or to the first of that size. Submodels that are not measured and equal the first pipeline's are loaded once, and not
counted in later ones' memory. Use `--target cpu` to try it.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu.pipelines_on_gpu import synchronize, used

RUNS = {"step": 1.0, "decoder": 0.4}
"""What is measured, and how often it is run for each of --runs."""
PROFILED = 5
"""Runs under the profiler."""
SWITCHES = {"on": True, "off": False}


@dataclass(frozen=True)
class Choice:
    """How a variant's sessions are made. hidden: the operators' types that are left to ONNX Runtime. silenced: functions of
    sdflow.runtime that find nothing."""

    text: str
    tuning: Any
    hidden: frozenset[str]
    silenced: frozenset[str]

    @classmethod
    def of(cls, text: str) -> Choice:
        from sdflow.runtime.sessions.tuning import Tuning

        base, *more = text.split(",")
        if base not in ("ours", "ort"):
            raise SystemExit(f"{text}: begins with ours or ort")
        known = {field.name for field in fields(Tuning)}
        hidden = frozenset(each[1:] for each in more if each.startswith("-"))
        given = dict(each.split("=", 1) for each in more if not each.startswith("-"))
        own = {name: SWITCHES.get(value, value) for name, value in given.items() if name in known}
        silenced = frozenset(name for name, value in given.items() if "." in name and value == "off")
        provider = {name: value for name, value in given.items() if name not in silenced.union(known)}
        return cls(text, Tuning(**{"own_kernels": base == "ours", "provider": provider, **own}), hidden, silenced)


@contextmanager
def left_to_onnxruntime(types: Collection[str]) -> Iterator[Counter[str]]:
    """Nodes of these types stay as they are in sessions that are made meanwhile; yields how many there were."""
    from sdflow.runtime.sessions import session as sessions

    replace, found = sessions.with_own_kernels, Counter[str]()

    def partly(graph: Any, **given: Any) -> Any:
        hidden = [node for node in graph.graph.node if node.op_type in types]
        found.update(node.op_type for node in hidden)
        for node in hidden:
            node.domain += HIDDEN
        result = replace(graph, **given)
        for node in (*hidden, *(() if result is None else result.graph.node)):
            node.domain = node.domain.removesuffix(HIDDEN)
        return result

    sessions.with_own_kernels = partly if types else replace
    try:
        yield found
    finally:
        sessions.with_own_kernels = replace


HIDDEN = ".hidden"


@contextmanager
def finding_nothing(functions: Collection[str]) -> Iterator[None]:
    """These functions of sdflow.runtime, `kernels.replace.FUNCTION` say, give an empty dictionary meanwhile."""
    with ExitStack() as replaced:
        for each in functions:
            module, _, name = each.rpartition(".")
            try:
                found = import_module(f"sdflow.runtime.{module}")
                replaced.enter_context(mock.patch.object(found, name, lambda *arguments, **named: {}))
            except (ImportError, AttributeError) as error:
                raise SystemExit(f"{each}: {error}") from error
        yield


class Variant:
    """A pipeline's step and decoder, ready to run again and again."""

    def __init__(self, folder: Path, choice: Choice, options: argparse.Namespace, first: Variant | None = None) -> None:
        """first: what is not measured and the same there is taken from it. Raises SystemExit where the graph has none of the
        operators that are to be left to ONNX Runtime."""
        import torch

        from sdflow.runtime.pipeline import Pipeline

        measured, images = options.what, options.images
        self.name, self.folder = f"{folder.name}, {choice.text}", folder
        with finding_nothing(choice.silenced), left_to_onnxruntime(choice.hidden) as found:
            shared = {} if first is None else first.not_measured(folder, measured)
            self.pipeline = Pipeline.load(folder, options.target, checker=False, tuning=choice.tuning, shared=shared)
            with self.pipeline.place.current(), torch.no_grad():
                shape = self.pipeline.latents_shape(images, None, None)
                noise = torch.randn(shape, generator=torch.Generator().manual_seed(7))
                noise = noise.to(self.pipeline.place.device)
                if "step" in measured:
                    settings = {"guidance_scale": 7.5, "num_inference_steps": 50, "latents": noise.cpu()}
                    self.drawing = self.pipeline.drawing(["a horse"] * images, **settings)
                    self.noise = noise
                if "decoder" in measured:
                    self.decoder = self.pipeline.submodels["vae_decoder"].bound(latent_sample=(1, *shape[1:]))
                    self.decoder.inputs["latent_sample"].copy_(noise[:1])
                self.results = {what: self.run(what).float().clone() for what in measured}
        if absent := choice.hidden - found.keys():
            raise SystemExit(f"{self.name}: there is no {', '.join(sorted(absent))}")
        self.times: dict[str, list[float]] = {what: [] for what in measured}

    def not_measured(self, folder: Path, measured: Sequence[str]) -> dict[str, Any]:
        """Its submodels that another pipeline has too, but for those that are measured."""
        family, submodels = self.pipeline.family, self.pipeline.submodels
        left = {family.denoiser, *([family.decoder] if "decoder" in measured else [])}
        return {
            name: submodel
            for name, submodel in submodels.items()
            if name not in left and (self.folder / name).resolve() == (folder / name).resolve()
        }

    def run(self, what: str) -> Any:
        if what == "step":
            return self.drawing.denoiser.run(self.drawing.inputs, self.noise, 25)
        return self.decoder.run()["sample"]

    def measure(self, what: str, runs: int) -> None:
        self.run(what)
        synchronize()
        begun = time.perf_counter()
        for _ in range(runs):
            self.run(what)
        synchronize()
        self.times[what].append((time.perf_counter() - begun) / runs * 1e3)


def measure(options: argparse.Namespace) -> None:
    import torch

    from sdflow.runtime.kernels import library

    wanted = [
        (Path(folder), Choice.of(text))
        for each in options.pipelines
        for folder, text in ([each.split(":", 1)] if ":" in each else [(each, kernels) for kernels in options.kernels])
    ]
    if options.target == "cuda" and any(choice.tuning.own_kernels for _, choice in wanted):
        begun = time.perf_counter()
        if library.kernel_library() is None:  # the kernels themselves as a graph wants them
            raise SystemExit("our kernels cannot be used here")
        print(f"operators ready in {time.perf_counter() - begun:.1f} s", flush=True)
    variants = []
    for folder, choice in wanted:
        before, begun = used(), time.perf_counter()
        try:
            variants.append(Variant(folder, choice, options, variants[0] if variants else None))
        except (Exception, SystemExit) as error:  # noqa: BLE001  the others are measured all the same
            print(f"{folder.name}, {choice.text}: FAILED: {type(error).__name__}: {error}"[:400], flush=True)
            traceback.print_exc()
            continue
        more, seconds = used() - before, time.perf_counter() - begun
        print(f"{variants[-1].name}: {more:.2f} GB of the device, {seconds:.1f} s", file=sys.stderr, flush=True)
    if not variants:
        raise SystemExit("nothing can be measured")
    with variants[0].pipeline.place.current(), torch.no_grad():
        for what in options.what:
            for turn in range(options.turns):
                for variant in variants[:: -1 if turn % 2 else 1]:
                    variant.measure(what, max(1, round(options.runs * RUNS[what])))
            rows = [row(what, variant, variants) for variant in variants]
            print("\n".join(rows), file=sys.stderr if options.profile else sys.stdout, flush=True)
        for what in options.what if options.profile else ():  # when all are measured: a profiler makes runs slower
            profiles = [kernels_of(variant, what) for variant in variants]
            rows = [
                f"{row(what, variant, variants)}: {told(kernels)}"
                for variant, kernels in zip(variants, profiles, strict=True)
            ]
            print("\n".join([*rows, *lines(profiles[0])[: options.top]]), flush=True)
            if options.full is not None:
                with options.full.open("a") as file:
                    for each, kernels in zip(rows, profiles, strict=True):
                        print("\n".join([each, *lines(kernels), ""]), file=file)


def row(what: str, variant: Variant, variants: Sequence[Variant]) -> str:
    """Distances are to the first that gives as many values."""
    result, times = variant.results[what], variant.times[what]
    first = next(each.results[what] for each in variants if each.results[what].shape == result.shape)
    distance = float((result - first).norm() / first.norm())
    between = f"({min(times):.3f} to {max(times):.3f})"
    return f"{what:8s} {statistics.median(times):7.3f} ms {between:20s} {distance:.1e}  {variant.name}"


def short_name(name: str) -> str:
    """A kernel's name without its arguments and most of its template's."""
    name = re.sub(r"\((?!anonymous).*", "", name.replace("(anonymous namespace)::", ""))
    name = re.sub(r"^void ", "", name)
    return name if len(name) < 90 else name[:87] + "..."


def kernels_of(variant: Variant, what: str) -> list[tuple[str, float, float]]:
    """The kernels of a run, copies and memsets too, by name: milliseconds and launches, the longest first."""
    import torch
    from torch.profiler import ProfilerActivity

    synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        for _ in range(PROFILED):
            variant.run(what)
        synchronize()
    spent, count = Counter[str](), Counter[str]()
    for event in recorded.events():
        if str(event.device_type).endswith("CUDA"):
            spent[short_name(event.name)] += event.device_time_total
            count[short_name(event.name)] += 1
    return [(name, spent[name] / PROFILED / 1e3, count[name] / PROFILED) for name, _ in spent.most_common()]


def told(kernels: Sequence[tuple[str, float, float]]) -> str:
    """All of them in a few words."""
    memsets = sum(count for name, _, count in kernels if name.startswith("Memset"))
    total, launches = sum(spent for _, spent, _ in kernels), sum(count for *_, count in kernels)
    return f"{total:.3f} ms in {launches:.0f} kernels, {memsets:.0f} of them memsets"


def lines(kernels: Sequence[tuple[str, float, float]]) -> list[str]:
    return [f"  {spent:7.3f} ms  {count:5.0f} x  {name}" for name, spent, count in kernels]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipelines", nargs="+")
    parser.add_argument("--kernels", nargs="+", default=["ours", "ort"])
    parser.add_argument("--images", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--defines", default="")
    parser.add_argument("--what", nargs="+", choices=[*RUNS], default=[*RUNS])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--top", type=int, default=25)
    parser.add_argument("--full", type=Path)
    parser.add_argument("--target", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    if options.processes > 1:
        chosen = ["--kernels", *options.kernels, "--defines", options.defines, *["--profile"] * options.profile]
        chosen += ["--what", *options.what, "--turns", str(options.turns), "--runs", str(options.runs)]
        chosen += ["--images", str(options.images), "--top", str(options.top)]
        chosen += [] if options.full is None else ["--full", str(options.full)]
        for _ in range(options.processes):
            subprocess.run([sys.executable, __file__, *options.pipelines, *chosen], check=True)
        return
    from sdflow.runtime.kernels import compilation

    compilation.DEFINES.update(
        {name: int(value) for name, value in (x.split("=") for x in options.defines.split(",") if x)}
    )
    measure(options)


if __name__ == "__main__":
    main()
