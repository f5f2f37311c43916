"""What PNG files say is read back by sdflow and, independently, by sd-parsers and by the expressions of A1111's webui and
ComfyUI."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sd_parsers import ParserManager
from sd_parsers.data import Sampler
from sd_parsers.parsers import AUTOMATIC1111Parser, InvokeAIParser

from sdflow.errors import UsageError
from sdflow.families.shared.sampler_names import invokeai_name, webui_names
from sdflow.families.shared.schedulers import SCHEDULERS, parts_of
from sdflow.prompts.weights import parse
from sdflow.runtime.files.image_text import INVOKEAI_METADATA, PARAMETERS, SETTINGS, image_text, infotext
from sdflow.runtime.files.image_text_reading import read_image_settings
from sdflow.runtime.files.images import png_text

WEBUI = re.compile(r'\s*(\w[\w \-/]+):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)')
"""`re_param_code` of A1111's modules/infotext_utils.py: finds the settings in the last line of `parameters`."""
COMFYUI = re.compile(r'\s*([^:]+:\s*([^"\{].*?|".*?"|\{.*?\}))\s*(,|$)')
"""The same of ComfyUI, in src/scripts/pnginfo.ts of ComfyUI_frontend."""

DRAWN: dict[str, Any] = {
    "prompt": "a (large:1.2) réd circle, on blue",
    "negative_prompt": "text, blurry",
    "prompt_syntax": "a1111",
    "steps": 20,
    "guidance_scale": 7.5,
    "seed": 2**40,
    "scheduler": "EulerAncestralDiscreteScheduler",
    "scheduler_name": "euler_a",
    "size": [512, 768],
    "pipeline": "shapes",
    "clip_skip": 1,
    "eta": 0.0,
}
READ = {
    "negative_prompt": "text, blurry",
    "steps": 20,
    "guidance_scale": 7.5,
    "seed": 2**40,
    "scheduler": "euler_a",
    "width": 512,
    "height": 768,
    "clip_skip": 1,
}


def png(path: Path, chunks: dict[str, str]) -> Path:
    Image.new("RGB", (8, 8)).save(path, pnginfo=png_text(chunks))
    return path


def sampler_in(path: Path, parser: Any) -> Sampler:
    found = ParserManager(managed_parsers=[parser]).parse(path)
    assert found is not None
    (sampler,) = found.samplers
    return sampler


def test_sd_parsers_reads_what_the_webui_and_invokeai_would_have_written(tmp_path: Path) -> None:
    path = png(tmp_path / "image.png", image_text(DRAWN))
    webui, invoke = (sampler_in(path, each) for each in (AUTOMATIC1111Parser, InvokeAIParser))
    for each in (webui, invoke):
        assert [text.value for text in each.prompts] == [DRAWN["prompt"]]
        assert [text.value for text in each.negative_prompts] == ["text, blurry"]
        assert {key: float(each.parameters[key]) for key in ("steps", "cfg_scale", "seed")} == {
            "steps": 20, "cfg_scale": 7.5, "seed": 2**40
        }  # fmt: skip
    assert (webui.name, invoke.name) == ("Euler a", "euler_a")
    assert webui.model is not None and webui.model.name == "shapes"


def test_the_webui_finds_every_setting_in_the_last_line() -> None:
    *lines, last = infotext({**DRAWN, "pipeline": "a, b: c", "strength": 0.75, "mask_blur": 4.0}).strip().split("\n")
    assert lines == [DRAWN["prompt"], "Negative prompt: text, blurry"]
    found = {label: json.loads(value) if value[0] == '"' else value for label, value in WEBUI.findall(last)}
    assert found.pop("Version").startswith("sdflow ")
    assert found == {
        "Steps": "20", "Sampler": "Euler a", "CFG scale": "7.5", "Seed": str(2**40), "Size": "512x768", "Model": "a, b: c",
        "Denoising strength": "0.75", "Clip skip": "2", "Mask blur": "4",
    }  # fmt: skip


def test_comfyui_finds_the_prompts_and_the_settings() -> None:
    text = infotext({**DRAWN, "negative_prompt": None})
    steps = text.rindex("\nSteps:")
    assert text[: text.rindex("\nNegative prompt:", 0, steps)] == DRAWN["prompt"], "without the line it imports nothing"
    found = dict(each[0].rstrip(",").split(":", 1) for each in COMFYUI.findall(text[steps + 1 :]))
    numbers = {label.strip().lower(): value.strip() for label, value in found.items()}
    assert (numbers["steps"], numbers["sampler"], numbers["cfg scale"]) == ("20", "Euler a", "7.5")
    assert (numbers["size"], numbers["clip skip"]) == ("512x768", "2")


def test_text_that_is_not_ascii_is_utf_8_in_the_file(tmp_path: Path) -> None:
    content = png(tmp_path / "image.png", image_text(DRAWN)).read_bytes()
    assert b"iTXtparameters\0" in content and "réd".encode() in content and "réd".encode("latin-1") not in content
    plain = png(tmp_path / "plain.png", image_text({**DRAWN, "prompt": "red"})).read_bytes()
    assert b"tEXtparameters\0" in plain


@pytest.mark.parametrize("keyword", [SETTINGS, PARAMETERS, INVOKEAI_METADATA])
def test_sdflow_reads_each_of_the_three(tmp_path: Path, keyword: str) -> None:
    path = png(tmp_path / "image.png", {keyword: image_text(DRAWN)[keyword]})
    found = read_image_settings(path)
    assert (found.prompt, found.inputs, found.notes) == (DRAWN["prompt"], (), ())
    assert READ.items() <= found.settings.items()
    syntax = {SETTINGS: "a1111", PARAMETERS: "a1111", INVOKEAI_METADATA: None}[keyword]
    assert found.settings.get("prompt_syntax") == syntax
    called = found.call_arguments()
    assert (called["num_inference_steps"], called["height"], called["clip_skip"]) == (20, 768, 1)
    assert "scheduler" not in called and "refiner_start" not in called


WORDS = st.text(st.sampled_from("ab()[]\\:,.1<>é \"'"), min_size=1, max_size=30).map(str.strip).filter(bool)


@given(prompt=WORDS, negative=WORDS, seed=st.integers(0, 2**63 - 1), scale=st.floats(0, 1000))
def test_a_plain_prompt_means_the_same_in_the_syntax_of_the_webui(
    tmp_path_factory: pytest.TempPathFactory, prompt: str, negative: str, seed: int, scale: float
) -> None:
    drawn = {"prompt": prompt, "negative_prompt": negative, "seed": seed, "guidance_scale": scale, "steps": 2}
    path = png(tmp_path_factory.mktemp("image") / "image.png", {PARAMETERS: infotext(drawn)})
    found = read_image_settings(path)
    assert (found.settings["seed"], found.settings["guidance_scale"]) == (seed, scale)
    for text, was in ((found.prompt, prompt), (found.settings["negative_prompt"], negative)):
        ((read,),) = parse(text)
        assert (read.text, read.weight) == (was, 1.0)


def test_what_is_not_taken_over_is_said(tmp_path: Path) -> None:
    text = (
        "a cat <lora:ink:0.8>\nsecond line\nNegative prompt: dog\nugly\n"
        "Steps: 30, Sampler: DPM++ 2M, Schedule type: KL Optimal, CFG scale: 7, "
        'Seed: 1, Size: 512x512, Model hash: 45dee52b, Hires upscale: 2, Denoising strength: 0.4, Lora hashes: "ink: ab, b: c"'
    )
    found = read_image_settings(png(tmp_path / "image.png", {PARAMETERS: text}))
    assert (found.prompt, found.settings["negative_prompt"]) == ("a cat \nsecond line", "dog\nugly")
    assert found.settings["scheduler"] == "dpm++_2m" and "strength" not in found.settings
    assert [re.search(r"hires fix|KL Optimal|ink", note)[0] for note in found.notes] == [
        "hires fix",
        "KL Optimal",
        "ink",
    ]  # type: ignore[index]
    sampler = read_image_settings(png(tmp_path / "b.png", {PARAMETERS: "a\nSteps: 3, Sampler: Restart, Seed: 4"}))
    assert "scheduler" not in sampler.settings and "'Restart'" in sampler.notes[0]


@pytest.mark.parametrize(
    ("said", "scheduler"),
    [
        ("Sampler: DPM++ 2M Karras", "dpm++_2m_karras"),
        ("Sampler: DPM++ 2M, Schedule type: Karras", "dpm++_2m_karras"),
        ("Sampler: DPM++ 2M, Schedule type: Automatic", "dpm++_2m_karras"),
        ("Sampler: DPM++ 2M", "dpm++_2m"),  # of a webui from before schedule types
        ("Sampler: DPM++ 2M SDE, Schedule type: Exponential", "dpm++_2m_sde_exponential"),
        ("Sampler: Euler, Schedule type: SGM Uniform", "euler_trailing"),
        ("Sampler: DPM2 a, Schedule type: Beta", "dpm2_a_beta"),
        ("Sampler: PLMS", "pndm"),
    ],
)
def test_samplers_and_schedule_types_of_the_webui_are_taken_over(tmp_path: Path, said: str, scheduler: str) -> None:
    found = read_image_settings(png(tmp_path / "image.png", {PARAMETERS: f"a\nSteps: 3, {said}, Seed: 4"}))
    assert (found.settings["scheduler"], found.notes) == (scheduler, ())


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_is_read_back_by_the_name_that_each_program_has_for_it(tmp_path: Path, name: str) -> None:
    chunks = image_text({**DRAWN, "scheduler_name": name})
    plain = name.removeprefix("flow_")
    spacing = parts_of(name)[1]
    for keyword, known in ((SETTINGS, True), (PARAMETERS, webui_names(name)), (INVOKEAI_METADATA, invokeai_name(name))):
        found = read_image_settings(png(tmp_path / "image.png", {keyword: chunks[keyword]}))
        expected = name if keyword == SETTINGS else plain if known else None
        if keyword == INVOKEAI_METADATA and spacing == "trailing" and known:
            expected = plain.removesuffix("_trailing")  # of which it has no word
        assert found.settings.get("scheduler") == expected, keyword
        assert found.notes == ()


@pytest.mark.parametrize(
    ("chunks", "what"),
    [
        ({}, "the file contains no settings"),
        ({PARAMETERS: "a cat"}, "'parameters' is not in A1111's webui's format"),
        ({PARAMETERS: "a\nSteps: many, Seed: 1, Size: 1x1"}, "not in A1111's webui's format"),
        ({SETTINGS: "{"}, "'sdflow' is not in sdflow's format"),
        ({SETTINGS: '{"prompts": []}'}, "contact sheet"),
        ({SETTINGS: "[1]"}, "not in sdflow's format"),
        ({SETTINGS: '{"prompt": "a", "steps": 0}'}, "--steps: invalid value 0"),
        ({SETTINGS: '{"prompt": "a", "steps": "5"}'}, "--steps: invalid value '5'"),
        ({INVOKEAI_METADATA: '{"seed": 1}'}, "not in InvokeAI's format"),
        ({SETTINGS: '{"prompt": 5, "steps": 2}'}, "not in sdflow's format"),
        ({PARAMETERS: f"a\nSteps: {'9' * 400}, Seed: 1, Size: 64x64"}, "--steps: invalid value 9"),
        ({PARAMETERS: "a\n" + "a " * 30_000}, "not in A1111's webui's format"),  # in a moment
    ],
)
def test_a_text_that_says_nothing_is_refused(tmp_path: Path, chunks: dict[str, str], what: str) -> None:
    with pytest.raises(UsageError, match=re.escape(what)):
        read_image_settings(png(tmp_path / "image.png", chunks))


def test_a_file_that_is_no_image_is_refused(tmp_path: Path) -> None:
    (tmp_path / "image.png").write_text("no image")
    with pytest.raises(UsageError, match="cannot be read as an image"):
        read_image_settings(tmp_path / "image.png")
