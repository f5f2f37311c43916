"""Output of `sdflow cache`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict

from sdflow.report.output import print_json, print_table
from sdflow.store import Entry, GcReport, VerifyReport
from sdflow.units import spell_bytes


def print_entries(entries: Sequence[Entry], *, as_json: bool) -> None:
    """Every finished step, the most recently used first."""
    if as_json:
        print_json("cache entries", {"entries": [asdict(entry) for entry in entries]})
        return
    rows = [
        (
            entry.action[:12],
            entry.submodel,
            entry.pass_name,
            spell_bytes(entry.bytes),
            _date(entry.published),
            _date(entry.last_used),
            ", ".join(entry.pinned_by),
        )
        for entry in sorted(entries, key=lambda entry: -entry.last_used)
    ]
    print_table("", ("action", "submodel", "pass", "size", "built", "last used", "used by"), rows, right=("size",))
    objects = {entry.object: entry.bytes for entry in entries}
    print(f"{len(entries)} entries, {spell_bytes(sum(objects.values()))} in {len(objects)} objects")


def _date(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))


def print_cache_verification(report: VerifyReport, *, as_json: bool) -> None:
    """What was read again, and what was damaged."""
    if as_json:
        damaged = [{"path": str(path), "what": what} for path, what in report.damaged]
        print_json(
            "cache verification",
            {"objects": report.objects, "actions": report.actions, "bytes": report.bytes, "damaged": damaged},
        )
        return
    for path, what in report.damaged:
        print(f"damaged: {path}: {what}")
    print(f"sound: {report.actions} actions, {report.objects} objects, {spell_bytes(report.bytes)}")


def print_collection(report: GcReport, *, dry_run: bool, as_json: bool) -> None:
    """What was removed, or would be."""
    if as_json:
        print_json("cache collection", {"dry_run": dry_run, **asdict(report)})
        return
    done = "would remove" if dry_run else "removed"
    for entry in report.removed:
        print(f"{done} {entry.action[:12]} {entry.submodel} {entry.pass_name}, last used {_date(entry.last_used)}")
    print(
        f"{done} {len(report.removed)} entries, {report.orphans} unreferenced objects and {report.rubbish} leftovers; "
        f"{spell_bytes(report.bytes_freed)} freed, {spell_bytes(report.bytes_kept)} kept"
    )
    if report.over:
        print(f"{spell_bytes(report.over)} above the limit are in use by pipelines or running builds and stay")
