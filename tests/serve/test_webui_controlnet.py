"""ControlNet as the webui's extension has it, with `webuiapi`, against the real server of a pipeline with two ControlNets."""

from __future__ import annotations

import io
import json
from base64 import b64decode, b64encode
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import PIL.Image
import pytest
from serve.conftest import RunningServer, running_server
from shell import Shell
from until import PATIENCE

webuiapi = pytest.importorskip("webuiapi", reason="pip install -e '.[test]'")
pytestmark = pytest.mark.slow  # it builds a pipeline

ASKED = {"prompt": "an otter", "seed": 1, "steps": 3, "width": 64, "height": 64, "alwayson_scripts": {}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    shell = Shell(tmp_path_factory.mktemp("controlnet"))
    shell.json("run", "tiny_controlnet", "--no-verify", "--no-evaluate")
    with running_server(str(shell.folder / "pipelines/tiny_controlnet")) as made:
        yield made


def edges(width: int = 64) -> PIL.Image.Image:
    return PIL.Image.radial_gradient("L").resize((width, 64)).convert("RGB")


def test_units_are_the_controlnets_of_a_request(server: RunningServer) -> None:
    client: Any = webuiapi.WebUIApi(baseurl=f"{server.url}/sdapi/v1", sampler="DDIM")
    assert client.controlnet_model_list() == ["depth", "edges"]
    assert client.get_scripts() == {"txt2img": ["controlnet"], "img2img": ["controlnet"]}
    unit = webuiapi.ControlNetUnit(image=edges(), model="edges", weight=0.8, guidance_end=0.6)
    drawn = client.txt2img(**{**ASKED, "alwayson_scripts": {}}, controlnet_units=[unit]).image
    file = io.BytesIO()
    edges().save(file, "PNG")
    fields = {
        "prompt": "an otter",
        "seed": 1,
        "steps": 3,
        "size": "64x64",
        "guidance_scale": 7,
        "scheduler": "ddim",
        "eta": 1,
    }
    control = [{"name": "edges", "image": b64encode(file.getvalue()).decode(), "scale": 0.8, "end": 0.6}]
    same, plain = (
        httpx.post(f"{server.url}/v1/images/generations", json={**fields, **more}, timeout=PATIENCE).json()
        for more in ({"control": control}, {})
    )
    expected, other = (
        np.asarray(PIL.Image.open(io.BytesIO(b64decode(each["data"][0]["b64_json"]))), np.int16)
        for each in (same, plain)
    )
    np.testing.assert_allclose(np.asarray(drawn, np.int16), expected, atol=1)
    assert np.abs(expected - other).max() > 1
    off = webuiapi.ControlNetUnit(image=edges(), model="edges", enabled=False)
    without = client.txt2img(**{**ASKED, "alwayson_scripts": {}}, controlnet_units=[off]).image
    np.testing.assert_allclose(np.asarray(without, np.int16), other, atol=1)


@pytest.mark.parametrize(
    ("unit", "says"),
    [
        ({"model": "canny"}, "no ControlNet 'canny'"),
        ({"module": "openpose"}, "the preprocessor 'openpose' is not supported"),
        ({"control_mode": 2}, "the control mode 'ControlNet is more important' is not supported"),
        ({"image": edges(96)}, "96x64, another aspect ratio than 64x64"),
        ({"image": None}, "has no image"),
        ({"mask": edges()}, "mask "),
        ({"guidance_start": 0.7, "guidance_end": 0.5}, "greater than start"),
    ],
)
def test_what_a_unit_cannot_have_is_refused(server: RunningServer, unit: dict[str, Any], says: str) -> None:
    client: Any = webuiapi.WebUIApi(baseurl=f"{server.url}/sdapi/v1", sampler="DDIM")
    units = [webuiapi.ControlNetUnit(**{"image": edges(), "model": "edges", **unit})]
    with pytest.raises(RuntimeError) as error:
        client.txt2img(**{**ASKED, "alwayson_scripts": {}}, controlnet_units=units)
    status, body = error.value.args
    assert status == 400 and says in json.loads(body)["detail"]
