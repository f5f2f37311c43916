"""The commands and their options. Each body imports what it needs, to keep `--help` fast."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sdflow import __version__
from sdflow.cli.arguments import AsJson, CacheDir, OneWorkflow, Overrides, Quiet, Rehash, Targets, Verbose, Workflows
from sdflow.cli.bake import bake
from sdflow.cli.bench import bench, tune
from sdflow.cli.cache import app as cache_app
from sdflow.cli.deploy import deploy, query, status, terminate
from sdflow.cli.export import export
from sdflow.cli.generate import generate
from sdflow.cli.group import Commands
from sdflow.cli.help import CACHE_GROUPS, EXIT_STATUS, GROUPS, arrange
from sdflow.cli.inspect import init, inspect
from sdflow.cli.opened import load, made_here, open_cache
from sdflow.cli.options import takes
from sdflow.cli.registry import provenance, pull, push
from sdflow.cli.selftest import selftest
from sdflow.cli.serve import serve
from sdflow.cli.sign import sign
from sdflow.cli.verify import verify
from sdflow.parameter import parameters
from sdflow.run.options import RunOptions

if TYPE_CHECKING:
    from sdflow.build.plan import Plan

app = typer.Typer(
    name="sdflow",
    cls=Commands,
    help="Build, cache, verify and measure pipelines of image models on ONNX Runtime, from YAML workflows.",
    epilog=f"Exit status: {EXIT_STATUS}",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # half the time of `--help`
    pretty_exceptions_enable=False,
)
app.add_typer(cache_app, name="cache")
app.command()(generate)
app.command()(export)
app.command()(bake)
app.command()(sign)
app.command()(bench)
app.command()(tune)
app.command()(inspect)
app.command()(init)
app.command()(provenance)
app.command()(push)
app.command()(pull)
app.command()(serve)
app.command()(deploy)
app.command()(query)
app.command()(status)
app.command()(terminate)
app.command()(selftest)
app.command()(verify)

RUN = parameters(RunOptions)


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(__version__)


@app.command()
@takes(RUN)
def run(
    workflow: OneWorkflow,
    target: Targets = None,
    overrides: Overrides = None,
    rehash: Rehash = False,
    cache: CacheDir = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    json: AsJson = False,
    **given: Any,
) -> None:
    """Build, verify and measure the pipelines of a workflow.

    Only steps that are not cached are built. Each pipeline is verified against PyTorch and then assembled as a folder.
    """
    import shlex

    from sdflow.cli.progress import progress_view
    from sdflow.report.run import print_run, to_build
    from sdflow.report.run_page import write_run_page
    from sdflow.run.run import run_workflow

    options = RunOptions(**given)
    with progress_view(quiet=quiet, verbose=verbose) as listener:
        loaded = load(workflow, overrides, target)
        if made := made_here(cache):
            listener.note(made)
        opened = open_cache(cache, [loaded], rehash=rehash)

        def planned(plan: Plan) -> None:
            if said := to_build(plan, opened, options):
                listener.note(said)

        result = run_workflow(loaded, opened, options, listener, planned)
    pages: dict[str, Path] = {}
    try:
        for each in result.pipelines:
            if each.verification is not None or each.evaluation is not None:
                pages[each.plan.pipeline.name] = write_run_page(each, options.results)
    finally:  # what was built is reported even if a page cannot be written
        again = shlex.join(["sdflow", *sys.argv[1:]])
        print_run(result, pages, as_json=json, again=again, quiet=quiet, verbose=verbose)


@app.command()
def plan(
    workflow: Workflows,
    target: Targets = None,
    overrides: Overrides = None,
    cache: CacheDir = None,
    locked: Annotated[
        bool, typer.Option("--locked", help="Refuse inputs that differ from WORKFLOW.lock, which `sdflow lock` writes.")
    ] = False,
    device_memory: Annotated[
        str | None,
        typer.Option(
            "--device-memory",
            help="Show whether the pipelines fit in this much device memory, such as 8GB. Default: this machine's card.",
            metavar="SIZE",
        ),
    ] = None,
    verbose: Verbose = False,
    json: AsJson = False,
) -> None:
    """Show which steps are cached and which would run, and why.

    Also tells whether the pipelines will fit the device. Builds nothing.
    """
    from sdflow.build.lock import locked_plan
    from sdflow.build.plan import make_plan
    from sdflow.fits.device import device_for
    from sdflow.report.build import print_plan
    from sdflow.units import parse_size

    loaded = [load(path, overrides, target) for path in workflow]
    opened = open_cache(cache, loaded)
    plans = [(locked_plan if locked else make_plan)(each, opened) for each in loaded]
    device = device_for(parse_size(device_memory, "--device-memory") if device_memory is not None else None)
    print_plan(plans, opened, device, as_json=json, verbose=verbose)


@app.command()
def lock(
    workflow: Workflows,
    target: Targets = None,
    overrides: Overrides = None,
    rehash: Rehash = False,
    cache: CacheDir = None,
    quiet: Quiet = False,
    json: AsJson = False,
) -> None:
    """Lock a workflow to its inputs.

    Writes digests and hub commits to WORKFLOW.lock; `sdflow run --locked` then builds from nothing else.
    """
    from sdflow.build.lock import write_lock
    from sdflow.cli.progress import progress_view
    from sdflow.report.build import print_locks

    loaded = [load(path, overrides, target) for path in workflow]
    with progress_view(quiet=quiet, verbose=False):
        written = [write_lock(each, open_cache(cache, [each], rehash=rehash)) for each in loaded]
    print_locks(written, as_json=json, quiet=quiet)


@app.command()
def explain(
    workflow: Workflows,
    step: Annotated[
        str | None, typer.Option(help="Only steps whose name contains this, such as unet or sd15_cuda/unet/2.")
    ] = None,
    target: Targets = None,
    overrides: Overrides = None,
    cache: CacheDir = None,
    json: AsJson = False,
) -> None:
    """Explain what changed in each step since it was last built."""
    from sdflow.build.plan import make_plan
    from sdflow.report.build import print_explanation

    loaded = [load(path, overrides, target) for path in workflow]
    opened = open_cache(cache, loaded)
    plans = [make_plan(each, opened) for each in loaded]
    print_explanation(plans, opened, only=step, as_json=json)


@app.command()
def validate(workflow: Workflows, target: Targets = None, overrides: Overrides = None, json: AsJson = False) -> None:
    """Check workflows and the models they name.

    Reports every mistake with file, line and column.
    """
    from sdflow.build.model_check import input_problems
    from sdflow.errors import Problem, WorkflowError
    from sdflow.report.build import print_validation

    problems: list[Problem] = []
    valid: dict[str, list[str]] = {}
    for path in workflow:
        try:
            loaded = load(path, overrides, target)
        except WorkflowError as error:
            problems.extend(error.problems)
        else:
            if found := input_problems(loaded):
                problems.extend(found)
            else:
                valid[str(path)] = [pipeline.name for pipeline in loaded.pipelines]
    print_validation(valid, problems, as_json=json)
    if problems:
        raise WorkflowError(problems)


@app.command()
def schema(
    name: Annotated[
        str, typer.Argument(help="workflow, run (what `run --json` prints), or lock.", show_default=True)
    ] = "workflow",
) -> None:
    """Print the JSON Schema of workflows, results or locks."""
    import json

    from sdflow.config import json_schema
    from sdflow.passes.registry import catalog

    if name == "workflow":
        found = json_schema(catalog())
    else:
        from sdflow.report.schemas import schema_named

        found = schema_named(name)
    print(json.dumps(found, indent=2))


@app.command()
def passes(
    name: Annotated[str | None, typer.Argument(help="Show the options of this pass.")] = None,
    olive: Annotated[bool, typer.Option("--olive", help="Also list the other passes of olive-ai.")] = False,
    json: AsJson = False,
) -> None:
    """List all passes, or the options of one pass."""
    from sdflow.report.machine import print_passes

    print_passes(name, olive=olive, as_json=json)


@app.command()
def targets(json: AsJson = False) -> None:
    """List the targets and which of them run on this machine."""
    from sdflow.report.machine import print_targets
    from sdflow.runtime.sessions.availability import target_availability

    print_targets(target_availability(), as_json=json)


@app.command()
def doctor(cache: CacheDir = None, json: AsJson = False) -> None:
    """Check this machine for known problems and suggest fixes.

    Looks at installed versions, disk, memory and the cache.
    """
    from sdflow.report.machine import print_diagnoses
    from sdflow.selftest.doctor import diagnose

    diagnoses = diagnose(open_cache(cache))
    print_diagnoses(diagnoses, as_json=json)
    if any(each.level == "error" for each in diagnoses):
        sys.exit(1)


arrange(app, GROUPS)
arrange(cache_app, CACHE_GROUPS)
