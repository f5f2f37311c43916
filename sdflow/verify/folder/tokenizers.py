"""The same texts through two tokenizers: the folder's, as the runtime loads it, and the checkpoint's, as transformers does."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from sdflow.families.shared.part import Companion
from sdflow.families.shared.text import token_ids
from sdflow.runtime.files.trial import MOST_PADDING
from sdflow.sources.load import load_companion
from sdflow.verify.finding import Finding
from sdflow.verify.folder.compare import CHECK, REBUILD
from sdflow.verify.folder.source import Source

TEXTS = Path(__file__).parent / "texts.txt"


@cache
def texts() -> tuple[str, ...]:
    """The committed texts: words, scripts, emoji, punctuation, white space, prompts beyond 77 tokens, special tokens."""
    return tuple(json.loads(line) for line in TEXTS.read_text(encoding="utf-8").splitlines())


def is_tokenizer(companion: Companion) -> bool:
    """Whether it is one, and no scheduler or image processor."""
    return companion.file == "tokenizer_config.json"


def compare_tokenizers(folder: Path, name: str, companion: Companion, source: Source) -> list[Finding]:
    """What the folder's tokenizer makes otherwise of the texts. Raises CheckpointError for one that cannot be loaded."""
    ours = load_companion(companion, folder / name, str(folder / name))
    theirs = _published(name, companion, source)
    apart = [text for text in texts() if _tokens(ours, text) != _tokens(theirs, text)]
    found = []
    if apart:
        first = apart[0]
        where = _where(_tokens(ours, first), _tokens(theirs, first))
        named = json.dumps(first, ensure_ascii=False)
        found.append(f"{len(apart)} of {len(texts())} texts become other tokens, the first is {named:.60}: {where}")
    comparable = not apart and ours.model_max_length == theirs.model_max_length  # another length is said below
    length = min(ours.model_max_length, MOST_PADDING)
    if comparable and any(
        not _equal_rows(token_ids(ours, part, length), _padded(theirs, part, length)) for part in _batches(texts())
    ):
        found.append("texts are padded or cut to other tokens")
    for entry in ("model_max_length", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"):
        if getattr(ours, entry) != getattr(theirs, entry):
            found.append(f"{entry} is {getattr(ours, entry)} when it is loaded, where {getattr(theirs, entry)} belongs")
    return [Finding("", CHECK, "error", name, what, REBUILD) for what in found]


def _published(name: str, companion: Companion, source: Source) -> Any:
    """As diffusers' from_pretrained loads it: of the class that the checkpoint's model_index.json names, where it is there."""
    library, class_name = source.index.get(name) or (companion.library, companion.class_name)
    module = importlib.import_module(companion.library if library != companion.library else library)
    cls = getattr(module, str(class_name), None) or getattr(module, str(companion.class_name))
    return cls.from_pretrained(source.companions[name], local_files_only=True)


def _tokens(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, truncation=False).input_ids
    return ids


def _padded(tokenizer: Any, part: Sequence[str], length: int) -> Any:
    """As diffusers' pipelines call it."""
    options = {"padding": "max_length", "max_length": length, "truncation": True}
    return tokenizer(list(part), **options, return_tensors="pt").input_ids


def _equal_rows(one: Any, other: Any) -> bool:
    return bool(one.shape == other.shape and (one == other).all())


def _batches(whole: Sequence[str], size: int = 64) -> list[Sequence[str]]:
    return [whole[begin : begin + size] for begin in range(0, len(whole), size)]


def _where(ours: Sequence[int], theirs: Sequence[int]) -> str:
    place = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        return f"{len(ours)} tokens, where {len(theirs)} belong"
    return f"its token {place + 1} is {ours[place]}, where {theirs[place]} belongs"
