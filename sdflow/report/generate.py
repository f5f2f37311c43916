"""Output of `sdflow generate`."""

from __future__ import annotations

from sdflow.report.output import print_json, print_table, put
from sdflow.runtime.generate import GenerateResult
from sdflow.units import spell_seconds


def print_generate(result: GenerateResult, *, as_json: bool = False) -> None:
    """The images' files, or everything as JSON."""
    if as_json:
        print_json("generate", result.to_json())
        return
    checked = any(each.flagged is not None for each in result.images)
    rows = [
        (each.file, str(each.seed), each.prompt, *([{None: "", False: "no", True: "yes"}[each.flagged]] * checked))
        for each in result.images
    ]
    print_table("", ("file", "seed", "prompt", *(["flagged"] * checked)), rows, right=("seed",))
    if result.sheet:
        put(f"contact sheet: {result.sheet}")
    for note in result.notes:
        put(f"  {note}")
    count = len(result.images)
    each = f", {spell_seconds(result.draw_seconds / count)} each" if count > 1 else ""
    took, loading = spell_seconds(result.draw_seconds), spell_seconds(result.load_seconds)
    put(f"{count} image{'s' if count > 1 else ''} in {took}{each}, after {loading} of loading")
