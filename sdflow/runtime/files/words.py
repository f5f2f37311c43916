"""Embeddings of a `sdflow generate` run: read, checked against the prompts, and recorded in the images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sdflow.digest import digest_file
from sdflow.errors import UsageError
from sdflow.prompts.reading import Reading
from sdflow.sources.embedding import Embedding, embeddings_in, read_embedding, require_different, split_word


def read_words(
    embeddings: Sequence[str], texts: Sequence[str], reading: Reading, *, folder: Path | None, allow_pickle: bool
) -> list[Embedding]:
    """Read the embeddings (FILE or FILE:WORD), and those in the folder that a text names. texts: all prompts.

    Raises CheckpointError for files that are not embeddings, UsageError for duplicate words and for unused embeddings.
    """
    words = [read_embedding(*split_word(each), allow_pickle=allow_pickle) for each in embeddings]
    require_different(words)
    own = {word.word.lower() for word in words}
    there = (
        {}
        if folder is None
        else {word: path for word, path in embeddings_in(folder).items() if word.lower() not in own}
    )
    named = words_named(texts, replace(reading, words=dict.fromkeys(there, 1)))
    words += [read_embedding(there[word], word, allow_pickle=allow_pickle) for word in named]
    reading = replace(reading, words={word.word: word.count for word in words})
    used = words_named(texts, reading)
    for word in words:
        if word.word not in used:
            raise UsageError(
                f"no prompt contains {word.word!r}",
                where=str(word.path),
                remedy="Use the word in the prompt or the negative prompt.",
            )
    return words


def words_named(texts: Sequence[str], reading: Reading) -> list[str]:
    """Return the words of a reading that the texts contain, in order."""
    named = {piece for text in texts for piece in reading.pieces(text) if isinstance(piece, tuple)}
    return [word for word in reading.words if named.intersection(reading.pieces(word))]


def recorded_embeddings(words: Sequence[Embedding]) -> Mapping[str, Any]:
    """Return the embeddings as recorded in a PNG's text; empty without any."""
    files = {each.word: {"name": each.path.name, "sha256": digest_file(each.path)} for each in words}
    return {"embeddings": files} if files else {}
