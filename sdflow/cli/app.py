"""The commands and their options. Each body imports what it needs, so that `--help` is quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from sdflow import __version__
from sdflow.cli.bench import bench, tune
from sdflow.cli.cache import app as cache_app
from sdflow.cli.deploy import deploy, query, status, terminate
from sdflow.cli.export import export
from sdflow.cli.generate import generate
from sdflow.cli.inspect import init, inspect
from sdflow.cli.needs import needs
from sdflow.cli.opened import open_cache
from sdflow.cli.selftest import selftest
from sdflow.cli.serve import serve

app = typer.Typer(
    name="sdflow",
    help="Build, cache, verify and measure Stable Diffusion pipelines on ONNX Runtime, from YAML workflows.",
    epilog="Exit status: 0 done; 1 `doctor` found something; 2 bad usage or workflow; 3 a pass failed; 4 verification failed; "
    "5 the target is not available and was required; 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # half the time of `--help`
    pretty_exceptions_enable=False,
)
app.add_typer(cache_app, name="cache")
app.command()(generate)
app.command()(export)
app.command()(bench)
app.command()(tune)
app.command()(inspect)
app.command()(init)
app.command()(serve)
app.command()(deploy)
app.command()(query)
app.command()(status)
app.command()(terminate)
app.command()(selftest)

Workflows = Annotated[list[Path], typer.Argument(help="Workflow files (YAML).", metavar="WORKFLOW...")]
OneWorkflow = Annotated[Path, typer.Argument(help="Workflow file (YAML).", metavar="WORKFLOW")]
Targets = Annotated[
    list[str] | None, typer.Option("--target", help="Build for this target instead of the workflow's. Repeatable.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a value: unet.passes.2.opt_level=0, model=synthetic:sd15. Repeatable."),
]
CacheDir = Annotated[Path, typer.Option("--cache", envvar="SDFLOW_CACHE", help="The cache's folder.")]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        min=1,
        help="Steps that may run at a time, memory permitting. Default: 2, and 1 for steps that carry weights.",
        show_default=False,
    ),
]
Rehash = Annotated[
    bool, typer.Option("--rehash", help="Read every file again; believe no digest that was noted with a file's time.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(__version__)


@app.command()
def run(
    workflow: OneWorkflow,
    target: Targets = None,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Folder for the pipelines, one folder each.")] = Path("pipelines"),
    copy: Annotated[bool, typer.Option("--copy", help="Copy the models in, so that the folder stands alone.")] = False,
    clean_cache: Annotated[
        bool,
        typer.Option("--clean_cache", "--clean-cache", help="Build every step of this workflow anew."),
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Build cached steps again and compare the digests; replaces nothing.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify/--no-verify", help="Hold the artifacts to the PyTorch model, as the workflow says."),
    ] = True,
    evaluate: Annotated[
        bool, typer.Option("--evaluate/--no-evaluate", help="Measure latency and draw the workflow's image.")
    ] = True,
    require_target: Annotated[
        bool, typer.Option("--require-target", help="Fail (status 5) if the target's provider is not on this machine.")
    ] = False,
    keep_failed: Annotated[
        bool, typer.Option("--keep-failed", help="Keep the unfinished files of a pass that failed.")
    ] = False,
    jobs: Jobs = None,
    on: Annotated[
        str | None,
        typer.Option("--on", help="Run the steps on a Ray cluster: ray, or ray://HOST:PORT.", metavar="CLUSTER"),
    ] = None,
    results: Annotated[Path, typer.Option(help="Folder for the measurements (JSON lines) and images.")] = Path(
        "results"
    ),
    rehash: Rehash = False,
    cache: CacheDir = Path("cache"),
    json: AsJson = False,
) -> None:
    """Build what is not cached, verify it, assemble the pipelines, and measure them."""
    from sdflow.cli.progress import progress_view
    from sdflow.report import print_run
    from sdflow.run.run import RunOptions, run_workflow

    options = RunOptions(
        out=out,
        results=results,
        copy=copy,
        rebuild=clean_cache,
        check=check,
        verify=verify,
        evaluate=evaluate,
        require_target=require_target,
        keep_failed=keep_failed,
        jobs=jobs,
        on=on,
    )
    with progress_view() as listener:
        loaded = _load(workflow, overrides, target)
        result = run_workflow(loaded, open_cache(cache, [loaded], rehash=rehash), options, listener)
    print_run(result, as_json=json)


@app.command()
@needs("REFERENCE")
def verify(
    subject: Annotated[list[Path], typer.Argument(help="Pipeline folders or workflow files.", metavar="PIPELINE...")],
    target: Targets = None,
    overrides: Overrides = None,
    full: Annotated[
        bool, typer.Option("--full/--quick", help="More steps, shapes and prompts, one at the model's own size.")
    ] = True,
    submodel: Annotated[
        list[str] | None, typer.Option("--submodel", help="Only this submodel, and no image. Repeatable.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Verify even what passed before.")] = False,
    fix: Annotated[
        bool,
        typer.Option(
            "--fix", help="If float16 overflows, or int8 is beyond its limit: find the smallest set of nodes to keep."
        ),
    ] = False,
    run_on: Annotated[
        str | None,
        typer.Option(
            "--run-on",
            help="Run the artifacts on this target too, with its provider's own kernels. It must be here.",
            metavar="TARGET",
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write the report, one self-contained page.")] = None,
    out: Annotated[Path, typer.Option(help="The folder of the pipelines that workflows build.")] = Path("pipelines"),
    rehash: Rehash = False,
    cache: CacheDir = Path("cache"),
    json: AsJson = False,
) -> None:
    """Prove that pipelines compute what the PyTorch model computes, for any target, on this machine's CPU."""
    from sdflow.cli.verify import verify_all

    verify_all(
        subject,
        open_cache(cache, rehash=rehash),
        load=lambda path: _load(path, overrides, target),
        targets=target or [],
        full=full,
        submodels=submodel,
        fresh=fresh,
        propose=fix,
        run_on=run_on,
        html=html,
        out=out,
        as_json=json,
    )


@app.command()
def bake(
    base: Annotated[
        Path, typer.Option("--base", help="A pipeline folder that sdflow built; LoRAs that it has stay.", metavar="DIR")
    ],
    lora: Annotated[
        list[str],
        typer.Option(
            "--lora",
            help="A LoRA and its scale (default 1.0). FILE: a .safetensors file, a folder, hf:owner/name; with #NAME where a "
            "folder or repository holds several. Repeatable.",
            metavar="FILE:SCALE",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="The folder of the new pipeline.", metavar="DIR")],
    copy: Annotated[bool, typer.Option("--copy", help="Copy the models in, so that the folder stands alone.")] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Hold the result to the PyTorch model with the LoRAs merged; the report goes to --results."
        ),
    ] = False,
    results: Annotated[Path, typer.Option("--results", help="Folder for the report of --verify.")] = Path("results"),
    jobs: Jobs = None,
    rehash: Rehash = False,
    cache: CacheDir = Path("cache"),
    json: AsJson = False,
) -> None:
    """Merge LoRAs into a pipeline that was built before. Needs no workflow, exports and fuses nothing again."""
    from sdflow.cli.progress import progress_view
    from sdflow.report import print_bake
    from sdflow.run.bake import bake as bake_pipeline

    with progress_view() as listener:
        result = bake_pipeline(
            base,
            lora,
            out,
            open_cache(cache, rehash=rehash),
            listener,
            copy=copy,
            jobs=jobs,
            verify=verify,
            results=results,
        )
    print_bake(result, as_json=json)


@app.command()
def plan(
    workflow: Workflows,
    target: Targets = None,
    overrides: Overrides = None,
    cache: CacheDir = Path("cache"),
    json: AsJson = False,
) -> None:
    """Show every step as cached or to run, with the reason. Builds nothing."""
    from sdflow.build.plan import make_plan
    from sdflow.report import print_plan

    loaded = [_load(path, overrides, target) for path in workflow]
    opened = open_cache(cache, loaded)
    print_plan([make_plan(each, opened) for each in loaded], opened, as_json=json)


@app.command()
def explain(
    workflow: Workflows,
    step: Annotated[
        str | None, typer.Option(help="Only steps whose name contains this: unet, sd15_cuda/unet/2.")
    ] = None,
    target: Targets = None,
    overrides: Overrides = None,
    cache: CacheDir = Path("cache"),
    json: AsJson = False,
) -> None:
    """Say what changed in each step since it was last built."""
    from sdflow.build.plan import make_plan
    from sdflow.report import print_explanation

    loaded = [_load(path, overrides, target) for path in workflow]
    opened = open_cache(cache, loaded)
    plans = [make_plan(each, opened) for each in loaded]
    print_explanation(plans, opened, only=step, as_json=json)


@app.command()
def validate(workflow: Workflows, target: Targets = None, overrides: Overrides = None, json: AsJson = False) -> None:
    """Check workflows and the models that they name; report every mistake with file, line and column."""
    from sdflow.build.model_check import model_problems
    from sdflow.build.plan import lora_problems
    from sdflow.errors import Problem, WorkflowError
    from sdflow.report import print_validation

    problems: list[Problem] = []
    valid: dict[str, list[str]] = {}
    for path in workflow:
        try:
            loaded = _load(path, overrides, target)
        except WorkflowError as error:
            problems.extend(error.problems)
        else:
            if found := [*model_problems(loaded), *lora_problems(loaded)]:
                problems.extend(found)
            else:
                valid[str(path)] = [pipeline.name for pipeline in loaded.pipelines]
    print_validation(valid, problems, as_json=json)
    if problems:
        raise WorkflowError(problems)


@app.command()
def schema() -> None:
    """Print the JSON Schema of workflows, for editors."""
    import json

    from sdflow.config import json_schema
    from sdflow.passes.registry import catalog

    print(json.dumps(json_schema(catalog()), indent=2))


@app.command()
def passes(
    name: Annotated[str | None, typer.Argument(help="Show the options of this pass.")] = None,
    olive: Annotated[bool, typer.Option("--olive", help="List olive-ai's other passes as well.")] = False,
    json: AsJson = False,
) -> None:
    """List the passes, or the options of one."""
    from sdflow.report import print_passes

    print_passes(name, olive=olive, as_json=json)


@app.command()
def targets(json: AsJson = False) -> None:
    """List the targets: which execution providers this machine has, and why not the others."""
    from sdflow.report import print_targets
    from sdflow.runtime.sessions.availability import target_availability

    print_targets(target_availability(), as_json=json)


@app.command()
def doctor(cache: CacheDir = Path("cache"), json: AsJson = False) -> None:
    """Check this machine: versions known to break, disk, memory, the cache; and say what to do."""
    from sdflow.report import print_diagnoses
    from sdflow.selftest.doctor import diagnose

    diagnoses = diagnose(open_cache(cache))
    print_diagnoses(diagnoses, as_json=json)
    if any(each.level == "error" for each in diagnoses):
        sys.exit(1)


def _load(path: Path, overrides: list[str] | None, targets: list[str] | None):  # type: ignore[no-untyped-def]
    from sdflow.config import load_workflow
    from sdflow.passes.registry import catalog

    return load_workflow(path, catalog=catalog(), overrides=overrides or (), targets=targets or ())
