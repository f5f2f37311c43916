"""An evaluation of the tiny pipeline on the CPU, in its own process, and what happens when that cannot be."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import onnx
import psutil
import pytest
from onnx import helper
from PIL import Image
from until import until

from sdflow.artifact import Artifact
from sdflow.bench.evaluate import REQUEST, EvaluationResult, Request, SubmodelResult, append_result, evaluate
from sdflow.bench.evaluate_worker import failure_of, run
from sdflow.build.assemble import assemble
from sdflow.config.workflow import EvaluateSpec, ImageSpec, LatencySpec
from sdflow.errors import SdflowError, TargetUnavailableError, VerificationError
from sdflow.manifest import Origin
from sdflow.processes.workers import clean_environment, python_command
from sdflow.runtime.files import folder
from sdflow.runtime.sessions.placement import PlacedNode, judge
from sdflow.runtime.sessions.session import create_session
from sdflow.sources import Checkpoint
from sdflow.targets import TARGETS, Target

SPEC = EvaluateSpec(LatencySpec(warmup=1, runs=3), ImageSpec(prompt="a hørse", steps=2, seed=5, height=64, width=64))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def phases() -> list[str]:
    return []


@pytest.fixture(scope="module")
def result(tiny_pipeline: Path, results: Path, phases: list[str]) -> EvaluationResult:
    return evaluate(tiny_pipeline, SPEC, "cpu", name="tiny", results=results, threads=1, progress=phases.append)


def test_every_submodel_and_the_pipeline_are_timed(result: EvaluationResult, phases: list[str]) -> None:
    assert result.measured
    assert result.failure is None
    assert list(result.submodels) == ["text_encoder", "unet", "vae_encoder", "vae_decoder", "safety_checker"]
    latencies = [part.latency for part in result.submodels.values()] + [result.pipeline]
    for latency in latencies:
        assert latency is not None
        assert 0 < latency.min_ms <= latency.median_ms <= latency.p90_ms <= latency.p99_ms
        assert (latency.warmup, latency.runs) == (1, 3)
        assert latency.first_ms > 0
    unet = result.submodels["unet"].latency
    assert result.pipeline is not None
    assert unet is not None
    assert result.pipeline.median_ms > 2 * unet.min_ms, "two steps take longer than two runs of the UNet"
    assert "unet: timing" in phases


def test_the_shapes_are_those_of_the_image(result: EvaluationResult) -> None:
    assert result.submodels["unet"].inputs == {
        "sample": "2x4x8x8 float32",
        "timestep": "1 float32",
        "encoder_hidden_states": "2x77x32 float32",
    }
    assert result.submodels["text_encoder"].inputs == {"input_ids": "2x77 int32"}
    assert result.submodels["vae_decoder"].inputs == {"latent_sample": "1x4x8x8 float32"}
    assert result.settings["denoiser_batch"] == 2


def test_the_provider_of_every_node_is_known(result: EvaluationResult) -> None:
    assert result.provider == "CPUExecutionProvider"
    for part in result.submodels.values():
        assert part.placement.nodes.keys() == {"CPUExecutionProvider"}
        assert part.placement.nodes["CPUExecutionProvider"] > 50
        assert part.placement.fallen == ()


def test_peak_memory_is_that_of_the_worker_alone(result: EvaluationResult) -> None:
    assert result.peak_memory_bytes is not None
    assert 100e6 < result.peak_memory_bytes < 2e9
    ballast = bytearray(os.urandom(1024)) * 800_000  # 800 MB here must not count there
    assert psutil.Process().memory_info().rss > 800e6
    script = "from sdflow.processes.in_worker import peak_memory; print(peak_memory())"
    alone = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert int(alone.stdout) < 300e6
    del ballast


def test_the_image_holds_its_settings(result: EvaluationResult, results: Path) -> None:
    assert result.image == str(results / "tiny.png")
    with Image.open(results / "tiny.png") as image:
        assert image.size == (64, 64)
        assert len(image.getcolors(maxcolors=10_000) or []) > 100, "not of one colour"
        settings = json.loads(image.text["sdflow"])
    assert settings["prompt"] == "a hørse"
    assert settings["seed"] == 5
    assert settings["scheduler"] == "PNDMScheduler"
    assert settings["artifacts"] == result.artifacts


def test_results_are_lines_of_json_with_versions_device_and_digests(
    result: EvaluationResult, results: Path, tiny_artifacts: dict[str, Artifact]
) -> None:
    (line,) = (results / "tiny.jsonl").read_text().splitlines()
    recorded = EvaluationResult.from_json(json.loads(line))
    assert recorded == result
    assert recorded.versions["onnxruntime"]
    assert recorded.device["cores"] >= 1
    assert recorded.time is not None
    assert recorded.artifacts == {name: artifact.digest for name, artifact in tiny_artifacts.items()}
    append_result(results / "tiny.jsonl", result)
    assert len((results / "tiny.jsonl").read_text().splitlines()) == 2, "each evaluation is a line of its own"


def test_a_target_that_is_not_here_is_not_measured_and_says_why(tiny_pipeline: Path, tmp_path: Path) -> None:
    found = evaluate(tiny_pipeline, SPEC, "directml", name="tiny", results=tmp_path)
    assert not found.measured
    assert found.reason == "it runs on Windows only"
    assert list(tmp_path.iterdir()) == [], "nothing was measured, nothing is recorded"
    with pytest.raises(TargetUnavailableError, match="Windows only"):
        evaluate(tiny_pipeline, SPEC, "directml", required=True)


def test_nodes_on_another_provider_fail_the_result_unless_allowed(result: EvaluationResult) -> None:
    placed = [PlacedNode("conv", "Conv", "", "CPUExecutionProvider")]
    fallen = judge(placed, "CUDAExecutionProvider", set())
    parts = {"unet": SubmodelResult({}, 0.1, fallen, None)}
    message = failure_of(parts)
    assert message is not None
    with pytest.raises(VerificationError, match="1 of 1 nodes do not run on CUDAExecutionProvider"):
        dataclasses.replace(result, failure=message).raise_for_failure()
    result.raise_for_failure()


@pytest.mark.usefixtures("forked_workers")
def test_a_graph_that_the_provider_cannot_run_is_an_error_of_the_pipeline(
    tiny_checkpoint: Checkpoint, tiny_artifacts: dict[str, Artifact], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assemble(out, parts=tiny_artifacts, companions=tiny_checkpoint.companions, origin=Origin("tiny", "cpu"), copy=True)
    model = onnx.load(out / "text_encoder" / "model.onnx", load_external_data=False)
    model.graph.node.append(helper.make_node("NoSuchOperator", ["input_ids"], ["nothing"], domain="com.microsoft"))
    onnx.save(model, out / "text_encoder" / "model.onnx")
    with pytest.raises(VerificationError, match="NoSuchOperator"):
        evaluate(out, SPEC, "cpu")


@pytest.mark.usefixtures("forked_workers")
def test_a_worker_that_dies_is_an_error_with_its_last_words(tiny_pipeline: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_pipeline, tmp_path / "out")
    (tmp_path / "out" / "tokenizer" / "vocab.json").write_text("{")
    with pytest.raises(SdflowError, match="Error while initializing BPE"):
        evaluate(tmp_path / "out", SPEC, "cpu", threads=1)


@pytest.mark.parametrize("sent", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_the_worker_dies_with_its_parent(tiny_pipeline: Path, tmp_path: Path, sent: signal.Signals) -> None:
    script = (
        "import sys; from pathlib import Path; from sdflow.bench.evaluate import evaluate;"
        "from sdflow.config.workflow import EvaluateSpec, LatencySpec;"
        "spec = EvaluateSpec(LatencySpec(runs=1_000_000), None);"
        "evaluate(Path(sys.argv[1]), spec, 'cpu', threads=1, progress=lambda phrase: print(phrase, flush=True))"
    )
    environment = {**clean_environment(tmp_path), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", script, str(tiny_pipeline)]
    parent = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    while b"timing" not in parent.stdout.readline():
        assert parent.poll() is None
    (worker,) = psutil.Process(parent.pid).children()
    parent.send_signal(sent)
    parent.wait()
    parent.stdout.close()
    until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, "the worker outlives its parent")


def test_the_workers_messages_are_not_mixed_with_what_libraries_print(tiny_pipeline: Path, tmp_path: Path) -> None:
    request = Request(tiny_pipeline, "tiny", "cpu", EvaluateSpec(None, None), threads=1)
    worker = subprocess.Popen(
        python_command("sdflow.bench.evaluate_worker"),
        env=clean_environment(tmp_path),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(REQUEST.dump_json(request) + b"\n")
    worker.stdin.flush()
    messages = [json.loads(line) for line in worker.stdout]
    assert worker.wait() == 0
    worker.stdin.close()
    worker.stdout.close()
    assert [next(iter(message)) for message in messages[:-1]] == ["phase"] * (len(messages) - 1)
    found = EvaluationResult.from_json(messages[-1]["result"])
    assert found.measured
    assert found.pipeline is None
    assert found.submodels["unet"].latency is None
    assert list(tmp_path.iterdir()) == [], "and nothing is written at home"


@pytest.mark.usefixtures("forked_workers")
def test_what_the_runtime_could_not_do_as_it_should_is_in_the_result(tiny_pipeline: Path, tmp_path: Path) -> None:
    """An operator whose shapes are not known: the UNet cannot be taken apart."""
    folder = tmp_path / "pipeline"
    shutil.copytree(tiny_pipeline, folder)
    path = folder / "unet" / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    product = next(node for node in model.graph.node if node.op_type == "MatMul")
    product.op_type, product.domain = "FusedMatMul", "com.microsoft"
    if "com.microsoft" not in {entry.domain for entry in model.opset_import}:
        model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    path.unlink()
    path.write_bytes(model.SerializeToString())
    image = ImageSpec(prompt="a horse", steps=1, guidance_scale=1.0, height=64, width=64)
    found = evaluate(folder, EvaluateSpec(LatencySpec(0, 1), image), "cpu", results=tmp_path / "results", threads=1)
    assert found.failure is None
    (note,) = found.notes
    assert "the denoiser runs as a whole" in note
    assert "FusedMatMul" in note
    (line,) = (tmp_path / "results" / "pipeline.jsonl").read_text().splitlines()
    assert json.loads(line)["notes"] == [note]


def test_a_target_with_static_shapes_makes_one_session_of_each_submodel(
    tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = TARGETS["cpu"]
    fixed = dataclasses.replace(cpu, session=dataclasses.replace(cpu.session, static_shapes=True))
    monkeypatch.setitem(cast(dict[str, Target], TARGETS), "cpu", fixed)
    made: list[Path] = []

    def counted(model: Path, *arguments: Any, **options: Any) -> Any:
        made.append(model)
        return create_session(model, *arguments, **options)

    monkeypatch.setattr(folder, "create_session", counted)
    image = ImageSpec(prompt="a horse", steps=1, guidance_scale=1.0, height=64, width=64)
    evaluated = run(
        Request(
            tiny_pipeline, "tiny", "cpu", EvaluateSpec(LatencySpec(0, 1), image), tmp_path / "image.png", threads=1
        ),
        lambda phrase: None,
    )
    assert evaluated.failure is None
    assert all(part.placement.nodes for part in evaluated.submodels.values())
    counts = {name: made.count((tiny_pipeline / name / "model.onnx").resolve()) for name in evaluated.submodels}
    assert counts.pop("unet") == 4, "timed as a whole; the image is drawn with its three parts, on the CPU and on CUDA"
    assert set(counts.values()) == {1}


def test_a_pipeline_without_all_that_draws_is_refused_in_words(
    tiny_checkpoint: Checkpoint, tiny_artifacts: dict[str, Artifact], tmp_path: Path
) -> None:
    parts = {"text_encoder": tiny_artifacts["text_encoder"]}
    assemble(
        tmp_path / "out", parts=parts, companions=tiny_checkpoint.companions, origin=Origin("tiny", "cpu"), copy=True
    )
    with pytest.raises(SdflowError, match="no image can be timed without unet and vae_decoder"):
        run(Request(tmp_path / "out", "part", "cpu", EvaluateSpec(LatencySpec(0, 1), None), threads=1), lambda _: None)
