"""The measure of meaning reads drawn images rightly and rejects what was not asked for."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image, ImageFilter

from sdflow.samples.prompts import evaluation_set
from sdflow.samples.scene import BACKGROUNDS, COLOURS, KINDS, Scene, Style, draw
from sdflow.samples.score import read, tally
from sdflow.samples.sheet import sheet

CASES = evaluation_set()[::4]
SCENE = Scene("red", "circle", "blue", "medium", "left")
STYLES = [Style(stripes, outline) for stripes in (False, True) for outline in (False, True)]


def drawn(scene: Scene, seed: int = 1, style: Style | None = None) -> Image.Image:
    return Image.fromarray(draw(scene, seed, style or Style()))


@pytest.mark.parametrize("style", STYLES, ids=str)
@pytest.mark.parametrize("blur", [0.0, 0.7])
def test_drawn_images_are_read_as_drawn(style: Style, blur: float) -> None:
    images = [drawn(case.scene, case.seed, style).filter(ImageFilter.GaussianBlur(blur)) for case in CASES]
    result = tally(CASES, images)
    assert min(result.colour, result.kind, result.background, result.size, result.position) >= 0.98
    assert result.stripes == float(style.stripes)
    assert result.outline == pytest.approx(float(style.outline), abs=0.02)


@pytest.mark.parametrize(
    "wrong",
    [
        *[replace(SCENE, colour=colour) for colour in COLOURS if colour not in ("red", "blue")],
        *[replace(SCENE, kind=kind) for kind in KINDS if kind != "circle"],
    ],
    ids=lambda scene: f"{scene.colour}-{scene.kind}",
)
def test_another_colour_or_kind_is_judged_wrong(wrong: Scene) -> None:
    reading = read(drawn(wrong))
    assert not reading.shows(SCENE)
    assert reading.shows(wrong)


@pytest.mark.parametrize("word", ["background", "size", "position"])
def test_another_background_size_or_position_is_told_apart(word: str) -> None:
    other = {"background": "green", "size": "large", "position": "bottom"}[word]
    assert getattr(read(drawn(replace(SCENE, **{word: other}))), word) == other


def test_noise_shows_nothing() -> None:
    rng = np.random.default_rng(0)
    for _ in range(10):
        reading = read(Image.fromarray(rng.integers(0, 256, (128, 128, 3), dtype=np.uint8)))
        assert (reading.colour, reading.kind, reading.stripes, reading.outline) == (None, None, False, False)


@pytest.mark.parametrize("colour", [*BACKGROUNDS.values(), (0, 0, 0), (255, 255, 255)], ids=str)
def test_an_image_without_a_shape_shows_no_shape(colour: tuple[int, int, int]) -> None:
    reading = read(Image.new("RGB", (128, 128), colour))
    assert (reading.colour, reading.kind) == (None, None)


def test_noise_over_an_image_hides_its_shape() -> None:
    rng = np.random.default_rng(0)
    noisy = np.clip(draw(SCENE, 1) + rng.normal(0, 90, (128, 128, 3)), 0, 255).astype(np.uint8)
    assert not read(Image.fromarray(noisy)).shows(SCENE)


def test_a_patch_of_white_is_no_stripes() -> None:
    pixels = draw(SCENE, 1)
    shape = (pixels == np.array(COLOURS["red"])).all(axis=2)
    shape[60:] = False
    pixels[shape] = 255
    assert not read(Image.fromarray(pixels)).stripes


def test_tally_counts_what_the_images_show() -> None:
    half = len(CASES) // 2
    right = [drawn(case.scene, case.seed) for case in CASES[:half]]
    images = right + [Image.new("RGB", (128, 128), BACKGROUNDS["gray"])] * (len(CASES) - half)
    assert tally(CASES, images).colour_and_kind == pytest.approx(half / len(CASES))


def test_tally_refuses_an_image_too_few() -> None:
    with pytest.raises(ValueError):
        tally(CASES, [drawn(SCENE)])


def test_a_sheet_holds_each_image_and_refuses_missing_prompts() -> None:
    images = [drawn(case.scene, case.seed) for case in CASES[:5]]
    page = sheet(images, [case.prompt for case in CASES[:5]], columns=3)
    assert page.width >= 3 * 128 and page.height >= 2 * 128
    corner = np.asarray(page.crop((8, 8, 136, 136)))
    assert np.array_equal(corner, np.asarray(images[0]))
    with pytest.raises(ValueError):
        sheet(images, ["one prompt"])
