"""`sdflow cache`: list, verify and shrink the cache."""

from __future__ import annotations

from typing import Annotated

import typer

from sdflow.cli.arguments import AsJson, CacheDir, Url
from sdflow.cli.copies import export_, import_, key, pull, push
from sdflow.cli.engines import engines
from sdflow.cli.group import CacheCommands
from sdflow.cli.opened import cache_folder, open_cache, remote_of
from sdflow.cli.terminal import must_agree

app = typer.Typer(
    cls=CacheCommands, help="List, check, share and shrink the cache.", no_args_is_help=True, rich_markup_mode=None
)
app.command()(push)
app.command()(pull)
app.command()(key)
app.command("export")(export_)
app.command("import")(import_)
app.command()(engines)


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

    with answering(remote_of(open_cache(cache, url=url))) as remote_cache:
        entries = listed(remote_cache.share, stop.check)
        claims = remote_cache.claims(each.entry.object for each in entries)
        print_remote_entries(entries, claims, remote_cache.spec.shown, as_json=json)


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
            remedy="No build uses them. Make the cache writable and verify again; check the disk if this recurs.",
        )
    if result.damaged:
        raise CacheError(
            f"{len(result.damaged)} damaged entries were moved to quarantine",
            remedy="the next `sdflow run` rebuilds them; check the disk if this recurs",
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
            raise UsageError(
                "a remote cache can only be shrunk by the age of its entries",
                where="--remote",
                remedy="Add --older-than 30d.",
            )
        with answering(remote_of(open_cache(cache, url=url))) as remote_cache:
            swept = sweep(remote_cache.share, parse_age(older_than), dry_run=dry_run, meanwhile=stop.check)
        print_swept(swept, remote_cache.spec.shown, dry_run=dry_run, as_json=json)
        return
    if older_than is not None or url is not None:
        raise UsageError("requires --remote", where="--older-than" if older_than else "--url", remedy="Add --remote.")
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
    must_agree(f"everything in {root.resolve()}", yes=yes, command="sdflow cache clean")
    Cache(root).clean()
    put(f"{root} is empty")
