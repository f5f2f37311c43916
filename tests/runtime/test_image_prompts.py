"""With IP-Adapters every family draws what diffusers' own pipelines draw with them (fp32 on the CPU).

diffusers loads the adapters by itself, from the files. The graphs are converted and not fused: what the passes do to them is held
elsewhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from beside_diffusers import KINDS, PROMPT, SIZE, assert_equal, differ, generator, of_diffusers, pattern, put_together
from converted import Converted
from ip_adapter_files import save_adapter, save_encoder, tensors, with_adapters
from PIL import Image

from sdflow.errors import UsageError
from sdflow.runtime.denoiser.moving import Moving
from sdflow.runtime.denoiser.split import split
from sdflow.runtime.pipeline import Pipeline
from sdflow.sources import PlainDigests, load_pipeline, open_checkpoint
from sdflow.sources.reference import AdapterReference

SETTINGS: dict[str, Any] = {"num_inference_steps": 2, "output_type": "np", "guidance_scale": 5.0}
FILES = ("plain.safetensors", "plus.safetensors")


class Built:
    """A small pipeline with a plain adapter and one called plus: our folder on ONNX Runtime, and diffusers' pipelines."""

    def __init__(self, architecture: str, root: Path, converted: Converted) -> None:
        self.architecture, self.root = architecture, root
        save_encoder(root / "image_encoder")
        for index, name in enumerate(FILES):
            save_adapter(root / name, tensors(architecture, plus=bool(index), seed=index))
        adapters = [AdapterReference(str(root / name)) for name in FILES]
        model = f"synthetic:{architecture}"
        opened = open_checkpoint(model, digests=PlainDigests(), download=False, adapters=adapters)
        self.folder = root / "pipeline"
        put_together(opened, converted, self.folder)
        self.ours = Pipeline.load(self.folder, "cpu", threads=1)
        self.model = model

    def theirs(self, kind: str = "", *files: str, plain: bool = False) -> Any:
        """diffusers' pipeline with these adapters, by default with both. kind: how its class ends, before `Pipeline`."""
        parts = load_pipeline(open_checkpoint(self.model, digests=PlainDigests(), download=False)).components
        if self.architecture == "sdxl-tiny":
            parts["feature_extractor"] = self.ours.companions["feature_extractor"]
        made = of_diffusers(f"{KINDS[self.architecture]}{kind}Pipeline", parts)
        return made if plain else with_adapters(made, self.root, *(files or FILES))


@pytest.fixture(scope="module", params=KINDS)
def built(request: pytest.FixtureRequest, converted: Converted, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(request.param, tmp_path_factory.mktemp(request.param), converted)


@pytest.fixture(scope="module")
def theirs(built: Built) -> Any:
    return built.theirs()


ONE, OTHER, WIDE = pattern(1), pattern(2), pattern(3, 72, 136)


def test_an_image_for_each_adapter_with_its_scale_equals_diffusers(built: Built, theirs: Any) -> None:
    given: dict[str, Any] = {"ip_adapter_image": [ONE, WIDE], **SETTINGS}
    theirs.set_ip_adapter_scale([0.6, 0.4])
    expected = theirs(PROMPT, generator=generator(), **given).images
    drawn = built.ours(PROMPT, ip_adapter_scale=[0.6, 0.4], generator=generator(), **given).images
    assert_equal(drawn, expected)
    assert differ(drawn, built.ours(PROMPT, ip_adapter_scale=1.0, generator=generator(), **given).images)
    given["ip_adapter_image"] = [OTHER, WIDE]
    assert differ(drawn, built.ours(PROMPT, ip_adapter_scale=[0.6, 0.4], generator=generator(), **given).images)


@pytest.mark.once("built", 1)
def test_several_images_of_one_adapter_and_a_batch_equal_diffusers(built: Built, theirs: Any) -> None:
    """All images of a batch get the same image prompts. The images are of different sizes; CLIP's processor crops them."""
    settings = {**SETTINGS, "num_images_per_prompt": 2}
    given: dict[str, Any] = {"ip_adapter_image": [[ONE, WIDE], OTHER], **settings}
    prompts = [PROMPT, "a red house"]
    theirs.set_ip_adapter_scale([0.7, 0.3])
    expected = theirs(prompts, generator=generator(), **given).images
    assert_equal(built.ours(prompts, ip_adapter_scale=[0.7, 0.3], generator=generator(), **given).images, expected)


@pytest.mark.once("built")
def test_without_guidance_equals_diffusers(built: Built, theirs: Any) -> None:
    given: dict[str, Any] = {"ip_adapter_image": [ONE, OTHER], **SETTINGS, "guidance_scale": 1.0}
    theirs.set_ip_adapter_scale([0.5, 0.5])
    expected = theirs(PROMPT, generator=generator(), **given).images
    assert_equal(built.ours(PROMPT, ip_adapter_scale=0.5, generator=generator(), **given).images, expected)


def test_without_an_image_the_plain_image_is_drawn_also_after_one(built: Built) -> None:
    """diffusers refuses such a call with adapters; here it is the image without them."""
    plain = built.theirs(plain=True)(PROMPT, generator=generator(), **SETTINGS).images
    drawn = built.ours(PROMPT, ip_adapter_image=[ONE, OTHER], generator=generator(), **SETTINGS).images
    assert differ(drawn, plain)
    assert_equal(built.ours(PROMPT, generator=generator(), **SETTINGS).images, plain)
    assert_equal(built.ours(PROMPT, ip_adapter_image=[ONE, OTHER], ip_adapter_scale=0.0, generator=generator(),
                            **SETTINGS).images, plain)  # fmt: skip


@pytest.mark.once("built")
def test_one_adapter_without_an_image_is_left_out(built: Built) -> None:
    theirs = built.theirs("", FILES[1])
    theirs.set_ip_adapter_scale(0.8)
    expected = theirs(PROMPT, ip_adapter_image=WIDE, generator=generator(), **SETTINGS).images
    drawn = built.ours(PROMPT, ip_adapter_image=[None, WIDE], ip_adapter_scale=0.8, generator=generator(), **SETTINGS)
    assert_equal(drawn.images, expected)


@pytest.mark.once("built", 1)
def test_image_to_image_equals_diffusers(built: Built) -> None:
    theirs = built.theirs("Img2Img")
    theirs.set_ip_adapter_scale([0.6, 0.4])
    vae = theirs.vae
    pixels = torch.from_numpy(np.asarray(pattern(4)) / 127.5 - 1).float().permute(2, 0, 1)[None]
    with torch.no_grad():  # what diffusers encodes the image to, without the noise that it would draw for that
        latents = vae.encode(pixels).latent_dist.mode() * vae.config.scaling_factor
    given: dict[str, Any] = {"ip_adapter_image": [ONE, OTHER], "strength": 0.6, **SETTINGS}
    expected = theirs(PROMPT, image=latents, generator=generator(), **given).images
    drawn = built.ours(PROMPT, pattern(4), ip_adapter_scale=[0.6, 0.4], generator=generator(), **given).images
    assert_equal(drawn, expected)


@pytest.mark.once("built", 1)
def test_inpainting_equals_diffusers(built: Built) -> None:
    theirs = built.theirs("Inpaint")
    theirs.set_ip_adapter_scale([0.6, 0.4])
    mask = Image.new("L", (SIZE, SIZE))
    mask.paste(255, (0, 0, SIZE // 2, SIZE))
    given: dict[str, Any] = {"ip_adapter_image": [ONE, OTHER], "strength": 1.0, **SETTINGS}
    channels = built.ours.latents.channels
    scale = built.ours.latents.scale
    noise = torch.randn(1, channels, SIZE // scale, SIZE // scale, generator=generator())
    vae, reader = theirs.vae, theirs.image_processor
    with torch.no_grad():
        mean = vae.encode(reader.preprocess(pattern(4))).latent_dist.mode() * vae.config.scaling_factor
    with (
        pytest.MonkeyPatch.context() as patch
    ):  # diffusers draws a sample of the encoder's distribution; ours is its mean
        patch.setattr(type(theirs), "_encode_vae_image", lambda self, image, generator: mean)
        expected = theirs(
            PROMPT, image=pattern(4), mask_image=mask, latents=noise, height=SIZE, width=SIZE, **given
        ).images
    drawn = built.ours(PROMPT, pattern(4), mask, whole=True, latents=noise, ip_adapter_scale=[0.6, 0.4], **given).images
    assert_equal(drawn, expected)


@pytest.mark.once("built")
def test_steps_read_keys_and_values_of_the_images_that_are_computed_once(built: Built) -> None:
    """What depends on images alone is in the part that runs once per image. The scales are inputs of the step."""
    model = onnx.load(str(built.folder / "unet/model.onnx"), load_external_data=False)
    sizes = {
        "batch": 2,
        "sequence": 77,
        "latent_height": 8,
        "latent_width": 8,
        "image_tokens_0": 4,
        "image_tokens_1": 6,
    }
    parts = split(model, sizes, moving=Moving("sample", "timestep"), guidance=True)

    def matrices(part: Any) -> int:
        read = {name for node in part.graph.node for name in node.input}
        return sum("_ip." in tensor.name for tensor in part.graph.initializer if tensor.name in read)

    assert matrices(parts.text) == matrices(model) > 0
    assert matrices(parts.step) == matrices(parts.timestep) == 0
    inputs = {item.name for item in parts.step.graph.input}
    assert {"ip_adapter_scale_0", "ip_adapter_scale_1"} <= inputs
    assert not {"ip_hidden_states_0", "ip_hidden_states_1"} & inputs


@pytest.mark.once("built")
def test_with_little_memory_the_image_is_the_same(built: Built) -> None:
    given: dict[str, Any] = {"ip_adapter_image": [ONE, OTHER], **SETTINGS}
    expected = built.ours(PROMPT, generator=generator(), **given).images
    frugal = Pipeline.load(built.folder, "cpu", threads=1, low_memory=True)
    assert_equal(frugal(PROMPT, generator=generator(), **given).images, expected)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"ip_adapter_image": ONE}, "1 images for 2 IP-Adapters"),
        ({"ip_adapter_image": [ONE, OTHER, WIDE]}, "3 images for 2"),
        ({"ip_adapter_image": [ONE, OTHER], "ip_adapter_scale": [1.0]}, "1 scales for 2"),
        ({"ip_adapter_image": [ONE, OTHER], "ip_adapter_scale": float("nan")}, "nan is not a valid scale"),
        ({"ip_adapter_image": [ONE, OTHER], "ip_adapter_scale": {"up": 1.0}}, "is not a valid scale"),
        ({"ip_adapter_image": [ONE, "one.png"]}, "is not an image"),
    ],
)
def test_what_means_nothing_is_refused(built: Built, given: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        built.ours(PROMPT, **given, **SETTINGS)
