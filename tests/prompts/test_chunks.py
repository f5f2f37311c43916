"""Long prompts in chunks: no token is lost, none is torn from its neighbours without need."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from sdflow.prompts.chunks import NEAR, Chunk, chunked
from sdflow.prompts.reading import Reading
from sdflow.prompts.weights import Weighted

SIZE, COMMA = 75, 99
NO_WORDS = Reading("a1111")


def numbers(text: str) -> list[int]:
    """A tokenizer for tests: the numbers in the text."""
    return [int(each) for each in text.split()]


def chunks_of(*sections: list[tuple[str, float]], reading: Reading = NO_WORDS) -> list[Chunk]:
    return chunked([[Weighted(*each) for each in section] for section in sections], reading, numbers, COMMA, SIZE)


def text_of(ids: list[int]) -> str:
    return " ".join(map(str, ids))


TOKENS = st.lists(st.one_of(st.integers(1, 98), st.just(COMMA)), max_size=300)


@given(st.lists(st.tuples(TOKENS, st.sampled_from([1.0, 0.5, 1.3])), max_size=5))
def test_every_token_is_there_in_order_with_its_weight_and_no_chunk_is_too_long(
    parts: list[tuple[list[int], float]],
) -> None:
    made = chunks_of([(text_of(ids), weight) for ids, weight in parts])
    assert all(len(each.ids) <= SIZE and len(each.ids) == len(each.weights) for each in made)
    assert [pair for each in made for pair in zip(each.ids, each.weights, strict=True)] == [
        (token, weight) for ids, weight in parts for token in ids
    ]
    assert made, "an empty prompt has a chunk too"


@given(TOKENS)
def test_a_chunk_ends_full_or_behind_a_comma_that_is_near(ids: list[int]) -> None:
    made = chunks_of([(text_of(ids), 1.0)])
    for each in made[:-1]:
        assert len(each.ids) == SIZE or (each.ids[-1] == COMMA and len(each.ids) >= SIZE - NEAR)


def test_what_stands_behind_a_near_comma_goes_to_the_next_chunk() -> None:
    near = chunks_of([(text_of([1] * 60 + [COMMA] + [2] * 20), 1.0)])
    assert [len(each.ids) for each in near] == [61, 20]
    far = chunks_of([(text_of([1] * 50 + [COMMA] + [2] * 30), 1.0)])
    assert [len(each.ids) for each in far] == [75, 6]


def test_each_section_begins_a_chunk() -> None:
    assert [each.ids for each in chunks_of([("1 2", 1.0)], [("3", 1.0)])] == [(1, 2), (3,)]
    assert [each.ids for each in chunks_of([], [("3", 1.0)])] == [(), (3,)], "as a BREAK at the beginning"
    assert [each.ids for each in chunks_of([("1", 1.0)], [])] == [(1,)], "as one at the end"


def test_the_vectors_of_a_word_stay_together() -> None:
    reading = Reading("a1111", {"style": 4})
    made = chunks_of([(f"{text_of([1] * 73)} ", 1.0), ("style", 1.5), (" 2", 1.0)], reading=reading)
    assert [each.ids for each in made] == [(1,) * 73, (-4, -3, -2, -1, 2)]
    assert made[1].weights == (1.5,) * 4 + (1.0,)


def test_a_row_has_start_end_and_filling() -> None:
    ids, weights = Chunk((5, 6), (2.0, 3.0)).row(100, 101, 0, 7)
    assert ids == [100, 5, 6, 101, 0, 0, 0]
    assert weights == [1.0, 2.0, 3.0, 1.0, 1.0, 1.0, 1.0]
    assert Chunk(tuple(range(75)), (1.0,) * 75).row(100, 101, 0, 77)[0][-1] == 101


@given(st.lists(st.sampled_from(["1", "2", "Style", "style", "my-style", "style2", ","]), max_size=12))
def test_words_are_found_whole_and_in_any_letters(parts: list[str]) -> None:
    reading = Reading("plain", {"style": 2, "other": 1})
    pieces = reading.pieces(" ".join(parts))
    assert [piece for piece in pieces if isinstance(piece, tuple)] == [
        (-3, -2) for each in parts if each.lower() == "style"
    ]
    texts = list(itertools.chain.from_iterable(piece.split() for piece in pieces if isinstance(piece, str)))
    assert texts == [each for each in parts if each.lower() != "style"]
