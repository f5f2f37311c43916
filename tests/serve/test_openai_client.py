"""The official `openai` client, unchanged, against the real server."""

from __future__ import annotations

import http.client
import io
import json
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import PIL.Image
import pytest
import torch
from serve.conftest import SIZE, RunningServer
from until import PATIENCE, until

from sdflow.families.shared.noising import DIFFUSION
from sdflow.runtime.pipeline import Pipeline
from sdflow.serve.http.api_document import ANSWERS, ONE_PIXEL


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as made:
        yield made


@pytest.fixture(scope="module")
def pipeline(tiny_pipeline: Path) -> Pipeline:
    """The same pipeline, here."""
    return Pipeline.load(tiny_pipeline, "cpu", threads=1)


LONG = {"prompt": "a", "n": 4, "steps": 150, "size": "256x256"}
"""It takes longer than what is done meanwhile, also where a test is held up."""


def opened(encoded: str | None) -> PIL.Image.Image:
    assert encoded is not None
    return PIL.Image.open(io.BytesIO(b64decode(encoded)))


def assert_same(image: PIL.Image.Image, expected: PIL.Image.Image) -> None:
    """But for values that lie between two of 256."""
    np.testing.assert_allclose(np.asarray(image, np.int16), np.asarray(expected, np.int16), atol=1)


def test_what_is_not_read_of_a_prompt_is_in_the_answer(server: RunningServer) -> None:
    for prompt, said in (("an otter", None), ("an otter " * 100, "reads 77: the rest is ignored: '")):
        body = {"prompt": prompt, "steps": 1, "size": SIZE}
        (image,) = httpx.post(f"{server.url}/v1/images/generations", json=body, timeout=PATIENCE).json()["data"]
        assert (said is None) == ("warnings" not in image)
        if said is not None:
            (only,) = image["warnings"]
            assert said in only
    log = [line for line in server.lines if "otter" in json.dumps(line)]
    assert log == [], "what clients write is not logged"


def test_the_models_are_listed_with_their_verdict(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "sdflow")
    told: Any = model.model_extra
    assert (told["sdflow"]["verdict"], told["sdflow"]["size"]) == ("not verified", "128x128")
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="no pipeline named 'dall-e-3'; available: tiny"):
        client.models.retrieve("dall-e-3")


def test_images_are_those_that_the_pipeline_draws(client: openai.OpenAI, pipeline: Pipeline) -> None:
    more = {"seed": 7, "steps": 3, "guidance_scale": 5, "negative_prompt": "blurred", "scheduler": "euler"}
    answer = client.images.generate(prompt="a red circle", n=2, size=SIZE, extra_body=more)
    assert answer.size == SIZE
    assert answer.data is not None
    assert [datum.model_extra["seed"] for datum in answer.data] == [7, 8]  # type: ignore[index]
    from sdflow.runtime.denoiser.schedule import named_scheduler

    pipeline.scheduler = named_scheduler("euler", pipeline.scheduler.config, DIFFUSION)
    for datum, seed in zip(answer.data, (7, 8), strict=True):
        expected = pipeline(
            "a red circle",
            negative_prompt="blurred",
            height=64,
            width=64,
            num_inference_steps=3,
            guidance_scale=5,
            generator=[torch.Generator().manual_seed(seed)],
        )
        assert_same(opened(datum.b64_json), expected.images[0])


def test_a_url_holds_the_image_itself(client: openai.OpenAI) -> None:
    answer = client.images.generate(
        model="tiny",
        prompt="a",
        size=SIZE,
        response_format="url",
        output_format="jpeg",
        output_compression=50,
        extra_body={"steps": 1, "seed": 1},
    )
    assert answer.data is not None and answer.data[0].url is not None
    head, _, encoded = answer.data[0].url.partition(",")
    assert head == "data:image/jpeg;base64"
    assert opened(encoded).format == "JPEG"


def test_unfinished_images_are_streamed(client: openai.OpenAI) -> None:
    stream = client.images.generate(
        prompt="a red circle", size=SIZE, stream=True, partial_images=2, extra_body={"steps": 4, "seed": 3}
    )
    events = list(stream)
    assert [event.type for event in events] == [
        *["image_generation.partial_image"] * 2,
        "image_generation.completed",
    ]
    assert [event.partial_image_index for event in events[:2]] == [0, 1]
    sizes = {opened(event.b64_json).size for event in events}
    assert sizes == {(64, 64)}
    still = client.images.generate(prompt="a red circle", size=SIZE, extra_body={"steps": 4, "seed": 3})
    assert still.data is not None
    assert_same(opened(events[-1].b64_json), opened(still.data[0].b64_json))


def test_every_step_is_told_where_it_is_asked_for(server: RunningServer) -> None:
    body = {"prompt": "a", "size": SIZE, "steps": 3, "stream": True, "progress": True, "n": 2, "scheduler": "ddim"}
    with httpx.stream("POST", f"{server.url}/v1/images/generations", json=body, timeout=PATIENCE) as answer:
        kinds = [line.removeprefix("event: ") for line in answer.iter_lines() if line.startswith("event: ")]
    assert sorted(kinds) == ["image_generation.completed"] * 2 + ["image_generation.progress"] * 6


def png(mode: str, seed: int = 0, size: tuple[int, int] = (64, 64)) -> bytes:
    shape = (size[1], size[0]) if mode == "L" else (size[1], size[0], len(mode))
    values = np.random.default_rng(seed).integers(0, 255, shape, np.uint8)
    if mode == "RGBA":
        values[..., 3] = 255
        values[32:, :, 3] = 0  # the lower half is drawn
    file = io.BytesIO()
    PIL.Image.fromarray(values, mode).save(file, "PNG")
    return file.getvalue()


def test_an_image_is_gone_on_from(client: openai.OpenAI, pipeline: Pipeline) -> None:
    image, more = png("RGB"), {"seed": 5, "steps": 4, "strength": 0.5, "scheduler": "euler"}
    answer = client.images.edit(image=image, prompt="a red circle", extra_body=more)
    assert answer.data is not None
    from sdflow.runtime.denoiser.schedule import named_scheduler

    pipeline.scheduler = named_scheduler("euler", pipeline.scheduler.config, DIFFUSION)
    expected = pipeline(
        "a red circle",
        PIL.Image.open(io.BytesIO(image)),
        num_inference_steps=4,
        strength=0.5,
        generator=[torch.Generator().manual_seed(5)],
    )
    assert_same(opened(answer.data[0].b64_json), expected.images[0])


def test_only_what_is_transparent_in_the_mask_is_drawn(client: openai.OpenAI, pipeline: Pipeline) -> None:
    """And without a mask, what is transparent in the image itself."""
    more = {"seed": 5, "steps": 4, "scheduler": "ddim"}
    lower_half = PIL.Image.fromarray(np.repeat(np.array([0, 255], np.uint8), 2048).reshape(64, 64))
    from sdflow.runtime.denoiser.schedule import named_scheduler

    pipeline.scheduler = named_scheduler("ddim", pipeline.scheduler.config, DIFFUSION)
    for image, files in ((png("RGB"), {"mask": png("RGBA", seed=9)}), (png("RGBA"), {})):
        answer = client.images.edit(image=image, prompt="a", extra_body=more, **files)
        assert answer.data is not None
        expected = pipeline(
            "a",
            PIL.Image.open(io.BytesIO(image)).convert("RGB"),
            lower_half,
            num_inference_steps=4,
            generator=[torch.Generator().manual_seed(5)],
        )
        assert_same(opened(answer.data[0].b64_json), expected.images[0])


@pytest.mark.parametrize(
    ("fields", "status", "param", "says"),
    [
        ({"n": 5}, 400, "n", "n is 5; the maximum is 4"),
        ({"n": 0}, 400, "n", "greater than or equal to 1"),
        ({"size": "70x64"}, 400, "size", "multiples of 64, not 70x64"),
        ({"size": "large"}, 400, "size", "'large' is not a size"),
        ({"size": "64x0"}, 400, "size", "multiples of 64"),
        ({"size": "65536x65536"}, 400, "size", "65536x65536 has 4294967296 pixels"),
        ({"steps": 1000}, 400, "steps", "maximum is 150"),
        ({"seed": -1}, 400, "seed", "greater than or equal to 0"),
        ({"scheduler": "eulr"}, 400, "scheduler", "'euler'"),
        ({"model": "dall-e-3"}, 404, "model", "available: tiny"),
        ({"prompt": "a" * 4001}, 400, "prompt", "has 4001 characters"),
        ({"prompt": None}, 400, "prompt", "valid string"),
        ({"pormpt": "a"}, 400, "pormpt", "unknown field"),
        ({"reuse": {"every": 2}}, 400, "reuse", "not available on a server"),
        ({"image": "/etc/passwd"}, 400, "image", "unknown field"),
        ({"guidance_scale": "high"}, 400, "guidance_scale", "valid number"),
        ({"clip_skip": 20}, 400, "clip_skip", "cannot be skipped"),
        ({"prompt_2": "b"}, 400, "prompt_2", "does not support prompt_2"),
        ({"background": "transparent"}, 400, "background", "'auto' or 'opaque'"),
    ],
)
def test_what_is_wrong_is_told_in_openais_form(
    server: RunningServer, fields: dict[str, Any], status: int, param: str, says: str
) -> None:
    body = {"prompt": "a", "size": SIZE, "steps": 1, **fields}
    answer = httpx.post(f"{server.url}/v1/images/generations", json=body, timeout=PATIENCE)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    assert says in error["message"]
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


@pytest.mark.parametrize(
    ("path", "content", "kind", "says"),
    [
        (
            "v1/images/generations",
            b'{"prompt": "a\\ud800"}',
            "application/json",
            "prompt: there is half of a character at position 1.",
        ),
        (
            "v1/images/generations",
            b'{"prompt": "a", "\\ud800": 1}',
            "application/json",
            "valid string",
        ),
        ("v1/images/generations", b'{"prompt": "a", "loras": "[["}', "application/json", "loras: Expecting value"),
        (
            "v1/images/generations",
            b"prompt=a",
            "text/plain",
            "must be application/json, but is text/plain.",
        ),
        ("v1/images/generations", b"[]", "application/json", "valid dictionary"),
        (
            "v1/images/edits",
            b'{"prompt": "a"}',
            "application/json",
            "must be multipart/form-data, but is application/json.",
        ),
        ("v1/images/edits", b"", "multipart/form-data", "Missing boundary in multipart."),
        ("sdapi/v1/txt2img", b'{"prompt": "a\\ud800"}', "application/json", "prompt: there is half of a character"),
        (
            "v1/loras",
            b"weights",
            "application/octet-stream",
            "must be multipart/form-data, but is application/octet-stream.",
        ),
    ],
)
def test_a_body_that_is_none_is_told(server: RunningServer, path: str, content: bytes, kind: str, says: str) -> None:
    answer = httpx.post(f"{server.url}/{path}", content=content, headers={"Content-Type": kind}, timeout=PATIENCE)
    assert answer.status_code == 400
    told = answer.json()
    message = told["detail"] if path.startswith("sdapi") else told["error"]["message"]
    assert says in message and not message.endswith("..")


def test_lists_of_a_form_that_are_nested_too_deeply_are_told(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="nested too deeply"):
        client.images.edit(image=png("RGB"), prompt="a", extra_body={"loras": "[" * 100_000})


def test_pages_and_health_answer_head(server: RunningServer) -> None:
    for path in ("/", "/docs", "/healthz", "/readyz"):
        answer = httpx.head(f"{server.url}{path}", timeout=PATIENCE)
        assert (answer.status_code, answer.content) == (200, b"")


def test_an_error_on_the_way_ends_a_stream(client: openai.OpenAI) -> None:
    stream = client.images.generate(prompt="a", size=SIZE, stream=True, extra_body={"clip_skip": 20})
    with pytest.raises(openai.APIError, match="cannot be skipped"):
        list(stream)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"no image", "not a readable image"),
        (png("RGB")[:200], "not a readable image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a readable image"),
    ],
)
def test_what_is_no_image_is_refused(client: openai.OpenAI, content: bytes, says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says):
        client.images.edit(image=content, prompt="a")


def test_a_client_that_goes_away_frees_its_place(server: RunningServer) -> None:
    begun, url = len(server.lines), httpx.URL(server.url)
    body = json.dumps(LONG)
    connection = http.client.HTTPConnection(url.host, url.port)
    connection.request("POST", "/v1/images/generations", body, {"Content-Type": "application/json"})
    until(lambda: server.metrics("sdflow_drawing_images") > 0)
    connection.close()
    server.wait_for(lambda line: line.get("status") == 499, begun)
    until(lambda: server.metrics("sdflow_drawing_images") == 0)
    assert server.metrics("sdflow_waiting_images") == 0


def test_too_many_are_refused_with_a_time_to_try_again(server: RunningServer) -> None:
    """The queue holds twelve. A request that is being drawn counts until it is cancelled."""
    body, counted = {**LONG, "stream": True, "progress": True}, 'sdflow_refusals_total{reason="queue_full"}'
    before = server.metrics(counted)
    url = f"{server.url}/v1/images/generations"
    with (
        httpx.stream("POST", url, json=body, timeout=PATIENCE) as first,
        httpx.stream("POST", url, json=body, timeout=PATIENCE) as second,
        httpx.stream("POST", url, json=body, timeout=PATIENCE) as third,
    ):
        assert [each.status_code for each in (first, second, third)] == [200] * 3
        lines = first.iter_lines()
        next(lines)  # they have begun
        until(lambda: server.metrics("sdflow_drawing_images") + server.metrics("sdflow_waiting_images") == 12)
        refused = httpx.post(url, json={"prompt": "a", "size": SIZE, "steps": 1}, timeout=PATIENCE)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    error = refused.json()["error"]
    assert error["code"] == "queue_full"
    assert error["message"].startswith("The queue has 12 of at most 12 images, so 1 more does not fit. Try again in ")
    until(lambda: server.metrics("sdflow_drawing_images") == 0)
    assert server.metrics(counted) == before + 1


def test_the_log_has_a_line_for_each_request_and_no_prompt(server: RunningServer) -> None:
    body = {"prompt": "secret words", "size": SIZE, "steps": 1, "n": 3}
    httpx.post(f"{server.url}/v1/images/generations", json=body, timeout=PATIENCE)
    line = server.wait_for(lambda line: line.get("images") == 3)  # of no other test
    assert (line["event"], line["path"], line["status"]) == ("request", "/v1/images/generations", 200)
    assert not [line for line in server.lines if "secret" in str(line)]


def test_the_documentation_names_every_field(server: RunningServer) -> None:
    assert httpx.get(f"{server.url}/docs", timeout=PATIENCE).status_code == 200
    told = httpx.get(f"{server.url}/openapi.json", timeout=PATIENCE).json()
    (form,) = told["paths"]["/v1/images/edits"]["post"]["requestBody"]["content"].values()
    fields = told["components"]["schemas"]["Generation"]["properties"]
    assert {"prompt", "size", "seed", "loras", "stream"} <= fields.keys()
    assert {"image", "mask", "strength"} <= form["schema"]["properties"].keys()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/models", None),
        ("/v1/models/{name}", None),
        ("/v1/images/generations", {"prompt": "a", "size": SIZE, "steps": 1}),
        ("/sdapi/v1/txt2img", {"prompt": "a", "width": 64, "height": 64, "steps": 1}),
        ("/sdapi/v1/progress", None),
        ("/sdapi/v1/sd-models", None),
        ("/sdapi/v1/samplers", None),
        ("/sdapi/v1/options", None),
        ("/sdapi/v1/schedulers", None),
        ("/sdapi/v1/upscalers", None),
        ("/sdapi/v1/scripts", None),
        ("/sdapi/v1/script-info", None),
        ("/sdapi/v1/memory", None),
        ("/sdapi/v1/cmd-flags", None),
        ("/sdapi/v1/png-info", {"image": ONE_PIXEL}),
        ("/controlnet/version", None),
        ("/controlnet/module_list", None),
        ("/controlnet/control_types", None),
        ("/controlnet/settings", None),
        ("/readyz", None),
    ],
)
def test_answers_are_as_the_documentation_shows_them(
    server: RunningServer, path: str, body: dict[str, Any] | None
) -> None:
    url, method = f"{server.url}{path.format(name='tiny')}", "get" if body is None else "post"
    answer = httpx.request(method, url, json=body, timeout=PATIENCE)
    assert answer.status_code == 200
    assert_alike(answer.json(), ANSWERS[f"{method} {path}"])


def test_an_image_like_another(client: openai.OpenAI, pipeline: Pipeline) -> None:
    """OpenAI's variations: image to image without a prompt."""
    from sdflow.runtime.denoiser.schedule import named_scheduler

    pipeline.scheduler = named_scheduler("euler", pipeline.scheduler.config, DIFFUSION)
    start = pipeline("a red circle", height=64, width=64, num_inference_steps=2).images[0]
    file = io.BytesIO()
    start.save(file, "PNG")
    more = {"steps": 4, "seed": 7, "strength": 0.5, "scheduler": "euler"}
    answer = client.images.create_variation(image=file.getvalue(), n=2, response_format="b64_json", extra_body=more)
    assert answer.data is not None and len(answer.data) == 2
    options = {"image": start, "num_inference_steps": 4, "strength": 0.5, "height": 64, "width": 64}
    for seed, each in zip((7, 8), answer.data, strict=True):
        expected = pipeline("", generator=[torch.Generator().manual_seed(seed)], **options).images[0]
        assert_same(opened(each.b64_json), expected)
    with pytest.raises(openai.BadRequestError) as error:
        client.images.create_variation(image=b"no image")
    assert error.value.code == "invalid_image"


def test_every_error_has_a_code(client: openai.OpenAI) -> None:
    for asked, code in (
        (lambda: client.images.generate(prompt="a", extra_body={"steps": 1000}), "invalid_value"),
        (lambda: client.images.generate(prompt="a", model="dall-e-3"), "model_not_found"),
        (lambda: client.images.generate(prompt="a", extra_body={"unheard_of": 1}), "unknown_parameter"),
        (lambda: client.post("/images/generations", body={}, cast_to=object), "missing"),
        (lambda: client.get("/nothing", cast_to=object), "not_found"),
        (lambda: client.delete("/models", cast_to=object), "method_not_allowed"),
    ):
        with pytest.raises(openai.APIStatusError) as error:
            asked()
        assert error.value.code == code


OF_PIPELINES = ("defaults", "artifacts", "parameters", "items", "batch_seconds", "pipelines", "quantized", "left_aside")
"""Maps whose keys are of a pipeline or a request."""


def assert_alike(found: Any, shown: Any) -> None:
    """The same keys, and values of the same types."""
    if isinstance(found, dict) and isinstance(shown, dict):
        assert found.keys() == shown.keys()
        for name in found.keys() - set(OF_PIPELINES):
            assert_alike(found[name], shown[name])
    elif isinstance(found, list) and isinstance(shown, list):
        for one, other in zip(found, shown, strict=False):
            assert_alike(one, other)
    else:
        assert found is None or shown is None or type(found) is type(shown)
