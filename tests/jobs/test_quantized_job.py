"""A pipeline whose products are int8, from the shell: it is built, held to its own limit, named, drawn with, and given a LoRA."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml
from onnx import numpy_helper
from shell import ROOT, Shell
from small_lora import write_lora

pytestmark = pytest.mark.slow
NAME = "small_int8"
FOLDER = f"pipelines/{NAME}"
DRAW = ("--prompt", "an otter", "--steps", "2", "--seed", "1", "--height", "64", "--width", "64", "--threads", "1")


def workflow(limit: float | None) -> dict[str, Any]:
    """The small pipeline for the CPU, the chain of its text encoder ending in int8. No name says so."""
    base = yaml.safe_load((ROOT / "workflows/tiny_cpu.yaml").read_text())
    quantize = {"pass": "QuantizeInt8", **({} if limit is None else {"limit": limit})}
    optimize = {"pass": "OrtTransformersOptimization", "model_type": "clip", "opt_level": 0, "float16": False}
    passes = [{"pass": "OnnxConversion", "target_opset": 17}, {"pass": "LoraMerge"}, optimize, quantize]
    extends = str(ROOT / "workflows" / base.pop("extends"))
    return {**base, "extends": extends, "name": "small", "submodels": {"text_encoder": {"passes": passes}}}


def written(shell: Shell, name: str, limit: float | None) -> str:
    (shell.folder / name).write_text(yaml.safe_dump(workflow(limit)))
    return name


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    return Shell(tmp_path_factory.mktemp("quantized_job"))


@pytest.fixture(scope="module")
def first(shell: Shell) -> Any:
    (pipeline,) = shell.json("run", written(shell, "small.yaml", 0.05), "--no-evaluate")["pipelines"]
    return pipeline


def test_its_folder_its_manifest_and_its_verification_say_what_it_is(shell: Shell, first: Any) -> None:
    assert Path(first["folder"]).name == NAME
    manifest = json.loads((shell.folder / FOLDER / "sdflow.json").read_text())
    told = manifest["submodels"]["text_encoder"]["quantized"]
    assert (told["to"], told["by"], told["limit"]) == ("int8", "QuantizeInt8", 0.05)
    assert "quantized" not in manifest["submodels"]["unet"]
    verdicts = first["verification"]["submodels"]
    assert verdicts["text_encoder"]["precision"] == "int8"
    assert verdicts["unet"]["precision"] == "float32"
    assert all(each["distance"] < 2e-5 for each in verdicts["text_encoder"]["exact"]), "without quantization"
    assert 1e-3 < verdicts["text_encoder"]["outputs"][0]["distance"] < 0.05
    assert first["verification"]["image"]["quantized"] == "int8"
    (found,) = shell.json("inspect", FOLDER)["findings"]
    assert found["details"]["quantized"] == "text_encoder to int8"


@pytest.mark.parametrize(("limit", "said"), [(None, "states no limit"), (0.001, "the workflow's limit is 0.001")])
def test_a_limit_that_is_missed_or_missing_fails_the_run(
    limit: float | None, said: str, shell: Shell, first: Any
) -> None:
    before = (shell.folder / FOLDER / "sdflow.json").read_bytes()
    done = shell.run("run", written(shell, "other.yaml", limit), "--no-evaluate")
    assert done.returncode == 4
    assert said in done.stderr and " away from the fp32 PyTorch model" in done.stderr
    assert (shell.folder / FOLDER / "sdflow.json").read_bytes() == before, "nothing was assembled"


def test_layers_to_keep_are_found_by_measurement(shell: Shell, first: Any) -> None:
    out = ("--no-evaluate", "--no-verify", "--out", "near")
    shell.json("run", written(shell, "near.yaml", 0.012), *out)
    done = shell.run("verify", f"near/{NAME}", "--fix", "--quick", "--json")
    assert done.returncode == 4, "the folder is as bad as it was"
    ((fix,),) = json.loads(done.stdout)["fixes"].values()
    assert fix["submodel"] == "text_encoder" and fix["keep"]
    fixed = workflow(0.012)
    fixed["submodels"]["text_encoder"]["passes"][-1]["keep"] = fix["keep"]
    (shell.folder / "fixed.yaml").write_text(yaml.safe_dump(fixed))
    (pipeline,) = shell.json("run", "fixed.yaml", "--no-evaluate", "--out", "fixed")["pipelines"]
    assert pipeline["verification"]["passed"]


def test_a_limit_that_no_layer_meets_is_told(shell: Shell, first: Any) -> None:
    """Keeping all of them is no proposal: the pass would have nothing to do."""
    manifest = json.loads((shell.folder / FOLDER / "sdflow.json").read_text())
    (step,) = [each for each in manifest["submodels"]["text_encoder"]["steps"] if each["pass"] == "QuantizeInt8"]
    hopeless = workflow(1e-5)
    hopeless["submodels"]["text_encoder"]["passes"][-1]["keep"] = step["facts"]["quantized"]["layers"][1:]
    (shell.folder / "hopeless.yaml").write_text(yaml.safe_dump(hopeless))
    shell.json("run", "hopeless.yaml", "--no-evaluate", "--no-verify", "--out", "hopeless")
    done = shell.run("verify", f"hopeless/{NAME}", "--fix", "--quick", "--submodel", "text_encoder")
    assert done.returncode == 4
    assert "exceeds the workflow's limit of 1e-05 whichever of its layers is in int8" in done.stderr
    assert "remove its QuantizeInt8" in done.stderr


def test_it_draws_and_takes_a_lora_that_is_merged_before_it_is_quantized(shell: Shell, first: Any) -> None:
    assert shell.run("generate", FOLDER, *DRAW, "--out", "plain.png").returncode == 0
    lora = write_lora(shell.folder / "otter.safetensors", ("text_encoder",))
    done = shell.run("bake", "--base", FOLDER, "--lora", f"{lora}:0.5", "--out", "pipelines/with_lora", "--verify")
    assert done.returncode == 0, done.stderr
    assert "QuantizeInt8: built" not in done.stderr, "the graph is as it was: the weights alone are written"
    assert "within its limit" in done.stdout
    plain, baked = (
        {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(shell.folder / folder).graph.initializer}
        for folder in (f"{FOLDER}/text_encoder/model.onnx", "pipelines/with_lora/text_encoder/model.onnx")
    )
    changed = [name for name in plain if not np.array_equal(plain[name], baked[name])]
    assert any(name.endswith("/int8") for name in changed) and any(name.endswith("/scales") for name in changed)


def test_bench_and_the_server_never_call_it_float32(shell: Shell, first: Any) -> None:
    engines = ("-e", "ort-cpu", "-e", "torch-sdpa", "--rounds", "2", "--threads", "1", "--size", "64", "--steps", "2")
    result = shell.json("bench", FOLDER, *engines, "--out", "bench")
    ours, theirs = result["engines"]
    assert (ours["dtype"], theirs["dtype"]) == ("int8 in text_encoder, float32", "float32")
    assert (ours["cases"][0]["verdict"], theirs["cases"][0]["verdict"]) == ("quantized", "right")
    assert ours["cases"][0]["check"]["distance"] > 10 * theirs["cases"][0]["check"]["distance"]
    from sdflow.serve.http.served_model import read_served

    told = read_served(shell.folder / FOLDER).to_json()["sdflow"]
    assert told["quantized"] == {"text_encoder": "int8"}
    assert told["verdict"] == "verified, quick; int8 within its workflow's limits"


def test_a_manifest_that_hides_it_does_not_pass(shell: Shell, first: Any) -> None:
    folder = shutil.copytree(shell.folder / FOLDER, shell.folder / "hidden", symlinks=False)
    manifest = json.loads((folder / "sdflow.json").read_text())
    del manifest["submodels"]["text_encoder"]["quantized"]
    (folder / "sdflow.json").write_text(json.dumps(manifest))
    done = shell.run("verify", "hidden", "--quick")
    assert done.returncode == 4
    assert "its graph is quantized to int8, and sdflow.json says that it is not quantized" in done.stderr
