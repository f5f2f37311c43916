"""What a program needs to know beside the graph, as one JSON file: sizes, the schedule, and how texts become token ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sdflow.errors import UsageError

FORMAT_VERSION = 1


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
    companions: Mapping[str, Any],
    ids: Mapping[str, tuple[str, bool]],
    lengths: Mapping[str, int],
    templates: Mapping[str, tuple[str, str]],
) -> dict[str, Any]:
    """Input of the graph -> the table of its tokenizer; the negative prompts' inputs take that of the prompts'. One that is not
    CLIP's is given as the tokenizers library reads it, with what a program puts before and behind a text, if there is a chat
    template. lengths: companion -> tokens of a text. templates: companion -> what is put there."""

    def table(companion: str) -> dict[str, Any]:
        tokenizer = companions[companion]
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        other = {"length": lengths[companion], "pad": tokenizer.pad_token_id, "tokenizer": content}
        if companion in templates:
            other |= dict(zip(("before", "behind"), templates[companion], strict=True))
        return _clip_table(tokenizer) or other

    return {name: table(companion) for name, (companion, negative) in ids.items() if not negative}


def compact(content: Mapping[str, Any]) -> bytes:
    """As JSON on few bytes."""
    return (json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n").encode()
