"""With ControlNets every family draws what diffusers' own ControlNet pipelines draw (fp32 on the CPU).

The graphs are converted and not fused: what the passes do to them is held elsewhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from beside_diffusers import KINDS, PROMPT, SIZE, assert_equal, differ, generator, of_diffusers, pattern, put_together
from converted import Converted
from PIL import Image

from sdflow.errors import UsageError
from sdflow.runtime.pipeline import Pipeline
from sdflow.sources import PlainDigests, load_pipeline, open_checkpoint

SETTINGS: dict[str, Any] = {"num_inference_steps": 4, "output_type": "np", "guidance_scale": 5.0}


class Built:
    """A small pipeline with the ControlNets `edges` and `depth`: our folder on ONNX Runtime, and diffusers' modules."""

    def __init__(self, architecture: str, root: Path, converted: Converted) -> None:
        nets = {"edges": f"synthetic:{architecture}?seed=1", "depth": f"synthetic:{architecture}?seed=2"}
        opened = open_checkpoint(f"synthetic:{architecture}", digests=PlainDigests(), download=False, nets=nets)
        self.architecture, self.folder = architecture, root / "pipeline"
        put_together(opened, converted, self.folder)
        self.ours = Pipeline.load(self.folder, "cpu", threads=1)
        self.torch = load_pipeline(opened)
        self.nets = dict(zip(("depth", "edges"), self.torch.controlnet.nets, strict=True))

    def theirs(self, kind: str, *nets: str) -> Any:
        """diffusers' pipeline with these ControlNets. kind: how its class ends, before `Pipeline`."""
        parts = {name: part for name, part in self.torch.components.items() if name != "controlnet"}
        if nets:
            parts["controlnet"] = [self.nets[name] for name in nets] if len(nets) > 1 else self.nets[nets[0]]
        return of_diffusers(f"{KINDS[self.architecture]}{kind}Pipeline", parts)


@pytest.fixture(scope="module", params=KINDS)
def built(request: pytest.FixtureRequest, converted: Converted, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(request.param, tmp_path_factory.mktemp(request.param), converted)


EDGES, DEPTH = pattern(1), pattern(2)


def test_one_net_with_its_scale_equals_diffusers(built: Built) -> None:
    theirs = built.theirs("ControlNet", "edges")
    expected = theirs(PROMPT, image=EDGES, controlnet_conditioning_scale=0.6, generator=generator(), **SETTINGS)
    drawn = built.ours(PROMPT, control={"edges": EDGES}, control_scale=0.6, generator=generator(), **SETTINGS)
    assert_equal(drawn.images, expected.images)
    stronger = built.ours(PROMPT, control={"edges": EDGES}, generator=generator(), **SETTINGS)
    assert differ(drawn.images, stronger.images), "the scale changes nothing"


def test_two_nets_with_starts_and_ends_of_their_own_equal_diffusers(built: Built) -> None:
    """In the second step both run, in the first and last one does. The images are of another size, and are resized."""
    expected = built.theirs("ControlNet", "edges", "depth")(
        PROMPT,
        image=[EDGES, DEPTH],
        controlnet_conditioning_scale=[0.5, 0.8],
        control_guidance_start=[0.0, 0.25],
        control_guidance_end=[0.75, 1.0],
        height=SIZE,
        width=2 * SIZE,
        generator=generator(),
        **SETTINGS,
    )
    given: dict[str, Any] = {"height": SIZE, "width": 2 * SIZE, **SETTINGS}
    drawn = built.ours(
        PROMPT,
        control={"edges": EDGES, "depth": DEPTH},
        control_scale={"edges": 0.5, "depth": 0.8},
        control_guidance_start={"depth": 0.25},
        control_guidance_end={"edges": 0.75},
        generator=generator(),
        **given,
    )
    assert_equal(drawn.images, expected.images)


@pytest.mark.once("built")
def test_nets_change_from_call_to_call_and_without_any_the_image_is_the_plain_one(built: Built) -> None:
    """One UNet serves all of them, and nothing of a call stays for the next."""
    height, width = SIZE, 2 * SIZE
    given: dict[str, Any] = {"height": height, "width": width, **SETTINGS}
    for name in ("edges", "depth"):
        expected = built.theirs("ControlNet", name)(PROMPT, image=pattern(5), generator=generator(), **given)
        assert_equal(
            built.ours(PROMPT, control={name: pattern(5)}, generator=generator(), **given).images, expected.images
        )
    plain = built.theirs("")(PROMPT, generator=generator(), **given)
    assert_equal(built.ours(PROMPT, generator=generator(), **given).images, plain.images)


@pytest.mark.once("built", 1)
def test_several_images_of_several_prompts_without_guidance_equal_diffusers(built: Built) -> None:
    settings = {**SETTINGS, "guidance_scale": 1.0, "num_inference_steps": 2, "num_images_per_prompt": 2}
    prompts = [PROMPT, "a red house"]
    theirs = built.theirs("ControlNet", "edges")
    expected = theirs(prompts, image=[EDGES, DEPTH], generator=generator(), **settings)
    drawn = built.ours(prompts, control={"edges": [EDGES, DEPTH]}, generator=generator(), **settings)
    assert_equal(drawn.images, expected.images)


@pytest.mark.once("built")
def test_guess_mode_equals_diffusers(built: Built) -> None:
    theirs = built.theirs("ControlNet", "edges")
    expected = theirs(PROMPT, image=EDGES, guess_mode=True, generator=generator(), **SETTINGS)
    drawn = built.ours(PROMPT, control={"edges": EDGES}, guess_mode=True, generator=generator(), **SETTINGS)
    assert_equal(drawn.images, expected.images)
    plain = built.ours(PROMPT, control={"edges": EDGES}, generator=generator(), **SETTINGS)
    assert differ(drawn.images, plain.images), "guess mode changes nothing"


@pytest.mark.once("built", 1)
def test_image_to_image_equals_diffusers(built: Built) -> None:
    vae = built.torch.vae
    pixels = torch.from_numpy(np.asarray(pattern(4)) / 127.5 - 1).float().permute(2, 0, 1)[None]
    with torch.no_grad():  # what diffusers encodes the image to, without the noise that it would draw for that
        latents = vae.encode(pixels).latent_dist.mode() * vae.config.scaling_factor
    settings = {**SETTINGS, "strength": 0.6}
    theirs = built.theirs("ControlNetImg2Img", "edges")
    given = {"control_image": EDGES, "controlnet_conditioning_scale": 0.7, "control_guidance_end": 1.0}
    expected = theirs(PROMPT, image=latents, **given, generator=generator(), **settings)
    drawn = built.ours(
        PROMPT, pattern(4), control={"edges": EDGES}, control_scale=0.7, generator=generator(), **settings
    )
    assert_equal(drawn.images, expected.images)


@pytest.mark.parametrize("strength", [1.0, 0.6])
@pytest.mark.once("built", 1)
def test_into_a_mask_with_nets_equals_diffusers(built: Built, strength: float) -> None:
    """One net and two; the mean of what the VAE encodes to, as ours, not a sample of it."""
    mask = np.zeros((SIZE, SIZE), "uint8")
    mask[:, SIZE // 2 :] = 255
    white = Image.fromarray(mask)
    settings = {**SETTINGS, "strength": strength, "num_inference_steps": 4}
    vae = built.torch.vae
    for nets, images in ((("edges",), [EDGES]), (("edges", "depth"), [EDGES, DEPTH])):
        theirs = built.theirs("ControlNetInpaint", *nets)
        theirs._encode_vae_image = lambda image, generator: (
            vae.encode(image).latent_dist.mode() * vae.config.scaling_factor
        )
        scales = [0.7, 0.4][: len(nets)]
        one = len(nets) == 1
        given: dict[str, Any] = {
            "control_image": images[0] if one else images,
            "controlnet_conditioning_scale": scales[0] if one else scales,
        }
        size = {"height": SIZE, "width": SIZE}
        expected = theirs(
            PROMPT, image=pattern(4), mask_image=white, **given, **size, generator=generator(), **settings
        )
        control = dict(zip(nets, images, strict=True))
        drawn = built.ours(
            PROMPT,
            pattern(4),
            white,
            whole=True,
            control=control,
            control_scale=dict(zip(nets, scales, strict=True)),
            generator=generator(),
            **settings,
        )
        assert_equal(drawn.images, expected.images)
    plain = built.ours(PROMPT, pattern(4), white, generator=generator(), **settings)
    assert differ(drawn.images, plain.images), "the nets change nothing"


def test_the_image_takes_the_size_of_the_control_image(built: Built) -> None:
    settings = {**SETTINGS, "num_inference_steps": 2}
    drawn = built.ours(PROMPT, control={"edges": pattern(1, 64, 136)}, generator=generator(), **settings)
    assert drawn.images.shape[1:3] == (64, 136 // built.ours.latents.granularity * built.ours.latents.granularity)


@pytest.mark.once("built")
def test_with_little_memory_the_image_is_the_same(built: Built) -> None:
    frugal = Pipeline.load(built.folder, "cpu", threads=1, low_memory=True)
    settings = {**SETTINGS, "num_inference_steps": 2}
    expected = built.ours(PROMPT, control={"edges": EDGES}, generator=generator(), **settings).images
    assert_equal(frugal(PROMPT, control={"edges": EDGES}, generator=generator(), **settings).images, expected)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"control": {"pose": EDGES}}, "no ControlNet 'pose'"),
        ({"control": {"edges": EDGES}, "control_guidance_start": 0.5, "control_guidance_end": 0.5}, "begins at 0.5"),
        ({"control": {"edges": EDGES}, "control_guidance_end": 1.5}, "ends at 1.5"),
        ({"control": {"edges": EDGES}, "control_scale": float("nan")}, "not a valid scale"),
        ({"control": {"edges": EDGES}, "control_scale": {"depth": 1.0}}, "no image for the ControlNet 'depth'"),
        ({"control": {"edges": [EDGES] * 3}}, "3 control images for 1"),
        ({"control": {"edges": "edges.png"}}, "edges"),
    ],
)
def test_what_means_nothing_is_refused(built: Built, given: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        built.ours(PROMPT, **given, **SETTINGS)
