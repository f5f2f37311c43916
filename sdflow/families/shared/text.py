"""Encode prompts with text encoders: like diffusers, or in weighted chunks like A1111's webui."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sdflow.errors import UsageError
from sdflow.families.shared.request import Run
from sdflow.families.shared.truncation import shown, text_of, warn_of_truncation
from sdflow.models.base import Config
from sdflow.parameter import Parameter
from sdflow.prompts.chunks import Chunk, chunked
from sdflow.prompts.limits import report
from sdflow.prompts.reading import Reading
from sdflow.prompts.weights import parse

if TYPE_CHECKING:
    import torch

_ANY_LENGTH = "prompt_syntax a1111 reads prompts of any length."

SECOND_PROMPTS: Mapping[str, Parameter] = {
    "prompt_2": Parameter("Prompt for the second text encoder.", str, otherwise="the prompt"),
    "negative_prompt_2": Parameter(
        "Negative prompt for the second text encoder.", str, otherwise="the negative prompt"
    ),
}
"""Arguments of families with a second text encoder."""


@dataclass(frozen=True)
class Encoded:
    """Outputs of a text encoder.

    outputs: by name, one row per chunk per text. weights: (rows, tokens); None if all are 1. chunks: per text.
    """

    outputs: Mapping[str, torch.Tensor]
    weights: torch.Tensor | None
    chunks: int

    def hidden(self, output: str) -> torch.Tensor:
        """Hidden states times their weights with the mean restored, shape (texts, chunks * tokens, width).

        As A1111's "Original" emphasis (modules/sd_emphasis.py), except that the mean is per chunk: there, texts in one
        batch share a mean.
        """
        rows = self.outputs[output]
        if self.weights is not None:
            weighted = rows.float() * self.weights.to(rows.device)[..., None]
            mean, changed = (each.mean(dim=(1, 2), keepdim=True) for each in (rows.float(), weighted))
            rows = (weighted * (mean / changed)).to(rows.dtype)
        return rows.reshape(-1, self.chunks * rows.shape[1], rows.shape[2])

    def whole(self, output: str) -> torch.Tensor:
        """A pooled output, shape (texts, width): that of each text's first chunk."""
        return self.outputs[output][:: self.chunks]


def encode(run: Run, reading: Reading, texts: Mapping[str, tuple[Any, Sequence[str]]]) -> dict[str, Encoded]:
    """Outputs of each text encoder for its texts, padded to the same number of chunks.

    texts: part -> (tokenizer, texts).
    """
    import torch

    if reading.plain and not reading.words:
        return {
            name: Encoded(run(name, {"input_ids": text_ids(tokenizer, of, name, remedy=_ANY_LENGTH)}), None, 1)
            for name, (tokenizer, of) in texts.items()
        }
    chunks = {name: [_chunks(tokenizer, text, reading) for text in of] for name, (tokenizer, of) in texts.items()}
    count = max(len(of_text) for of in chunks.values() for of_text in of)
    if reading.most is not None and count > reading.most:
        raise UsageError(
            f"the prompt has {count} chunks of 75 tokens; at most {reading.most} are allowed",
            where="prompt",
            remedy="Shorten it, or remove BREAK.",
        )
    found = {}
    for name, (tokenizer, _) in texts.items():
        marks = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.model_max_length
        rows = [chunk.row(*marks) for each in chunks[name] for chunk in (*each, *[Chunk()] * (count - len(each)))]
        ids, weights = torch.tensor([row[0] for row in rows]), torch.tensor([row[1] for row in rows])
        found[name] = Encoded(run(name, {"input_ids": ids}), weights if (weights != 1).any() else None, count)
    return found


def _chunks(tokenizer: Any, text: str, reading: Reading) -> list[Chunk]:
    def tokenize(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, truncation=False, verbose=False).input_ids
        return ids

    size = tokenizer.model_max_length - 2
    if not reading.plain:
        return chunked(parse(text), reading, tokenize, tokenizer.get_vocab().get(",</w>"), size)
    pieces = [piece if isinstance(piece, tuple) else tokenize(piece) for piece in reading.pieces(text)]
    ids = [token for piece in pieces for token in piece]
    if len(ids) > size:
        words = f"a prompt has {len(ids) + 2} tokens, but the text encoder reads {size + 2}"
        report([f"{words}: the rest is ignored: {shown(text_of(tokenizer, ids[size:], reading))}. {_ANY_LENGTH}"])
    ids = ids[:size]  # truncated as in diffusers
    return [Chunk(tuple(ids), (1.0,) * len(ids))]


def further_texts(given: str | Sequence[str] | None, first: Sequence[str]) -> list[str]:
    """Texts for a further encoder: one for all, or one each, where an empty one stays so; None or empty: those of the
    first, as in diffusers."""
    return [given] * len(first) if given and isinstance(given, str) else list(given or first)


def plain_texts(texts: Sequence[str], reading: Reading) -> list[str]:
    """The texts for an encoder without support for weights or chunks; text in other syntaxes is unescaped.

    Raises UsageError for a text with weights or BREAK, and for textual inversion words.
    """
    if reading.words:
        raise UsageError(
            "this model does not support textual inversion", where="embeddings", remedy="Remove the embeddings."
        )
    if reading.plain:
        return list(texts)
    found = []
    for text in texts:
        sections = parse(text)
        if len(sections) > 1 or any(each.weight != 1 for each in sections[0]):
            raise UsageError(
                f"{text[:40]!r} has weights or BREAK, which this model does not support",
                where="prompt",
                remedy="Remove them, or use prompt_syntax plain, which takes every character literally.",
            )
        found.append("".join(each.text for each in sections[0]))
    return found


def token_ids(tokenizer: Any, texts: Sequence[str], length: int | None = None) -> torch.Tensor:
    """Token ids, shape (texts, length), padded and truncated as in diffusers; length None: the tokenizer's maximum."""
    ids: torch.Tensor = tokenizer(
        list(texts),
        padding="max_length",
        max_length=tokenizer.model_max_length if length is None else length,
        truncation=True,
        return_tensors="pt",
    ).input_ids
    return ids


def text_ids(
    tokenizer: Any, texts: Sequence[str], encoder: str, length: int | None = None, remedy: str = ""
) -> torch.Tensor:
    """Token ids, (texts, length), as `token_ids` returns them, with a warning for each truncated text. encoder, remedy:
    for the warning."""
    most = tokenizer.model_max_length if length is None else length
    warn_of_truncation(tokenizer, texts, most, encoder, remedy)
    return token_ids(tokenizer, texts, length)


def last_but_one(config: Config) -> str:
    """Name of the penultimate hidden state of a CLIP text encoder with this config."""
    return f"hidden_states.{config['num_hidden_layers'] - 1}"


def last_but_one_layer(outputs: Iterable[str]) -> str:
    """Name of the penultimate hidden state among a text encoder's outputs."""
    return max((name for name in outputs if name.startswith("hidden_states.")), key=_layer)


def _layer(output: str) -> int:
    return int(output.partition(".")[2])
