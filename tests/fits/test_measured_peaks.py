"""The estimate of device memory beside what was measured on an H200 (benchmarks/results): within `ERROR`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sdflow.fits.estimate import CONTEXT, ERROR, MemoryNeed, Way, memory_need, with_refiner
from tests.fits.fitting import ROOT, full_size, need, planned

NO_CHECKER = "submodels.safety_checker=null"
FLOAT32_VAE = ("vae_encoder.precision=float32", "vae_decoder.precision=float32")
"""As the VAEs of SDXL, FLUX.2 and Z-Image were when they were measured."""
MEASURED: dict[str, tuple[tuple[str, ...], Way, float, str]] = {
    "FLUX.2-klein-4B": (("flux2_klein", *FLOAT32_VAE), "resident", 18.5, "gpu/klein-in-turns"),
    "FLUX.2-klein-4B in turns": (("flux2_klein", *FLOAT32_VAE), "turns", 9.2, "gpu/klein-in-turns"),
    "Z-Image-Turbo": (("z_image_turbo", *FLOAT32_VAE), "resident", 24.3, "gpu/z-image-in-turns"),
    "Z-Image-Turbo in turns": (("z_image_turbo", *FLOAT32_VAE), "turns", 13.4, "gpu/z-image-in-turns"),
    "SDXL": (("sdxl", *FLOAT32_VAE), "resident", 10.76, "gpu/sdxl-memory"),
    "SDXL in float8": (("sdxl_float8_cuda", *FLOAT32_VAE), "resident", 8.90, "float8, a process of its own"),
    "SD 1.5": (("sd15", NO_CHECKER), "resident", 3.01, "gpu/sd15-memory"),
    "SD 1.5 with a ControlNet": (
        ("sd15", NO_CHECKER, "controlnets={edges: synthetic:sd15}"), "resident", 3.8, "SD 1.5 with a ControlNet",
    ),
}  # fmt: skip
"""What -> workflow and changes, way, GB beside CUDA's context, and where it is recorded."""


def off(estimated: MemoryNeed, way: Way, measured: float) -> float:
    return (estimated.peak(way) - CONTEXT) / (measured * 1e9) - 1


VAES = pytest.mark.parametrize("vae", [FLOAT32_VAE, ()], ids=["float32 VAE", "VAE as shipped"])
"""A float16 VAE changes these peaks little: its decoder works in as much memory, and its weights are small."""


@pytest.mark.parametrize("what", MEASURED)
def test_the_estimate_is_near_what_was_measured(what: str) -> None:
    arguments, way, measured, _ = MEASURED[what]
    shipped = [each for each in arguments if each not in FLOAT32_VAE]
    for each in (arguments, shipped):
        assert abs(off(need(*each), way, measured)) <= ERROR, each


@VAES
def test_sdxl_with_its_refiner_is_near_what_was_measured(vae: tuple[str, ...]) -> None:
    refiner = memory_need(*planned("sdxl_refiner", overrides=["model=synthetic:sdxl-refiner", *vae]))
    assert abs(off(with_refiner(need("sdxl", *vae), refiner), "resident", 16.1)) <= ERROR


@pytest.mark.parametrize("base", ["sdxl", "sd35_medium", "flux1_schnell", "flux2_klein", "z_image_turbo"])
def test_a_float16_decoder_with_float32_scores_works_in_as_much_memory_as_a_float32_one(base: str) -> None:
    shipped, exact = (need(base, *vae).submodels["vae_decoder"] for vae in ((), FLOAT32_VAE))
    assert shipped.weights == exact.weights / 2
    assert shipped.working == exact.working
    half = need(base, "vae_decoder.passes.OnnxFloatToFloat16.node_block_list=null").submodels["vae_decoder"]
    assert half.working == pytest.approx(exact.working / 2, abs=1)


@VAES
def test_four_images_of_klein_are_near_what_was_measured(vae: tuple[str, ...]) -> None:
    """Only the denoiser works on all of them at once."""
    one = need("flux2_klein", *vae)
    denoiser = one.submodels[one.denoiser]
    four = replace(denoiser, working=4 * denoiser.working)
    together = replace(one, submodels={**one.submodels, one.denoiser: four})
    assert abs(off(together, "resident", 21.3)) <= ERROR


def test_what_was_measured_is_what_is_recorded() -> None:
    said = "\n".join(path.read_text() for path in (ROOT / "benchmarks/results").rglob("*.json"))
    for _, _, measured, claim in MEASURED.values():
        assert claim in said or json.dumps(claim)[1:-1] in said
        assert f"{measured:g}" in said


def test_the_manual_has_the_same_figures() -> None:
    """The table of docs/device_memory.md: what, measured, estimated, off."""
    manual = Path(ROOT / "docs/device_memory.md").read_text(encoding="utf-8")
    rows = {
        cells[0]: cells[1:4]
        for line in manual.splitlines()
        if len(cells := [c.strip() for c in line.split("|")[1:-1]]) == 4
    }
    for what, (arguments, way, measured, _) in MEASURED.items():
        estimated = need(*arguments)
        assert rows[what] == [
            f"{measured:g} GB",
            f"{(estimated.peak(way) - CONTEXT) / 1e9:.3g} GB",
            f"{off(estimated, way, measured):+.1%}",
        ]


def test_what_a_controlnet_keeps_counts_where_weights_take_turns_or_are_streamed() -> None:
    plain, controlled = need("sdxl"), need("sdxl", "controlnets={edges: synthetic:sdxl}")
    (net,) = (controlled.submodels[name] for name in controlled.nets)
    assert net.working > 0 and not plain.nets
    assert controlled.peak("turns") - plain.peak("turns") == net.working
    assert controlled.streamed(6 * 10**9) - plain.streamed(6 * 10**9) == net.working


@pytest.mark.parametrize("base", ["sd15", "sdxl", "flux2_klein"])
def test_turns_take_less_than_resident_weights(base: str) -> None:
    found = memory_need(*full_size(base))
    assert found.peak("turns") < found.peak("resident")
