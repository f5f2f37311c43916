"""Images for ControlNets and IP-Adapters in a request: what of it is taken. What is drawn: test_every_pipeline."""

from __future__ import annotations

import asyncio
import io
import json
from base64 import b64encode
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import PIL.Image
import pytest
from starlette.requests import Request

from sdflow.serve.api_error import ApiError
from sdflow.serve.http.openai_api import read_form
from sdflow.serve.http.openai_fields import Edit, Generation
from sdflow.serve.http.requested import jobs_of
from sdflow.serve.http.served_model import read_served
from sdflow.serve.http.uploads import read_conditioning_images
from sdflow.serve.limits import Limits


def png() -> bytes:
    file = io.BytesIO()
    PIL.Image.radial_gradient("L").resize((64, 64)).convert("RGB").save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"control": [{"name": "depth"}]}, "control", "tiny has no ControlNet 'depth'; available: edges"),
        ({"control": [{"name": "edges"}, {"name": "edges"}]}, "control", "more than one image"),
        ({"control": [{"name": "edges", "start": 0.5, "end": 0.5}]}, "control", "greater than start"),
        ({"control": [{"name": "edges", "image": "/etc/passwd"}]}, "control", "not valid base64|not a readable"),
        ({"control": [{"name": "edges", "image": "http://127.0.0.1/x.png"}]}, "control", "not valid base64"),
        ({"control": [{"name": "edges"}] * 9}, "control", "maximum is 8"),
        ({"image_prompts": [{}] * 9}, "image_prompts", "maximum is 8"),
        ({"image_prompts": [{"scale": 0.5}, {"scale": 0.6}]}, "image_prompts", "the same scale"),
    ],
)
def test_what_means_nothing_is_told(tiny_pipeline: Path, fields: dict[str, Any], param: str, says: str) -> None:
    model = replace(read_served(tiny_pipeline, check=False), nets=("edges",), adapters=1)
    image = b64encode(png()).decode()
    given = {name: [{"image": image, **each} for each in listed] for name, listed in fields.items()}
    with pytest.raises(ApiError, match=says) as error:
        read_conditioning_images(Generation(prompt="a", **given), model, Limits())
    assert (error.value.status, error.value.param) == (400, param)


def test_a_pipeline_without_them_says_so_and_the_size_is_that_of_what_it_follows(tiny_pipeline: Path) -> None:
    model, image = read_served(tiny_pipeline, check=False), b64encode(png()).decode()
    told = model.to_json()["sdflow"]
    assert (told["control"], told["image_prompts"], told["references"]) == ([], 0, 0)
    for given, says in (
        ({"control": [{"name": "edges", "image": image}]}, "available: none"),
        ({"image_prompts": [{"image": image}]}, "has no IP-Adapter"),
        ({"references": [image]}, "does not support reference images"),
    ):
        with pytest.raises(ApiError, match=says):
            read_conditioning_images(Generation(prompt="a", **given), model, Limits())
    able = replace(model, nets=("edges",), adapters=2)
    shown = [{"image": image, "scale": 0.5}, {"image": image, "scale": 0.6}]
    fields = Generation(prompt="a", control=[{"name": "edges", "image": image}], image_prompts=shown)
    (job,) = jobs_of(fields, able, Limits(), None, None, None, (), read_conditioning_images(fields, able, Limits()))
    assert (job.arguments["height"], job.arguments["width"]) == (64, 64)
    assert [(each.adapter, each.scale) for each in job.conditioning.prompts] == [(0, 0.5), (1, 0.6)]
    assert job.conditioning.controls[0].image.size == (64, 64)
    with pytest.raises(ApiError, match="there are 1 images for 2 IP-Adapters"):
        read_conditioning_images(Generation(prompt="a", image_prompts=shown[:1]), able, Limits())


def test_a_reference_in_a_form_may_be_as_long_as_the_body() -> None:
    image, text = ("a.png", png(), "image/png"), json.dumps(["A" * (2 << 20)])
    sent = httpx.Request("POST", "http://test/", data={"prompt": "a", "references": text}, files={"image": image})
    content = sent.read()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": content}

    headers = [(b"content-type", sent.headers["content-type"].encode())]
    request = Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)
    fields, _, _ = asyncio.run(read_form(request, Limits(), Edit))
    assert [len(each) for each in fields.references] == [2 << 20]
