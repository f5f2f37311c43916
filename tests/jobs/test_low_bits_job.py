"""FLUX.1 with its transformer from one GGUF file and its text encoder from another: built, verified, and used by the commands."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from beside_diffusers import PROMPT, assert_equal, generator
from low_bit_files import T, by_gguf, mixed, t5_by_llama_cpp, write_gguf
from original_layout import flux_tensors
from shell import Shell

from sdflow.families.flux.packing import packed
from sdflow.runtime.pipeline import Pipeline
from sdflow.sources import PlainDigests, load_module, load_pipeline, open_checkpoint

MODEL = "synthetic:flux1-schnell-tiny"
WORKFLOW = f"""
extends: base/flux1.yaml
model: {MODEL}
components: {{transformer: flux1-schnell-Q4_K_S.gguf, text_encoder_2: t5-encoder-Q8_0.gguf}}
target: cpu
verify: quick
"""


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory, started_python: Any) -> Shell:
    shell = Shell(tmp_path_factory.mktemp("low-bits"), started_python)
    other = open_checkpoint(f"{MODEL}?seed=5", digests=PlainDigests(), download=False)
    transformer, text = (load_module(name, other.submodels[name].load) for name in ("transformer", "text_encoder_2"))
    kinds = mixed(T.Q8_0, T.Q5_0, T.Q4_1, T.BF16)
    write_gguf(shell.folder / "flux1-schnell-Q4_K_S.gguf", flux_tensors(transformer), kinds, "flux")
    tensors = t5_by_llama_cpp(text.state_dict())
    write_gguf(shell.folder / "t5-encoder-Q8_0.gguf", tensors, mixed(T.Q8_0, T.Q4_0), "t5encoder")
    (shell.folder / "low.yaml").write_text(WORKFLOW)
    return shell


def test_it_is_built_verified_and_generates_what_diffusers_does_with_those_values(shell: Shell) -> None:
    (pipeline,) = shell.json("run", "low.yaml", "--no-evaluate")["pipelines"]
    assert pipeline["verification"]["passed"]
    verified = shell.json("verify", "pipelines/low")
    assert verified["passed"]
    files = {"transformer": "flux1-schnell-Q4_K_S.gguf", "text_encoder_2": "t5-encoder-Q8_0.gguf"}
    components = {name: str(shell.folder / file) for name, file in files.items()}
    theirs = load_pipeline(open_checkpoint(MODEL, digests=PlainDigests(), download=False, components=components))
    expected = by_gguf(shell.folder / files["transformer"])
    found = flux_tensors(theirs.transformer)
    assert all(np.array_equal(found[name].numpy(), expected[name]) for name in expected)
    given: dict[str, Any] = {"height": 64, "width": 64, "num_inference_steps": 2, "output_type": "np"}
    latents = torch.randn((1, 16, 8, 8), generator=generator())
    images = theirs(PROMPT, latents=packed(latents), guidance_scale=0.0, max_sequence_length=256, **given).images
    drawn = Pipeline.load(shell.folder / "pipelines/low", "cpu")(PROMPT, latents=latents, **given).images
    assert_equal(drawn, images)
    settings = shell.json(
        "generate", "pipelines/low", "--prompt", "an otter", "--steps", "1", "--height", "64", "--width", "64"
    )["settings"]
    assert settings["steps"] == 1


def test_what_was_built_says_where_its_weights_are_from(shell: Shell) -> None:
    (described,) = shell.json("inspect", "pipelines/low")["found"]
    said = described["details"]["dequantized from"]
    assert "transformer: gguf (" in said and "text_encoder_2: gguf (" in said and "Q8_0" in said


def test_inspect_names_the_files(shell: Shell) -> None:
    (transformer,) = shell.json("inspect", "flux1-schnell-Q4_K_S.gguf")["found"]
    assert transformer["kind"] == "transformer" and transformer["details"]["architecture in the file"] == "flux"
    assert transformer["details"]["format"] == "gguf" and "Q5_0 (" in transformer["details"]["types"]
    assert "components: {transformer: flux1-schnell-Q4_K_S.gguf}" in transformer["workflow"]
    (text,) = shell.json("inspect", "t5-encoder-Q8_0.gguf")["found"]
    assert "components: {text_encoder" in text["workflow"] and "Q4_0 (" in text["details"]["types"]
    assert any("text_encoder_2 of FLUX.1 too" in note for note in text["notes"])
    done = shell.run("init", "--model", "flux1-schnell-Q4_K_S.gguf", "--out", "written.yaml")
    assert done.returncode == 0, done.stderr
    assert "transformer: flux1-schnell-Q4_K_S.gguf" in (shell.folder / "written.yaml").read_text()
    assert shell.run("validate", "written.yaml").returncode in (0, 2)
