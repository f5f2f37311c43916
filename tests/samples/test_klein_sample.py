"""The sample in FLUX.2-klein's shape, built for the CPU, shows what PyTorch's shows: drawn from prompts, and with a reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from started_python import Command

from samples.klein.edits import Edit, evaluation_edits
from samples.klein.evaluate import edits_share, noise
from sdflow.samples.prompts import KLEIN, evaluation_set
from sdflow.samples.scene import PIXELS, PLAIN, draw
from sdflow.samples.score import tally

ROOT = Path(__file__).parents[2]
CASES = evaluation_set(KLEIN)[5::40]
EDITS = evaluation_edits()[:4]
STEPS = 4


def drawn(pipeline: Any, prompt: str, seed: int, **more: Any) -> Image.Image:
    """From first latents of the case's own; `pipeline`: PyTorch's or a built one, which differ in how they pack them."""
    import torch

    latents = torch.from_numpy(noise(seed)[None])
    (image,) = pipeline(
        prompt=prompt, latents=latents, num_inference_steps=STEPS, height=PIXELS, width=PIXELS, **more
    ).images
    assert isinstance(image, Image.Image)
    return image


def reference(edit: Edit) -> Image.Image:
    return Image.fromarray(draw(edit.before, edit.seed, PLAIN))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shapes_klein")


@pytest.fixture(scope="module")
def built(sdflow: Command, folder: Path) -> Any:
    """Built and loaded. `tests/jobs/test_flux2_job.py` verifies its family."""
    from sdflow.runtime.pipeline import Pipeline

    done = sdflow("run", "shapes_klein", "--no-evaluate", "--no-verify", folder=folder)
    assert done.returncode == 0, done.stderr
    return Pipeline.load(folder / "pipelines/shapes_klein", "cpu", threads=1)


@pytest.fixture(scope="module")
def in_4_bits(built: Any, sdflow: Command, folder: Path) -> Any:
    """With the weights of its transformer and its text encoder in 4 bits; all else is in the cache."""
    from sdflow.runtime.pipeline import Pipeline

    workflow = str(ROOT / "workflows/shapes_klein_int4_cpu.yaml")
    done = sdflow("run", workflow, "--no-evaluate", "--no-verify", folder=folder)
    assert done.returncode == 0, done.stderr
    return Pipeline.load(folder / "pipelines/shapes_klein_int4_cpu", "cpu", threads=1)


@pytest.fixture(scope="module")
def by_pytorch() -> Any:
    import torch
    from diffusers import Flux2KleinPipeline

    pipeline = Flux2KleinPipeline.from_pretrained(ROOT / "samples/shapes-klein", torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def exact(built: Any) -> list[Image.Image]:
    """Images of the cases."""
    return [drawn(built, case.prompt, case.seed) for case in CASES]


def test_it_draws_what_the_prompt_says_as_pytorchs_does(exact: list[Image.Image], by_pytorch: Any) -> None:
    theirs = [drawn(by_pytorch, case.prompt, case.seed) for case in CASES]
    assert tally(CASES, exact) == tally(CASES, theirs)
    assert tally(CASES, exact).colour_and_kind >= 0.8


def test_it_changes_a_reference_as_the_prompt_says_as_pytorchs_does(built: Any, by_pytorch: Any) -> None:
    ours = [drawn(built, each.instruction, each.seed, references=[reference(each)]) for each in EDITS]
    theirs = [drawn(by_pytorch, each.instruction, each.seed, image=reference(each)) for each in EDITS]
    assert edits_share(EDITS, ours) == edits_share(EDITS, theirs)
    assert edits_share(EDITS, ours)["everything"] >= 0.8


def test_in_4_bits_it_shows_what_was_asked_for_as_often(in_4_bits: Any, exact: list[Image.Image], folder: Path) -> None:
    from sdflow.manifest import read_manifest

    quantized = [drawn(in_4_bits, case.prompt, case.seed) for case in CASES]
    assert tally(CASES, quantized).colour_and_kind >= tally(CASES, exact).colour_and_kind - 1 / len(CASES)
    assert any(one.tobytes() != other.tobytes() for one, other in zip(quantized, exact, strict=True))
    said = read_manifest(folder / "pipelines/shapes_klein_int4_cpu").origin.quantized
    assert said == {"text_encoder": "int4", "transformer": "int4"}
