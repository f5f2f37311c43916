"""Data that a program needs besides the graph, as one JSON file: sizes, the schedule, and tokenizer tables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sdflow.errors import UsageError

FORMAT_VERSION = 1


def clip_table(tokenizer: Any, name: str) -> dict[str, Any]:
    """A CLIP tokenizer as plain data: byte-pair encoding over words. alone: texts that are always separate words ->
    ids.

    Raises UsageError for another kind of tokenizer.
    """
    found = _clip_table(tokenizer)
    if found is None:
        raise UsageError(
            "its tokenizer is not CLIP's, and graphs support no other",
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
    # SDXL's second tokenizer pads with "!", and therefore treats each "!" in a text as padding.
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
    companions: Mapping[str, Any],
    ids: Mapping[str, tuple[str, bool]],
    lengths: Mapping[str, int],
    templates: Mapping[str, tuple[str, str]],
) -> dict[str, Any]:
    """Input of the graph -> its tokenizer's table; negative prompts share the prompts'. A tokenizer other than CLIP's
    is given in the tokenizers library's format, with the prefix and suffix of its chat template, if any. lengths:
    companion -> tokens per text. templates: companion -> prefix and suffix."""

    def table(companion: str) -> dict[str, Any]:
        tokenizer = companions[companion]
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        other = {"length": lengths[companion], "pad": tokenizer.pad_token_id, "tokenizer": content}
        if companion in templates:
            other |= dict(zip(("before", "behind"), templates[companion], strict=True))
        return _clip_table(tokenizer) or other

    return {name: table(companion) for name, (companion, negative) in ids.items() if not negative}


def compact(content: Mapping[str, Any]) -> bytes:
    """Compact JSON."""
    return (json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n").encode()
