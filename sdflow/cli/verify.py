"""`sdflow verify`: pipeline folders, or what workflows built; several reports go beside one another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sdflow.errors import UsageError, VerificationError

if TYPE_CHECKING:
    from sdflow.config.workflow import VerifySpec, Workflow
    from sdflow.store import Cache
    from sdflow.verify import Subject


def verify_all(
    paths: Sequence[Path],
    cache: Cache,
    *,
    load: Callable[[Path], Workflow],
    targets: Sequence[str],
    full: bool,
    submodels: Sequence[str] | None,
    fresh: bool,
    html: Path | None,
    out: Path,
    as_json: bool,
    propose: bool = False,
    run_on: str | None = None,
    memory: int | None = None,
    quiet: bool = False,
    verbose: bool = False,
) -> None:
    """Verify each and print the verdicts. Raises VerificationError at the end when one does not pass.

    propose: for each that overflows or is beyond its limit, find and print the nodes that must stay as they are. run_on: a target
    that is here. memory: bytes that a verification may take; None: what this machine has.
    """
    from sdflow.cli.progress import progress_view
    from sdflow.report.verify import print_verifications
    from sdflow.run.fix import Fix, fix
    from sdflow.targets import find_target
    from sdflow.verify import verify, write_html

    if run_on is not None:
        find_target(run_on, "--run-on")
    if html is not None and html.is_dir():
        raise UsageError("this is a folder", where=f"--html {html}", remedy="Name a file in it.")
    done = []
    fixes: dict[str, list[Fix]] = {}
    for path in paths:
        for subject, spec in _subjects(path, cache, load, targets, full, out):
            with progress_view(quiet=quiet, verbose=verbose) as view:
                view.doing(f"{subject.name} verify", "starting")
                verified = verify(
                    subject,
                    spec,
                    cache,
                    submodels=submodels,
                    fresh=fresh,
                    run_on=run_on,
                    memory=memory,
                    progress=lambda phrase, name=subject.name, view=view: view.doing(f"{name} verify", phrase),  # type: ignore[misc]
                )
                view.doing(f"{subject.name} verify", "")
                if propose and (verified.result.overflowing or verified.result.beyond_stated):
                    fixes[subject.name] = fix(subject, spec, verified.result, cache, view)
            done.append(verified)
    print_verifications([each.result for each in done], as_json=as_json, fixes=fixes, quiet=quiet, verbose=verbose)
    if html is not None:  # after the verdicts: they must not be lost where a report cannot be written
        for index, verified in enumerate(done):
            write_html(verified, html if len(done) == 1 else html.with_stem(f"{html.stem}-{index + 1}"))
    failed = [each for each in done if not each.result.passed]
    if failed:
        raise VerificationError("\n".join(f"{each.result.name}: {each.result.failure()}" for each in failed))


def _subjects(
    path: Path, cache: Cache, load: Callable[[Path], Workflow], targets: Sequence[str], full: bool, out: Path
) -> Iterator[tuple[Subject, VerifySpec]]:
    from dataclasses import replace

    from sdflow.config.workflow import VerifySpec
    from sdflow.verify import subject_of_folder

    level: Literal["full", "quick"] = "full" if full else "quick"
    if path.is_dir():
        if len(targets) > 1:
            raise UsageError("a pipeline folder is for one target", where=str(path), remedy="Give one --target.")
        yield subject_of_folder(path, cache, target=targets[0] if targets else None), VerifySpec(level=level)
        return
    for pipeline in load(path).pipelines:
        folder = out / pipeline.name
        if not folder.is_dir():
            raise UsageError(f"{folder} is not there", where=str(path), remedy="Build it first: sdflow run.")
        subject = subject_of_folder(folder, cache)
        image = pipeline.evaluate.image
        spec = replace(pipeline.verify or VerifySpec(), level=level)
        refiner = subject.refiner
        if refiner is not None:
            refiner = replace(refiner, allow_fallback=pipeline.evaluate.allow_fallback)
        subject = replace(subject, allow_fallback=pipeline.evaluate.allow_fallback, refiner=refiner)
        yield replace(subject, image=image) if image else subject, spec
