"""`sdflow verify`: verify pipeline folders, or the pipelines of workflows; several reports get numbered names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sdflow.cli.arguments import AsJson, CacheDir, Overrides, Quiet, Rehash, Targets, Verbose
from sdflow.cli.needs import needs
from sdflow.cli.opened import load, open_cache
from sdflow.errors import UsageError, VerificationError

if TYPE_CHECKING:
    from sdflow.config.workflow import VerifySpec
    from sdflow.store import Cache
    from sdflow.verify import Subject


@needs("REFERENCE")
def verify(
    subject: Annotated[list[Path], typer.Argument(help="Pipeline folders or workflow files.", metavar="PIPELINE...")],
    target: Targets = None,
    overrides: Overrides = None,
    full: Annotated[
        bool,
        typer.Option("--full/--quick", help="Test more steps, shapes and prompts, one at the model's native size."),
    ] = True,
    submodel: Annotated[
        list[str] | None, typer.Option("--submodel", help="Verify only this submodel, and no image. Repeatable.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Ignore cached verdicts and verify again.")] = False,
    fix: Annotated[
        bool,
        typer.Option(
            "--fix",
            help="Where float16 overflows or int8 exceeds its limit, find the fewest nodes to leave unconverted.",
        ),
    ] = False,
    run_on: Annotated[
        str | None,
        typer.Option(
            "--run-on",
            help="Also run the artifacts on this target, with its provider's kernels. It must be available here.",
            metavar="TARGET",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            help="Memory limit, such as 6GB; larger models are verified block by block. Default: free memory.",
            metavar="SIZE",
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a self-contained HTML report.")] = None,
    out: Annotated[Path, typer.Option(help="Folder that the workflows' pipelines were built in.")] = Path("pipelines"),
    rehash: Rehash = False,
    cache: CacheDir = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    json: AsJson = False,
) -> None:
    """Verify pipelines against the PyTorch model.

    Runs on the CPU of this machine, for any target. `--run-on` also runs the kernels of a target that is installed here.
    """
    from sdflow.cli.progress import progress_view
    from sdflow.report.verify import print_verifications
    from sdflow.run.fix import Fix
    from sdflow.run.fix import fix as find_fixes
    from sdflow.targets import find_target
    from sdflow.units import parse_size
    from sdflow.verify import verify as hold
    from sdflow.verify import write_html

    if run_on is not None:
        find_target(run_on, "--run-on")
    if html is not None and html.is_dir():
        raise UsageError("is a folder", where=f"--html {html}", remedy="Name a file in it.")
    store = open_cache(cache, rehash=rehash)
    most = None if memory is None else parse_size(memory, "--memory")
    done = []
    fixes: dict[str, list[Fix]] = {}
    for path in subject:
        for each, spec in _subjects(path, store, overrides, target or [], full, out):
            with progress_view(quiet=quiet, verbose=verbose) as view:
                view.doing(f"{each.name} verify", "starting")
                verified = hold(
                    each,
                    spec,
                    store,
                    submodels=submodel,
                    fresh=fresh,
                    run_on=run_on,
                    memory=most,
                    progress=lambda phrase, name=each.name, view=view: view.doing(f"{name} verify", phrase),  # type: ignore[misc]
                )
                view.doing(f"{each.name} verify", "")
                if fix and (verified.result.overflowing or verified.result.beyond_stated):
                    fixes[each.name] = find_fixes(each, spec, verified.result, store, view)
            done.append(verified)
    print_verifications([each.result for each in done], as_json=json, fixes=fixes, quiet=quiet, verbose=verbose)
    if html is not None:  # after the verdicts, which must survive a failed write
        for index, verified in enumerate(done):
            write_html(verified, html if len(done) == 1 else html.with_stem(f"{html.stem}-{index + 1}"))
    failed = [each for each in done if not each.result.passed]
    if failed:
        raise VerificationError("\n".join(f"{each.result.name}: {each.result.failure()}" for each in failed))


def _subjects(
    path: Path, cache: Cache, overrides: Sequence[str] | None, targets: Sequence[str], full: bool, out: Path
) -> Iterator[tuple[Subject, VerifySpec]]:
    from dataclasses import replace

    from sdflow.config.workflow import VerifySpec
    from sdflow.verify import subject_of_folder

    level: Literal["full", "quick"] = "full" if full else "quick"
    if path.is_dir():
        if len(targets) > 1:
            raise UsageError("a pipeline folder is built for one target", where=str(path), remedy="Use --target once.")
        yield subject_of_folder(path, cache, target=targets[0] if targets else None), VerifySpec(level=level)
        return
    for pipeline in load(path, overrides, targets).pipelines:
        folder = out / pipeline.name
        if not folder.is_dir():
            raise UsageError(f"{folder} does not exist", where=str(path), remedy="Build it first: sdflow run.")
        subject = subject_of_folder(folder, cache)
        image = pipeline.evaluate.image
        spec = replace(pipeline.verify or VerifySpec(), level=level)
        refiner = subject.refiner
        if refiner is not None:
            refiner = replace(refiner, allow_fallback=pipeline.evaluate.allow_fallback)
        subject = replace(subject, allow_fallback=pipeline.evaluate.allow_fallback, refiner=refiner)
        yield replace(subject, image=image) if image else subject, spec
