"""What a verification needs is known before it starts, and refused where it is not there."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest

from sdflow.config.workflow import ImageSpec, VerifySpec
from sdflow.errors import VerificationError
from sdflow.sources import Checkpoint, PlainDigests, open_checkpoint
from sdflow.sources.load import parameter_shapes
from sdflow.verify.memory import LIBRARIES, graph_bytes, reference_bytes, require_memory
from sdflow.verify.reference.selection import Selection, select

GB = 10**9


def selection_of(checkpoint: Checkpoint) -> Selection:
    return select(VerifySpec(), ImageSpec(), list(checkpoint.submodels), checkpoint)


def test_the_float32_unet_of_sdxl_is_the_most_and_fits_into_20_gb() -> None:
    """2.6 billion parameters: the denoiser and the decoder in float32, no float16 copy beside them."""
    checkpoint = open_checkpoint("synthetic:sdxl", digests=PlainDigests(), download=False)
    loads = {name: part.load for name, part in checkpoint.submodels.items()}
    counts = {name: sum(map(prod, parameter_shapes(name, load).values())) for name, load in loads.items()}
    drawing = counts["unet"] + counts["vae_decoder"]
    found = reference_bytes(checkpoint.family, counts, 0)
    assert found == LIBRARIES + 4 * drawing
    assert 10.3 * GB < found < 13 * GB
    assert max(graph_bytes(2 * counts["unet"], float16=True), found) < 20 * GB
    assert graph_bytes(4 * counts["unet"], float16=False) < 20 * GB


def test_small_halves_are_counted_with_their_widened_copy() -> None:
    checkpoint = open_checkpoint("synthetic:sd15-tiny", digests=PlainDigests(), download=False)
    assert reference_bytes(checkpoint.family, {"unet": GB // 2}, 0) == LIBRARIES + 3 * GB


def test_too_little_memory_is_refused_with_what_to_do(tiny_pipeline: Path, tiny_checkpoint: Checkpoint) -> None:
    loads = {name: part.load for name, part in tiny_checkpoint.submodels.items()}
    selection, family = selection_of(tiny_checkpoint), tiny_checkpoint.family
    arguments = (family, loads, selection, tiny_pipeline, list(loads))
    needed = require_memory(*arguments, available=GB * 20)
    assert LIBRARIES < needed < 2 * GB
    with pytest.raises(VerificationError, match="MB of memory, and 500 MB are available") as raised:
        require_memory(*arguments, available=GB // 2)
    assert "--submodel" in str(raised.value.remedy)
