"""The ONNX pipeline draws what the PyTorch pipeline draws, and diffusers' own ONNX pipeline loads the same folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from sdflow.artifact import Artifact
from sdflow.build.assemble import assemble
from sdflow.errors import UsageError, VerificationError
from sdflow.families import FAMILIES
from sdflow.manifest import Origin
from sdflow.passes.base import PassInputs
from sdflow.passes.float16 import OnnxFloatToFloat16
from sdflow.runtime.files.folder import load_submodel
from sdflow.runtime.pipeline import Pipeline
from sdflow.sources import Checkpoint
from sdflow.targets import TARGETS

# Largest difference of pixel values in [0, 1], fp32 on the CPU. Measured with 4 steps: 6.1e-6 with guidance, 1.5e-6
# without; with 20 steps 3.7e-6 and 1.7e-6 (images from 0 to 1, standard deviation 0.26).
TOLERANCE = 1e-4

PROMPT = "a photo of an astronaut riding a horse on mars"
SETTINGS: dict[str, Any] = {"num_inference_steps": 4, "negative_prompt": "blurry"}

ONE_THREAD = onnxruntime.SessionOptions()
ONE_THREAD.intra_op_num_threads = 1
ON_CPU = {"provider": "CPUExecutionProvider", "sess_options": ONE_THREAD}


@pytest.fixture(scope="module")
def pipeline(tiny_pipeline: Path) -> Iterator[Pipeline]:
    """On one thread each: two pools that wait for work by spinning would slow each other down."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Pipeline.load(tiny_pipeline, "cpu", threads=1)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def latents(pipeline: Pipeline) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(pipeline.latents_shape(1, None, None), dtype=np.float32)


def assert_equal_images(drawn: np.ndarray, expected: np.ndarray) -> None:
    assert expected.std() > 0.05, "an image of one colour would prove nothing"
    assert drawn.shape == expected.shape
    difference = np.abs(drawn - expected).max()
    assert difference <= TOLERANCE, f"largest difference {difference}"


@pytest.mark.parametrize("guidance_scale", [1.0, 7.5])
def test_image_equals_pytorchs(pipeline: Pipeline, tiny_torch: Any, latents: np.ndarray, guidance_scale: float) -> None:
    settings = {**SETTINGS, "guidance_scale": guidance_scale}
    expected = tiny_torch(PROMPT, latents=torch.from_numpy(latents), output_type="np", **settings).images
    assert_equal_images(pipeline(PROMPT, latents=latents, output_type="np", **settings).images, expected)


@pytest.mark.parametrize(
    "scheduler", ["DDIMScheduler", "EulerAncestralDiscreteScheduler", "DPMSolverMultistepScheduler"]
)
def test_image_equals_pytorchs_with_other_schedulers_and_the_same_seed(
    pipeline: Pipeline, tiny_torch: Any, scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for one in (pipeline, tiny_torch):
        monkeypatch.setattr(one, "scheduler", getattr(diffusers, scheduler).from_config(one.scheduler.config))
    expected = tiny_torch(PROMPT, generator=torch.Generator().manual_seed(3), output_type="np", **SETTINGS).images
    drawn = pipeline(PROMPT, generator=torch.Generator().manual_seed(3), output_type="np", **SETTINGS)
    assert_equal_images(drawn.images, expected)
    assert drawn.nsfw_content_detected == [False]


def test_other_sizes_and_several_prompts_at_once(pipeline: Pipeline, tiny_torch: Any) -> None:
    settings = {**SETTINGS, "negative_prompt": ["", "blurry"], "height": 64, "width": 192, "num_inference_steps": 2}
    latents = np.random.default_rng(2).standard_normal(pipeline.latents_shape(2, 64, 192), dtype=np.float32)
    prompts = ["a horse", "a much longer prompt about the same horse " * 20]
    expected = tiny_torch(prompts, latents=torch.from_numpy(latents), output_type="np", **settings).images
    assert expected.shape == (2, 64, 192, 3)
    assert_equal_images(pipeline(prompts, latents=latents, output_type="np", **settings).images, expected)


def test_diffusers_onnx_pipeline_loads_the_folder_unchanged_and_draws_the_same(
    pipeline: Pipeline, tiny_pipeline: Path, latents: np.ndarray
) -> None:
    theirs = diffusers.OnnxStableDiffusionPipeline.from_pretrained(tiny_pipeline, **ON_CPU)
    theirs.set_progress_bar_config(disable=True)
    assert theirs.safety_checker is not None
    settings = {**SETTINGS, "guidance_scale": 7.5, "height": 128, "width": 128}
    expected = theirs(PROMPT, latents=latents, output_type="np", **settings).images
    assert_equal_images(pipeline(PROMPT, latents=latents, output_type="np", **settings).images, expected)


def test_diffusers_onnx_pipeline_loads_a_copy_without_a_safety_checker(
    tiny_checkpoint: Checkpoint, tiny_artifacts: dict[str, Artifact], tmp_path: Path
) -> None:
    parts = {name: artifact for name, artifact in tiny_artifacts.items() if name != "safety_checker"}
    companions = {name: path for name, path in tiny_checkpoint.companions.items() if name != "feature_extractor"}
    assemble(tmp_path / "out", parts=parts, companions=companions, origin=Origin("tiny", "cpu"), copy=True)
    theirs = diffusers.OnnxStableDiffusionPipeline.from_pretrained(tmp_path / "out", **ON_CPU)
    assert theirs.safety_checker is None
    ours = Pipeline.load(tmp_path / "out", "cpu", threads=1)
    assert ours("a horse", height=64, width=64, num_inference_steps=1).nsfw_content_detected is None


def test_a_flagged_image_is_blackened(tiny_artifacts: dict[str, Artifact], pipeline: Pipeline, tmp_path: Path) -> None:
    """The thresholds of a copy of the safety checker are lowered until every image is flagged."""
    folder = tiny_artifacts["safety_checker"].path
    model = onnx.load(folder / "model.onnx")
    thresholds = [tensor for tensor in model.graph.initializer if tensor.name.endswith("embeds_weights")]
    assert len(thresholds) == 2
    for tensor in thresholds:
        tensor.CopyFrom(onnx.numpy_helper.from_array(np.full(tensor.dims, -2, np.float32), tensor.name))
    (tmp_path / "safety_checker").mkdir()
    onnx.save(model, tmp_path / "safety_checker" / "model.onnx")
    (tmp_path / "safety_checker" / "config.json").write_bytes((folder / "config.json").read_bytes())
    strict = {
        **pipeline.submodels,
        "safety_checker": load_submodel(tmp_path, "safety_checker", TARGETS["cpu"], family=pipeline.family),
    }
    drawn = Pipeline(pipeline.family, strict, pipeline.companions)("a horse", num_inference_steps=1, output_type="np")
    assert drawn.nsfw_content_detected == [True]
    assert not drawn.images.any()


def test_half_precision_graphs_are_fed_half_precision(
    tiny_artifacts: dict[str, Artifact], pipeline: Pipeline, latents: np.ndarray, tmp_path: Path
) -> None:
    inputs = PassInputs("vae_decoder", tiny_artifacts["vae_decoder"].path, {})
    (tmp_path / "vae_decoder").mkdir()
    OnnxFloatToFloat16().run(inputs, tmp_path / "vae_decoder", OnnxFloatToFloat16.Config())
    decoder = load_submodel(tmp_path, "vae_decoder", TARGETS["cpu"], family=pipeline.family)
    assert decoder.input_types == {"latent_sample": "float16"}
    submodels = {**pipeline.submodels, "vae_decoder": decoder}
    drawn = Pipeline(pipeline.family, submodels, pipeline.companions).decode(torch.from_numpy(latents))
    assert drawn.dtype == torch.float32
    assert (drawn - pipeline.decode(torch.from_numpy(latents))).abs().max() < 0.02  # float16 has 11 bits


def test_the_first_images_sessions_are_there_before_it(
    tiny_pipeline: Path, pipeline: Pipeline, latents: np.ndarray
) -> None:
    """They are created while tokenizers are imported; the encoder's are not, since text to image does not run it."""
    expected = pipeline(PROMPT, latents=latents, output_type="np", **SETTINGS).images
    prepared = Pipeline.load(tiny_pipeline, "cpu", threads=1, first={})
    (before,) = prepared.denoisers.kept.values()
    drawn = prepared(PROMPT, latents=latents, output_type="np", **SETTINGS).images
    assert np.array_equal(drawn, expected)
    assert [*prepared.denoisers.kept.values()] == [before]
    assert prepared.submodels["vae_encoder"]._session is None


def test_nothing_is_created_before_a_larger_image(tiny_pipeline: Path, pipeline: Pipeline) -> None:
    side = pipeline.latents.image_size
    larger = Pipeline.load(tiny_pipeline, "cpu", threads=1, first={"height": 2 * side, "width": side})
    assert not larger.denoisers.kept


def test_sizes_that_the_model_cannot_have_are_refused(pipeline: Pipeline) -> None:
    with pytest.raises(UsageError, match="height is 100 pixels"):
        pipeline("a horse", height=100)
    with pytest.raises(UsageError, match="have the shape"):
        pipeline("a horse", latents=np.zeros((1, 4, 2, 2), np.float32))


def test_a_graph_with_other_inputs_is_refused(pipeline: Pipeline) -> None:
    with pytest.raises(VerificationError, match="the graph takes sample, timestep, encoder_hidden_states"):
        pipeline.submodels["unet"](sample=np.zeros((1, 4, 8, 8)))


def test_a_folder_that_is_no_pipeline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no pipeline here"):
        Pipeline.load(tmp_path, "cpu")
    (tmp_path / "model_index.json").write_text(json.dumps({"unet": ["diffusers", "UNet2DConditionModel"]}))
    with pytest.raises(UsageError, match="has no text_encoder, unet, vae_decoder"):
        Pipeline(FAMILIES["stable_diffusion"], {}, {})


@pytest.mark.parametrize("submodel", ["unet", "vae_decoder"])
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:1000]), "is not an ONNX model"),
        (lambda path: path.unlink(), "there is no such file"),
        (lambda path: path.with_name("model.onnx.data").write_bytes(b""), "of model.onnx.data, which has 0"),
    ],
)
def test_a_damaged_submodel_is_told_in_words(
    tiny_pipeline: Path, tmp_path: Path, submodel: str, damage: Callable[[Path], object], said: str
) -> None:
    shutil.copytree(tiny_pipeline, tmp_path / "copy")
    damage(tmp_path / "copy" / submodel / "model.onnx")
    with pytest.raises(VerificationError, match=said):
        Pipeline.load(tmp_path / "copy", "cpu", checker=False, threads=1)("a horse", num_inference_steps=1)
