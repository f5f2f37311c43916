"""What a verification needs is known before it starts: what fits is verified whole, what does not block by block, and what fits
neither way is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdflow.config.workflow import ImageSpec, VerifySpec
from sdflow.errors import VerificationError
from sdflow.families import FAMILIES
from sdflow.families.shared.base import Family
from sdflow.sources import Checkpoint, PlainDigests, open_checkpoint
from sdflow.sources.load import parameter_shapes
from sdflow.verify.memory import LIBRARIES, GraphSize, MemoryPlan, Size, plan_memory, require_memory
from sdflow.verify.reference.selection import Selection, select

GB = 10**9


def selection_of(checkpoint: Checkpoint) -> Selection:
    return select(VerifySpec(), ImageSpec(), list(checkpoint.submodels), checkpoint)


def planned(family: Family, sizes: dict[str, Size], available: float) -> MemoryPlan:
    """Of a pipeline in float16 that has no reference yet."""
    graphs = {name: GraphSize(size, 2 * size.parameters, float16=True) for name, size in sizes.items()}
    return plan_memory(family, sizes, graphs, 0, int(available))


def opened(reference: str) -> tuple[Family, dict[str, Size]]:
    checkpoint = open_checkpoint(reference, digests=PlainDigests(), download=False)
    loads = {name: part.load for name, part in checkpoint.submodels.items()}
    return checkpoint.family, {name: Size.of(parameter_shapes(name, load).values()) for name, load in loads.items()}


def test_the_float32_unet_of_sdxl_is_the_most_and_fits_whole_into_20_gb() -> None:
    """2.6 billion parameters: the denoiser and the decoder in float32, no float16 copy beside them."""
    family, sizes = opened("synthetic:sdxl")
    plan = planned(family, sizes, 20 * GB)
    drawing = sizes["unet"].parameters + sizes["vae_decoder"].parameters
    assert plan.streamed == {}
    assert plan.needed == LIBRARIES + 4 * drawing
    assert 10.3 * GB < plan.needed < 13 * GB


def test_small_halves_are_counted_with_their_widened_copy() -> None:
    sizes = {"unet": Size(GB // 2, GB // 20)}
    assert plan_memory(FAMILIES["stable_diffusion"], sizes, {}, 0, 10 * GB).needed == LIBRARIES + 3 * GB


def test_stable_diffusion_3_5_medium_is_verified_block_by_block_in_6_gb() -> None:
    """T5 has 4.76 billion parameters, 19 GB; the transformer 2.24 billion, 9 GB."""
    family, sizes = opened("synthetic:sd35-medium")
    assert planned(family, sizes, 6 * GB).needed <= 6 * GB
    assert {"text_encoder_3", "transformer"} <= planned(family, sizes, 6 * GB).streamed.keys()
    assert planned(family, sizes, 16 * GB).streamed.keys() == {"text_encoder_3"}, "the transformer fits whole"
    assert planned(family, sizes, 40 * GB).streamed == {}


def test_a_transformer_of_12_billion_parameters_is_verified_in_16_gb() -> None:
    """FLUX.1's: 19 double blocks and 38 single ones; the largest matrix is that of a single block's projections."""
    sizes = {
        "transformer": Size(11_900_000_000, 3072 * 21504),
        "text_encoder_3": Size(4_762_000_000, 32128 * 4096),
        "text_encoder": Size(123_000_000, 49408 * 768),
        "vae_decoder": Size(50_000_000, 512 * 512 * 9),
        "vae_encoder": Size(34_000_000, 512 * 512 * 9),
    }
    plan = planned(FAMILIES["stable_diffusion_3"], sizes, 16 * GB)
    assert plan.needed <= 16 * GB
    assert plan.streamed.keys() == {"transformer", "text_encoder_3"}
    assert all(each < 3 * GB for each in plan.streamed.values())
    assert "transformer block by block, 2.53 GB of its weights at a time" in plan.words()
    assert planned(FAMILIES["stable_diffusion_3"], sizes, 8 * GB).needed <= 8 * GB


def test_one_tensor_is_never_cut() -> None:
    sizes = {"unet": Size(2 * GB, GB // 5)}
    plan = plan_memory(FAMILIES["stable_diffusion"], sizes, {}, 0, 3 * GB)
    assert plan.streamed["unet"] == 4 * GB // 5 > (3 * GB - LIBRARIES) // 6


def test_quantized_weights_are_counted_as_the_float32_ones_that_a_session_has() -> None:
    size = Size(4 * GB, GB // 20)
    int4 = GraphSize(size, 5 * GB // 2, float16=True, quantized=True)
    assert int4.whole == LIBRARIES + 8 * size.parameters
    assert GraphSize(size, 2 * size.parameters, float16=True).whole == LIBRARIES + 4 * size.parameters


def test_a_denoiser_that_takes_references_is_loaded_though_the_reference_is_there() -> None:
    """By the size of its module, where its graph, here without weights, is smaller."""
    graphs = {"transformer": GraphSize(Size(GB, GB // 20), 0, float16=True)}
    with_references, without = FAMILIES["flux2"], FAMILIES["z_image"]
    assert (with_references.references is None, without.references is None) == (False, True)
    assert plan_memory(with_references, {}, graphs, 0, 20 * GB).needed >= LIBRARIES + 4 * GB
    assert plan_memory(without, {}, graphs, 0, 20 * GB).needed == LIBRARIES


def test_too_little_memory_is_refused_with_what_to_do(tiny_pipeline: Path, tiny_checkpoint: Checkpoint) -> None:
    loads = {name: part.load for name, part in tiny_checkpoint.submodels.items()}
    selection, family = selection_of(tiny_checkpoint), tiny_checkpoint.family
    arguments = (family, loads, selection, tiny_pipeline, list(loads))
    needed = require_memory(*arguments, available=GB * 20).needed
    assert LIBRARIES < needed < 2 * GB
    with pytest.raises(VerificationError, match="MB of memory.*, but 500 MB are available") as raised:
        require_memory(*arguments, available=GB // 2)
    assert "--submodel" in str(raised.value.remedy)
