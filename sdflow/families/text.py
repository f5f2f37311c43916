"""Prompts through CLIP text encoders: as diffusers encodes them, or in chunks and with weights as A1111's webui does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sdflow.errors import UsageError
from sdflow.families.request import Run
from sdflow.models.base import Config
from sdflow.prompts.chunks import Chunk, chunked
from sdflow.prompts.reading import Reading
from sdflow.prompts.weights import parse

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Encoded:
    """What a text encoder gave for texts. outputs: by name, a row for each chunk of each text. weights: (rows, tokens);
    None where every token weighs 1. chunks: of each text."""

    outputs: Mapping[str, torch.Tensor]
    weights: torch.Tensor | None
    chunks: int

    def hidden(self, output: str) -> torch.Tensor:
        """(texts, chunks * tokens, width): each row times its weights, its mean as it was.

        As the emphasis "Original" of A1111's webui (modules/sd_emphasis.py), for each chunk of each text by itself: there
        texts that are encoded in one batch share a mean.
        """
        rows = self.outputs[output]
        if self.weights is not None:
            weighted = rows.float() * self.weights.to(rows.device)[..., None]
            mean, changed = (each.mean(dim=(1, 2), keepdim=True) for each in (rows.float(), weighted))
            rows = (weighted * (mean / changed)).to(rows.dtype)
        return rows.reshape(-1, self.chunks * rows.shape[1], rows.shape[2])

    def whole(self, output: str) -> torch.Tensor:
        """(texts, width) of an output for a text as a whole: that of its first chunk."""
        return self.outputs[output][:: self.chunks]


def encode(run: Run, reading: Reading, texts: Mapping[str, tuple[Any, Sequence[str]]]) -> dict[str, Encoded]:
    """What each text encoder gives for its texts, all in the same number of chunks.

    texts: part -> its tokenizer, and the texts.
    """
    import torch

    if reading.plain and not reading.words:
        return {
            name: Encoded(run(name, {"input_ids": token_ids(tokenizer, of)}), None, 1)
            for name, (tokenizer, of) in texts.items()
        }
    chunks = {name: [_chunks(tokenizer, text, reading) for text in of] for name, (tokenizer, of) in texts.items()}
    count = max(len(of_text) for of in chunks.values() for of_text in of)
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
    ids = [token for piece in pieces for token in piece][:size]  # as diffusers cuts it
    return [Chunk(tuple(ids), (1.0,) * len(ids))]


def plain_texts(texts: Sequence[str], reading: Reading) -> list[str]:
    """The texts for an encoder that knows neither weights nor chunks: what other syntaxes write without them is plain text.

    Raises UsageError for a text with weights or BREAK, and where words stand for learned vectors.
    """
    if reading.words:
        raise UsageError("this model takes no learned words", where="embeddings", remedy="Leave the embeddings out.")
    if reading.plain:
        return list(texts)
    found = []
    for text in texts:
        sections = parse(text)
        if len(sections) > 1 or any(each.weight != 1 for each in sections[0]):
            raise UsageError(
                f"{text[:40]!r} has weights or BREAK, which this model does not know",
                where="prompt",
                remedy="Write it without them, or with prompt_syntax plain, which reads every character as text.",
            )
        found.append("".join(each.text for each in sections[0]))
    return found


def token_ids(tokenizer: Any, texts: Sequence[str], length: int | None = None) -> torch.Tensor:
    """(texts, length) of a tokenizer; None: as many as the model reads. A longer text is cut, as in diffusers."""
    ids: torch.Tensor = tokenizer(
        list(texts),
        padding="max_length",
        max_length=tokenizer.model_max_length if length is None else length,
        truncation=True,
        return_tensors="pt",
    ).input_ids
    return ids


def last_but_one(config: Config) -> str:
    """The output of a CLIP text encoder with this config that goes into its last layer."""
    return f"hidden_states.{config['num_hidden_layers'] - 1}"


def last_but_one_layer(outputs: Iterable[str]) -> str:
    """The output that goes into the last layer, of those that a text encoder gave."""
    return max((name for name in outputs if name.startswith("hidden_states.")), key=_layer)


def _layer(output: str) -> int:
    return int(output.partition(".")[2])
