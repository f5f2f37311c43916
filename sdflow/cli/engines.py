"""`sdflow cache engines`: list, remove and share compiled engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from sdflow.cli.arguments import AsJson, Trust, Url
from sdflow.cli.opened import open_cache, remote_of
from sdflow.cli.terminal import must_agree


def engines(
    clear: Annotated[bool, typer.Option("--clear", help="Remove them; they are rebuilt on demand.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Skip the confirmation.")] = False,
    push: Annotated[bool, typer.Option("--push", help="Upload them to a remote cache.")] = False,
    pull: Annotated[bool, typer.Option("--pull", help="Download this machine's from a remote cache.")] = False,
    url: Url = None,
    trust: Trust = None,
    json: AsJson = False,
) -> None:
    """List, remove, or share compiled engines.

    TensorRT, TensorRT for RTX, MIGraphX and Windows ML's providers keep them in $SDFLOW_ENGINES. --pull accepts only engines
    signed with a key in --trust or $SDFLOW_ENGINES_TRUST.
    """
    from sdflow.errors import UsageError
    from sdflow.report.cache import print_engines
    from sdflow.runtime.sessions.engine_cache import engine_root
    from sdflow.runtime.sessions.engine_share import clear_on_the_way
    from sdflow.runtime.sessions.kept_engines import clear_engines, kept_engines

    root = engine_root()
    if url is not None and not (push or pull):
        raise UsageError("requires --push or --pull", where="--url", remedy="Add one of them.")
    if trust and not pull:
        raise UsageError("requires --pull", where="--trust", remedy="Add --pull, or leave out --trust.")
    if push or pull:
        _move_engines(root, push=push, pull=pull, clear=clear, url=url, trust=trust or [], json=json)
        return
    kept = kept_engines(root)
    if clear:
        must_agree(f"all engines in {root}", yes=yes, command="sdflow cache engines --clear")
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
        raise UsageError(
            "--push, --pull and --clear cannot be combined", where="sdflow cache engines", remedy="Use one of them."
        )
    signers = tuple(trust) if trust or push else trust_from_environment()
    if signers is None:
        raise UsageError(
            "no trusted signer is named, and engines are code that the driver runs",
            where="--pull",
            remedy=f"Add --trust KEY, or set {TRUST_VARIABLE} to keys, or to `{ANYBODY}` to accept all.",
        )
    remote = replace(remote_of(open_cache(root, url=url)).spec, trust=signers)
    moved = push_engines(root, remote) if push else pull_engines(root, remote, machines_here())
    print_moved_engines(moved, remote.shown, pushed=push, as_json=json)
