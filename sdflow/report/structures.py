"""Output of `sdflow cache export` and `sdflow cache import`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sdflow.report.output import print_json, print_table, put
from sdflow.run.structures import Exported, Imported
from sdflow.units import spell_bytes


def print_exported(result: Exported, *, as_json: bool) -> None:
    """The exported structures, and their verification."""
    if as_json:
        sizes = {"bytes": result.bytes, "unpacked": result.unpacked}
        print_json("exported structures", {"file": result.where, **sizes, "structures": list(result.structures)})
        return
    _print(result.structures)
    size = "" if result.bytes is None else f"{spell_bytes(result.bytes)}, "
    put(f"{result.where}: {size}{spell_bytes(result.unpacked)} unpacked")


def print_imported(result: Imported, *, as_json: bool) -> None:
    """An archive's structures, and the number of new ones."""
    about = result.about
    if as_json:
        counts = {"results": result.count, "new": [record.action.digest for record in result.new]}
        print_json("imported structures", {"file": result.where, "about": about, **counts})
        return
    structures = about.get("structures")
    _print([each for each in structures if isinstance(each, dict)] if isinstance(structures, list) else [])
    versions = about.get("versions")
    if isinstance(versions, dict):
        put("made with " + ", ".join(_plain(f"{name} {version}") for name, version in versions.items()))
    put(f"{len(result.new)} of {result.count} results were new to the cache")


def _print(structures: Sequence[Mapping[str, Any]]) -> None:
    rows = []
    for each in structures:
        verified, size, submodels = each.get("verified"), each.get("bytes"), each.get("submodels")
        rows.append(
            (
                _plain(each.get("name")),
                _plain(each.get("target")),
                _plain(", ".join(map(str, submodels))) if isinstance(submodels, list) else "?",
                spell_bytes(size) if isinstance(size, int) else "?",
                _plain(f"{verified.get('level')}, with {each.get('model')}") if isinstance(verified, dict) else "no",
            )
        )
    print_table("", ("structures", "target", "submodels", "size", "verified"), rows, right=("size",))


def _plain(text: Any) -> str:
    """Text from another machine, without control characters."""
    return "".join(letter for letter in str(text)[:200] if letter.isprintable())
