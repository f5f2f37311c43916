"""Output of `sdflow cache`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from sdflow.artifact import Record
from sdflow.report.output import print_json, print_table, put
from sdflow.runtime.sessions.engine_share import Moved
from sdflow.runtime.sessions.kept_engines import KeptEngines
from sdflow.store import Entry, GcReport, VerifyReport
from sdflow.store.remote.catalog import Listed, Swept
from sdflow.store.remote.trust import Claim
from sdflow.store.remote.up import Sent
from sdflow.units import spell_bytes


def print_entries(entries: Sequence[Entry], *, as_json: bool) -> None:
    """Every finished step, most recently used first."""
    if as_json:
        print_json("cache entries", {"entries": [asdict(entry) for entry in entries]})
        return
    rows = [
        (
            entry.action[:12],
            entry.submodel,
            f"{entry.pass_name} ({entry.quantized})" if entry.quantized else entry.pass_name,
            spell_bytes(entry.bytes),
            _date(entry.published),
            _date(entry.last_used),
            ", ".join(entry.pinned_by),
        )
        for entry in sorted(entries, key=lambda entry: -entry.last_used)
    ]
    print_table("", ("action", "submodel", "pass", "size", "built", "last used", "used by"), rows, right=("size",))
    objects = {entry.object: entry.bytes for entry in entries}
    put(f"{len(entries)} entries, {spell_bytes(sum(objects.values()))} in {len(objects)} objects")


def _date(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))


def print_cache_verification(report: VerifyReport, *, as_json: bool) -> None:
    """The counts of checked entries, and damaged files."""
    if as_json:
        damaged = [{"path": str(path), "what": what} for path, what in report.damaged]
        print_json(
            "cache verification",
            {"objects": report.objects, "actions": report.actions, "bytes": report.bytes, "damaged": damaged},
        )
        return
    for path, what in report.damaged:
        put(f"damaged: {path}: {what}")
    put(f"intact: {report.actions} actions, {report.objects} objects, {spell_bytes(report.bytes)}")


def print_collection(report: GcReport, *, dry_run: bool, as_json: bool) -> None:
    """The entries removed, or to be removed."""
    if as_json:
        print_json("cache collection", {"dry_run": dry_run, **asdict(report)})
        return
    done = "would remove" if dry_run else "removed"
    for entry in report.removed:
        put(f"{done} {entry.action[:12]} {entry.submodel} {entry.pass_name}, last used {_date(entry.last_used)}")
    put(
        f"{done} {len(report.removed)} entries, {report.orphans} unreferenced objects and {report.rubbish} leftovers; "
        f"{spell_bytes(report.bytes_freed)} freed, {spell_bytes(report.bytes_kept)} kept"
    )
    if report.over:
        put(f"{spell_bytes(report.over)} above the limit were kept, because pipelines or running builds use them")


def print_remote_entries(
    entries: Sequence[Listed], claims: Mapping[str, Sequence[Claim]], remote: str, *, as_json: bool
) -> None:
    """Every finished step of a remote cache. claims: object -> who claims to have verified it."""
    if as_json:
        print_json(
            "remote cache entries",
            {
                "remote": remote,
                "entries": [
                    {
                        "action": each.entry.action.digest,
                        "object": each.entry.object,
                        "pass_name": _pass(each),
                        "submodel": str(each.entry.action.content.get("submodel", "?")),
                        "bytes": each.bytes,
                        "pushed": each.pushed,
                        "verified": [asdict(said) for said in claims.get(each.entry.object, ())],
                    }
                    for each in entries
                ],
            },
        )
        return
    rows = [
        (
            each.entry.action.digest[:12],
            str(each.entry.action.content.get("submodel", "?")),
            _pass(each),
            "files missing" if each.bytes is None else spell_bytes(each.bytes),
            "" if each.pushed is None else _date(each.pushed),
            ", ".join(_claimed(said) for said in claims.get(each.entry.object, ())),
        )
        for each in entries
    ]
    print_table("", ("action", "submodel", "pass", "size", "pushed", "verified elsewhere"), rows, right=("size",))
    objects = {each.entry.object: each.bytes or 0 for each in entries}
    put(f"{len(entries)} entries, {spell_bytes(sum(objects.values()))} in {len(objects)} objects, in {remote}")


def _claimed(said: Claim) -> str:
    key = "unsigned" if said.key is None else f"{'' if said.trusted else 'not trusted '}{said.key[:8]}"
    return f"{said.level} for {said.target} ({key})"


def _pass(listed: Listed) -> str:
    step = listed.entry.action.content.get("pass")
    return str(step.get("name", "?")) if isinstance(step, dict) else "?"


def print_pushed(sent: Sent, results: int, remote: str, *, as_json: bool) -> None:
    """The entries sent to a remote cache. results: number of local ones."""
    if as_json:
        counts = {"cached": results, "pushed": sent.results, "bytes": sent.bytes, "there": sent.there}
        print_json("cache push", {"remote": remote, **counts})
        return
    put(
        f"{sent.results} of {results} results were new to {remote}: {spell_bytes(sent.bytes)} sent, "
        f"{spell_bytes(sent.there)} were already there"
    )


def print_pulled(fetched: Sequence[Record], missing: int, remote: str, *, as_json: bool) -> None:
    """The entries fetched from a remote cache. missing: number of remote entries that were not here."""
    size = sum({record.artifact.digest: record.artifact.bytes for record in fetched}.values())
    if as_json:
        actions = [record.action.digest for record in fetched]
        print_json("cache pull", {"remote": remote, "missing": missing, "fetched": actions, "bytes": size})
        return
    put(f"{len(fetched)} of {missing} missing results fetched from {remote}, {spell_bytes(size)}")


def print_swept(swept: Swept, remote: str, *, dry_run: bool, as_json: bool) -> None:
    """The entries removed from a remote cache, or to be removed."""
    if as_json:
        print_json("remote cache collection", {"remote": remote, "dry_run": dry_run, **asdict(swept)})
        return
    put(
        f"{'would remove' if dry_run else 'removed'} {swept.actions} entries, {swept.manifests} manifests and "
        f"{swept.pieces} pieces of {remote}; {spell_bytes(swept.bytes_freed)} freed, {spell_bytes(swept.bytes_kept)} kept"
    )


def print_moved_engines(moved: Moved, where: str, *, pushed: bool, as_json: bool) -> None:
    """The engines sent to or fetched from a remote cache."""
    if as_json:
        print_json("moved engines", {"remote": where, "pushed": pushed, **asdict(moved)})
        return
    there = f"{moved.there} were already there"
    others = f"; {moved.others} for other machines, drivers or versions were ignored" if moved.others else ""
    put(f"{moved.engines} engines {'pushed to' if pushed else 'pulled from'} {where}, {there}{others}")


def print_engines(kept: Sequence[KeptEngines], root: Path, *, removed: bool, as_json: bool) -> None:
    """The engines stored by providers, or those removed."""
    if as_json:
        rows = [{**asdict(each), "folder": str(each.folder)} for each in kept]
        print_json("engines", {"folder": str(root), "removed": removed, "engines": rows})
        return
    if kept:
        columns = ("provider", "device", "driver", "models", "size", "last used", "folder")
        table = [
            (
                each.provider.removesuffix("ExecutionProvider"),
                each.device or "-",
                each.driver or "-",
                str(each.models),
                spell_bytes(each.bytes),
                _date(each.used),
                each.folder.name,
            )
            for each in kept
        ]
        print_table("", columns, table, right=("models", "size"))
    put(f"{'removed' if removed else 'kept'}: {spell_bytes(sum(each.bytes for each in kept))} in {root}")
