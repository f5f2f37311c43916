"""Output of `sdflow provenance`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdflow.report.output import print_json, print_table, put

DIGITS = 12
"""Digits of a digest in a table."""


def print_provenance(path: Path, statement: Mapping[str, Any], *, as_json: bool, verbose: bool = False) -> None:
    """A pipeline's inputs and builder. verbose: every file with its whole digest."""
    if as_json:
        print_json("provenance", {"file": str(path), "statement": statement})
        return
    predicate = statement["predicate"]
    definition, run = predicate["buildDefinition"], predicate["runDetails"]
    asked, when = definition["externalParameters"], run["metadata"]
    put(f"{asked['pipeline']}: {asked['model']} for {asked['target']}, from {asked['workflow']}")
    versions = ", ".join(f"{name} {version}" for name, version in run["builder"]["version"].items())
    put(f"built {when['startedOn']} to {when['finishedOn']} by {run['builder']['id']} ({versions})")
    for each in run["byproducts"]:
        said = each.get("annotations", {})
        verdict = "passed" if said.get("passed") else "failed"
        put(f"verification: {verdict} at level {said.get('level')} on {said.get('machine')}, {said.get('provider')}")
    put("")
    rows = [(each["name"], _identity(each, verbose), _note(each)) for each in definition["resolvedDependencies"]]
    print_table("built from", ("input", "digest or version", "licence"), rows)
    steps = [
        (name, step["pass"], step["action"] if verbose else step["action"][:DIGITS])
        for name, chain in definition["internalParameters"]["actions"].items()
        for step in chain
    ]
    print_table("built by", ("submodel", "pass", "cache key"), steps)
    subjects = [(each["name"], _identity(each, verbose)) for each in statement["subject"]]
    if verbose:
        print_table("files", ("file", "SHA-256"), subjects)
    else:
        put(f"{len(subjects)} files (-v lists them); sdflow verify compares them")


def _identity(descriptor: Mapping[str, Any], whole: bool) -> str:
    for digest in descriptor.get("digest", {}).values():
        return str(digest if whole else digest[:DIGITS])
    uri = str(descriptor.get("uri", ""))
    return uri.rpartition("@")[2] if uri.startswith("pkg:") else uri


def _note(descriptor: Mapping[str, Any]) -> str:
    return str(descriptor.get("annotations", {}).get("license", ""))
