"""Tokenize texts within the graph, with the operators of onnxruntime-extensions.

Its CLIPTokenizer (0.15) differs from CLIP's: it keeps digits together, knows only blanks as whitespace, neither
truncates long texts nor ends them, and pads with the end token, whatever the model uses. Nodes around it correct that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from sdflow.export.builder import Builder


def add_tokenizer(graph: Builder, texts: str, table: Mapping[str, Any]) -> str:
    """Token ids, (texts, length) int64, of a vector of strings. table: `sdflow.export.program_data.clip_table`."""
    texts = _replaced(graph, texts, r"\s+", " ")
    texts = _replaced(graph, texts, r"(\pN)", r" \1 ")
    vocabulary, length = table["vocabulary"], table["length"]
    for word in table["alone"]:
        texts = _replaced(graph, texts, f"({re.escape(word)})", r" \1 ")
    ids, there = graph.extension(
        "CLIPTokenizer",
        [texts],
        2,
        vocab=json.dumps(vocabulary, ensure_ascii=False),
        merges="#version: 0.2\n" + "\n".join(" ".join(pair) for pair in table["merges"]),
        padding_length=-1,  # the longest: with less, a long text runs into the next row
    )
    ids, there = (_cut(graph, each, length) for each in (ids, there))
    for word, own in table["alone"].items():
        if f"{word}</w>" in vocabulary:
            found = graph.add("Equal", ids, graph.whole(vocabulary[f"{word}</w>"]))
            ids = graph.add("Where", found, graph.whole(own), ids)
    full = graph.add("Equal", graph.part(there, [length - 1], [length], [1]), graph.whole(1))
    last = graph.add("Equal", graph.constant(range(length), "int64"), graph.whole(length - 1))
    ids = graph.add("Where", graph.add("And", last, full), graph.whole(table["end"]), ids)
    return graph.add("Where", graph.add("Equal", there, graph.whole(1)), ids, graph.whole(table["pad"]))


def _cut(graph: Builder, rows: str, length: int) -> str:
    """Rows of this length: short ones padded with zeros, long ones cut."""
    longer = graph.add("Pad", rows, graph.whole(0, 0, 0, length))
    return graph.part(longer, [0], [length], [1])


def _replaced(graph: Builder, texts: str, pattern: str, by: str) -> str:
    """Replace matches of an RE2 pattern."""
    (made,) = graph.extension("StringRegexReplace", [texts, graph.text(pattern), graph.text(by)], 1)
    return made
