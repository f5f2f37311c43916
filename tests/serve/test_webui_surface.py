"""All that `webuiapi` can call, found by introspection: each is answered as A1111's webui does, or refused in words."""

from __future__ import annotations

import asyncio
import inspect
import io
import json
import threading
from base64 import b64decode
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageChops
import pytest
from serve.conftest import RunningServer
from until import PATIENCE, until

from sdflow.families.shared.sampler_names import available
from sdflow.families.shared.schedulers import NOISE_SAMPLERS, NOISE_SCHEDULERS, SPACINGS

webuiapi = pytest.importorskip("webuiapi.webuiapi", reason="pip install -e '.[test]'")

SMALL = {"prompt": "a (red:1.2) circle", "width": 64, "height": 64, "seed": 5, "steps": 2}
OWN = {"__init__", "set_auth", "async_post", "post_and_get_api_result", "custom_get", "custom_post", "get_endpoint"} | {
    "check_extensions",
    "_to_api_result",
    "_to_api_result_async",
}
"""What asks for nothing by itself."""
GONE = {"get_artists", "get_artist_categories", "list_prompt_gen_models", "prompt_gen"}
"""What the webui has no more, and what an extension would answer: 404, as there."""
NOT_DONE = {"extra_single_image", "extra_batch_images", "interrogate", "controlnet_detect"}

OWN_SAMPLERS = [(name, NOISE_SAMPLERS[name]) for name in available(NOISE_SCHEDULERS) if name in NOISE_SAMPLERS]

Client = Any


@pytest.fixture
def client(server: RunningServer) -> Client:
    made = webuiapi.WebUIApi(baseurl=f"{server.url}/sdapi/v1", steps=2)
    made.answers = []
    made.session.hooks["response"].append(lambda answer, *_, **__: made.answers.append(answer))
    return made


def drawing(client: Client, **more: Any) -> tuple[threading.Thread, list[Any]]:
    """Four large images, being drawn from now on in another thread; what comes of it."""
    found: list[Any] = []
    long = {"prompt": "a", "steps": 150, "batch_size": 4, "width": 256, "height": 256, "seed": 7, **more}
    thread = threading.Thread(target=lambda: found.append(client.txt2img(**long)))
    thread.start()
    until(lambda: 0 < client.get_progress()["progress"] < 1)
    return thread, found


def gray(side: int = 64) -> PIL.Image.Image:
    return PIL.Image.radial_gradient("L").resize((side, side)).convert("RGB")


def half(side: int = 64) -> PIL.Image.Image:
    made = PIL.Image.new("L", (side, side))
    made.paste(255, (side // 2, 0, side, side))
    return made


def _txt2img(client: Client) -> None:
    found = client.txt2img(**SMALL, n_iter=2, negative_prompt="blue", sampler_name="DDIM")
    assert [image.size for image in found.images] == [(64, 64)] * 2
    info = found.info
    assert (info["all_seeds"], info["sampler_name"], info["width"]) == ([5, 6], "DDIM", 64)
    assert info["infotexts"] == [image.info["parameters"] for image in found.images]
    assert "Steps: 2, Sampler: DDIM" in info["infotexts"][1] and "Seed: 6" in info["infotexts"][1]
    assert client.txt2img(**SMALL, send_images=False).images == []
    again = asyncio.run(_awaited(client))
    assert PIL.ImageChops.difference(again.image, client.txt2img(**SMALL).image).getextrema() == ((0, 0),) * 3


async def _awaited(client: Client) -> Any:
    return await client.txt2img(**SMALL, use_async=True)


def _img2img(client: Client) -> None:
    start = gray()
    inverted = client.img2img([start], mask_image=half(), mask_blur=0, inpainting_mask_invert=1, **SMALL)
    pixels, before = (np.asarray(each, np.int16) for each in (inverted.image, start))
    assert np.array_equal(pixels[:, 32:], before[:, 32:]) and not np.array_equal(pixels[:, :32], before[:, :32])
    assert "init_images" not in inverted.parameters
    assert "init_images" in client.img2img([start], include_init_images=True, **SMALL).parameters


def _interrupt(client: Client) -> None:
    thread, found = drawing(client)
    client.interrupt()
    thread.join(PATIENCE)
    (interrupted,) = found
    assert 0 < len(interrupted.images) <= 4
    assert interrupted.images[0].size == (256, 256)
    assert "Seed: 7" in interrupted.info["infotexts"][0]


def _skip(client: Client) -> None:
    """The images that have begun are finished as they are, and those that wait begin."""
    thread, found = drawing(client)
    while thread.is_alive():
        client.skip()
        thread.join(0.1)
    assert len(found[0].images) == 4 and len(found[0].info["infotexts"]) == 4


def _progress(client: Client) -> None:
    thread, _ = drawing(client)
    until(lambda: client.get_progress()["current_image"] is not None)
    told = client.get_progress()
    assert told["eta_relative"] > 0 and told["state"]["sampling_steps"] == 600
    assert PIL.Image.open(io.BytesIO(b64decode(told["current_image"]))).size == (256, 256)
    quiet = client.session.get(f"{client.baseurl}/progress?skip_current_image=true").json()
    assert quiet["current_image"] is None
    client.interrupt()
    thread.join(PATIENCE)
    assert client.get_progress()["progress"] == 0


def _options(client: Client) -> None:
    assert client.get_options() == {"sd_model_checkpoint": "tiny", "CLIP_stop_at_last_layers": 1, "sd_vae": "Automatic"}
    plain = client.txt2img(**SMALL)
    client.set_options({**client.get_options(), "CLIP_stop_at_last_layers": 2})
    skipped = client.txt2img(**SMALL)
    client.set_options({"CLIP_stop_at_last_layers": 1})
    assert "Clip skip: 2" in skipped.info["infotexts"][0] and skipped.info["clip_skip"] == 2
    assert plain.image.tobytes() != skipped.image.tobytes()
    override = {"override_settings": {"CLIP_stop_at_last_layers": 2}}
    assert client.txt2img(**SMALL, **override).image.tobytes() == skipped.image.tobytes()
    assert client.txt2img(**SMALL).image.tobytes() == plain.image.tobytes()
    client.set_options({"sd_vae": "other.safetensors"})
    assert client.answers[-1].status_code == 400
    assert "sd_vae 'other.safetensors' is not supported" in client.answers[-1].json()["detail"]


def _png_info(client: Client) -> None:
    drawn = client.txt2img(**SMALL, negative_prompt="blue")
    told = client.png_info(drawn.image)
    assert told.info == drawn.info["infotexts"][0]
    said = told.json["parameters"]
    assert (said["Prompt"], said["Negative prompt"], said["Seed"]) == (SMALL["prompt"], "blue", "5")
    assert (said["Size-1"], said["Size-2"]) == ("64", "64")
    assert client.png_info(gray()).info == ""


def _memory(client: Client) -> None:
    ram = client.get_memory()["ram"]
    assert 0 < ram["used"] < ram["total"] and "cuda" in client.get_memory()


def _set_model(client: Client) -> None:
    client.util_set_model("tini")
    assert client.util_get_current_model() == "tiny"


def _is(expected: Any, get: Callable[[Client], Any]) -> Callable[[Client], None]:
    def check(client: Client) -> None:
        assert get(client) == expected
        assert client.answers[-1].status_code == 200

    return check


def _aliases(client: Client) -> list[str]:
    return [alias for each in client.get_samplers() for alias in each["aliases"]]


ANSWERED: dict[str, Callable[[Client], None]] = {
    "txt2img": _txt2img,
    "img2img": _img2img,
    "interrupt": _interrupt,
    "skip": _skip,
    "get_progress": _progress,
    "get_options": _options,
    "set_options": _options,
    "png_info": _png_info,
    "get_memory": _memory,
    "util_set_model": _set_model,
    "util_get_current_model": _set_model,
    "util_wait_for_ready": _is(None, lambda client: client.util_wait_for_ready()),
    "util_get_model_names": _is(["tiny"], lambda client: client.util_get_model_names()),
    "util_get_sampler_names": _is(
        sorted(row.webui or name for name, row in OWN_SAMPLERS), lambda client: client.util_get_sampler_names()
    ),
    "util_get_scheduler_names": _is(2 + len(SPACINGS), lambda client: len(client.util_get_scheduler_names())),
    "get_samplers": _is([name for name, _ in OWN_SAMPLERS], lambda client: [*_aliases(client)]),
    "get_schedulers": _is(
        ["Automatic", "Uniform", *(each.webui for each in SPACINGS.values())],
        lambda client: [each["label"] for each in client.get_schedulers()],
    ),
    "get_sd_models": _is(["tiny"], lambda client: [each["title"] for each in client.get_sd_models()]),
    "get_upscalers": _is(["None"], lambda client: [each["name"] for each in client.get_upscalers()]),
    "get_cmd_flags": _is(4, lambda client: client.get_cmd_flags()["images"]),
    "get_scripts": _is({"txt2img": [], "img2img": []}, lambda client: client.get_scripts()),
    "get_embeddings": _is({"loaded": {}, "skipped": {}}, lambda client: client.get_embeddings()),
    "refresh_checkpoints": _is(None, lambda client: client.refresh_checkpoints()),
    "controlnet_version": _is(3, lambda client: client.controlnet_version()),
    "controlnet_model_list": _is([], lambda client: client.controlnet_model_list()),
    "controlnet_module_list": _is(["none"], lambda client: client.controlnet_module_list()),
    **{
        f"get_{name}": _is([], lambda client, name=name: getattr(client, f"get_{name}")())
        for name in ("loras", "hypernetworks", "face_restorers", "realesrgan_models", "prompt_styles", "sd_vae")
    },
    "get_latent_upscale_modes": _is([], lambda client: client.get_latent_upscale_modes()),
}


def test_every_method_is_answered_or_refused() -> None:
    methods = {name for name, _ in inspect.getmembers(webuiapi.WebUIApi, inspect.isfunction)}
    assert methods == OWN | GONE | NOT_DONE | ANSWERED.keys()


@pytest.mark.parametrize("name", ANSWERED)
def test_it_is_answered(client: Client, name: str) -> None:
    ANSWERED[name](client)


def called(method: Any) -> None:
    """With its defaults, and an image where it has none."""
    needed = [name for name, each in inspect.signature(method).parameters.items() if each.default is each.empty]
    values = {"images": [gray()], "init_images": [gray()], "category": "1", "text_prompt": "a"}
    images = {"input_image": gray()} if "input_image" in inspect.signature(method).parameters else {}
    method(**{name: values.get(name, gray()) for name in needed}, **images)


@pytest.mark.parametrize("name", sorted(NOT_DONE | GONE))
def test_it_is_refused_in_words(client: Client, name: str) -> None:
    with suppress(RuntimeError, KeyError):  # what it makes of the answer
        called(getattr(client, name))
    answer = client.answers[-1]
    assert answer.status_code == (404 if name in GONE else 400)
    if "/sdapi/" in answer.url or "/controlnet/" in answer.url:
        assert answer.json()["detail"] == answer.json()["errors"] and answer.json()["error"] == "HTTPException"
        assert "not supported" in answer.json()["detail"] or "does not exist" in answer.json()["detail"]


EXTENSIONS = [
    (name, method)
    for name, found in inspect.getmembers(webuiapi, inspect.isclass)
    if name.endswith("Interface")
    for method, _ in inspect.getmembers(found, inspect.isfunction)
    if method not in ("__init__", "print_deprecation_warning")
    and (name, method) != ("ControlNetInterface", "model_list")
]


@pytest.mark.parametrize(("interface", "method"), EXTENSIONS)
def test_extensions_are_not_there(client: Client, interface: str, method: str) -> None:
    with suppress(RuntimeError, KeyError, TypeError):
        called(getattr(getattr(webuiapi, interface)(client), method))
    assert client.answers[-1].status_code == 404


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"enable_hr": True}, "enable_hr True is not supported"),
        ({"restore_faces": True}, "restore_faces True"),
        ({"tiling": True}, "tiling True"),
        ({"styles": ["oil"]}, "styles ['oil']"),
        ({"subseed_strength": 0.1}, "subseed_strength 0.1"),
        ({"s_churn": 0.3}, "s_churn"),
        ({"s_noise": 0.9}, "s_noise"),
        ({"script_name": "X/Y/Z plot"}, "script_name"),
        ({"scheduler": "KL Optimal"}, "does not support the schedule type 'KL Optimal'"),
        ({"sampler_name": "Restart"}, "no scheduler is named 'Restart'"),
        ({"sampler_name": "Euler a", "eta": 0.5}, "with an eta of 0.5 is not supported"),
        ({"override_settings": {"sd_vae": "x"}}, "sd_vae 'x' is not supported"),
        ({"adetailer": [webuiapi.ADetailer()], "alwayson_scripts": {}}, "'ADetailer' is not supported"),
        ({"sag": webuiapi.Sag(), "alwayson_scripts": {}}, "'Self Attention Guidance' is not supported"),
        (
            {"controlnet_units": [webuiapi.ControlNetUnit(image=gray(), module="canny")], "alwayson_scripts": {}},
            "the preprocessor 'canny' is not supported",
        ),
        (
            {"controlnet_units": [webuiapi.ControlNetUnit(image=gray(), model="canny")], "alwayson_scripts": {}},
            "tiny has no ControlNet 'canny'",
        ),
    ],
)
def test_what_is_not_done_is_never_ignored(client: Client, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(RuntimeError) as error:
        client.txt2img(**{**SMALL, **fields})
    status, body = error.value.args
    told = json.loads(body)
    assert status == 400 and says in told["detail"]
    assert told.keys() == {"error", "detail", "body", "errors"}


@pytest.mark.parametrize("fields", [{"resize_mode": 1}, {"inpainting_fill": 2}, {"initial_noise_multiplier": 0.5}])
def test_nor_of_an_image(client: Client, fields: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="not supported|less than or equal to 1"):
        client.img2img([gray()], **SMALL, **fields)


def test_only_the_masked_part_is_drawn_at_full_size_and_put_back(client: Client) -> None:
    """The same as cutting, drawing and pasting by hand."""
    start, mask = gray(128), PIL.Image.new("L", (128, 128))
    mask.paste(255, (72, 40, 88, 56))
    options = {**SMALL, "denoising_strength": 1.0, "mask_blur": 0, "inpainting_fill": 1}
    found = client.img2img([start], mask_image=mask, inpaint_full_res=True, inpaint_full_res_padding=8, **options)
    box = (64, 32, 96, 64)
    cut, cut_mask = (each.crop(box).resize((64, 64)) for each in (start, mask))
    drawn = client.img2img([cut], mask_image=cut_mask, inpaint_full_res=False, **options).image
    expected = start.copy()
    expected.paste(drawn.resize((32, 32)), (64, 32), mask.crop(box))
    assert found.image.size == (128, 128)
    np.testing.assert_allclose(np.asarray(found.image, np.int16), np.asarray(expected, np.int16), atol=1)
    assert found.image.info["parameters"] == found.info["infotexts"][0]


def test_what_is_below_a_mask_can_be_its_surroundings(client: Client) -> None:
    options = {**SMALL, "denoising_strength": 0.5, "mask_blur": 0, "inpaint_full_res": False}
    spot, start = half(), gray()
    start.paste((255, 0, 0), (32, 0, 64, 64))
    red, plain = (
        client.img2img([each], mask_image=spot, inpainting_fill=0, **options).image for each in (start, gray())
    )
    assert red.tobytes() == plain.tobytes(), "what is behind the mask has no influence"
    kept = [client.img2img([each], mask_image=spot, inpainting_fill=1, **options).image for each in (start, gray())]
    assert kept[0].tobytes() != kept[1].tobytes()
