"""How texts become token ids: within the graph, by the operators of onnxruntime-extensions, or in a program, by tables beside it.

Its CLIPTokenizer (0.15) is not quite CLIP's: it keeps digits together, knows no whitespace but blanks, neither cuts long texts
nor ends them, and fills with the end token whatever the model fills with. Nodes around it make up for that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from sdflow.errors import UsageError
from sdflow.export.builder import Builder


def clip_table(tokenizer: Any, name: str) -> dict[str, Any]:
    """A CLIP tokenizer as plain data: byte-pair encoding over words. alone: texts that are words wherever they stand -> ids.

    Raises UsageError for a tokenizer of another kind.
    """
    found = _clip_table(tokenizer)
    if found is None:
        raise UsageError(
            "its tokenizer is not CLIP's, and a graph has no operators for others",
            where=name,
            remedy="Export without --text: the graph then takes token ids.",
        )
    return found


def _clip_table(tokenizer: Any) -> dict[str, Any] | None:
    read = json.loads(tokenizer.backend_tokenizer.to_str())
    backend = read["model"]
    if backend.get("type") != "BPE" or backend.get("end_of_word_suffix") != "</w>":
        return None
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in backend["merges"]]
    marks = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    # SDXL's second tokenizer fills with "!", and so takes each "!" of a text for itself.
    alone = {each["content"]: each["id"] for each in read["added_tokens"] if each["id"] not in marks}
    return {
        "length": tokenizer.model_max_length,
        "start": tokenizer.bos_token_id,
        "end": tokenizer.eos_token_id,
        "pad": tokenizer.pad_token_id,
        "unknown": tokenizer.unk_token_id,
        "alone": alone,
        "vocabulary": backend["vocab"],
        "merges": merges,
    }


def tokenizer_tables(
    companions: Mapping[str, Any], ids: Mapping[str, tuple[str, bool]], lengths: Mapping[str, int]
) -> dict[str, Any]:
    """Input of the graph -> the table of its tokenizer; the negative prompts' inputs take that of the prompts'. One that is not
    CLIP's is given as the tokenizers library reads it. lengths: companion -> tokens of a text."""

    def table(companion: str) -> dict[str, Any]:
        tokenizer = companions[companion]
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        other = {"length": lengths[companion], "pad": tokenizer.pad_token_id, "tokenizer": content}
        return _clip_table(tokenizer) or other

    return {name: table(companion) for name, (companion, negative) in ids.items() if not negative}


def add_tokenizer(graph: Builder, texts: str, table: Mapping[str, Any]) -> str:
    """Token ids, (texts, length) int64, of a vector of strings. table: `clip_table`."""
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
        padding_length=-1,  # as long as the longest: shorter, it lets a long text run into the next one's row
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
    """Rows of this length: zeros behind short ones, long ones cut off."""
    longer = graph.add("Pad", rows, graph.whole(0, 0, 0, length))
    return graph.part(longer, [0], [length], [1])


def _replaced(graph: Builder, texts: str, pattern: str, by: str) -> str:
    """Texts with what RE2 finds replaced."""
    (made,) = graph.extension("StringRegexReplace", [texts, graph.text(pattern), graph.text(by)], 1)
    return made
