"""What clients of A1111's webui call, against the real server."""

from __future__ import annotations

import io
import json
import threading
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import PIL.Image
import pytest
import torch
from sd_parsers import ParserManager
from sd_parsers.parsers import AUTOMATIC1111Parser
from serve.conftest import RunningServer
from until import PATIENCE, until

from sdflow.families.shared.noising import DIFFUSION
from sdflow.machine.packages import missing
from sdflow.runtime.denoiser.schedule import named_scheduler
from sdflow.runtime.pipeline import Pipeline
from sdflow.serve.api_error import ApiError
from sdflow.serve.http.webui_api import loras_in
from sdflow.serve.http.webui_inpaint import inverted
from sdflow.serve.jobs import Image as PlainImage

SMALL = {"prompt": "a (red:1.2) circle", "width": 64, "height": 64, "steps": 2, "seed": 5, "sampler_name": "Euler a"}


def ask(server: RunningServer, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
    url = f"{server.url}/sdapi/v1/{path}"
    return httpx.get(url, timeout=PATIENCE) if body is None else httpx.post(url, json=body, timeout=PATIENCE)


def pixels(encoded: str) -> np.ndarray:
    return np.asarray(PIL.Image.open(io.BytesIO(b64decode(encoded))), np.int16)


def png(image: PIL.Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def test_images_are_those_of_the_pipeline(server: RunningServer, tiny_pipeline: Path) -> None:
    answer = ask(server, "txt2img", {**SMALL, "batch_size": 2, "restore_faces": False, "script_args": []}).json()
    assert json.loads(answer["info"])["all_seeds"] == [5, 6]
    pipeline = Pipeline.load(tiny_pipeline, "cpu", threads=1)
    pipeline.scheduler = named_scheduler("euler_a", pipeline.scheduler.config, DIFFUSION)
    options = {"height": 64, "width": 64, "num_inference_steps": 2, "guidance_scale": 7.0, "prompt_syntax": "a1111"}
    drawn = [pixels(each) for each in answer["images"]]
    for image, seed in zip(drawn, (5, 6), strict=True):
        expected = pipeline(SMALL["prompt"], generator=[torch.Generator().manual_seed(seed)], **options).images[0]
        np.testing.assert_allclose(image, np.asarray(expected, np.int16), atol=1)
    (sampler,) = (
        ParserManager(managed_parsers=[AUTOMATIC1111Parser]).parse(io.BytesIO(b64decode(answer["images"][1]))).samplers
    )
    assert (sampler.name, sampler.parameters["seed"], sampler.parameters["cfg_scale"]) == ("Euler a", "6", "7")
    assert [text.value for text in sampler.prompts] == [SMALL["prompt"]]
    start = b64encode(png(PIL.Image.fromarray(drawn[0].astype(np.uint8)))).decode()
    again = ask(server, "img2img", {**SMALL, "init_images": [f"data:image/png;base64,{start}"]}).json()
    assert pixels(again["images"][0]).shape == (64, 64, 3)


def test_a_client_of_the_webui_works_unchanged(server: RunningServer) -> None:
    webuiapi = pytest.importorskip("webuiapi", reason="pip install -e '.[test]'")
    client = webuiapi.WebUIApi(baseurl=f"{server.url}/sdapi/v1", sampler="DPM++ 2M Karras", steps=2)
    client.util_set_model("tiny")
    assert (client.util_get_model_names(), client.util_get_current_model()) == (["tiny"], "tiny")
    assert client.get_progress()["state"]["job_count"] == 0
    small = {"prompt": "a (red:1.2) circle", "width": 64, "height": 64, "seed": 5}
    drawn = client.txt2img(**small, batch_size=2)
    assert [image.size for image in drawn.images] == [(64, 64)] * 2
    assert (drawn.info["all_seeds"], drawn.info["sampler_name"]) == ([5, 6], "DPM++ 2M")
    told = {"sampler_name": "DPM++ 2M", "scheduler": "Karras"}
    same = ask(server, "txt2img", {**small, "steps": 2, **told}).json()["images"][0]
    np.testing.assert_allclose(np.asarray(drawn.image, np.int16), pixels(same), atol=1)
    mask = PIL.Image.new("L", (64, 64))
    mask.paste(255, (32, 0, 64, 64))
    whole = {"inpainting_fill": 1, "inpaint_full_res": False}
    again = client.img2img(images=[drawn.image], mask_image=mask, **small, **whole, denoising_strength=0.8)
    fields = {"prompt": small["prompt"], "seed": 5, "steps": 2, "guidance_scale": 7, "scheduler": "dpm++_2m_karras"}
    files = {"image": ("image.png", png(drawn.image)), "mask": ("mask.png", png(mask))}
    data = {**fields, "strength": 0.8, "prompt_syntax": "a1111", "mask_blur": 4}
    edited = httpx.post(f"{server.url}/v1/images/edits", data=data, files=files, timeout=PATIENCE).json()
    np.testing.assert_allclose(np.asarray(again.image, np.int16), pixels(edited["data"][0]["b64_json"]), atol=1)
    client.interrupt()


def test_the_lists(server: RunningServer) -> None:
    assert [each["title"] for each in ask(server, "sd-models").json()] == ["tiny"]
    samplers = {each["name"]: each for each in ask(server, "samplers").json()}
    assert samplers["Euler a"]["options"] == {} and samplers["DPM++ 2M"]["options"] == {"scheduler": "karras"}
    assert {"Heun", "DPM++ 2M SDE", "DPM2 a", "deis"} <= samplers.keys()
    assert ("DPM++ SDE" in samplers) == ("LMS" in samplers and not missing("torchsde"))
    labels = [each["label"] for each in ask(server, "schedulers").json()]
    assert labels == ["Automatic", "Uniform", "SGM Uniform", "Karras", "Exponential", "Beta"]
    assert ask(server, "loras").json() == []
    assert ask(server, "options").json()["sd_model_checkpoint"] == "tiny"
    assert ask(server, "options", {"sd_model_checkpoint": "tiny"}).status_code == 200
    assert ask(server, "options", {"sd_model_checkpoint": "other"}).status_code == 404
    assert ask(server, "progress").json()["progress"] == 0


def test_a_schedule_type_that_nobody_names_is_the_samplers_own(server: RunningServer) -> None:
    """As the webui's Automatic; a sampler of two runs a step tells of each of them."""
    asked = {**SMALL, "sampler_name": "DPM2", "steps": 3}
    alone, automatic, karras, uniform = (
        ask(server, "txt2img", {**asked, **more}).json()["images"][0]
        for more in ({}, {"scheduler": "Automatic"}, {"scheduler": "karras"}, {"scheduler": "Uniform"})
    )
    for same in (automatic, karras):
        np.testing.assert_allclose(pixels(same), pixels(alone), atol=1)
    assert np.abs(pixels(uniform) - pixels(alone)).max() > 8
    text = PIL.Image.open(io.BytesIO(b64decode(alone))).info["parameters"]
    assert "Sampler: DPM2, Schedule type: Karras" in text and "Steps: 3" in text


def test_what_is_drawn_tells_how_far_it_is_and_is_interrupted(server: RunningServer) -> None:
    answers: list[httpx.Response] = []
    long = {"prompt": "a", "steps": 150, "batch_size": 4, "width": 256, "height": 256}
    asking = threading.Thread(target=lambda: answers.append(ask(server, "txt2img", long)))
    asking.start()
    until(lambda: 0 < ask(server, "progress").json()["progress"] < 1)
    assert ask(server, "interrupt", {}).status_code == 200
    asking.join(PATIENCE)
    (answer,) = answers
    assert answer.status_code == 200 and 0 < len(answer.json()["images"]) < 4
    until(lambda: server.metrics("sdflow_drawing_images") == 0)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"sampler_name": "Restart"}, "no scheduler is named 'Restart'"),
        ({"sampler_name": "DPM++ 2N"}, "did you mean 'dpm++_2m'"),
        (
            {"sampler_name": "Euler", "scheduler": "Align Your Steps"},
            "Euler does not support the schedule type",
        ),
        ({"sampler_name": None, "scheduler": "Karras"}, "requires sampler_name"),
        (
            {"sampler_name": "Heun", "steps": 100},
            "100 steps of heun take 200 denoiser runs; the maximum is 150",
        ),
        ({"override_settings": {"sd_model_checkpoint": ["tiny"]}}, "valid string"),
        ({"prompt": "a <lora:ink:0.8>"}, "no LoRA named 'ink'"),
        ({"width": 70}, "multiples of 64"),
        (
            {"alwayson_scripts": {"ControlNet": {"args": [{"model": "x" * 300, "image": "AA=="}]}}},
            "at most 200 characters",
        ),
        ({"steps": 1000}, "maximum is 150"),
        ({"batch_size": 4, "n_iter": 4}, "n is 16; the maximum is 4"),
    ],
)
def test_what_is_wrong_is_told(server: RunningServer, fields: dict[str, Any], says: str) -> None:
    answer = ask(server, "txt2img", {**SMALL, **fields})
    assert answer.status_code == 400
    assert says in answer.json()["detail"]


def test_a_masked_part_is_enlarged_only_within_the_limits(server: RunningServer) -> None:
    small = b64encode(png(PIL.Image.new("RGB", (8, 8), "white"))).decode()
    body = {**SMALL, "init_images": [small], "mask": small, "width": 30720, "height": 30720}
    answer = ask(server, "img2img", {**body, "inpainting_mask_invert": 1})
    assert answer.status_code == 400 and "this pipeline generates at most" in answer.json()["detail"]
    assert inverted(PlainImage("L", (2, 1), b"\x00\xf0")).pixels == b"\xff\x0f"


def test_loras_are_taken_out_of_a_prompt() -> None:
    prompt, loras = loras_in("a cat <lora:ink:0.8> in a <lora:my style> hat")
    assert prompt == "a cat  in a  hat"
    assert [(each.name, each.scale) for each in loras] == [("ink", 0.8), ("my style", 1.0)]
    assert loras_in("a < b > c") == ("a < b > c", [])
    for wrong, says in (
        ("<lora:ink:strong>", "'strong' is not a valid scale"),
        ("<lora:ink:0.8:0.5>", "'0.8:0.5' is not a valid scale"),
        (f"<lora:{'x' * 300}:1>", "at most 200 characters"),
    ):
        with pytest.raises(ApiError, match=says):
            loras_in(wrong)
