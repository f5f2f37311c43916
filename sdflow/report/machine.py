"""Output of `sdflow passes`, `sdflow targets` and `sdflow doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from sdflow.config.catalog import PassNotFound
from sdflow.errors import UsageError
from sdflow.passes import registry
from sdflow.report.output import print_json, print_table, put
from sdflow.targets import TARGETS

if TYPE_CHECKING:
    from sdflow.runtime.sessions.availability import Availability
    from sdflow.selftest.doctor import Diagnosis


def print_diagnoses(diagnoses: Sequence[Diagnosis], *, as_json: bool) -> None:
    """The doctor's findings, with remedies below the table."""
    if as_json:
        print_json("doctor", {"findings": [asdict(each) for each in diagnoses]})
        return
    print_table("", ("", "subject", "what"), [(each.level, each.subject, each.what) for each in diagnoses])
    for each in diagnoses:
        if each.level != "ok":
            put(f"{each.level}: {each.subject}: {each.what}", f"  {each.remedy}")


def print_targets(found: Sequence[Availability], *, as_json: bool) -> None:
    """Each target: the provider that ran a small model here, or why none did."""
    if as_json:
        print_json("targets", {"targets": [asdict(each) for each in found]})
        return
    rows = []
    for each in found:
        target = TARGETS[each.target]
        wanted = ", ".join(name for name, _, _ in target.providers)
        rows.append(
            (
                each.target,
                target.title,
                each.provider or wanted,
                "yes" if each.available else "no",
                "; ".join(filter(None, (each.reason, each.remedy))),
            )
        )
    print_table("", ("target", "", "execution provider", "runs here", "reason and fix"), rows)
    put("Every target can be built here, even if it does not run here.")


def print_passes(name: str | None, *, olive: bool, as_json: bool) -> None:
    """The passes with a line each, or one pass with its options.

    Raises UsageError for an unknown pass.
    """
    if name is not None:
        _print_pass(name, as_json=as_json)
        return
    names = registry.catalog().names() if olive else list(registry.OWN)
    described = [registry.describe(each, Path.cwd()) for each in names]
    if as_json:
        print_json("passes", {"passes": [asdict(each) for each in described]})
        return
    rows = [(each.name, each.origin, each.accepts, each.summary) for each in described]
    print_table("", ("pass", "from", "reads", "description"), rows)
    put("sdflow passes NAME shows a pass's options; --olive also lists the other passes of olive-ai.")
    put("To use a pass of your own, write `pass: user_scripts/FILE.py` in the workflow (docs/passes.md).")


def _print_pass(name: str, *, as_json: bool) -> None:
    try:
        described = registry.describe(name, Path.cwd())
    except PassNotFound as error:
        raise UsageError(str(error), remedy="sdflow passes --olive lists every name") from error
    if as_json:
        print_json("pass", asdict(described))
        return
    put(f"{described.name} ({described.origin}), reads: {described.accepts}", *described.summary.split("\n"), "")
    rows = [
        (option.name, option.type, "required" if option.required else repr(option.default), option.description)
        for option in described.options
    ]
    print_table("", ("option", "type", "default", ""), rows)
