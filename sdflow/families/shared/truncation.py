"""Report the parts of prompts that exceed a text encoder's token limit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from sdflow.prompts.limits import report
from sdflow.prompts.reading import Reading

_SHOWN = 160
"""Maximum length of a text in a message."""


def warn_of_truncation(
    tokenizer: Any, texts: Sequence[str], length: int, encoder: str, remedy: str = "", *, ends: Sequence[str] = ()
) -> None:
    """Warn of each text with more tokens than `length`, quoting what is ignored.

    texts: as passed to the tokenizer. encoder: name of the encoder. remedy: a sentence, or nothing. ends: chat template
    suffix of each text. Does nothing for stand-in tokenizers, as used in exports.
    """
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase  # which a tokenizer has imported

    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return
    for text, end in dict.fromkeys(zip(texts, ends or [""] * len(texts), strict=True)):
        ids: list[int] = tokenizer(text, truncation=False, verbose=False).input_ids
        if len(ids) <= length:
            continue
        closing = 1 if ids[-1] == tokenizer.eos_token_id else 0
        dropped = ids[length - closing : len(ids) - closing]
        dropped = dropped[: max(0, len(dropped) - len(tokenizer(end, add_special_tokens=False).input_ids))]
        lost = f"the rest is ignored: {shown(tokenizer.decode(dropped).strip())}"
        what = lost if dropped else "the end of the chat template is cut off"
        report([f"a prompt has {len(ids)} tokens, but the {encoder} reads {length}: {what}. {remedy}".strip()])


def chats_of(tokenizer: Any, texts: Sequence[str], length: int, *, thinking: bool) -> list[str]:
    """Return each text as a user message in Qwen3's chat template, warning of those with more tokens than `length`."""
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True, enable_thinking=thinking
        )
        for text in texts
    ]
    ends = [chat.rpartition(text)[2] if text and text in chat else "" for chat, text in zip(chats, texts, strict=True)]
    warn_of_truncation(tokenizer, chats, length, "text_encoder (Qwen3)", ends=ends)
    return chats


def text_of(tokenizer: Any, ids: Sequence[int], reading: Reading) -> str:
    """Decode tokens, including learned words."""
    found = []
    for word, run in groupby(ids, key=lambda token: reading.word_of(token) if token < 0 else None):
        found.append(str(tokenizer.decode(list(run))).strip() if word is None else word)
    return " ".join(found)


def shown(text: str) -> str:
    """Quote a text for a message, shortened in the middle if long."""
    return repr(text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}")
