"""One workflow builds a base and its refiner: one folder, what is equal built once and there once, one image from both."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file
from shell import ROOT, Shell

from sdflow.build.plan import PipelinePlan, Plan, make_plan
from sdflow.config import load_workflow
from sdflow.config.workflow import PipelineSpec, VerifySpec
from sdflow.errors import CheckpointError, WorkflowError
from sdflow.manifest import read_manifest
from sdflow.passes.registry import catalog
from sdflow.sources import PlainDigests, open_checkpoint, require_made_for
from sdflow.sources.load import parameter_shapes
from sdflow.store import Cache
from sdflow.targets import TARGETS
from sdflow.verify import subject_of_folder, with_refiner

WORKFLOW = NAME = "sdxl_with_refiner_tiny"
DRAW = ("--prompt", "an otter", "--steps", "4", "--seed", "1", "--height", "64", "--width", "64", "--threads", "1")


def both(plan: Plan) -> tuple[PipelinePlan, PipelinePlan]:
    (base,) = plan.pipelines
    assert base.refiner is not None
    return base, base.refiner


def test_the_refiner_is_built_with_the_base_without_what_it_lacks(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", salt="")
    plan = make_plan(load_workflow(WORKFLOW, catalog=catalog()), cache)
    base, refiner = both(plan)
    assert list(plan.every) == [base, refiner]
    assert (base.pipeline.name, refiner.pipeline.name) == (NAME, f"{NAME}_refiner")
    assert refiner.pipeline.refiner is None
    assert "the checkpoint has no text_encoder: it is not built" in refiner.notes
    assert base.together.keys() == {chain.submodel for chain in base.chains} | {
        f"refiner/{chain.submodel}" for chain in refiner.chains
    }
    chains = {chain.submodel: chain.steps for chain in refiner.chains}
    assert list(chains) == ["unet", "vae_encoder", "vae_decoder", "text_encoder_2"]
    for chain in base.chains:
        if chain.submodel not in chains:
            continue
        ours, theirs = (steps[0].action(None, "").digest for steps in (chain.steps, chains[chain.submodel]))
        assert (ours == theirs) == (chain.submodel != "unet")
        ours, theirs = (steps[-1].action("before", "").digest for steps in (chain.steps, chains[chain.submodel]))
        assert (ours == theirs) == (chain.submodel != "unet")


def test_with_null_there_is_none() -> None:
    (only,) = load_workflow(WORKFLOW, catalog=catalog(), overrides=["refiner=null"]).pipelines
    assert only.refiner is None


@pytest.mark.parametrize("target", list(TARGETS))
def test_a_refiner_with_a_workflow_of_its_own_has_its_chains_and_their_promises(target: str) -> None:
    (base,) = load_workflow("sdxl_with_refiner", catalog=catalog(), targets=[target]).pipelines
    (expected,) = load_workflow("sdxl_refiner", catalog=catalog(), targets=[target]).pipelines
    refiner = base.refiner
    assert refiner is not None and refiner.model == expected.model and refiner.target == base.target == target

    def chains(each: PipelineSpec) -> dict[str, list[tuple[str, Any, Any]]]:
        return {
            name: [(spec.pass_name, spec.options, spec.expect) for spec in chain]
            for name, chain in each.submodels.items()
        }

    assert chains(refiner) == chains(expected)
    for name in ("text_encoder_2", "vae_encoder", "vae_decoder"):
        ours, theirs = ([step[:2] for step in chains(each)[name]] for each in (base, refiner))
        assert ours == theirs, "what is equal is built once"


def test_its_checkpoint_may_be_another_and_components_but_the_denoiser_are_of_both() -> None:
    written = [
        "refiner.model=synthetic:sdxl-refiner-tiny?seed=3",
        "components={vae: synthetic:sdxl?seed=4, unet: synthetic:lcm-sdxl}",
    ]
    (base,) = load_workflow("sdxl_with_refiner", catalog=catalog(), overrides=written, targets=["cuda"]).pipelines
    refiner = base.refiner
    assert refiner is not None and refiner.model == "synthetic:sdxl-refiner-tiny?seed=3"
    assert base.components == {"vae": "synthetic:sdxl?seed=4", "unet": "synthetic:lcm-sdxl"}
    assert refiner.components == {"vae": "synthetic:sdxl?seed=4"}


@pytest.mark.parametrize(
    ("written", "what"),
    [
        ("refiner={model: synthetic:sdxl-refiner-tiny}", "a workflow file"),
        ("refiner={extends: [base/sdxl_refiner.yaml]}", "a workflow file"),
        ("refiner={extends: base/sdxl_refinr.yaml}", "there is no file"),
        ("refiner={extends: base/sdxl_refiner.yaml, witout: []}", "unknown key of `refiner` 'witout'"),
        ("refiner={extends: base/sdxl_with_refiner.yaml}", "the workflow of a refiner has no `refiner`"),
        ("refiner=7", "a reference to a checkpoint"),
    ],
)
def test_a_refiner_that_is_written_wrongly_is_told(written: str, what: str) -> None:
    with pytest.raises(WorkflowError, match=what):
        load_workflow(WORKFLOW, catalog=catalog(), overrides=[written])


def test_loras_are_those_of_the_base_alone(tmp_path: Path) -> None:
    lora = f'loras=[{{file: "{ROOT / "samples/loras/stripes.safetensors"}"}}]'
    (base,) = load_workflow(WORKFLOW, catalog=catalog(), overrides=[lora]).pipelines
    refiner = base.refiner
    assert refiner is not None
    assert len(base.loras) == 1 and refiner.loras == ()
    passes = {spec.pass_name for chain in refiner.submodels.values() for spec in chain}
    assert "LoraMerge" not in passes


def lora_for_the_base(path: Path) -> Path:
    """A LoRA for what the UNet reads of the text; the refiner's reads narrower texts."""
    load = open_checkpoint("synthetic:sdxl-tiny", digests=PlainDigests(), download=False).submodels["unet"].load
    shapes = parameter_shapes("unet", load)
    random, tensors = np.random.default_rng(0), {}
    for key in [key for key in shapes if key.endswith("attn2.to_k.weight")]:
        name = f"lora_unet_{key.removesuffix('.weight').replace('.', '_')}"
        tensors[f"{name}.lora_up.weight"] = random.standard_normal((shapes[key][0], 2)).astype(np.float32)
        tensors[f"{name}.lora_down.weight"] = random.standard_normal((2, shapes[key][1])).astype(np.float32)
    save_file(tensors, path)
    return path


def test_a_lora_for_the_base_is_refused_by_the_refiner(tmp_path: Path) -> None:
    lora = lora_for_the_base(tmp_path / "lora.safetensors")
    base, refiner = (
        open_checkpoint(f"synthetic:{name}", digests=PlainDigests(), download=False)
        for name in ("sdxl-tiny", "sdxl-refiner-tiny")
    )
    require_made_for(lora, base)
    with pytest.raises(CheckpointError, match="Stable Diffusion XL refiner"):
        require_made_for(lora, refiner)


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    return Shell(tmp_path_factory.mktemp("refined"))


@pytest.fixture(scope="module")
def built(shell: Shell) -> list[Any]:
    found: list[Any] = shell.json("run", str(WORKFLOW), "--no-verify", "--no-evaluate")["pipelines"]
    return found


def pixels(path: Path) -> bytes:
    with Image.open(path) as image:
        return image.tobytes()


@pytest.mark.slow
def test_they_are_one_folder_and_draw_one_image(shell: Shell, built: list[Any]) -> None:
    assert [each["name"] for each in built] == [NAME]
    base = shell.folder / "pipelines" / NAME
    refiner = base / "refiner"
    same = {
        name
        for name, digest in read_manifest(refiner).artifacts.items()
        if read_manifest(base).artifacts[name] == digest
    }
    assert same == {"text_encoder_2", "vae_encoder", "vae_decoder"}
    assert {str((refiner / name).readlink()) for name in same} == {f"../{name}" for name in same}
    assert read_manifest(base).origin.refiner == "refiner"
    assert "no class for a base with its refiner" in json.loads((base / "sdflow.json").read_text())["about_refiner"]
    assert sorted(path.name for path in base.parent.iterdir() if not path.name.startswith(".")) == [NAME]
    settings = shell.json("generate", str(base), *DRAW, "--out", "both")["settings"]
    assert settings["refiner"]["pipeline"] == f"{NAME}_refiner" and settings["refiner"]["start"] == 0.8
    alone = shell.json("generate", str(base), *DRAW, "--refiner-start", "1", "--out", "alone")["settings"]
    assert "refiner" not in alone
    assert pixels(shell.folder / "both/001-1.png") != pixels(shell.folder / "alone/001-1.png")


@pytest.mark.slow
def test_the_folder_of_the_refiner_is_a_pipeline_of_its_own(shell: Shell, built: list[Any]) -> None:
    source = Image.fromarray((np.random.default_rng(0).random((64, 64, 3)) * 255).astype("uint8"))
    source.save(shell.folder / "source.png")
    command = ("generate", f"pipelines/{NAME}/refiner", *DRAW, "--image", "source.png", "--out", "refined")
    assert shell.json(*command)["settings"]["pipeline"] == f"{NAME}_refiner"


@pytest.mark.slow
def test_a_second_run_writes_nothing_and_a_copy_has_what_is_equal_once(shell: Shell, built: list[Any]) -> None:
    before = (shell.folder / "pipelines" / NAME).stat().st_ino
    again = shell.json("run", str(WORKFLOW), "--no-verify", "--no-evaluate")["pipelines"]
    assert {step["outcome"] for step in again[0]["steps"]} == {"cached"}
    assert (shell.folder / "pipelines" / NAME).stat().st_ino == before
    for _ in range(2):
        shell.json("run", str(WORKFLOW), "--no-verify", "--no-evaluate", "--copy", "--out", "copies")
        folder = shell.folder / "copies" / NAME
        real = [path for path in folder.rglob("model.onnx") if path.resolve().is_relative_to(folder)]
        assert len({path.resolve() for path in real}) == 6, "five of the base, and the refiner's UNet"
    moved = folder.rename(shell.folder / "moved")
    assert shell.json("generate", str(moved), *DRAW, "--out", "of_moved")["settings"]["refiner"]


@pytest.mark.slow
def test_a_bake_keeps_the_refiner(shell: Shell, built: list[Any]) -> None:
    lora = lora_for_the_base(shell.folder / "lora.safetensors")
    done = shell.run("bake", "--base", f"pipelines/{NAME}", "--lora", str(lora), "--out", "elsewhere/baked")
    assert done.returncode == 0, done.stderr
    base, baked = (read_manifest(shell.folder / each) for each in (f"pipelines/{NAME}", "elsewhere/baked"))
    assert base.artifacts["unet"] != baked.artifacts["unet"]
    refiners = [read_manifest(shell.folder / each / "refiner") for each in (f"pipelines/{NAME}", "elsewhere/baked")]
    assert refiners[0].artifacts == refiners[1].artifacts and refiners[1].origin.loras == ()
    settings = shell.json("generate", "elsewhere/baked", *DRAW, "--out", "from_baked")["settings"]
    assert settings["refiner"]["pipeline"] == "baked_refiner"


@pytest.mark.slow
def test_a_refiner_that_is_gone_is_told(shell: Shell, built: list[Any]) -> None:
    alone = shell.folder / "alone"
    shutil.copytree(shell.folder / "pipelines" / NAME, alone, ignore=shutil.ignore_patterns("refiner"))
    done = shell.run("generate", "alone", *DRAW)
    assert done.returncode == 2 and "refiner/model_index.json is missing" in done.stderr


@pytest.mark.slow
def test_verify_holds_what_both_draw_together_to_diffusers(shell: Shell, built: list[Any]) -> None:
    found = shell.json("verify", f"pipelines/{NAME}")["pipelines"][0]
    assert found["passed"] and found["ensemble"]["psnr"] > 90 and found["image"]["psnr"] > 90
    assert {name for name in found["submodels"] if name.startswith("refiner/")} == {"refiner/unet"}
    assert shell.json("verify", f"pipelines/{NAME}")["pipelines"][0]["cached"]
    part = shell.json("verify", f"pipelines/{NAME}", "--submodel", "refiner/unet")["pipelines"][0]
    assert list(part["submodels"]) == ["refiner/unet"] and part["ensemble"] is None


@pytest.mark.slow
def test_an_image_that_they_do_not_draw_as_diffusers_does_not_pass(
    shell: Shell, built: list[Any], tmp_path: Path
) -> None:
    """Where every part by itself is right: the refiner with another schedule."""
    wrong = shell.folder / "wrong"
    shutil.copytree(shell.folder / "pipelines" / NAME, wrong, symlinks=True)
    for link in wrong.iterdir():
        if link.is_symlink():
            link.unlink()
            link.symlink_to((shell.folder / "pipelines" / NAME / link.name).resolve())
    unet = wrong / "refiner/unet"
    unet.unlink()
    unet.symlink_to((shell.folder / "pipelines" / NAME / "refiner/unet").resolve())
    scheduler = wrong / "refiner/scheduler/scheduler_config.json"
    scheduler.write_text(json.dumps(json.loads(scheduler.read_text()) | {"beta_end": 0.05}))
    subject = subject_of_folder(wrong, Cache(tmp_path / "cache"))
    assert subject.refiner is not None
    verdict, images, _ = with_refiner.both(subject, subject.refiner, VerifySpec(), Cache(tmp_path / "cache"), threads=1)
    assert "the image's PSNR against" in verdict.problems[0][0]
    assert set(images) == {f"ensemble_{name}.png" for name in ("artifact", "difference", "pytorch")}


@pytest.mark.slow
def test_evaluate_bench_and_tune_take_both_as_one(shell: Shell, built: list[Any]) -> None:
    folder = f"pipelines/{NAME}"
    (run,) = shell.json("run", str(WORKFLOW), "--no-verify")["pipelines"]
    measured = run["evaluation"]
    timed = [name for name in measured["submodels"] if name.startswith("refiner/")]
    assert timed == ["refiner/unet"], "what both have is timed once"
    assert measured["artifacts"].keys() >= {"unet", "refiner/unet"} and measured["pipeline"]["runs"] == 3
    both = ("--engine", "ort-cpu", "--engine", "torch-sdpa")
    shell.json("bench", folder, "--size", "64", "--steps", "4", "--rounds", "1", *both, "--out", "report")
    report = json.loads((shell.folder / "report/bench.json").read_text())
    found = {engine["name"]: engine for engine in report["engines"] if engine["status"] == "measured"}
    assert found.keys() == {"ort-cpu", "torch-sdpa"}
    assert all(engine["cases"][0]["verdict"] == "right" for engine in found.values()), report["engines"]
    assert "refiner/unet" in report["pipeline"]["artifacts"]
    tuned = shell.json("tune", folder, "--size", "64", "--rounds", "1", "--option", "memory_pattern")
    assert [trial["option"] for trial in tuned["trials"]] == ["memory_pattern"]
    assert tuned["trials"][0]["verdict"] in ("taken", "no gain")
