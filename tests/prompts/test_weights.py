"""Weights in prompts are read as A1111's webui reads them; diffusion-prompt-embedder, a package with its parser, agrees."""

from __future__ import annotations

import math

import pytest
from diffusion_prompt_embedder import parse_prompt_attention
from hypothesis import assume, given
from hypothesis import strategies as st

from sdflow.errors import UsageError
from sdflow.prompts.weights import Weighted, parse

MARKS = st.lists(
    st.sampled_from(
        ["(", ")", "[", "]", ":", ":1.3)", ":.5)", ": 2 )", "\\", "\\(", "\\]", " ", ",", "a", "cat", "é", "1"]
    ),
    max_size=25,
).map("".join)
DEPTH = 40


def flat(prompt: str) -> list[tuple[str, float]]:
    """Characters with their weights: how equal neighbours are joined does not matter."""
    return [(letter, round(each.weight, 9)) for section in parse(prompt) for each in section for letter in each.text]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    {
        "normal text": [("normal text", 1.0)],
        "an (important) word": [("an ", 1.0), ("important", 1.1), (" word", 1.0)],
        "((twice))": [("twice", 1.21)],
        "[less]": [("less", 1 / 1.1)],
        "(word:1.3)": [("word", 1.3)],
        "(a [b] c:2)": [("a ", 2.0), ("b", 2 / 1.1), (" c", 2.0)],
        "(not closed": [("not closed", 1.1)],
        r"\(literal\]": [("(literal]", 1.0)],
        "a time of 12:30": [("a time of 12:30", 1.0)],
        "(a:1.2.3)": [("a:1.2.3)", 1.1)],
        "": [("", 1.0)],
    }.items(),
)
def test_marks_weigh_as_documented(prompt: str, expected: list[tuple[str, float]]) -> None:
    (section,) = parse(prompt)
    assert [(each.text, pytest.approx(each.weight)) for each in section if each.text] == [
        (text, pytest.approx(weight)) for text, weight in expected if text
    ]


@given(MARKS)
def test_any_prompt_is_read_as_the_package_reads_it(prompt: str) -> None:
    expected = [(letter, round(weight, 9)) for text, weight in parse_prompt_attention(prompt) for letter in text]
    assert flat(prompt) == expected


@given(st.text(st.characters(blacklist_characters="()[]\\:"), max_size=60))
def test_a_text_without_marks_is_that_text(text: str) -> None:
    assume("BREAK" not in text)
    (section,) = parse(text)
    assert all(each.weight == 1 for each in section)
    assert "".join(each.text for each in section) == text


@given(st.text(max_size=80))
def test_any_text_at_all_has_finite_weights(text: str) -> None:
    assert all(math.isfinite(each.weight) for section in parse(text) for each in section)


@given(st.text("abc ,", min_size=1, max_size=20), st.integers(0, DEPTH), st.integers(0, DEPTH))
def test_brackets_nest(text: str, round_ones: int, square_ones: int) -> None:
    (section,) = parse("(" * round_ones + "[" * square_ones + text + "]" * square_ones + ")" * round_ones)
    assert [each.text for each in section] == [text]
    assert section[0].weight == pytest.approx(1.1 ** (round_ones - square_ones))


@pytest.mark.parametrize("prompt", ["a cat BREAK on a mat", "a cat\nBREAK on a mat"])
def test_break_ends_a_section(prompt: str) -> None:
    assert parse(prompt) == [[Weighted("a cat", 1.0)], [Weighted("on a mat", 1.0)]]


def test_break_within_brackets_ends_a_section_and_both_keep_their_weight() -> None:
    assert parse("(a cat BREAK a mat:1.5)") == [[Weighted("a cat", 1.5)], [Weighted("a mat", 1.5)]]


def test_a_word_that_has_break_in_it_is_a_word() -> None:
    assert parse("BREAKFAST") == [[Weighted("BREAKFAST", 1.0)]]


def test_a_weight_beyond_all_numbers_is_refused() -> None:
    with pytest.raises(UsageError, match="has the weight inf"):
        parse(f"(cat:{'9' * 400})")


def test_a_text_without_weights_is_plain_whatever_the_syntax() -> None:
    from sdflow.errors import UsageError
    from sdflow.families.shared.text import plain_texts
    from sdflow.prompts.reading import PLAIN, Reading

    marked = Reading("a1111")
    assert plain_texts(["a (cat:1.2) BREAK b"], PLAIN) == ["a (cat:1.2) BREAK b"]
    assert plain_texts(["a cat", r"a \(cat\)", ""], marked) == ["a cat", "a (cat)", ""]
    for text in ("a (cat:1.2)", "a [cat]", "a BREAK b"):
        with pytest.raises(UsageError, match="weights or BREAK"):
            plain_texts([text], marked)
