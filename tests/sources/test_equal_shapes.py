"""Files of 2.1 (768 pixels, predicts the velocity) and of 2.1 base (512, the noise) have equal shapes: which one it is.

The files have the shapes of the full models and no values: they are sparse, and nothing but their headers is read.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from math import prod
from pathlib import Path

import pytest
import torch
from original_layout import stable_diffusion_2

from sdflow.config import load_workflow
from sdflow.errors import CheckpointError, WorkflowError
from sdflow.manifest import Origin
from sdflow.passes.registry import catalog
from sdflow.run.init import InitRequest, write_workflow
from sdflow.sources import Checkpoint, open_checkpoint
from sdflow.sources.architectures import architecture_config
from sdflow.sources.reference import parse_reference
from tests.sources.hub_cache import COMMIT, cached_repository


class NoDigests:
    """Sums up no bytes: there are none. Other values are computed."""

    def digest(self, path: Path) -> str:
        return "0" * 64

    def value(self, path: Path, what: str, compute: Callable[[Path], str]) -> str:
        return "0" * 64 if what.startswith("tensors") else compute(path)


def opened(reference: Path | str) -> Checkpoint:
    return open_checkpoint(str(reference), digests=NoDigests(), download=False, allow_pickle=True)


@pytest.fixture(scope="module")
def original() -> dict[str, torch.Tensor]:
    """Tensors of 2.x without values."""
    import diffusers
    import transformers

    with torch.device("meta"):
        unet = diffusers.UNet2DConditionModel.from_config(architecture_config("sd21", "unet"))
        vae = diffusers.AutoencoderKL.from_config(architecture_config("sd21", "vae"))
        config = transformers.CLIPTextConfig.from_dict(architecture_config("sd21", "text_encoder"))
        tensors = stable_diffusion_2(unet, vae, transformers.CLIPTextModel(config))
        return {name: torch.empty(tensor.shape, dtype=torch.float32) for name, tensor in tensors.items()}


def write(
    path: Path, original: dict[str, torch.Tensor], metadata: dict[str, str] | None = None, step: int | None = None
) -> Path:
    """A .safetensors file with these shapes, its tensors a hole in the file; global_step has its value."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    end = 0
    if step is not None:
        header["global_step"] = {"dtype": "I64", "shape": [], "data_offsets": [0, 8]}
        end = 8
    for name, tensor in original.items():
        begin, end = end, end + 4 * prod(tensor.shape)
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    with path.open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw + struct.pack("<q", step or 0))
        stream.truncate(8 + len(raw) + end)
    return path


def prediction(checkpoint: Checkpoint) -> str:
    config = json.loads((checkpoint.companions["scheduler"] / "scheduler_config.json").read_text())
    return str(config["prediction_type"])


def test_without_a_word_it_is_2_1_and_the_user_hears_of_it(original: dict[str, torch.Tensor], tmp_path: Path) -> None:
    checkpoint = opened(write(tmp_path / "model.safetensors", original))
    assert checkpoint.provenance["architecture"] == "sd21"
    assert prediction(checkpoint) == "v_prediction" and checkpoint.facts["image_size"] == 768
    (note,) = checkpoint.notes[1:]
    assert "does not say" in note and "model.safetensors#sd21-base (512 pixels, epsilon)" in note


@pytest.mark.parametrize("architecture", ["sd21", "sd21-base"])
def test_the_user_says_which_it_is(architecture: str, original: dict[str, torch.Tensor], tmp_path: Path) -> None:
    checkpoint = opened(f"{write(tmp_path / 'model.safetensors', original)}#{architecture}")
    assert checkpoint.provenance["architecture"] == architecture and len(checkpoint.notes) == 1
    assert checkpoint.submodels["unet"].load["config"] == architecture_config(architecture, "unet")
    assert prediction(checkpoint) == architecture_config(architecture, "scheduler")["prediction_type"]
    assert checkpoint.reference.endswith(f"#{architecture}")
    with pytest.raises(CheckpointError, match="has the shapes of sd21 and of sd21-base and of sd-turbo, not of sdxl"):
        opened(f"{tmp_path / 'model.safetensors'}#sdxl")


@pytest.mark.parametrize(
    ("metadata", "step", "architecture"),
    [
        ({"modelspec.prediction_type": "epsilon"}, None, "sd21-base"),
        ({"modelspec.prediction_type": "v"}, None, "sd21"),
        ({"modelspec.architecture": "stable-diffusion-v2-512"}, None, "sd21-base"),
        ({"modelspec.architecture": "stable-diffusion-v2-768-v"}, None, "sd21"),
        (None, 875000, "sd21-base"),
        (None, 110000, "sd21"),
        ({"modelspec.prediction_type": "v"}, 875000, "sd21"),
    ],
)
def test_what_the_file_says_is_taken_and_told(
    metadata: dict[str, str] | None,
    step: int | None,
    architecture: str,
    original: dict[str, torch.Tensor],
    tmp_path: Path,
) -> None:
    checkpoint = opened(write(tmp_path / "model.safetensors", original, metadata, step))
    assert checkpoint.provenance["architecture"] == architecture
    told = next(iter(metadata.values())) if metadata else str(step)
    assert f"is taken for {architecture}: its" in checkpoint.notes[1] and told in checkpoint.notes[1]


def test_a_step_that_says_nothing_and_one_that_is_no_number_are_as_none(
    original: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    assert "does not say" in opened(write(tmp_path / "a.safetensors", original, step=220000)).notes[1]
    listed = {**original, "global_step": torch.empty(3)}
    assert "does not say" in opened(write(tmp_path / "b.safetensors", listed)).notes[1]


def test_a_prediction_that_neither_makes_is_refused(original: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", original, {"modelspec.prediction_type": "sample"})
    with pytest.raises(CheckpointError, match=r"modelspec\.prediction_type is sample, but sd21"):
        opened(path)
    assert "although its modelspec.prediction_type is sample" in opened(f"{path}#sd21-base").notes[1]


@pytest.mark.parametrize(("step", "architecture"), [(875000, "sd21-base"), (110000, "sd21"), (None, "sd21")])
def test_a_pickle_keeps_its_step_beside_the_tensors(
    step: int | None, architecture: str, original: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    torch.save({"state_dict": original, "global_step": step}, tmp_path / "model.ckpt")
    checkpoint = opened(tmp_path / "model.ckpt")
    assert checkpoint.provenance["architecture"] == architecture
    assert set(checkpoint.submodels) == {"text_encoder", "unet", "vae_encoder", "vae_decoder"}
    other = opened(f"{tmp_path / 'model.ckpt'}#sd21-base")
    assert prediction(other) == "epsilon"


def test_a_workflow_names_a_file_and_its_architecture(original: dict[str, torch.Tensor], tmp_path: Path) -> None:
    from sdflow.config import load_workflow
    from sdflow.passes import registry

    write(tmp_path / "model.safetensors", original)
    (tmp_path / "w.yaml").write_text(
        "model: model.safetensors#sd21-base\ntarget: cpu\nsubmodels: {unet: {passes: [{pass: OnnxConversion}]}}\n"
        "verify: false\nevaluate: null\n"
    )
    (pipeline,) = load_workflow(tmp_path / "w.yaml", catalog=registry.catalog()).pipelines
    assert pipeline.model == f"{tmp_path / 'model.safetensors'}#sd21-base"
    assert opened(pipeline.model).provenance["architecture"] == "sd21-base"


def test_a_file_of_the_hub_is_named_with_its_architecture_as_its_message_says(
    original: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The spelling that the message suggests is one that every reader of references takes."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot = cached_repository(tmp_path, "owner/name") / "snapshots" / COMMIT
    (snapshot / "models").mkdir(parents=True)
    write(snapshot / "models/dream.safetensors", original)
    (note,) = opened("hf:owner/name/models/dream.safetensors").notes[1:]
    suggested = "hf:owner/name/models/dream.safetensors#sd21-base"
    assert f"To change that, write {suggested} (512 pixels, epsilon)." in note
    checkpoint = opened(suggested)
    assert checkpoint.provenance["architecture"] == "sd21-base" and checkpoint.provenance["commit"] == COMMIT
    assert checkpoint.notes[1:] == () and prediction(checkpoint) == "epsilon"
    text = f"extends: base/stable_diffusion_2.yaml\nmodel: {suggested}\ntarget: cpu\n"
    (tmp_path / "w.yaml").write_text(text)
    (pipeline,) = load_workflow(tmp_path / "w.yaml", catalog=catalog()).pipelines
    assert pipeline.model == suggested
    written = write_workflow(InitRequest(tmp_path / "i.yaml", suggested))
    assert load_workflow(written, catalog=catalog()).pipelines[0].model == suggested
    pinned = Origin("p", "cpu", model=suggested, checkpoint=checkpoint.provenance).pinned_model("here")
    assert pinned == f"{suggested}@{COMMIT}"
    assert opened(pinned).provenance["architecture"] == "sd21-base"


@pytest.mark.parametrize("reference", ["hf:a/b/c.safetensors#sd99", "hf:a/b/c.safetensors#", "hf:a/b#sd21"])
def test_an_unknown_architecture_of_a_file_of_the_hub_is_refused(reference: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"unknown architecture|not of the form"):
        parse_reference(reference)
    (tmp_path / "w.yaml").write_text(f"extends: base/stable_diffusion_2.yaml\nmodel: '{reference}'\ntarget: cpu\n")
    with pytest.raises(WorkflowError, match=r"unknown architecture|not of the form"):
        load_workflow(tmp_path / "w.yaml", catalog=catalog())
