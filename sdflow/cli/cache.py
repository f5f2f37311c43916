"""`sdflow cache`: what is in the cache, is it sound, and how to make it smaller."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sdflow.cli.arguments import AsJson, CacheDir
from sdflow.cli.group import CacheCommands
from sdflow.cli.opened import cache_folder, open_cache
from sdflow.cli.quiet import say

if TYPE_CHECKING:
    from sdflow.build.chain import PlannedStep
    from sdflow.store import Cache
    from sdflow.store.remote import Remote

app = typer.Typer(
    cls=CacheCommands, help="List, check, share and shrink the cache.", no_args_is_help=True, rich_markup_mode=None
)

Url = Annotated[
    str | None,
    typer.Option("--url", help="Remote cache: a URL or a folder. Default: $SDFLOW_REMOTE_CACHE.", metavar="URL"),
]
Workflows = Annotated[
    list[Path] | None,
    typer.Argument(help="Only the steps of these workflows, with the remote cache they name.", metavar="[WORKFLOW]..."),
]


@app.command("ls")
def list_entries(
    remote: Annotated[bool, typer.Option("--remote", help="List the remote cache.")] = False,
    url: Url = None,
    cache: CacheDir = None,
    json: AsJson = False,
) -> None:
    """List the cached steps, and which pipelines use them."""
    from sdflow.report.cache import print_entries, print_remote_entries
    from sdflow.store import Cache

    if not remote and url is None:
        print_entries(Cache(cache_folder(cache)).entries(), as_json=json)
        return
    from sdflow import stop
    from sdflow.store.copying import answering
    from sdflow.store.remote.catalog import listed

    with answering(_shared(cache_folder(cache), url)) as remote_cache:
        entries = listed(remote_cache.share, stop.check)
        claims = remote_cache.claims(each.entry.object for each in entries)
        print_remote_entries(entries, claims, remote_cache.spec.shown, as_json=json)


@app.command()
def push(workflow: Workflows = None, url: Url = None, cache: CacheDir = None, json: AsJson = False) -> None:
    """Upload cached steps to a remote cache.

    Skips what is already there.
    """
    from sdflow.report.cache import print_pushed
    from sdflow.store.copying import copy_entries
    from sdflow.store.remote.archives import to_write

    opened, plans = _planned(cache_folder(cache), url, workflow or [])
    records = list(opened.steps()) if not workflow else [each.record for each in plans if each.record is not None]
    remote = _remote_of(opened)
    with to_write(remote.spec, add=True) as place:
        there = opened if place is remote.spec else opened.at(place)  # it may know already what is to be replaced
        _remote_of(there)
        copied = copy_entries(there, [record.action for record in records], up=True)
    print_pushed(copied.sent, len(records), remote.spec.shown, as_json=json)


@app.command()
def pull(workflow: Workflows = None, url: Url = None, cache: CacheDir = None, json: AsJson = False) -> None:
    """Download missing steps from a remote cache.

    Those of the given workflows, or everything.
    """
    from sdflow import stop
    from sdflow.report.cache import print_pulled
    from sdflow.store.copying import answering, copy_entries
    from sdflow.store.remote.catalog import listed

    opened, plans = _planned(cache_folder(cache), url, workflow or [])
    if workflow:
        actions = [each.action for each in plans if each.state == "remote" and each.action is not None]
    else:
        # Steps alone: a verdict is each machine's own, whatever somebody has put there.
        with answering(opened.remote) as remote:
            actions = [each.entry.action for each in listed(remote.share, stop.check) if each.entry.action.of_step]
    copied = copy_entries(opened, actions, up=False)
    print_pulled(copied.new, copied.missing, _remote_of(opened).spec.shown, as_json=json)


@app.command()
def key(file: Annotated[Path, typer.Argument(help="File to write the private key to.", metavar="FILE")]) -> None:
    """Create a key that signs what you push, and pipelines.

    Set $SDFLOW_SIGNING_KEY to its file. Prints the public key, for those who should trust it, and writes it to FILE.pub.
    """
    from sdflow.report.output import put
    from sdflow.store.signing import make_key

    put(make_key(file), wrap=False)


@app.command("export")
def export_(
    file: Annotated[
        str, typer.Argument(help="Where to write: an archive (.zip, .sdflow), a folder, or a URL.", metavar="FILE")
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
        bool, typer.Option("--verify/--no-verify", help="Verify each against PyTorch first, with weights bound.")
    ] = True,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Maximum number of steps to run in parallel.")
    ] = None,
    cache: CacheDir = None,
    json: AsJson = False,
) -> None:
    """Write optimized graphs without weights to an archive.

    `sdflow cache import` reads it, on machines without torch too.
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


@app.command("import")
def import_(
    file: Annotated[
        str, typer.Argument(help="Where `sdflow cache export` wrote: an archive, a folder, or a URL.", metavar="FILE")
    ],
    trust: Annotated[
        list[str] | None,
        typer.Option(
            "--trust", help="Import only what this key, certificate, or identity signed. Repeatable.", metavar="KEY"
        ),
    ] = None,
    cache: CacheDir = None,
    json: AsJson = False,
) -> None:
    """Import an archive of optimized graphs into the cache.

    Checks every digest first. Pipelines are then built without torch.
    """
    from sdflow.report.structures import print_imported
    from sdflow.run.structures import import_structures

    print_imported(import_structures(file, open_cache(cache), trust or ()), as_json=json)


def _listed(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]


def _planned(root: Path, url: str | None, workflows: Sequence[Path]) -> tuple[Cache, list[PlannedStep]]:
    """The cache with its remote, and the steps of workflows."""
    from sdflow.build.plan import make_plan
    from sdflow.config import load_workflow
    from sdflow.passes.registry import catalog

    loaded = [load_workflow(path, catalog=catalog()) for path in workflows]
    opened = open_cache(root, loaded, url=url)
    _remote_of(opened)
    plans = [make_plan(each, opened) for each in loaded]
    return opened, [step for plan in plans for pipeline in plan.every for step in pipeline.steps(opened)]


def _shared(root: Path, url: str | None) -> Remote:
    return _remote_of(open_cache(root, url=url))


def _remote_of(cache: Cache) -> Remote:
    """Raises UsageError where none is named. What it has to say goes to standard error."""
    from sdflow.errors import UsageError

    if cache.remote is None:
        raise UsageError(
            "no remote cache is named",
            where="sdflow cache",
            remedy="Give --url, set SDFLOW_REMOTE_CACHE, or name a workflow that has `cache: {remote: …}`.",
        )
    cache.remote.tell = say
    return cache.remote


@app.command()
def verify(cache: CacheDir = None, json: AsJson = False) -> None:
    """Check every cached file against its digest.

    Moves corrupt entries to quarantine and exits with status 3.
    """
    from sdflow.errors import CacheError
    from sdflow.report.cache import print_cache_verification
    from sdflow.store import Cache

    result = Cache(cache_folder(cache)).verify()
    print_cache_verification(result, as_json=json)
    if result.stuck:
        raise CacheError(
            f"{len(result.damaged)} entries are damaged; {len(result.stuck)} of them cannot be moved to quarantine",
            where=str(cache_folder(cache)),
            remedy="No build uses them. Make the cache writable and verify again; check the disk if this comes back.",
        )
    if result.damaged:
        raise CacheError(
            f"{len(result.damaged)} damaged entries were moved to quarantine",
            remedy="the next `sdflow run` builds them again; check the disk if this happens more than once",
        )


@app.command()
def gc(
    max_size: Annotated[
        str | None,
        typer.Option(help="Evict the least recently used entries above this size: 20GB, 500MB.", metavar="SIZE"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
    remote: Annotated[bool, typer.Option("--remote", help="Shrink the remote cache; requires --older-than.")] = False,
    older_than: Annotated[
        str | None,
        typer.Option(help="With --remote: remove entries pushed longer ago than this: 30d, 12h.", metavar="AGE"),
    ] = None,
    url: Url = None,
    cache: CacheDir = None,
    json: AsJson = False,
) -> None:
    """Remove unused entries, or shrink the cache to a size.

    Entries that pipelines link to are kept.
    """
    from sdflow.errors import UsageError
    from sdflow.report.cache import print_collection, print_swept
    from sdflow.store import Cache
    from sdflow.units import parse_age, parse_size

    if remote:
        from sdflow import stop
        from sdflow.store.copying import answering
        from sdflow.store.remote.catalog import sweep

        if older_than is None or max_size is not None:
            raise UsageError("a remote cache is shrunk by age", where="--remote", remedy="Give --older-than 30d.")
        with answering(_shared(cache_folder(cache), url)) as remote_cache:
            swept = sweep(remote_cache.share, parse_age(older_than), dry_run=dry_run, meanwhile=stop.check)
        print_swept(swept, remote_cache.spec.shown, dry_run=dry_run, as_json=json)
        return
    if older_than is not None or url is not None:
        raise UsageError("belongs to --remote", where="--older-than" if older_than else "--url", remedy="Add --remote.")
    result = Cache(cache_folder(cache)).gc(None if max_size is None else parse_size(max_size), dry_run=dry_run)
    print_collection(result, dry_run=dry_run, as_json=json)


@app.command()
def clean(
    yes: Annotated[bool, typer.Option("--yes", help="Skip the confirmation.")] = False, cache: CacheDir = None
) -> None:
    """Remove everything from the cache.

    Pipelines built without --copy stop working.
    """
    from sdflow.report.output import put
    from sdflow.store import Cache

    root = cache_folder(cache)
    _must_agree(f"everything in {root.resolve()}", yes=yes, command="sdflow cache clean")
    Cache(root).clean()
    put(f"{root} is empty")


@app.command()
def engines(
    clear: Annotated[bool, typer.Option("--clear", help="Remove them; they are rebuilt on demand.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Skip the confirmation.")] = False,
    push: Annotated[bool, typer.Option("--push", help="Upload them to a remote cache.")] = False,
    pull: Annotated[bool, typer.Option("--pull", help="Download this machine's from a remote cache.")] = False,
    url: Url = None,
    trust: Annotated[
        list[str] | None,
        typer.Option(
            "--trust",
            help="Download only what this key, certificate, or identity signed. Repeatable. Default: $SDFLOW_ENGINES_TRUST.",
            metavar="KEY",
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """List, remove, or share compiled engines.

    TensorRT, TensorRT for RTX, MIGraphX and Windows ML's providers keep them in $SDFLOW_ENGINES.
    """
    from sdflow.errors import UsageError
    from sdflow.report.cache import print_engines
    from sdflow.runtime.sessions.engine_cache import engine_root
    from sdflow.runtime.sessions.engine_share import clear_on_the_way
    from sdflow.runtime.sessions.kept_engines import clear_engines, kept_engines

    root = engine_root()
    if url is not None and not (push or pull):
        raise UsageError("belongs to --push and --pull", where="--url", remedy="Add one of them.")
    if trust and not pull:
        raise UsageError("belongs to --pull", where="--trust", remedy="Leave it out.")
    if push or pull:
        _move_engines(root, push=push, pull=pull, clear=clear, url=url, trust=trust or [], json=json)
        return
    kept = kept_engines(root)
    if clear:
        _must_agree(f"all engines in {root}", yes=yes, command="sdflow cache engines --clear")
        clear_engines(kept)
        clear_on_the_way(root)
    print_engines(kept, root, removed=clear, as_json=json)


def _move_engines(
    root: Path, *, push: bool, pull: bool, clear: bool, url: str | None, trust: list[str], json: bool
) -> None:
    from sdflow.errors import UsageError
    from sdflow.report.cache import print_moved_engines
    from sdflow.runtime.sessions.engine_share import (
        ANYBODY,
        TRUST_VARIABLE,
        machines_here,
        pull_engines,
        push_engines,
        trust_from_environment,
    )

    if push + pull + clear > 1:
        raise UsageError("--push, --pull and --clear are one at a time", where="sdflow cache engines")
    signers = tuple(trust) if trust or push else trust_from_environment()
    if signers is None:
        raise UsageError(
            "nobody is named whose engines to take, and an engine is code that the driver runs",
            where="--pull",
            remedy=f"Add --trust KEY, or set {TRUST_VARIABLE} to keys, or to `{ANYBODY}`.",
        )
    remote = replace(_shared(root, url).spec, trust=signers)
    moved = push_engines(root, remote) if push else pull_engines(root, remote, machines_here())
    print_moved_engines(moved, remote.shown, pushed=push, as_json=json)


def _must_agree(what: str, *, yes: bool, command: str) -> None:
    """Asks, unless the answer was given. Raises UsageError where nobody can be asked."""
    from sdflow.errors import UsageError

    if not yes and not sys.stdin.isatty():
        raise UsageError(
            f"removing {what} needs a confirmation, and there is no terminal to ask", where=command, remedy="Add --yes."
        )
    if not yes:
        typer.confirm(f"Remove {what}?", abort=True)
