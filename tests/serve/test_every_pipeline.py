"""Pipelines of every kind: the real server draws what `sdflow generate` draws, several requests at a time."""

from __future__ import annotations

import io
import threading
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import PIL.Image
import pytest
from serve.conftest import RunningServer, running_server
from shell import Shell
from until import PATIENCE

pytestmark = pytest.mark.slow  # each builds a pipeline, and starts a server of it
EDGES = "edges.png", "other.png"
FILES = ("image", "mask")
WANTED: dict[str, list[tuple[dict[str, Any], tuple[str, ...]]]] = {
    "tiny_controlnet": [
        ({}, ()),
        (
            {"control": [{"name": "edges", "image": "edges.png", "scale": 0.8, "end": 0.6}]},
            ("--control", "edges=edges.png:0.8:0:0.6"),
        ),
        (
            {
                "control": [
                    {"name": "edges", "image": "other.png"},
                    {"name": "depth", "image": "edges.png", "scale": 0.5},
                ]
            },
            ("--control", "edges=other.png", "--control", "depth=edges.png:0.5"),
        ),
    ],
    "tiny_ip_adapter": [
        ({}, ()),
        ({"image_prompts": [{"image": "edges.png", "scale": 0.8}]}, ("--ip-image", "edges.png:0.8")),
        (
            {"image_prompts": [{"image": "edges.png"}, {"image": "other.png"}]},
            ("--ip-image", "edges.png", "--ip-image", "other.png"),
        ),
    ],
    "sdxl_with_refiner_tiny": [
        ({}, ()),
        (
            {"prompt_2": "a moon", "negative_prompt": "blurred"},
            ("--prompt-2", "a moon", "--negative-prompt", "blurred"),
        ),
        ({"guidance_scale": 1.0}, ("--guidance-scale", "1")),
    ],
    "sdxl_refiner_tiny": [
        ({"image": "edges.png", "strength": 0.7}, ("--image", "edges.png", "--strength", "0.7")),
        ({"image": "other.png", "strength": 1.0}, ("--image", "other.png", "--strength", "1")),
    ],
    "sd15_inpainting_tiny": [
        ({"image": "edges.png", "mask": "mask.png"}, ("--image", "edges.png", "--mask", "mask.png")),
        (
            {"image": "other.png", "mask": "mask.png", "strength": 0.7},
            ("--image", "other.png", "--mask", "mask.png", "--strength", "0.7"),
        ),
    ],
    "sd21_tiny": [
        ({}, ()),
        ({"scheduler": "ddim", "negative_prompt": "blurred"}, ("--scheduler", "ddim", "--negative-prompt", "blurred")),
        ({"image": "edges.png", "strength": 0.7}, ("--image", "edges.png", "--strength", "0.7")),
    ],
    "sd15_taesd_tiny": [({}, ()), ({"negative_prompt": "blurred"}, ("--negative-prompt", "blurred"))],
    "sd_turbo_tiny": [
        ({}, ()),
        ({"image": "edges.png", "strength": 0.7}, ("--image", "edges.png", "--strength", "0.7")),
    ],
    "lcm_tiny": [({}, ()), ({"guidance_scale": 3.0}, ("--guidance-scale", "3"))],
    "sd35_tiny": [
        ({}, ()),
        (
            {"prompt_3": "oil on canvas", "guidance_scale": 4.5},
            ("--prompt-3", "oil on canvas", "--guidance-scale", "4.5"),
        ),
        (
            {"skip_guidance_layers": "1", "skip_layer_guidance_stop": 0.9},
            ("--skip-guidance-layers", "1", "--skip-layer-guidance-stop", "0.9"),
        ),
        ({"image": "edges.png", "strength": 0.6}, ("--image", "edges.png", "--strength", "0.6")),
    ],
}
"""Pipeline -> fields of a request, with files for their images, and what `sdflow generate` is told."""


def png(turned: int = 0) -> bytes:
    file = io.BytesIO()
    PIL.Image.radial_gradient("L").resize((64, 64)).rotate(turned).convert("RGB").save(file, "PNG")
    return file.getvalue()


def half() -> bytes:
    """White where it is to be drawn: the right half."""
    file, made = io.BytesIO(), PIL.Image.new("L", (64, 64))
    made.paste(255, (32, 0, 64, 64))
    made.save(file, "PNG")
    return file.getvalue()


def encoded(fields: dict[str, Any], folder: Path) -> dict[str, Any]:
    """With the images themselves in place of the names of their files: in a list as base64, else as they are."""
    return {
        name: [{**each, "image": b64encode((folder / each["image"]).read_bytes()).decode()} for each in value]
        if isinstance(value, list)
        else (folder / value).read_bytes()
        if name in FILES
        else value
        for name, value in fields.items()
    }


def ask(server: RunningServer, **fields: Any) -> httpx.Response:
    """From text; from an image where there is one."""
    body = {"prompt": "an otter", "steps": 3, "seed": 1, "size": "64x64", **fields}
    files = {name: (f"{name}.png", body.pop(name), "image/png") for name in FILES if name in body}
    if files:
        return httpx.post(f"{server.url}/v1/images/edits", data=body, files=files, timeout=PATIENCE)
    return httpx.post(f"{server.url}/v1/images/generations", json=body, timeout=PATIENCE)


def drawn_at_once(server: RunningServer, wanted: list[dict[str, Any]]) -> list[np.ndarray]:
    """Each request's image; they are drawn in turn, a step of each."""
    answers: dict[int, httpx.Response] = {}

    def draw(number: int) -> None:
        answers[number] = ask(server, **wanted[number])

    threads = [threading.Thread(target=draw, args=(number,)) for number in range(len(wanted))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = []
    for number in range(len(wanted)):
        assert answers[number].status_code == 200, answers[number].text
        file = io.BytesIO(b64decode(answers[number].json()["data"][0]["b64_json"]))
        found.append(np.asarray(PIL.Image.open(file), np.int16))
    return found


@pytest.mark.parametrize("name", WANTED)
def test_it_draws_what_generate_draws(name: str, tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    for file, turned in zip(EDGES, (0, 40), strict=True):
        (tmp_path / file).write_bytes(png(turned))
    (tmp_path / "mask.png").write_bytes(half())
    shell.json("run", name, "--no-verify", "--no-evaluate")
    assert_same(shell, f"pipelines/{name}", WANTED[name])


def assert_same(shell: Shell, folder: str, wanted: list[tuple[dict[str, Any], tuple[str, ...]]]) -> None:
    size = ("--height", "64", "--width", "64")
    draw = ("--prompt", "an otter", "--steps", "3", "--seed", "1", *size, "--threads", "1")
    expected = []
    for number, (_, options) in enumerate(wanted):
        shell.json("generate", folder, *draw, *options, "--out", f"drawn{number}")
        with PIL.Image.open(shell.folder / f"drawn{number}/001-1.png") as image:
            expected.append(np.asarray(image.convert("RGB"), np.int16))
    assert len({each.tobytes() for each in expected}) == len(expected)
    with running_server(str(shell.folder / folder)) as server:
        found = drawn_at_once(server, [encoded(fields, shell.folder) for fields, _ in wanted])
        for image, each in zip(found, expected, strict=True):
            np.testing.assert_allclose(image, each, atol=1)
