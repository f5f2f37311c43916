"""ComfyUI's nodes keep its contract, draw what the pipeline draws, and exchange latents in the scale of ComfyUI, which is that of
diffusers' VAE without its scaling factor."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from comfyui_host import Host

from sdflow.runtime.pipeline import Pipeline

NODES = Path(__file__).parents[2] / "integrations/comfyui"
EXAMPLE: dict[str, dict[str, Any]] = json.loads((NODES / "example.json").read_text())


@pytest.fixture(scope="module")
def host(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    models = tmp_path_factory.mktemp("models")
    (models / "sdflow/small").mkdir(parents=True)
    (models / "sdflow/small/tiny").symlink_to(tiny_pipeline, target_is_directory=True)
    (models / "loras").mkdir()
    (models / "loras/ink.safetensors").write_bytes(b"")
    made = Host(models)
    made.load(NODES)
    yield made


def prompt_of(**sample: Any) -> dict[str, dict[str, Any]]:
    """The example that is shipped, on the tiny pipeline."""
    prompt = copy.deepcopy(EXAMPLE)
    prompt["1"]["inputs"]["pipeline"] = "small/tiny"
    prompt["2"]["inputs"] |= {"width": 64, "height": 64, "batch_size": 2}
    prompt["3"]["inputs"] |= {"steps": 2, "positive": "a (large:1.3) circle", "negative": "ugly", **sample}
    return prompt


@pytest.fixture(scope="module")
def outputs(host: Host) -> Mapping[str, tuple[Any, ...]]:
    """Of each node of the example."""
    return host.execute(prompt_of(scheduler="euler"))


def noise_of_comfyui(seed: int, *shape: int) -> torch.Tensor:
    """`prepare_noise` of ComfyUI's comfy/sample.py: one draw for the batch."""
    return torch.randn(shape, generator=torch.manual_seed(seed), device="cpu")


def test_the_example_draws_what_the_pipeline_draws_from_the_noise_of_comfyui(
    host: Host, outputs: Mapping[str, tuple[Any, ...]], tiny_pipeline: Path, tiny_torch: Any
) -> None:
    samples, images = outputs["3"][0], outputs["4"][0]
    assert samples.keys() == {"samples"} and samples["samples"].shape == (2, 4, 8, 8)
    assert images.shape == (2, 64, 64, 3) and 0 <= images.min() < images.max() <= 1
    assert host.saved == [images] and host.steps[:2] == [(1, 2), (2, 2)]
    pipe = Pipeline.load(tiny_pipeline, "cpu", threads=1, scheduler="euler")
    options = {"height": 64, "width": 64, "num_inference_steps": 2, "guidance_scale": 7.5, "prompt_syntax": "a1111"}
    expected = pipe(
        ["a (large:1.3) circle"] * 2, negative_prompt=["ugly"] * 2, latents=noise_of_comfyui(7, 2, 4, 8, 8),
        output_type="latent", **options,
    ).images  # fmt: skip
    scaled = samples["samples"] * tiny_torch.vae.config.scaling_factor
    np.testing.assert_allclose(scaled.numpy(), expected, atol=1e-3)
    with torch.no_grad():  # as ComfyUI's VAEDecode has the latents
        decoded = tiny_torch.vae.decode(samples["samples"].clone()).sample.permute(0, 2, 3, 1)
    np.testing.assert_allclose(images.numpy(), (decoded / 2 + 0.5).clamp(0, 1).numpy(), atol=1e-4)


def test_images_are_encoded_in_the_scale_of_comfyui_and_drawn_from(
    host: Host, outputs: Mapping[str, tuple[Any, ...]], tiny_torch: Any
) -> None:
    pixels = torch.rand(1, 70, 64, 3, generator=torch.Generator().manual_seed(0))
    pipeline = outputs["1"][0]
    (latent,) = host.nodes["SdflowEncode"]().encode(pipeline, pixels)  # type: ignore[attr-defined]
    with torch.no_grad():
        expected = tiny_torch.vae.encode(pixels[:, 3:67].permute(0, 3, 1, 2) * 2 - 1).latent_dist.mean
    np.testing.assert_allclose(latent["samples"].numpy(), expected.numpy(), atol=1e-4)
    host.steps.clear()
    given = {
        **prompt_of(denoise=0.5, steps=3, scheduler="euler")["3"]["inputs"],
        "pipeline": pipeline,
        "latent_image": latent,
    }
    sample = host.nodes["SdflowSample"]()
    with torch.inference_mode():
        (near,) = sample.sample(**{**given, "denoise": 0.05})  # type: ignore[attr-defined]
        (far,) = sample.sample(**given)  # type: ignore[attr-defined]
    assert host.steps[-1] == (3, 3), "so many steps are run, whatever denoise is"
    distances = [float((each["samples"] - latent["samples"]).abs().mean()) for each in (near, far)]
    assert distances[0] < distances[1] / 2
    mask = torch.zeros(1, 64, 64)
    mask[:, :, 32:] = 1
    with torch.inference_mode():
        (half,) = sample.sample(**{**given, "latent_image": {**latent, "noise_mask": mask}})  # type: ignore[attr-defined]
    kept, drawn = (half["samples"] - latent["samples"]).abs().split(4, dim=3)
    assert kept.max() < 1e-4 < drawn.max() and half["noise_mask"] is mask


def test_inputs_are_checked_as_comfyui_does_and_a_run_can_be_interrupted(
    host: Host, outputs: Mapping[str, tuple[Any, ...]]
) -> None:
    assert host.validate(prompt_of()) == []
    wrong = prompt_of(steps=0, scheduler="restart", pipeline=["2", 0])
    assert sorted(host.validate(wrong)) == [
        "3.pipeline: LATENT is no SDFLOW_PIPELINE", "3.scheduler: 'restart' not in list", "3.steps: 0 is out of bounds"
    ]  # fmt: skip
    assert host.nodes["SdflowLora"].INPUT_TYPES()["required"]["lora_name"] == (["ink.safetensors"],)  # type: ignore[attr-defined]
    host.interrupted = True
    given = {**prompt_of(steps=5)["3"]["inputs"], "pipeline": outputs["1"][0], "latent_image": outputs["2"][0]}
    with pytest.raises(Exception) as interrupted, torch.inference_mode():
        host.nodes["SdflowSample"]().sample(**given)  # type: ignore[attr-defined]
    host.interrupted = False
    assert type(interrupted.value).__name__ == "InterruptProcessingException"
