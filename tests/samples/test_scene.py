"""The images and prompts of the sample pipeline: deterministic, as named, and apart where held out."""

import random
import re
from pathlib import Path

import numpy as np
import pytest

from sdflow.samples.prompts import KLEIN, SHAPES, caption, evaluation_set, first_latents
from sdflow.samples.scene import KINDS, PIXELS, SIZES, Scene, Style, all_scenes, distance, draw, is_held_out

SAMPLES = Path(__file__).parents[2] / "samples"
SCENE = Scene("red", "circle", "blue", "large", "left")


def test_equal_arguments_draw_equal_pixels_and_another_seed_moves_the_shape() -> None:
    assert np.array_equal(draw(SCENE, 3), draw(SCENE, 3))
    assert not np.array_equal(draw(SCENE, 3), draw(SCENE, 4))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_every_kind_has_the_area_of_the_disc_of_its_radius(kind: str, size: str) -> None:
    area = (distance(kind, SIZES[size], 0.0, 0.0) < 0).sum()
    assert np.sqrt(area / np.pi) == pytest.approx(SIZES[size], rel=0.04)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_centred_on_its_centroid(kind: str) -> None:
    rows, columns = np.nonzero(distance(kind, 26.0, 10.0, -7.0) < 0)
    centre = (PIXELS - 1) / 2
    assert (columns.mean() - centre, rows.mean() - centre) == pytest.approx((10.0, -7.0), abs=0.5)


def test_a_style_changes_the_shape_and_nothing_around_it() -> None:
    around = draw(SCENE, 1) == draw(SCENE, 1, Style(stripes=True, outline=True))
    background = (draw(SCENE, 1) == np.array((40, 85, 215))).all(axis=2)
    assert background.any() and around[background].all()
    assert not around[~background].all()


def test_the_evaluation_set_is_fixed_and_has_held_out_combinations() -> None:
    cases = evaluation_set()
    assert cases == evaluation_set()
    assert len(cases) >= 200
    assert len({(case.prompt, case.seed) for case in cases}) == len(cases)
    assert sum(case.held_out for case in cases) == 60
    assert cases[0].prompt == "big pink square, in the center, green background"


@pytest.mark.parametrize(("sample", "folder"), [(SHAPES, "shapes"), (KLEIN, "shapes-klein")])
def test_a_sample_knows_every_word_of_its_prompts(sample: str, folder: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SAMPLES / folder / "tokenizer")
    for case in evaluation_set(sample):
        words = tokenizer.tokenize(case.prompt)
        assert tokenizer.unk_token not in words, case.prompt
        assert len(words) == len(re.findall(r"\w+|,", case.prompt)), case.prompt


def test_some_but_few_combinations_are_held_out_and_each_word_is_seen() -> None:
    scenes = all_scenes()
    seen = [scene for scene in scenes if not is_held_out(scene)]
    assert 0.1 < 1 - len(seen) / len(scenes) < 0.25
    for words in zip(*[(s.colour, s.kind, s.background, s.size, s.position) for s in scenes], strict=True):
        assert set(words) <= {word for s in seen for word in (s.colour, s.kind, s.background, s.size, s.position)}


def test_captions_name_the_colour_and_the_kind_in_more_than_one_wording() -> None:
    rng = random.Random(0)
    captions = {caption(SCENE, rng) for _ in range(200)}
    assert len(captions) > 30
    assert all("red" in text and "circle" in text for text in captions)


def test_first_latents_depend_on_the_seed_alone() -> None:
    assert np.array_equal(first_latents(5), first_latents(5))
    assert not np.array_equal(first_latents(5), first_latents(6))
    assert first_latents(5).shape == (4, 16, 16)
