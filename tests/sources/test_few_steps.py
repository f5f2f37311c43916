"""Models and LoRAs that draw in few steps are known by the names that they are published under, and by nothing alike."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
from safetensors.numpy import save_file

from sdflow.families.shared.few_steps import spelled
from sdflow.families.shared.schedulers import SCHEDULERS, renamed
from sdflow.sources import PlainDigests, few_steps, load_pipeline, open_checkpoint
from sdflow.sources.architectures import architecture_config
from sdflow.sources.checkpoint import Access
from sdflow.sources.few_steps import few_steps_of_lora
from sdflow.sources.single_file import open_single_file
from tests.support.named_schedulers import SAMPLERS
from tests.support.original_layout import stable_diffusion_2

LORAS: dict[tuple[str, str], tuple[Any, ...] | None] = {
    # repository, file: steps, guidance, eta, scheduler
    ("latent-consistency/lcm-lora-sdv1-5", "pytorch_lora_weights.safetensors"): (4, 1.0, 0.0, "lcm"),
    ("latent-consistency/lcm-lora-sdxl", "pytorch_lora_weights.safetensors"): (4, 1.0, 0.0, "lcm"),
    ("ByteDance/SDXL-Lightning", "sdxl_lightning_2step_lora.safetensors"): (2, 0.0, 0.0, "euler_trailing"),
    ("ByteDance/SDXL-Lightning", "sdxl_lightning_4step_lora.safetensors"): (4, 0.0, 0.0, "euler_trailing"),
    ("ByteDance/SDXL-Lightning", "sdxl_lightning_8step_lora.safetensors"): (8, 0.0, 0.0, "euler_trailing"),
    ("ByteDance/Hyper-SD", "Hyper-SD15-1step-lora.safetensors"): (1, 0.0, 1.0, "tcd"),
    ("ByteDance/Hyper-SD", "Hyper-SDXL-1step-lora.safetensors"): (1, 0.0, 1.0, "tcd"),
    ("ByteDance/Hyper-SD", "Hyper-SD15-8steps-lora.safetensors"): (8, 0.0, 0.0, "ddim_trailing"),
    ("ByteDance/Hyper-SD", "Hyper-SDXL-2steps-lora.safetensors"): (2, 0.0, 0.0, "ddim_trailing"),
    ("ByteDance/Hyper-SD", "Hyper-SD15-8steps-CFG-lora.safetensors"): (8, 5.0, 0.0, "ddim_trailing"),
    ("ByteDance/Hyper-SD", "Hyper-SDXL-12steps-CFG-lora.safetensors"): (12, 5.0, 0.0, "ddim_trailing"),
    ("h1t/TCD-SDXL-LoRA", "pytorch_lora_weights.safetensors"): (4, 0.0, 0.3, "tcd"),
    ("h1t/TCD-SD15-LoRA", "pytorch_lora_weights.safetensors"): (4, 0.0, 0.3, "tcd"),
    ("someone/ink-style", "pytorch_lora_weights.safetensors"): None,
    ("someone/styles", "lightning_bolts.safetensors"): None,
    ("someone/styles", "hyperrealism-sdxl-lora.safetensors"): None,
    ("someone/styles", "welcome-lora.safetensors"): None,
    ("someone/styles", "turbocharged.safetensors"): None,
}


def written(path: Path, metadata: dict[str, str] | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"lora_unet_x.lora_up.weight": np.zeros((1, 1), np.float32)}, path, metadata)
    return path


@pytest.mark.parametrize(("repository", "file"), LORAS)
@pytest.mark.parametrize("how", ["hub", "folder", "file"])
def test_a_lora_is_known_by_its_published_name(repository: str, file: str, how: str, tmp_path: Path) -> None:
    expected = LORAS[repository, file]
    if how == "hub":  # as the hub's cache has it
        path = written(tmp_path / "snapshots/0123abcd" / file)
        found = few_steps_of_lora(f"hf:{repository}", file, path)
    else:
        path = written(tmp_path / repository.rpartition("/")[2] / file)
        reference, weight_name = (str(path.parent), file) if how == "folder" else (str(path), None)
        found = few_steps_of_lora(reference, weight_name, path)
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert (found.steps, found.guidance_scale, found.eta, found.scheduler) == expected


@pytest.mark.parametrize(
    ("metadata", "steps"),
    [
        ({"modelspec.title": "SDXL Lightning 4step LoRA"}, 4),
        ({"ss_output_name": "lcm-lora-weights"}, 4),
        ({"ss_output_name": "ink"}, None),
        ({}, None),
    ],
)
def test_a_renamed_lora_is_known_by_what_its_header_says(
    metadata: dict[str, str], steps: int | None, tmp_path: Path
) -> None:
    path = written(tmp_path / "fast.safetensors", metadata)
    found = few_steps_of_lora(str(path), None, path)
    assert (found.steps if found else None) == steps


@pytest.mark.parametrize(
    ("reference", "steps"),
    [
        ("synthetic:sd-turbo", 1),
        ("synthetic:sdxl-turbo-tiny?seed=1", 1),
        ("synthetic:sd21-base", None),
        ("synthetic:lcm", None),
        ("synthetic:lcm-sdxl", None),
    ],
)
def test_a_model_is_known_by_its_published_name_and_a_lora_has_the_last_word(
    reference: str, steps: int | None, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(reference, digests=PlainDigests(), download=False)
    said = few_steps(checkpoint, [])
    assert said.get("steps") == steps
    assert "scheduler" not in said, "its own is the right one"
    lora = written(tmp_path / "lcm-lora.safetensors")
    with_lora = few_steps(checkpoint, [(str(lora), None, lora)])
    assert with_lora["scheduler"] == "lcm" and with_lora["because"] == "lcm-lora.safetensors is LCM-LoRA"
    assert spelled(with_lora) == "4 steps, no guidance, scheduler lcm"


def test_a_turbo_model_in_one_file_is_told_by_its_name_alone(tmp_path: Path) -> None:
    made = load_pipeline(open_checkpoint("synthetic:sd21-tiny", digests=PlainDigests(), download=False))
    tensors = stable_diffusion_2(made.unet, made.vae, made.text_encoder)
    from safetensors.torch import save_file as save

    for name, architecture, said in (
        ("sd_turbo.safetensors", "sd-turbo-tiny", {"steps": 1, "guidance_scale": 0.0, "strength": 0.5}),
        ("model.safetensors", "sd21-tiny", {}),
    ):
        save(tensors, tmp_path / name)
        checkpoint = open_single_file(tmp_path / name, str(tmp_path / name), Access(PlainDigests()))
        assert checkpoint.provenance["architecture"] == architecture
        found = few_steps(checkpoint, [])
        assert {key: found[key] for key in said} == said and bool(found) == bool(said)
        trailing = architecture_config(architecture, "scheduler").get("timestep_spacing") == "trailing"
        assert trailing == (name == "sd_turbo.safetensors")


# Schedulers by name


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("architecture", ["sd15", "sd21", "sdxl", "sdxl-turbo", "lcm"])
def test_a_renamed_config_is_what_diffusers_makes_of_it(
    name: str, architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = architecture_config(architecture, "scheduler")
    (tmp_path / "scheduler_config.json").write_text(json.dumps(renamed(own, name)))
    cls, options = SCHEDULERS[name]
    made = getattr(diffusers, cls)
    theirs = made.from_config(getattr(diffusers, own["_class_name"]).from_config(own).config, **options)
    diffusers.utils.logging.enable_propagation()
    caplog.clear()
    try:
        ours = made.from_pretrained(tmp_path)
    finally:
        diffusers.utils.logging.disable_propagation()
    assert caplog.messages == [], "diffusers has nothing to say of it"
    taken = [*inspect.signature(made.__init__).parameters][1:]
    assert {key: ours.config[key] for key in taken} == {key: theirs.config[key] for key in taken}
