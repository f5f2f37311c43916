"""Split texts of any length into chunks of token ids for a text encoder.

The rules are those of AUTOMATIC1111's stable-diffusion-webui (modules/sd_hijack_clip.py, `tokenize_line`): a chunk
holds as many tokens as fit between start and end; when it is full, tokens after a nearby comma move to the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sdflow.prompts.reading import Reading
from sdflow.prompts.weights import Weighted

NEAR = 20
"""Maximum distance of that comma in tokens."""


@dataclass(frozen=True)
class Chunk:
    """Tokens between start and end, with their weights."""

    ids: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()

    def row(self, start: int, end: int, pad: int, length: int) -> tuple[list[int], list[float]]:
        """Return ids and weights of `length` tokens: start, the chunk's, end, and padding of weight 1."""
        filling = length - len(self.ids) - 2
        return [start, *self.ids, end, *[pad] * filling], [1.0, *self.weights, *[1.0] * (filling + 1)]


def chunked(
    sections: Sequence[Sequence[Weighted]],
    reading: Reading,
    tokenize: Callable[[str], Sequence[int]],
    comma: int | None,
    size: int,
) -> list[Chunk]:
    """Return the chunks of a text; an empty text has one chunk without tokens.

    sections: each starts a new chunk. tokenize: returns a text's ids without start and end. comma: its id. size: of a
    chunk.
    """
    chunks: list[Chunk] = []
    ids: list[int] = []
    weights: list[float] = []
    last_comma: int | None = None

    def flush(kept: int | None = None) -> None:
        nonlocal ids, weights, last_comma
        end = len(ids) if kept is None else kept
        chunks.append(Chunk(tuple(ids[:end]), tuple(weights[:end])))
        ids, weights, last_comma = ids[end:], weights[end:], None

    def make_room(count: int) -> None:
        if len(ids) == size and last_comma is not None and size - last_comma <= NEAR:
            flush(last_comma + 1)
        if len(ids) + count > size:
            flush()

    for index, section in enumerate(sections):
        if index:
            flush()
        for each in section:
            for piece in reading.pieces(each.text):
                tokens = piece if isinstance(piece, tuple) else tokenize(piece)
                if isinstance(piece, tuple) and len(tokens) <= size:
                    make_room(len(tokens))  # keep a word's vectors together
                for token in tokens:
                    if token == comma:
                        last_comma = len(ids)
                        if len(ids) == size:
                            flush()
                    else:
                        make_room(1)
                    ids.append(token)
                    weights.append(each.weight)
    if ids or not chunks:
        flush()
    return chunks
