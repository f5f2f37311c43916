"""`sdflow bench` and `sdflow tune`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sdflow.cli.arguments import AsJson, CacheDir
from sdflow.cli.needs import needs
from sdflow.cli.opened import cache_folder
from sdflow.cli.quiet import quiet_libraries, say

if TYPE_CHECKING:
    from sdflow.bench.sweep import SweepPoint
    from sdflow.families.shared.defaults import Defaults
    from sdflow.targets import Target


@needs("REFERENCE", unless=("compare",))
def bench(
    pipeline: Annotated[Path | None, typer.Argument(help="A pipeline folder.", metavar="PIPELINE")] = None,
    engine: Annotated[
        list[str] | None, typer.Option("--engine", "-e", help="Only this engine. Repeatable. See --list.")
    ] = None,
    list_engines: Annotated[bool, typer.Option("--list", help="List the engines and stop.")] = False,
    batch: Annotated[str, typer.Option(help="Images at once; 1,8 sweeps.", metavar="N,...")] = "1",
    size: Annotated[
        str | None,
        typer.Option(help="Pixels of both sides. Default: the model's own.", metavar="N,...", show_default=False),
    ] = None,
    steps: Annotated[
        str | None, typer.Option(help="Steps an image. Default: the model's.", metavar="N,...", show_default=False)
    ] = None,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="What to draw.")] = (
        "a photo of an astronaut riding a horse on mars"
    ),
    negative_prompt: Annotated[str | None, typer.Option(help="What not to draw.", show_default=False)] = None,
    guidance_scale: Annotated[
        float | None, typer.Option(help="1 switches guidance off. Default: the model's.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the latents.")] = 0,
    scheduler: Annotated[str | None, typer.Option(help="As of `sdflow generate`. Default: its own.")] = None,
    warmup: Annotated[int, typer.Option(min=1, help="Calls after the first that are not counted.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each engine.")] = 5,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of the CPU, for every engine.", show_default=False)
    ] = None,
    tuning: Annotated[bool, typer.Option("--tuning/--no-tuning", help="Use what `sdflow tune` chose.")] = True,
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check",
            help="Hold the models' files to the digests of the build first, and compare with PyTorch's float32.",
        ),
    ] = True,
    first_limit: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="Give an engine up that takes longer to load or to its first image.",
            metavar="SECONDS",
            show_default=False,
        ),
    ] = None,
    reuse: Annotated[
        str | None,
        typer.Option(
            help="Measure approximations too, as of `sdflow generate`, beside the exact engine. Default: the workflow's.",
            metavar="every=2,from=0.1,to=0.9|off",
            show_default=False,
        ),
    ] = None,
    guidance_interval: Annotated[
        str | None, typer.Option(help="The same.", metavar="from=0.1,to=0.8|off", show_default=False)
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Compare two bench.json instead.", metavar="BEFORE AFTER")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Compare although machine or settings differ.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for JSON, CSV, Markdown and HTML.", metavar="DIR", show_default=False)
    ] = None,
    json: AsJson = False,
) -> None:
    """Measure engines side by side on one pipeline: ONNX Runtime, PyTorch, torch.compile; every image is checked."""
    quiet_libraries()
    from sdflow.bench.files import write_files
    from sdflow.bench.run import BenchRequest
    from sdflow.bench.run import bench as measure
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
        raise UsageError("there is no pipeline to measure", where="sdflow bench", remedy="Give its folder, or --list.")
    cases = _cases(pipeline, batch, size, steps, scheduler)
    from sdflow.bench.sweep import Settings

    guidance = _own(pipeline).guidance_scale if guidance_scale is None else guidance_scale
    settings = Settings(prompt, negative_prompt, guidance, seed, scheduler, warmup, rounds, threads, tuning)
    given = (
        None if text is None else parse(option, text)
        for option, text in (("--reuse", reuse), ("--guidance-interval", guidance_interval))
    )
    fewer = Approximation.chosen(read_manifest(pipeline).origin.said, *given)
    result = measure(BenchRequest(pipeline, cases, settings, engine or [], check, first_limit, fewer), say)
    files = write_files(result, out) if out is not None else []
    print_bench(result, files, as_json=json)
    if result.wrong:
        raise VerificationError(
            f"{', '.join(result.wrong)}: not the image that PyTorch draws in float32",
            where=str(pipeline),
            remedy="Its figures are of no use. `sdflow verify` finds the operator; `--no-tuning` leaves tuned options out.",
        )


@needs("DRAWS")
def tune(
    pipeline: Annotated[Path, typer.Argument(help="A pipeline folder.", metavar="PIPELINE")],
    target: Annotated[str | None, typer.Option(help="Default: the one that the pipeline was built for.")] = None,
    size: Annotated[int | None, typer.Option(min=8, help="Pixels of both sides.", show_default=False)] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images at once.")] = 1,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps an image. Default: 4, or the model's.", show_default=False)
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each candidate.")] = 5,
    option: Annotated[list[str] | None, typer.Option(help="Try this option alone. Repeatable.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Hold the choice to PyTorch, as `sdflow verify --run-on` does.")
    ] = True,
    cache: CacheDir = None,
    json: AsJson = False,
) -> None:
    """Try the options that matter on this machine, keep what is faster and computes the same."""
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
    """Verify the submodels with what was chosen. Where that does not pass, or cannot be done, nothing stays chosen: raises
    what the verification raises, VerificationError where a submodel fails."""
    from sdflow.config.workflow import VerifySpec
    from sdflow.errors import SdflowError, VerificationError
    from sdflow.runtime.files.recorded_tuning import record_tuning
    from sdflow.runtime.sessions.tuning import UNTUNED
    from sdflow.store import Cache
    from sdflow.verify import subject_of_folder
    from sdflow.verify import verify as hold

    say("holding the choice to PyTorch")
    try:
        store = Cache(cache)
        found = hold(subject_of_folder(pipeline, store), VerifySpec(), store, run_on=target.name, progress=say).result
        if not found.passed:
            raise VerificationError(found.failure(), where=str(pipeline), remedy="Nothing is chosen.")
    except SdflowError:
        record_tuning(pipeline, target, UNTUNED, {"verified": False})
        say("nothing is chosen; --no-verify keeps a choice without this")
        raise
    say(f"with the choice all submodels are as PyTorch has them, on {target.name} too")


def _cases(pipeline: Path, batch: str, size: str | None, steps: str | None, scheduler: str | None) -> list[SweepPoint]:
    from sdflow.bench.sweep import sweep
    from sdflow.families.shared.schedulers import require_known

    if scheduler is not None:
        require_known(scheduler)
    sizes = [_own_size(pipeline)] if size is None else _numbers("--size", size)
    counts = [_own(pipeline).steps] if steps is None else _numbers("--steps", steps)
    return list(sweep(_numbers("--batch", batch), sizes, counts))


def _numbers(option: str, text: str) -> list[int]:
    from sdflow.errors import UsageError

    numbers = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if 0 in numbers:
        raise UsageError(f"{text!r} is not a list of whole numbers", where=option, remedy=f"Write {option} 1,8.")
    return list(dict.fromkeys(numbers))


def _own(pipeline: Path) -> Defaults:
    """What an image from text takes where the caller says nothing."""
    from sdflow.manifest import read_manifest
    from sdflow.runtime.files.folder import folder_defaults

    read_manifest(pipeline)
    return folder_defaults(pipeline)["text"]


def _own_size(pipeline: Path) -> int:
    """Pixels of the model's own images."""
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
