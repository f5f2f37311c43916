"""What is drawn where nobody says how: the manual's table, the shipped architectures, the signatures of diffusers' pipelines."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import diffusers
import pytest

from sdflow.families import FAMILIES
from sdflow.families.shared.base import Family
from sdflow.families.shared.few_steps import known_model
from sdflow.families.z_image.family import LENGTH
from sdflow.models.base import Config
from sdflow.sources.architectures import architecture_config, architecture_index

MANUAL = Path(__file__).parents[2] / "docs/generating.md"
OTHERS = {"sd15-inpainting", "sd2-inpainting", "sdxl-inpainting", "sdxl-refiner", "sdxl-v", "sdxl-v-zsnr"}
"""Not in the table: they do not draw from text, or have the defaults of the architecture that they are like."""


def table() -> dict[str, list[str]]:
    """Architecture -> the other cells of its row."""
    text = MANUAL.read_text().partition("### Defaults by model")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:3] == "| `"]
    return {name.strip("`"): cells for name, *cells in rows}


ROWS = table()
ARCHITECTURES = {
    name: family for family in FAMILIES.values() for name in family.architectures if not name.endswith("-tiny")
}


def configs_of(name: str, family: Family) -> dict[str, Config]:
    index = architecture_index(name)
    return {
        part.name: {
            **architecture_config(name, part.component),
            **{option: index.get(option, family.options[option]) for option in part.options},
        }
        for part in family.parts
        if any(index.get(part.component) or ())
    }


def computed(name: str, family: Family, called: str | None = None) -> list[str]:
    """The cells that follow from the code. called: another name that the model may have."""
    configs, scheduler = configs_of(name, family), architecture_config(name, "scheduler")
    named = known_model([called or name])
    defaults = family.defaults_of(configs, scheduler, {} if named is None else named.changes())["text"]
    sizes = family.token_sizes(configs)
    tokens = LENGTH if family.name == "z_image" else max(each for axis, each in sizes.items() if axis[:5] != "joint")
    shift = (
        "by size"
        if scheduler.get("use_dynamic_shifting")
        else f"{scheduler['shift']:g}"
        if "shift" in scheduler
        else ""
    )
    numbers = (f"{defaults.steps}", f"{defaults.guidance_scale:g}", f"{family.latents(configs).image_size}")
    return [*numbers, scheduler["_class_name"].removesuffix("Scheduler"), shift, f"{tokens}"]


def test_every_architecture_has_a_row() -> None:
    assert set(ROWS) | OTHERS == set(ARCHITECTURES)


@pytest.mark.parametrize("name", ROWS)
def test_the_manuals_row_is_what_is_drawn(name: str) -> None:
    assert ROWS[name][:-1] == computed(name, ARCHITECTURES[name])


@pytest.mark.parametrize("name", [name for name, cells in ROWS.items() if cells[-1].endswith("Pipeline`")])
def test_where_the_manual_names_a_pipeline_its_signature_says_the_same(name: str) -> None:
    steps, guidance, *_, tokens, pipeline = ROWS[name]
    said: Any = inspect.signature(getattr(diffusers, pipeline.strip("`")).__call__).parameters
    assert float(steps) == said["num_inference_steps"].default
    assert float(guidance) == said["guidance_scale"].default
    if "max_sequence_length" in said:
        assert int(tokens) == said["max_sequence_length"].default


@pytest.mark.parametrize(
    "called", ["stable-diffusion-3.5-large-turbo", "sd3.5_large_turbo.safetensors", "stable_diffusion_3-5_large_turbo"]
)
def test_a_large_model_named_turbo_draws_in_four_steps_without_guidance(called: str) -> None:
    assert computed("sd35-large", ARCHITECTURES["sd35-large"], called)[:2] == ["4", "0"]
    assert known_model(["stable-diffusion-3.5-large"]) is None


IMAGE_TASKS = {
    ("sd15", "image"): "StableDiffusionImg2ImgPipeline", ("sd15", "inpaint"): "StableDiffusionInpaintPipeline",
    ("sdxl", "image"): "StableDiffusionXLImg2ImgPipeline", ("sdxl", "inpaint"): "StableDiffusionXLInpaintPipeline",
    ("sd3-medium", "image"): "StableDiffusion3Img2ImgPipeline",
    ("sd3-medium", "inpaint"): "StableDiffusion3InpaintPipeline",
    ("flux1-dev", "image"): "FluxImg2ImgPipeline", ("flux1-dev", "inpaint"): "FluxInpaintPipeline",
    ("flux2-klein-base-4b", "inpaint"): "Flux2KleinInpaintPipeline",
}  # fmt: skip


@pytest.mark.parametrize(("name", "task"), IMAGE_TASKS)
def test_from_images_defaults_are_those_of_diffusers_pipelines(name: str, task: Any) -> None:
    family = ARCHITECTURES[name]
    own = family.defaults_of(configs_of(name, family), architecture_config(name, "scheduler"), {})[task]
    said: Any = inspect.signature(getattr(diffusers, IMAGE_TASKS[name, task]).__call__).parameters
    wanted = [said[each].default for each in ("num_inference_steps", "guidance_scale", "strength")]
    assert [own.steps, own.guidance_scale, own.strength] == wanted
