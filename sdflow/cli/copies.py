"""`sdflow cache push`, `pull`, `export` and `import` copy entries; `sdflow cache key` creates a key to sign them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sdflow.cli.arguments import AsJson, CacheDir, Trust, Url
from sdflow.cli.opened import cache_folder, open_cache, remote_of

if TYPE_CHECKING:
    from sdflow.build.chain import PlannedStep
    from sdflow.store import Cache

Workflows = Annotated[
    list[Path] | None,
    typer.Argument(
        help="Only the steps of these workflows, using the remote cache that they name.", metavar="[WORKFLOW]..."
    ),
]


def push(workflow: Workflows = None, url: Url = None, cache: CacheDir = None, json: AsJson = False) -> None:
    """Upload cached steps to a remote cache.

    Skips steps that it already has.
    """
    from sdflow.report.cache import print_pushed
    from sdflow.store.copying import copy_entries
    from sdflow.store.remote.archives import to_write

    opened, plans = _planned(cache_folder(cache), url, workflow or [])
    records = list(opened.steps()) if not workflow else [each.record for each in plans if each.record is not None]
    remote = remote_of(opened)
    with to_write(remote.spec, add=True) as place:
        there = opened if place is remote.spec else opened.at(place)  # `opened` may know entries to replace
        remote_of(there)
        copied = copy_entries(there, [record.action for record in records], up=True)
    print_pushed(copied.sent, len(records), remote.spec.shown, as_json=json)


def pull(workflow: Workflows = None, url: Url = None, cache: CacheDir = None, json: AsJson = False) -> None:
    """Download missing steps from a remote cache.

    Downloads the steps of the given workflows, or all steps.
    """
    from sdflow import stop
    from sdflow.report.cache import print_pulled
    from sdflow.store.copying import answering, copy_entries
    from sdflow.store.remote.catalog import listed

    opened, plans = _planned(cache_folder(cache), url, workflow or [])
    if workflow:
        actions = [each.action for each in plans if each.state == "remote" and each.action is not None]
    else:
        # Steps only: each machine computes its own verdicts, whatever the remote contains.
        with answering(opened.remote) as remote:
            actions = [each.entry.action for each in listed(remote.share, stop.check) if each.entry.action.of_step]
    copied = copy_entries(opened, actions, up=False)
    print_pulled(copied.new, copied.missing, remote_of(opened).spec.shown, as_json=json)


def key(file: Annotated[Path, typer.Argument(help="File to write the private key to.", metavar="FILE")]) -> None:
    """Create a key that signs what you push, and pipelines.

    Set $SDFLOW_SIGNING_KEY to its path. Prints the public key, which others pass to --trust, and writes it to FILE.pub.
    """
    from sdflow.report.output import put
    from sdflow.store.signing import make_key

    put(make_key(file), wrap=False)


def export_(
    file: Annotated[
        str, typer.Argument(help="Destination: an archive (.zip, .sdflow), a folder, or a URL.", metavar="FILE")
    ],
    structures: Annotated[
        str,
        typer.Option(
            "--structures", help="Comma-separated architectures or workflow files: sd15,sdxl,my.yaml.", metavar="NAMES"
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(
            "--target", help="Comma-separated targets: cuda,directml. Default: the workflow's.", metavar="TARGETS"
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="First verify each graph, with weights, against PyTorch.")
    ] = True,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Maximum number of steps to run in parallel.")
    ] = None,
    cache: CacheDir = None,
    json: AsJson = False,
) -> None:
    """Write optimized graphs without weights to an archive.

    `sdflow cache import` reads the archive, even on machines without torch.
    """
    from sdflow.cli.progress import progress_view
    from sdflow.report.structures import print_exported
    from sdflow.run.structures import export_structures
    from sdflow.store.signing import signer_from_environment

    signer = signer_from_environment()
    names, targets = _listed(structures), _listed(target or "")
    with progress_view() as listener:
        result = export_structures(
            names, targets, file, open_cache(cache), listener, verify=verify, jobs=jobs, signer=signer
        )
    print_exported(result, as_json=json)


def import_(
    file: Annotated[
        str, typer.Argument(help="Archive, folder, or URL written by `sdflow cache export`.", metavar="FILE")
    ],
    trust: Trust = None,
    cache: CacheDir = None,
    json: AsJson = False,
) -> None:
    """Import an archive of optimized graphs into the cache.

    Checks every digest first. Pipelines can then be built without torch.
    """
    from sdflow.report.structures import print_imported
    from sdflow.run.structures import import_structures

    print_imported(import_structures(file, open_cache(cache), trust or ()), as_json=json)


def _listed(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]


def _planned(root: Path, url: str | None, workflows: Sequence[Path]) -> tuple[Cache, list[PlannedStep]]:
    """Open the cache with its remote and plan the workflows' steps."""
    from sdflow.build.plan import make_plan
    from sdflow.config import load_workflow
    from sdflow.passes.registry import catalog

    loaded = [load_workflow(path, catalog=catalog()) for path in workflows]
    opened = open_cache(root, loaded, url=url)
    remote_of(opened)
    plans = [make_plan(each, opened) for each in loaded]
    return opened, [step for plan in plans for pipeline in plan.every for step in pipeline.steps(opened)]
