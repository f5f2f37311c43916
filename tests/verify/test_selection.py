"""What is verified at each level: of large transformers the quick level takes short texts and few image tokens."""

from __future__ import annotations

import pytest

from sdflow.config.workflow import ImageSpec, VerifySpec
from sdflow.sources import PlainDigests, open_checkpoint
from sdflow.verify.reference.selection import Selection, select


def selection(reference: str, spec: VerifySpec) -> Selection:
    checkpoint = open_checkpoint(f"synthetic:{reference}", digests=PlainDigests(), download=False)
    return select(spec, ImageSpec(), list(checkpoint.submodels), checkpoint)


@pytest.mark.parametrize(
    ("architecture", "latents"), [("flux2-klein-4b", 4), ("z-image-turbo", 8), ("flux1-schnell", 8), ("sd35-medium", 8)]
)
def test_large_transformers_are_verified_quickly_with_short_texts(architecture: str, latents: int) -> None:
    quick = selection(architecture, VerifySpec())
    assert (quick.tokens, quick.steps, quick.rows, quick.columns) == (32, 2, latents, latents)
    assert quick.text_arguments == {"max_sequence_length": 32}
    assert quick.shapes == ((2, latents, 2 * latents),)


@pytest.mark.parametrize("architecture", ["flux2-klein-4b", "sd35-medium"])
def test_the_full_level_reads_texts_of_the_models_own_length(architecture: str) -> None:
    full = selection(architecture, VerifySpec(level="full"))
    assert full.tokens is None
    assert full.text_arguments == {}
    assert full.steps >= 4


@pytest.mark.parametrize("architecture", ["sd15-tiny", "sdxl", "sd35-tiny", "flux2-tiny"])
def test_other_models_read_texts_of_their_own_length_at_either_level(architecture: str) -> None:
    quick = selection(architecture, VerifySpec())
    assert (quick.tokens, quick.rows) == (None, 8)


def test_a_workflow_may_say_the_steps_and_the_size() -> None:
    quick = selection("flux2-klein-4b", VerifySpec(steps=4, height=128, width=256))
    assert (quick.steps, quick.rows, quick.columns, quick.tokens) == (4, 8, 16, 32)
