"""`precision` of a submodel: what it makes of the chain, by target, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from sdflow.config import load_workflow
from sdflow.config.workflow import StepSpec
from sdflow.errors import Problem, WorkflowError
from sdflow.passes.registry import catalog
from sdflow.targets import TARGETS

BASE = """
model: synthetic:sd15-tiny
evaluate: null
submodels:
  unet: {passes: [{pass: OnnxConversion}, {pass: OnnxFloatToFloat16, node_block_list: [a]}]}
  vae_decoder: {passes: [{pass: OnnxConversion}]}
targets:
  cuda: {submodels: {unet: {precision: bfloat16}}}
  cpu: {submodels: {unet: {precision: float32}}}
"""


def unet(folder: Path, text: str, *overrides: str) -> tuple[StepSpec, ...]:
    (folder / "b.yaml").write_text(BASE)
    (folder / "w.yaml").write_text(f"extends: b.yaml\n{text}")
    (pipeline,) = load_workflow(folder / "w.yaml", catalog=catalog(), overrides=overrides).pipelines
    return pipeline.submodels["unet"]


def problems(folder: Path, text: str, *overrides: str) -> list[Problem]:
    with pytest.raises(WorkflowError) as caught:
        unet(folder, text, *overrides)
    return list(caught.value.problems)


def test_each_target_has_its_own(tmp_path: Path) -> None:
    assert unet(tmp_path, "target: cuda")[1].options == {"node_block_list": ["a"], "precision": "bfloat16"}
    assert [step.pass_name for step in unet(tmp_path, "target: cpu")] == ["OnnxConversion"]
    assert unet(tmp_path, "target: rocm")[1].options == {"node_block_list": ["a"]}, "without one, as written"


def test_the_command_line_has_the_last_word(tmp_path: Path) -> None:
    chosen = unet(tmp_path, "target: cuda", "unet.precision=float16")
    assert chosen[1].options["precision"] == "float16"
    assert unet(tmp_path, "target: cuda", "unet.precision=null")[1].options == {"node_block_list": ["a"]}


@pytest.mark.parametrize("target", ["cpu", "rocm", "directml", "tensorrt"])
def test_a_target_without_bfloat16_says_which_has_it(tmp_path: Path, target: str) -> None:
    for override in ("unet.precision=bfloat16", "unet.passes.OnnxFloatToFloat16.precision=bfloat16"):
        if target == "cpu" and "passes" in override:
            continue  # there the step is left out
        (problem,) = problems(tmp_path, f"target: {target}", override)
        assert f"{target} has no kernels for bfloat16, cuda has" in problem.message


def test_a_chain_that_does_not_convert_cannot_be_in_16_bits(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "target: cuda\nsubmodels: {vae_decoder: {precision: float16}}")
    assert "no step of vae_decoder converts its weights to float16" in problem.message


def test_another_word_is_refused_for_every_target(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "target: cuda\ntargets: {rocm: {submodels: {unet: {precision: half}}}}")
    assert "`precision` must be float32 or float16 or bfloat16, found the text 'half'" in problem.message


SCALED, CONVERTED = "ActivationScaling", "OnnxFloatToFloat16"


def vaes(name: str | Path, targets: Sequence[str], *overrides: str) -> dict[str, list[list[str]]]:
    """The passes of both halves of a shipped workflow's VAE, by target."""
    found = load_workflow(name, catalog=catalog(), targets=targets, overrides=overrides).pipelines
    return {
        each.target: [[step.pass_name for step in each.submodels[f"vae_{half}"]] for half in ("encoder", "decoder")]
        for each in found
    }


@pytest.mark.parametrize("name", ["sdxl_tiny", "sd35_tiny", "flux1_schnell_tiny", "flux2_tiny", "z_image_tiny"])
def test_a_vae_of_unknown_range_is_scaled_and_float16_for_cuda_only(name: str) -> None:
    for target, chains in vaes(name, [*TARGETS]).items():
        for chain in chains:
            assert (SCALED in chain[1:2], CONVERTED in chain) == ((target == "cuda",) * 2), (target, chain)
    (mended,) = vaes(name, ["directml"], "vae_encoder.precision=float16", "vae_decoder.precision=float16").values()
    assert all(chain[-1] == CONVERTED and SCALED not in chain for chain in mended), "weights made for float16"
    (exact,) = vaes(name, ["cuda"], "vae_encoder.precision=float32", "vae_decoder.precision=float32").values()
    assert all(CONVERTED not in chain for chain in exact)


def test_taesd_in_its_place_is_float16_without(tmp_path: Path) -> None:
    path = tmp_path / "taesd.yaml"
    path.write_text("extends: [base/sdxl_tiny.yaml, base/taesd.yaml]\ncomponents: {vae: synthetic:taesd-tiny}\n")
    for target, chains in vaes(path, [*TARGETS]).items():
        assert chains == [["OnnxConversion", *([] if target == "cpu" else [CONVERTED])]] * 2, target
