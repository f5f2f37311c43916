"""`sdflow selftest`: check whether this machine generates the sample pipeline's images correctly."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sdflow.cli.arguments import AsJson, CacheDir
from sdflow.cli.needs import needs
from sdflow.cli.quiet import say


@needs("REFERENCE", "DRAWS", unless=("show", "collect"))
def selftest(
    target: Annotated[
        str | None, typer.Option("--target", help="Target to test. Default: the CPU, or the target of --pipeline.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option("--report", help="Write FILE.json and FILE.html, to attach to an issue.", metavar="FILE"),
    ] = None,
    pipeline: Annotated[
        Path | None, typer.Option("--pipeline", help="Sample pipeline built elsewhere with --copy.", metavar="PIPELINE")
    ] = None,
    show: Annotated[
        Path | None, typer.Option("--show", help="Print an existing report instead of testing.", metavar="FILE")
    ] = None,
    collect: Annotated[
        Path | None,
        typer.Option("--collect", help="Print a table of the reports in a folder instead of testing.", metavar="DIR"),
    ] = None,
    engine_cache: Annotated[
        Path | None,
        typer.Option("--engine-cache", help="Folder for compiled engines.", metavar="DIR"),
    ] = None,
    cache: CacheDir = None,
    json: AsJson = False,
) -> None:
    """Test this machine's hardware with a sample pipeline.

    Builds the sample, runs it on the target, compares its images with PyTorch's and times it. Reports contain no personal data.
    """
    from sdflow.errors import TargetUnavailableError, UsageError, VerificationError
    from sdflow.report.selftest import print_selftest
    from sdflow.selftest.result import read_report

    if collect is not None:
        if any(each is not None for each in (target, pipeline, report, show, engine_cache)):
            raise UsageError(
                "only reads reports", where="--collect", remedy="Leave out all other options; --json is allowed."
            )
        from sdflow.report.selftest import print_collected
        from sdflow.selftest.collect import collect as collect_reports

        collected = collect_reports(collect)
        print_collected(collected, as_json=json)
        for each in () if json else collected.left_out:
            say(f"skipped: {each.file}: {each.why}")
        return
    if show is not None:
        if any(each is not None for each in (target, pipeline, report, engine_cache)):
            raise UsageError(
                "only prints a report", where="--show", remedy="Leave out all other options; --json is allowed."
            )
        print_selftest(read_report(show), as_json=json)
        return
    from sdflow.cli.opened import open_cache
    from sdflow.cli.progress import progress_view
    from sdflow.selftest import selftest as run_selftest
    from sdflow.selftest.page import report_files, write_report

    files = () if report is None else report_files(report)  # report an unwritable name before the work
    with progress_view() as listener:
        found = run_selftest(target, open_cache(cache), listener, pipeline=pipeline, engine_cache=engine_cache)
    if files:
        write_report(found, files)
    print_selftest(found, files, as_json=json)
    if found.verdict == "unavailable":
        raise TargetUnavailableError(
            f"{found.target} is not available here",
            where="selftest",
            remedy=f"Build the sample here (sdflow run shapes --target {found.target} --copy), copy it to a machine that has "
            f"{found.target}, and run there: sdflow selftest --pipeline shapes-{found.target}.",
        )
    if found.verdict != "passed":
        raise VerificationError(
            f"the self-test of {found.target} did not pass: {found.verdict}",
            where="selftest",
            remedy="The report above names the images and nodes. --report FILE writes it for an issue.",
        )
