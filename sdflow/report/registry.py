"""Output of `sdflow push` and `sdflow pull`."""

from __future__ import annotations

from sdflow.oci import Pulled, Pushed
from sdflow.report.output import print_json, put
from sdflow.units import spell_bytes


def print_push(pushed: Pushed, *, as_json: bool, quiet: bool = False) -> None:
    """The files sent, and the digest to pull them by."""
    if as_json:
        content = {"reference": str(pushed.reference), "exact": str(pushed.exact), "sent": [*pushed.sent]}
        print_json("push", {**content, "kept": [*pushed.kept], "bytes": pushed.bytes})
    elif not quiet:
        put(f"{len(pushed.sent)} files sent, {spell_bytes(pushed.bytes)}; {len(pushed.kept)} were already there")
        put(f"{pushed.reference} is", pushed.exact, wrap=False)
    else:
        put(pushed.exact, wrap=False)


def print_pull(pulled: Pulled, *, as_json: bool, quiet: bool = False) -> None:
    """The files fetched, and their folder."""
    if as_json:
        content = {"exact": str(pulled.exact), "folder": str(pulled.folder), "fetched": [*pulled.fetched]}
        print_json("pull", {**content, "kept": [*pulled.kept], "bytes": pulled.bytes})
    elif not quiet:
        put(f"{len(pulled.fetched)} files fetched, {spell_bytes(pulled.bytes)}; {len(pulled.kept)} were already there")
        put("from", pulled.exact, f"pipeline: {pulled.folder}", wrap=False)
    else:
        put(pulled.folder, wrap=False)
