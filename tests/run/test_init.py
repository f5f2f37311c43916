"""`sdflow init` writes a workflow that is valid, can be planned and runs; what does not go together it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from shell import ROOT, Shell
from small_lora import write_lora
from started_python import StartedPython

from sdflow.config import load_workflow
from sdflow.errors import CheckpointError, SdflowError, UsageError
from sdflow.passes.registry import catalog
from sdflow.run.init import InitRequest, write_workflow
from sdflow.sources import PlainDigests, load_pipeline, open_checkpoint
from sdflow.targets import TARGETS

STRIPES = ROOT / "samples/loras/stripes.safetensors"
ATTENTION = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k"


def loaded(path: Path) -> Any:
    (pipeline,) = load_workflow(path, catalog=catalog()).pipelines
    return pipeline


def lora(path: Path, width: int = 768, **metadata: str) -> Path:
    tensors = {
        f"{ATTENTION}.lora_down.weight": torch.zeros(4, width),
        f"{ATTENTION}.lora_up.weight": torch.zeros(320, 4),
    }
    save_file(tensors, path, metadata)
    return path


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory, started_python: StartedPython | None) -> Shell:
    """A folder with a small model as diffusers saves it, and a LoRA for it."""
    shell = Shell(tmp_path_factory.mktemp("init"), started_python)
    checkpoint = open_checkpoint("synthetic:sd15-tiny", digests=PlainDigests(), download=False)
    load_pipeline(checkpoint).save_pretrained(shell.folder / "models/tiny")
    (shell.folder / "loras").mkdir()
    write_lora(shell.folder / "loras/mine.safetensors")
    done = shell.run("init", "--model", "models/tiny", "--lora", "loras/mine.safetensors:0.7", "--out", "mine.yaml")
    assert done.returncode == 0, done.stderr
    return shell


def test_the_workflow_names_model_and_lora_from_its_own_folder(shell: Shell) -> None:
    written = yaml.safe_load((shell.folder / "mine.yaml").read_text())
    assert written == {
        "extends": "base/stable_diffusion_1.yaml",
        "model": "models/tiny",
        "target": "cpu",
        "loras": [{"file": "loras/mine.safetensors", "scale": 0.7}],
        "verify": "quick",
    }


def test_the_workflow_is_valid_and_can_be_planned(shell: Shell) -> None:
    done = shell.run("validate", "mine.yaml")
    assert done.returncode == 0, done.stderr
    steps = shell.json("plan", "mine.yaml")["steps"]
    assert {step["state"] for step in steps} == {"to run"}


@pytest.mark.slow
def test_a_model_with_autoencoder_tiny_gets_its_chains(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(
        "synthetic:sd15-tiny", digests=PlainDigests(), download=False, components={"vae": "synthetic:taesd-tiny"}
    )
    load_pipeline(checkpoint).save_pretrained(tmp_path / "model")
    written = write_workflow(InitRequest(tmp_path / "w.yaml", str(tmp_path / "model")))
    assert yaml.safe_load(written.read_text())["extends"] == ["base/stable_diffusion_1.yaml", "base/taesd.yaml"]
    assert loaded(written).model == str(tmp_path / "model")


def test_a_refiner_gets_the_workflow_of_a_refiner(tmp_path: Path) -> None:
    checkpoint = open_checkpoint("synthetic:sdxl-refiner-tiny", digests=PlainDigests(), download=False)
    load_pipeline(checkpoint).save_pretrained(tmp_path / "model")
    written = write_workflow(InitRequest(tmp_path / "w.yaml", str(tmp_path / "model")))
    assert loaded(written).model == str(tmp_path / "model")
    assert written.read_text().startswith("# Stable Diffusion XL refiner for cpu")


@pytest.mark.slow  # by default, test_flux_job and test_z_image_job in tests/jobs run what `init` writes, and verify it
def test_the_workflow_runs(shell: Shell) -> None:
    """`tests/jobs/test_flux_job.py` verifies what one of `init` builds, `test_main_job.py` LoRAs in a pipeline."""
    (pipeline,) = shell.json("run", "mine.yaml", "--no-verify", "--no-evaluate")["pipelines"]
    assert pipeline["name"] == "mine"
    assert (shell.folder / "pipelines/mine/model_index.json").is_file()
    (found,) = shell.json("inspect", "pipelines/mine")["findings"]
    assert found["kind"] == "built pipeline"


@pytest.mark.parametrize("target", TARGETS)
def test_it_is_valid_for_every_target(target: str, tmp_path: Path) -> None:
    request = InitRequest(tmp_path / "w.yaml", "synthetic:sdxl", target)
    assert loaded(write_workflow(request)).target == target
    assert yaml.safe_load((tmp_path / "w.yaml").read_text())["extends"] == "base/sdxl.yaml"


def test_without_anything_it_is_stable_diffusion_1_5(tmp_path: Path) -> None:
    assert loaded(write_workflow(InitRequest(tmp_path / "w.yaml"))).model.startswith("hf:stable-diffusion-v1-5/")


@pytest.mark.parametrize("words", ["sks, a dog", "{sks}", "sks: dog", "# sks", "yes", "'", '"', "a } b", "é \u2028"])
def test_words_and_names_may_hold_what_yaml_reads_otherwise(words: str, tmp_path: Path) -> None:
    file = lora(tmp_path / f"{words}.safetensors", **{"modelspec.trigger_phrase": words})
    pipeline = loaded(write_workflow(InitRequest(tmp_path / "w.yaml", loras=[str(file)])))
    assert pipeline.loras[0].reference == str(file) and pipeline.evaluate.image.prompt == f"a photo, {words}"


@pytest.mark.parametrize(("width", "base"), [(768, "base/sd15.yaml"), (1024, "base/sd21.yaml")])
def test_a_lora_alone_says_the_model(width: int, base: str, tmp_path: Path) -> None:
    file = lora(
        tmp_path / 'a: "strange" name.safetensors', width, **{"modelspec.trigger_phrase": "sks\ndog # \u2028 \x01"}
    )
    written = write_workflow(InitRequest(tmp_path / "w.yaml", loras=[str(file)]))
    assert yaml.safe_load(written.read_text())["extends"] == base
    pipeline = loaded(written)
    assert pipeline.loras[0].reference == str(file)
    assert "sks" in pipeline.evaluate.image.prompt


def test_a_model_of_the_hub_is_known_by_the_shipped_workflows_or_told(tmp_path: Path) -> None:
    known = InitRequest(tmp_path / "w.yaml", "hf:stabilityai/stable-diffusion-xl-base-1.0")
    assert yaml.safe_load(write_workflow(known).read_text())["extends"] == "base/sdxl.yaml"
    with pytest.raises(UsageError, match="is unknown without downloading it"):
        write_workflow(InitRequest(tmp_path / "x.yaml", "hf:somebody/something"))
    told = InitRequest(tmp_path / "x.yaml", "hf:somebody/something", base="sdxl")
    assert loaded(write_workflow(told)).model == "hf:somebody/something"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "missing.safetensors"}, "no such file or folder"),
        ({"model": str(STRIPES)}, "not a model to build a pipeline from. It is: LoRA"),
        ({"model": str(ROOT / "docs")}, "nor weight files"),
        ({"loras": ["missing.safetensors"]}, "there is no file or folder"),
        ({"loras": [str(STRIPES)]}, "does not identify the models it is for"),
        ({"model": "synthetic:sdxl", "loras": ["LORA"]}, "is a LoRA for .*1.x, but the model is .*XL"),
        ({"model": "synthetic:sd15", "loras": ["EMBEDDING"]}, "is not a LoRA. It is: embedding"),
        ({"model": "synthetic:taesd"}, "is only a vae"),
        ({"model": "synthetic:ip-adapter"}, "is an IP-Adapter"),
        ({"target": "cudda"}, "no target is named cudda"),
        ({"base": "sdxxl", "model": "hf:a/b"}, "no workflow base/sdxxl.yaml ships with sdflow"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_and_nothing_is_written(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    save_file({"emb_params": torch.ones(2, 768)}, tmp_path / "embedding.safetensors")
    made = {"LORA": str(lora(tmp_path / "lora.safetensors")), "EMBEDDING": str(tmp_path / "embedding.safetensors")}
    options["loras"] = [made.get(each, each) for each in options.get("loras", ())]
    with pytest.raises(SdflowError, match=said):
        write_workflow(InitRequest(tmp_path / "w.yaml", **options))
    assert not (tmp_path / "w.yaml").exists()


def test_a_file_that_is_there_is_written_over_only_when_told_to(tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text("mine")
    with pytest.raises(UsageError, match="already exists"):
        write_workflow(InitRequest(tmp_path / "w.yaml"))
    assert (tmp_path / "w.yaml").read_text() == "mine"
    write_workflow(InitRequest(tmp_path / "w.yaml", force=True))
    with pytest.raises(CheckpointError, match="not a valid safetensors file"):
        (tmp_path / "bad.safetensors").write_text("no")
        write_workflow(InitRequest(tmp_path / "x.yaml", str(tmp_path / "bad.safetensors")))
