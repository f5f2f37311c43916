"""`sdflow cache`: what is in the cache, is it sound, and how to make it smaller."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Look into the cache, check it, make it smaller.", no_args_is_help=True, rich_markup_mode=None)

CacheDir = Annotated[Path, typer.Option("--cache", envvar="SDFLOW_CACHE", help="The cache's folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]


@app.command("ls")
def list_entries(cache: CacheDir = Path("cache"), json: AsJson = False) -> None:
    """List the cached steps: pass, submodel, size, when built and last used, which pipelines use it."""
    from sdflow.report import print_entries
    from sdflow.store import Cache

    print_entries(Cache(cache).entries(), as_json=json)


@app.command()
def verify(cache: CacheDir = Path("cache"), json: AsJson = False) -> None:
    """Read every file and compare its digest; what is corrupt goes to quarantine (status 3)."""
    from sdflow.errors import CacheError
    from sdflow.report import print_cache_verification
    from sdflow.store import Cache

    result = Cache(cache).verify()
    print_cache_verification(result, as_json=json)
    if result.stuck:
        raise CacheError(
            f"{len(result.damaged)} entries are damaged; {len(result.stuck)} of them cannot be moved to quarantine",
            where=str(cache),
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
        str | None, typer.Option(help="Keep at most this much, least recently used first out: 20GB, 500MB.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    cache: CacheDir = Path("cache"),
    json: AsJson = False,
) -> None:
    """Remove what nothing refers to and, with --max-size, what was used least recently. Pipelines keep theirs."""
    from sdflow.report import parse_size, print_collection
    from sdflow.store import Cache

    result = Cache(cache).gc(None if max_size is None else parse_size(max_size), dry_run=dry_run)
    print_collection(result, dry_run=dry_run, as_json=json)


@app.command()
def clean(
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    cache: CacheDir = Path("cache"),
) -> None:
    """Empty the cache. Pipelines that were built without --copy stop working."""
    from sdflow.errors import UsageError
    from sdflow.store import Cache

    if not yes and not sys.stdin.isatty():
        raise UsageError(
            f"removing everything in {cache.resolve()} wants a yes, and there is no terminal to ask",
            where="sdflow cache clean",
            remedy="Write it: --yes.",
        )
    if not yes:
        typer.confirm(f"Remove everything in the cache {cache.resolve()}?", abort=True)
    Cache(cache).clean()
    print(f"{cache} is empty")
