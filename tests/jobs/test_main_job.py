"""The main job from the shell: one command on a shipped workflow, as a user runs it."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from earlier_folder import as_an_earlier_sdflow
from kept_builds import KeptBuilds
from PIL import Image
from serve.conftest import running_server
from shell import Shell
from small_lora import write_lora
from started_python import StartedPython
from until import PATIENCE

from sdflow.build.plan import make_plan
from sdflow.config import load_workflow
from sdflow.passes import registry
from sdflow.store import Cache

ROOT = Path(__file__).parents[2]
TINY = ROOT / "workflows/tiny_cpu.yaml"


@pytest.fixture(scope="module")
def new_shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """Each of its processes is a new Python."""
    return Shell(tmp_path_factory.mktemp("main_job"))


@pytest.fixture(scope="module")
def shell(new_shell: Shell, started_python: StartedPython | None) -> Shell:
    return Shell(new_shell.folder, started_python)


@pytest.fixture(scope="module")
def first(new_shell: Shell, cache_of: KeptBuilds) -> Any:
    document = new_shell.json("run", str(TINY))
    cache_of.offer("tiny_cpu", new_shell.folder)
    return document


def test_the_first_run_builds_every_step_and_draws_an_image(shell: Shell, first: Any) -> None:
    (pipeline,) = first["pipelines"]
    jsonschema.validate(first, json.loads(shell.run("schema", "run").stdout))
    assert first["format_version"] == 1
    assert {step["outcome"] for step in pipeline["steps"]} == {"built"}
    assert pipeline["evaluation"]["measured"]
    assert pipeline["evaluation"]["pipeline"]["runs"] == 3
    assert set(pipeline["evaluation"]["submodels"]) == {
        "text_encoder", "unet", "vae_encoder", "vae_decoder", "safety_checker",
    }  # fmt: skip
    with Image.open(shell.folder / "results/tiny_cpu.png") as image:
        assert image.size == (64, 64)
        assert json.loads(image.info["sdflow"])["seed"] == 0
    (line,) = (shell.folder / "results/tiny_cpu.jsonl").read_text().splitlines()
    assert json.loads(line)["artifacts"] == pipeline["evaluation"]["artifacts"]


def test_nothing_was_looked_up_or_connected_to_and_the_home_directory_is_clean(shell: Shell, first: Any) -> None:
    assert not (shell.folder / "recorder/reached").exists()
    assert list((shell.folder / "home").iterdir()) == []


def test_the_recorder_of_the_test_above_does_record(shell: Shell) -> None:
    code = "import socket; socket.getaddrinfo('localhost', 1)"
    folder = shell.folder / "recorder"
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(folder)}, check=True)
    assert (folder / "reached").read_text() == "localhost\n"
    (folder / "reached").unlink()


def test_a_run_that_fails_prints_one_document_too(shell: Shell) -> None:
    schema = json.loads(shell.run("schema", "run").stdout)
    for words, status in (
        (("gone.yaml",), 2),
        ((str(TINY), "--set", "unet.passes.0.no=1"), 2),
        ((str(TINY), "--locked"), 2),
    ):
        done = shell.run("run", *words, "--json")
        assert done.returncode == status
        document = json.loads(done.stdout)
        jsonschema.validate(document, schema)
        assert document["kind"] == "error" and document["exit_status"] == status
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**document, "exit_status": None}, schema)


def test_verify_compares_the_folder_with_its_provenance(shell: Shell, first: Any) -> None:
    said = shell.json("provenance", "pipelines/tiny_cpu")
    (verdict,) = said["statement"]["predicate"]["runDetails"]["byproducts"]
    assert verdict["annotations"]["passed"] and verdict["annotations"]["level"] == "quick"
    file = shell.folder / said["file"]
    before = file.read_text()
    digest = hashlib.sha256(
        (shell.folder / "pipelines/tiny_cpu/tokenizer/tokenizer_config.json").read_bytes()
    ).hexdigest()
    file.write_text(before.replace(digest, "0" * 64))
    try:
        done = shell.run("verify", "pipelines/tiny_cpu", "--quick")
    finally:
        file.write_text(before)
    assert done.returncode == 4
    assert "tokenizer/tokenizer_config.json: is not the file that was built" in done.stderr


def test_a_second_run_executes_no_pass_and_changes_nothing(shell: Shell, first: Any) -> None:
    before = (shell.folder / "pipelines/tiny_cpu").stat().st_mtime_ns
    (second,) = shell.json("run", str(TINY), "--no-evaluate")["pipelines"]
    assert {step["outcome"] for step in second["steps"]} == {"cached"}
    artifacts = [step["artifact"] for step in first["pipelines"][0]["steps"]]
    assert [step["artifact"] for step in second["steps"]] == artifacts
    assert (shell.folder / "pipelines/tiny_cpu").stat().st_mtime_ns == before


def test_plan_and_explain_tell_what_changes(shell: Shell, first: Any) -> None:
    assert {step["state"] for step in shell.json("plan", str(TINY))["steps"]} == {"cached"}
    changed = shell.json("explain", str(TINY), "--set", "unet.passes.0.target_opset=16")["steps"]
    reasons = {step["step"]: step["reasons"] for step in changed if step["reasons"]}
    assert reasons == {
        "tiny_cpu/unet/0": ["option target_opset: 17 -> 16"],
        "tiny_cpu/unet/1": ["its input is built by the step before"],
        "tiny_cpu/unet/2": ["its input is built by the step before"],
    }
    nothing = shell.run("explain", str(TINY), "--step", "unett")
    assert nothing.returncode == 2, nothing.stdout
    assert "no step's name contains 'unett'" in nothing.stderr


def test_another_target_reuses_the_conversions_and_says_that_it_was_not_measured(shell: Shell, first: Any) -> None:
    only_text_encoder = ("--set", "submodels.unet=null", "--set", "submodels.vae_encoder=null")
    more = (
        "--no-verify",
        "--set",
        "submodels.vae_decoder=null",
        "--set",
        "submodels.safety_checker=null",
        "--set",
        "evaluate.image=null",
    )
    (cuda,) = shell.json("run", str(TINY), "--target", "cuda", *only_text_encoder, *more)["pipelines"]
    assert [step["outcome"] for step in cuda["steps"]] == ["cached", "built", "built", "built"]
    assert not cuda["evaluation"]["measured"]
    assert "CUDAExecutionProvider" in cuda["evaluation"]["reason"]
    required = shell.run("run", str(TINY), "--target", "cuda", *only_text_encoder, *more, "--require-target")
    assert required.returncode == 5


def test_a_report_that_cannot_be_written_does_not_cost_the_verdict(shell: Shell, first: Any) -> None:
    done = shell.run("verify", "pipelines/tiny_cpu", "--quick", "--html", str(TINY / "report.html"))
    assert done.returncode == 2
    assert "cannot be written" in done.stderr
    assert "tiny_cpu: verified for cpu, quick" in done.stdout


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--prompt-2", "oil"), "has no argument --prompt-2"),
        (("--crop", "0x0"), "has no argument --crop"),
        (("--crop", "0"), "--crop: '0' is not of the form"),
    ],
)
def test_an_option_of_another_family_is_refused(shell: Shell, first: Any, option: tuple[str, str], said: str) -> None:
    done = shell.run("generate", "pipelines/tiny_cpu", "--prompt", "an otter", "--steps", "1", *option)
    assert done.returncode == 2
    assert said in done.stderr and "Traceback" not in done.stderr
    assert not (shell.folder / "images").exists()


def test_a_copied_pipeline_stands_alone(shell: Shell, first: Any) -> None:
    shell.json("run", str(TINY), "--copy", "--no-evaluate", "--out", "copies")
    copied = shell.folder / "copies/tiny_cpu"
    assert not [path for path in copied.rglob("*") if path.is_symlink()]
    assert (copied / "unet/model.onnx").read_bytes() == (
        shell.folder / "pipelines/tiny_cpu/unet/model.onnx"
    ).read_bytes()


def test_a_new_onnxruntime_rebuilds_only_the_passes_that_use_it(new_shell: Shell, first: Any) -> None:
    metadata = new_shell.folder / "recorder" / "onnxruntime-99.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: onnxruntime\nVersion: 99.0\n")
    try:
        steps = new_shell.json("explain", str(TINY))["steps"]
    finally:
        shutil.rmtree(metadata)
    stale = {step["pass"] for step in steps if step["state"] == "to run"}
    assert stale == {"OrtTransformersOptimization", "BindWeights"}
    reasons = {step["reasons"][0].partition(" -> ")[0] for step in steps if step["reasons"]}
    assert len(reasons) == 2
    assert any(reason.startswith("uses onnxruntime: 1.") for reason in reasons)
    assert "its input is built by the step before" in reasons


def test_a_lora_executes_only_bindweights_of_unet_and_text_encoder(shell: Shell, first: Any, baked: Any) -> None:
    built = {step["step"]: step["pass"] for step in baked["steps"] if step["outcome"] == "built"}
    assert built == {"ink/text_encoder/2": "BindWeights", "ink/unet/2": "BindWeights"}
    assert {step["facts"]["touched"] for step in baked["steps"] if step["step"] in built} == {4, 32}


@pytest.fixture(scope="module")
def baked(shell: Shell, first: Any) -> Any:
    """A LoRA in the first run's pipeline, by `sdflow bake`."""
    lora = write_lora(shell.folder / "ink.safetensors")
    arguments = ("--base", "pipelines/tiny_cpu", "--lora", f"{lora}:0.8", "--out", "baked/ink")
    return shell.json("bake", *arguments)["pipeline"]


def test_bake_gives_what_the_workflow_gives(shell: Shell, baked: Any) -> None:
    workflow = shell.folder / "ink.yaml"
    workflow.write_text(f"extends: {TINY}\nloras: [{{file: ink.safetensors, scale: 0.8}}]\n")
    (pipeline,) = shell.json("run", str(workflow), "--no-evaluate", "--no-verify")["pipelines"]
    assert {step["outcome"] for step in pipeline["steps"]} == {"cached"}
    made = [{step["step"]: step["artifact"] for step in each["steps"]} for each in (pipeline, baked)]
    assert made[0] == made[1]
    manifests = [json.loads((shell.folder / at / "ink/sdflow.json").read_text()) for at in ("baked", "pipelines")]
    assert manifests[0] == manifests[1]


def test_bake_says_a_line_for_each_submodel(shell: Shell, baked: Any) -> None:
    done = shell.run("bake", "--base", "baked/ink", "--lora", "ink.safetensors:0", "--out", "baked/more", "--verify")
    assert done.returncode == 0, done.stderr
    built = done.stdout.partition("verified")[0]
    lines = {line.split()[0]: line for line in built.splitlines()}
    assert "LoRAs in 32 weights" in lines["unet"], "the base's own LoRA stays"
    assert "from the cache" in lines["vae_decoder"]
    assert "more: verified for cpu" in done.stdout, "with its own LoRA and the new one, against PyTorch"


@pytest.fixture(scope="module")
def earlier(shell: Shell, first: Any) -> Path:
    """The first run's folder, described as an earlier sdflow described it."""
    cache = Cache(shell.folder / "cache")
    plan = make_plan(load_workflow(TINY, catalog=registry.catalog()), cache)
    return as_an_earlier_sdflow(shell.folder / "pipelines/tiny_cpu", shell.folder / "pipelines/earlier", plan, cache)


def test_a_folder_of_an_earlier_sdflow_still_draws(shell: Shell, earlier: Path) -> None:
    settings = ("--prompt", "an otter", "--steps", "1", "--seed", "3", "--no-sheet")
    for name in ("earlier", "tiny_cpu"):
        shell.json("generate", f"pipelines/{name}", *settings, "--out", f"drawn/{name}")
    images = [next((shell.folder / "drawn" / name).glob("*.png")) for name in ("earlier", "tiny_cpu")]
    with Image.open(images[0]) as one, Image.open(images[1]) as other:
        assert one.tobytes() == other.tobytes()


def test_a_folder_of_an_earlier_sdflow_is_verified_with_its_recipes(shell: Shell, earlier: Path) -> None:
    done = shell.run("verify", str(earlier), "--quick", "--fresh", "--json")
    (verified,) = json.loads(done.stdout)["pipelines"]
    assert verified["passed"], done.stderr
    assert verified["name"] == "tiny_cpu", "as its manifest calls it"
    assert list(verified["submodels"]) == ["text_encoder", "unet", "vae_encoder", "vae_decoder", "safety_checker"]
    for name, submodel in verified["submodels"].items():
        assert f"{name}: without rounding" in done.stderr
        assert submodel["weights"] > 0, "its stored weights are computed again by their recipes"


def test_a_folder_of_an_earlier_sdflow_takes_a_lora_and_builds_only_the_weights(
    shell: Shell, earlier: Path, baked: Any
) -> None:
    arguments = ("--base", str(earlier), "--lora", "ink.safetensors:0.8", "--out", "baked/from_earlier")
    again = shell.json("bake", *arguments)["pipeline"]
    made = [{step["step"].partition("/")[2]: step["artifact"] for step in each["steps"]} for each in (again, baked)]
    assert made[0] == made[1], "what today's folder gives"
    assert {step["outcome"] for step in again["steps"]} == {"cached"}


def test_a_folder_of_an_earlier_sdflow_is_measured_beside_pytorch(shell: Shell, earlier: Path) -> None:
    settings = ("--size", "64", "--steps", "1", "--rounds", "1", "--threads", "1")
    measured = shell.json("bench", str(earlier), *settings, "-e", "ort-cpu", "-e", "torch-sdpa")
    assert {each["cases"][0]["verdict"] for each in measured["engines"] if each["status"] == "measured"} == {"right"}


def test_a_folder_of_an_earlier_sdflow_is_served(earlier: Path, started_python: StartedPython | None) -> None:
    with running_server(str(earlier), "--batch-sizes", "1", started=started_python) as server:
        body = {"prompt": "an otter", "steps": 1, "seed": 3, "size": "64x64"}
        answer = httpx.post(f"{server.url}/v1/images/generations", json=body, timeout=PATIENCE)
    assert answer.status_code == 200 and answer.json()["data"][0]["b64_json"], answer.text


@pytest.mark.parametrize(
    ("base", "lora", "says"),
    [
        ("absent", "ink.safetensors", "not an sdflow pipeline"),
        ("home", "ink.safetensors", "Build one: sdflow run"),
        ("pipelines/tiny_cpu", "gone.safetensors:0.5", "there is no file or folder 'gone.safetensors'"),
        ("pipelines/tiny_cpu", r"C:\ink.safetensors", r"C:\\ink.safetensors"),
    ],
)
def test_bake_without_a_pipeline_or_a_lora_ends_in_status_2(
    shell: Shell, baked: Any, base: str, lora: str, says: str
) -> None:
    done = shell.run("bake", "--base", base, "--lora", lora, "--out", "baked/other")
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert not (shell.folder / "baked/other").exists()


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("run", "missing.yaml"), 2, "missing.yaml"),
        (("run", str(TINY), "--set", "modle=x"), 2, "model"),
        (("run", str(TINY), "--target", "cudda"), 2, "cuda"),
        (("run", str(TINY), "--set", "model=absent_folder"), 2, "absent_folder"),
        (("run",), 2, "WORKFLOW"),
        (("plan", str(TINY), "--set", "evaluate.image.height=72"), 2, "evaluate.image.height is 72 pixels"),
        (("plan", str(TINY), "--set", "verify.width=72"), 2, "verify.width is 72 pixels"),
        (
            ("plan", str(TINY), "--set", "model=synthetic:sdxl-tiny"),
            2,
            "without text_encoder_2: synthetic:sdxl-tiny is of the",
        ),
        (("passes", "OnnxConvers"), 2, "OnnxConversion"),
        (("cache", "gc", "--max-size", "ten"), 2, "20GB"),
        (("cache", "gc", "--max-size", ""), 2, "20GB"),
        (("run", str(TINY), "--results", str(TINY)), 2, "--results"),
        (("run", str(TINY), "--out", str(TINY)), 2, "--out"),
        (("run", str(TINY), "--target", "directml", "--require-target"), 5, "directml"),
    ],
)
def test_bad_input_ends_in_status_2_and_a_message(
    shell: Shell, arguments: tuple[str, ...], status: int, says: str
) -> None:
    done = shell.run(*arguments)
    assert done.returncode == status
    assert says in done.stderr
    assert "Traceback" not in done.stderr
