"""`sdflow bench` and `sdflow tune`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sdflow.cli.arguments import AsJson, CacheDir, PipelineFolder, Quiet, Verbose
from sdflow.cli.needs import needs
from sdflow.cli.opened import cache_folder
from sdflow.cli.quiet import quiet_libraries, say

if TYPE_CHECKING:
    from sdflow.bench.sweep import SweepPoint
    from sdflow.families.shared.defaults import Defaults
    from sdflow.targets import Target


@needs("REFERENCE", unless=("compare",))
def bench(
    pipeline: Annotated[Path | None, typer.Argument(help="Pipeline folder.", metavar="PIPELINE")] = None,
    engine: Annotated[
        list[str] | None, typer.Option("--engine", "-e", help="Measure only this engine; see --list. Repeatable.")
    ] = None,
    list_engines: Annotated[bool, typer.Option("--list", help="List the engines and exit.")] = False,
    batch: Annotated[str, typer.Option(help="Batch sizes; 1,8 measures both.", metavar="N,...")] = "1",
    size: Annotated[
        str | None,
        typer.Option(help="Image width and height in pixels. Default: the model's native size.", metavar="N,..."),
    ] = None,
    steps: Annotated[str | None, typer.Option(help="Denoising steps. Default: the model's.", metavar="N,...")] = None,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Prompt.")] = (
        "a photo of an astronaut riding a horse on mars"
    ),
    negative_prompt: Annotated[str | None, typer.Option(help="Negative prompt.")] = None,
    guidance_scale: Annotated[
        float | None, typer.Option(help="Guidance scale; 1 (Z-Image: 0) turns guidance off. Default: the model's.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the initial latents.")] = 0,
    scheduler: Annotated[
        str | None, typer.Option(help="Scheduler, as for `sdflow generate`. Default: the pipeline's.")
    ] = None,
    references: Annotated[
        int, typer.Option(min=0, help="Number of reference images of the image's size (FLUX.2-klein).")
    ] = 0,
    warmup: Annotated[int, typer.Option(min=1, help="Untimed calls after the first.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds per engine.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads for every engine.")] = None,
    tuning: Annotated[
        bool, typer.Option("--tuning/--no-tuning", help="Use the options that `sdflow tune` chose.")
    ] = True,
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check",
            help="Verify the pipeline's files against their digests, and every image against float32 PyTorch.",
        ),
    ] = True,
    first_limit: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="Skip engines that take longer than this to load or to generate the first image.",
            metavar="SECONDS",
        ),
    ] = None,
    reuse: Annotated[
        str | None,
        typer.Option(
            help="Also measure this approximation, as for `sdflow generate`. Default: the workflow's.",
            metavar="every=2,from=0.1,to=0.9|off",
        ),
    ] = None,
    guidance_interval: Annotated[
        str | None, typer.Option(help="Also measure this approximation.", metavar="from=0.1,to=0.8|off")
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Compare two bench.json files instead.", metavar="BEFORE AFTER")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Compare even if machine or settings differ.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results as JSON, CSV, Markdown and HTML.", metavar="DIR")
    ] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    json: AsJson = False,
) -> None:
    """Compare the speed of ONNX Runtime, PyTorch and torch.compile.

    Measures every engine on the same pipeline and checks the image of each.
    """
    quiet_libraries()
    from sdflow.bench.files import write_files
    from sdflow.bench.run import BenchRequest
    from sdflow.bench.run import bench as measure
    from sdflow.cli.progress import progress_view
    from sdflow.errors import UsageError, VerificationError
    from sdflow.families.shared.approximation import Approximation, parse
    from sdflow.manifest import read_manifest
    from sdflow.report.bench import print_bench

    if compare is not None:
        _compare(compare, force, json)
        return
    if list_engines:
        _list(pipeline, engine or [], json)
        return
    if pipeline is None:
        raise UsageError("no pipeline is named", where="sdflow bench", remedy="Name a pipeline folder, or use --list.")
    cases = _cases(pipeline, batch, size, steps, scheduler)
    if references:
        _require_references(pipeline, references)
    from sdflow.bench.sweep import Settings

    guidance = _own(pipeline).guidance_scale if guidance_scale is None else guidance_scale
    settings = Settings(prompt, negative_prompt, guidance, seed, scheduler, warmup, rounds, threads, tuning, references)
    given = (
        None if text is None else parse(option, text)
        for option, text in (("--reuse", reuse), ("--guidance-interval", guidance_interval))
    )
    fewer = Approximation.chosen(read_manifest(pipeline).origin.said, *given)
    request = BenchRequest(pipeline, cases, settings, engine or [], check, first_limit, fewer)
    with progress_view(quiet=quiet, verbose=verbose) as view:
        result = measure(request, lambda phase: view.doing("bench", phase))
    files = write_files(result, out) if out is not None else []
    print_bench(result, files, as_json=json, quiet=quiet, verbose=verbose)
    if result.wrong:
        raise VerificationError(
            f"{', '.join(result.wrong)}: not the image that PyTorch generates in float32",
            where=str(pipeline),
            remedy="Discard these timings. `sdflow verify` finds the faulty operator; `--no-tuning` runs without tuned options.",
        )


@needs("DRAWS")
def tune(
    pipeline: PipelineFolder,
    target: Annotated[
        str | None, typer.Option(help="Target to tune for. Default: the one the pipeline was built for.")
    ] = None,
    size: Annotated[int | None, typer.Option(min=8, help="Image width and height in pixels.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 1,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Denoising steps. Default: 4, or the model's if fewer.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds per candidate.")] = 5,
    option: Annotated[list[str] | None, typer.Option(help="Try only this option. Repeatable.")] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify", help="Verify the choice against PyTorch, as `sdflow verify --run-on` does."
        ),
    ] = True,
    cache: CacheDir = None,
    json: AsJson = False,
) -> None:
    """Find the fastest session options for this machine.

    Keeps an option only if it is faster and computes the same.
    """
    quiet_libraries()
    from sdflow.bench.sweep import SweepPoint
    from sdflow.bench.tune import tune as search
    from sdflow.errors import UsageError
    from sdflow.report.bench import print_tune
    from sdflow.runtime.sessions.tuning import UNTUNED
    from sdflow.targets import TARGETS

    if target is not None and target not in TARGETS:
        raise UsageError(f"no target is named {target}", where="--target", remedy=f"Known: {', '.join(TARGETS)}.")
    pixels = size or _own_size(pipeline)
    case = SweepPoint(batch, pixels, pixels, min(4, _own(pipeline).steps) if steps is None else steps)
    result = search(pipeline, say, target=target, case=case, rounds=rounds, only=option or [])
    print_tune(result, as_json=json)
    if verify and result.tuning != UNTUNED:
        hold_to_pytorch(pipeline, TARGETS[result.target], cache_folder(cache))


def hold_to_pytorch(pipeline: Path, target: Target, cache: Path) -> None:
    """Verify the submodels with the chosen options, and drop the choice unless they pass. Raises VerificationError if a
    submodel fails, or whatever the verification raises."""
    from sdflow.config.workflow import VerifySpec
    from sdflow.errors import SdflowError, VerificationError
    from sdflow.runtime.files.recorded_tuning import record_tuning
    from sdflow.runtime.sessions.tuning import UNTUNED
    from sdflow.store import Cache
    from sdflow.verify import subject_of_folder
    from sdflow.verify import verify as hold

    say("verifying the choice against PyTorch")
    try:
        store = Cache(cache)
        found = hold(subject_of_folder(pipeline, store), VerifySpec(), store, run_on=target.name, progress=say).result
        if not found.passed:
            raise VerificationError(found.failure(), where=str(pipeline), remedy="The untuned options stay in use.")
    except SdflowError:
        record_tuning(pipeline, target, UNTUNED, {"verified": False})
        say("the untuned options stay in use; --no-verify keeps a choice without this check")
        raise
    say(f"all submodels pass with the chosen options, on {target.name} too")


def _cases(pipeline: Path, batch: str, size: str | None, steps: str | None, scheduler: str | None) -> list[SweepPoint]:
    from sdflow.bench.sweep import sweep
    from sdflow.families.shared.sampler_names import known_scheduler

    if scheduler is not None:
        known_scheduler(scheduler)
    sizes = [_own_size(pipeline)] if size is None else _numbers("--size", size)
    counts = [_own(pipeline).steps] if steps is None else _numbers("--steps", steps)
    return list(sweep(_numbers("--batch", batch), sizes, counts))


def _numbers(option: str, text: str) -> list[int]:
    from sdflow.errors import UsageError

    numbers = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if 0 in numbers:
        raise UsageError(f"{text!r} is not a list of whole numbers", where=option, remedy=f"Write {option} 1,8.")
    return list(dict.fromkeys(numbers))


def _require_references(pipeline: Path, count: int) -> None:
    from sdflow.runtime.drawing.references import require_references
    from sdflow.runtime.files.folder import folder_family, onnx_submodels

    require_references(folder_family(pipeline), onnx_submodels(pipeline), count, "--references")


def _own(pipeline: Path) -> Defaults:
    """The defaults of text-to-image generation."""
    from sdflow.manifest import read_manifest
    from sdflow.runtime.files.folder import folder_defaults

    read_manifest(pipeline)
    return folder_defaults(pipeline)["text"]


def _own_size(pipeline: Path) -> int:
    """The model's native image size in pixels."""
    from sdflow.manifest import read_manifest
    from sdflow.runtime.files.folder import folder_latents

    read_manifest(pipeline)
    return folder_latents(pipeline).image_size


def _compare(files: tuple[Path, Path], force: bool, as_json: bool) -> None:
    from sdflow.bench.compare import compare
    from sdflow.report.bench import print_comparison

    print_comparison(compare(*files, force=force), as_json=as_json)


def _list(pipeline: Path | None, engines: list[str], as_json: bool) -> None:
    from sdflow.bench.engines import choose
    from sdflow.bench.run import here
    from sdflow.manifest import read_manifest
    from sdflow.report.bench import print_engines

    built_for = "cuda" if pipeline is None else read_manifest(pipeline).origin.target
    device = here(built_for, engines).kind
    print_engines(choose(engines, device if pipeline is None else built_for, device), as_json=as_json)
