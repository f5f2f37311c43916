"""Run the same texts through the folder's tokenizer, loaded by the runtime, and the checkpoint's, loaded by
transformers."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from sdflow.families.shared.part import Companion
from sdflow.families.shared.text import token_ids
from sdflow.sources.load import load_companion
from sdflow.verify.finding import Finding
from sdflow.verify.folder.compare import CHECK, REBUILD
from sdflow.verify.folder.source import Source

TEXTS = Path(__file__).parent / "texts.txt"


@cache
def texts() -> tuple[str, ...]:
    """The committed texts: words, scripts, emoji, punctuation, white space, prompts beyond 77 tokens, special tokens."""
    return tuple(json.loads(line) for line in TEXTS.read_text(encoding="utf-8").splitlines())


MOST_PADDED = 1024


def is_tokenizer(companion: Companion) -> bool:
    """Whether it is a tokenizer, not a scheduler or image processor."""
    return companion.file == "tokenizer_config.json"


def compare_tokenizers(folder: Path, name: str, companion: Companion, source: Source) -> list[Finding]:
    """Report texts that the folder's tokenizer encodes differently. Raises CheckpointError if one cannot be loaded."""
    ours = load_companion(companion, folder / name, str(folder / name))
    theirs = _published(name, companion, source)
    apart = [text for text in texts() if _tokens(ours, text) != _tokens(theirs, text)]
    found = []
    if apart:
        first = apart[0]
        where = _where(_tokens(ours, first), _tokens(theirs, first))
        named = json.dumps(first, ensure_ascii=False)
        found.append(f"{len(apart)} of {len(texts())} texts give other tokens, the first is {named:.60}: {where}")
    comparable = not apart and ours.model_max_length == theirs.model_max_length  # other lengths are reported below
    if comparable and any(
        not _equal_rows(token_ids(ours, part, _length(ours)), _padded(theirs, part)) for part in _batches(texts())
    ):
        found.append("texts are padded or truncated to other tokens")
    for entry in ("model_max_length", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"):
        if getattr(ours, entry) != getattr(theirs, entry):
            found.append(f"{entry} is {getattr(ours, entry)} when loaded, expected {getattr(theirs, entry)}")
    return [Finding("", CHECK, "error", name, what, REBUILD) for what in found]


def _published(name: str, companion: Companion, source: Source) -> Any:
    """Load it as diffusers' from_pretrained does: the class named in the checkpoint's model_index.json, if it
    exists."""
    _, class_name = source.index.get(name) or (None, companion.class_name)
    module = importlib.import_module(companion.library)
    cls = getattr(module, str(class_name), None) or getattr(module, str(companion.class_name))
    return cls.from_pretrained(source.companions[name], local_files_only=True)


def _tokens(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, truncation=False).input_ids
    return ids


def _length(tokenizer: Any) -> int:
    """The length that texts are padded to, limited because language models allow more than any text here has."""
    return min(int(tokenizer.model_max_length), MOST_PADDED)


def _padded(tokenizer: Any, part: Sequence[str]) -> Any:
    """Tokenize as diffusers' pipelines do."""
    options = {"padding": "max_length", "max_length": _length(tokenizer), "truncation": True}
    return tokenizer(list(part), **options, return_tensors="pt").input_ids


def _equal_rows(one: Any, other: Any) -> bool:
    return bool(one.shape == other.shape and (one == other).all())


def _batches(whole: Sequence[str], size: int = 64) -> list[Sequence[str]]:
    return [whole[begin : begin + size] for begin in range(0, len(whole), size)]


def _where(ours: Sequence[int], theirs: Sequence[int]) -> str:
    place = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        return f"{len(ours)} tokens, expected {len(theirs)}"
    return f"its token {place + 1} is {ours[place]}, expected {theirs[place]}"
