"""`sdflow tune`: what it tries, what it refuses, and who uses its choice."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from started_python import Command

from sdflow.bench.run import BenchRequest, bench
from sdflow.bench.sweep import Settings, SweepPoint
from sdflow.bench.tune import Candidate, candidates, tune, verdict_of
from sdflow.cli.bench import hold_to_pytorch
from sdflow.errors import SdflowError, UsageError
from sdflow.manifest import MANIFEST_FILE
from sdflow.runtime.draw_request import GenerateRequest
from sdflow.runtime.files.recorded_tuning import record_tuning, recorded_tuning, tuning_file
from sdflow.runtime.generate import Progress, generate
from sdflow.runtime.pipeline import Pipeline
from sdflow.runtime.sessions.tuning import UNTUNED, Tuning
from sdflow.targets import TARGETS

ROOT = Path(__file__).parents[2]
CPU = TARGETS["cpu"]
CASE = SweepPoint(1, 64, 64, 1)
CHOICE = Tuning(
    session={"session.intra_op.allow_spinning": "0"},
    threads=1,
    optimization="ORT_ENABLE_EXTENDED",
    memory_arena=False,
    memory_pattern=False,
)


AFFINITY = {"session.intra_op_thread_affinities": "nonsense"}


def session_entry(name: str, value: str) -> Candidate:
    return Candidate(name, value, lambda tuning: replace(tuning, session={**tuning.session, name: value}))


def test_a_choice_that_computes_something_else_or_fails_is_not_taken(built: Path, tmp_path: Path) -> None:
    """The first candidate makes ONNX Runtime read other weights: as fast, and silently wrong."""
    other = tmp_path / "other"
    other.mkdir()
    for path in (built / "unet").iterdir():
        shutil.copyfile(path, other / path.name)
    values = np.fromfile(other / "model.onnx.data", np.float32)
    (values * np.float32(1.01)).tofile(other / "model.onnx.data")
    tried = [
        session_entry("session.model_external_initializers_file_folder_path", str(other)),
        Candidate("affinity", "nonsense", lambda tuning: replace(tuning, threads=2, session=AFFINITY)),
    ]
    result = tune(built, lambda text: None, case=CASE, rounds=1, tried=tried)
    wrong, failed = result.trials
    assert wrong.verdict == "WRONG"
    assert wrong.distance is not None
    assert wrong.distance > result.tolerance == 1e-4
    assert "differs by" in str(wrong.reason)
    assert failed.verdict == "failed"
    assert "ReadThreadAffinityConfig" in str(failed.reason)
    assert result.tuning == UNTUNED
    (record,) = json.loads(Path(result.file).read_text())["records"]
    assert [trial["verdict"] for trial in record["trials"]] == ["WRONG", "failed"]


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([0.9, 0.9, 0.91, 0.95, 0.97], "taken"),
        ([0.9, 0.9, 0.91, 1.2, 1.3], "unsteady"),
        ([0.99, 0.99, 0.99, 0.99, 0.99], "no gain"),
        ([1.1, 0.5, 1.2, 1.3, 0.6], "no gain"),
    ],
)
def test_faster_in_the_median_alone_is_unsteady(ratios: list[float], verdict: str) -> None:
    assert verdict_of(ratios) == verdict


def test_the_command_tries_options_and_keeps_a_choice_that_computes_the_same(
    built: Path, tmp_path: Path, tuning_folder: Path, sdflow: Command
) -> None:
    """One option of two values; all take minutes on a busy machine."""
    arguments = [
        "--size",
        "64",
        "--steps",
        "1",
        "--rounds",
        "1",
        "--option",
        "optimization",
        "--no-verify",
    ]
    done = sdflow("tune", str(built), *arguments, "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["format_version"], result["kind"], result["target"]) == (1, "tune", "cpu")
    assert [trial["option"] for trial in result["trials"]] == ["optimization", "optimization"]
    for trial in result["trials"]:
        assert trial["verdict"] in ("taken", "no gain", "unsteady")
        assert trial["distance"] <= 1e-4
        assert trial["ratio"] > 0
    assert Path(result["file"]).parent == tuning_folder
    recorded = recorded_tuning(built, CPU)
    assert recorded.tuning == Tuning(**result["tuning"])


def test_a_choice_that_cannot_be_held_to_pytorch_is_taken_back(
    built: Path, tmp_path: Path, tuning_folder: Path
) -> None:
    folder = shutil.copytree(built, tmp_path / "moved")
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    manifest["model"] = manifest["checkpoint"]["path"] = str(tmp_path / "gone")
    (folder / MANIFEST_FILE).chmod(0o644)
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    record_tuning(folder, CPU, CHOICE, {})
    with pytest.raises(SdflowError, match="gone"):
        hold_to_pytorch(folder, CPU, tmp_path / "cache")
    assert recorded_tuning(folder, CPU).tuning == UNTUNED


def test_every_option_of_a_choice_reaches_the_session(built: Path) -> None:
    pipeline = Pipeline.load(built, "cpu", checker=False, tuning=CHOICE)
    options = pipeline.submodels["vae_decoder"].session.get_session_options()
    assert options.intra_op_num_threads == 1
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    assert str(options.graph_optimization_level).endswith("ORT_ENABLE_EXTENDED")
    assert (options.enable_cpu_mem_arena, options.enable_mem_pattern) == (False, False)
    threads = Pipeline.load(built, "cpu", checker=False, tuning=CHOICE, threads=2)
    assert threads.submodels["vae_decoder"].session.get_session_options().intra_op_num_threads == 2


def test_generate_and_bench_use_the_choice_and_say_so(built: Path, tmp_path: Path) -> None:
    record_tuning(built, CPU, CHOICE, {})
    said: list[str] = []
    request = GenerateRequest(built, ["a horse"], tmp_path / "out", seed=1, height=64, width=64, steps=1, threads=1)
    generate(request, Progress(said.append))
    assert any(text.startswith("tuned on this machine: allow_spinning=0, threads=1") for text in said)
    settings = Settings(rounds=1, threads=1)
    for tuning, note in ((True, "tuned on this machine: "), (False, "")):
        wanted = BenchRequest(built, [CASE], replace(settings, tuning=tuning), ["ort-cpu"], check=False)
        (engine,) = bench(wanted, lambda text: None).engines
        assert engine.note.startswith(note)
        assert bool(engine.note) == bool(note)


def test_a_choice_holds_for_the_device_and_the_versions_it_was_made_with(built: Path) -> None:
    assert recorded_tuning(built, CPU) == recorded_tuning(built, CPU)
    assert recorded_tuning(built, CPU).note == ""
    path = record_tuning(built, CPU, CHOICE, {})
    content = json.loads(path.read_text())
    content["records"][0]["machine"]["versions"]["onnxruntime"] = "1.0"
    path.write_text(json.dumps(content))
    stale = recorded_tuning(built, CPU)
    assert stale.tuning == UNTUNED
    assert all(word in stale.note for word in ("not tuned", "`sdflow tune`", "different versions")), stale.note
    record_tuning(built, CPU, replace(CHOICE, threads=2), {})
    assert recorded_tuning(built, CPU).tuning.threads == 2
    assert len(json.loads(path.read_text())["records"]) == 2, "the other machine's choice stays"


def test_an_option_that_is_not_there_is_refused_with_those_that_are(built: Path) -> None:
    with pytest.raises(UsageError, match="no option is named thread") as caught:
        tune(built, lambda text: None, case=CASE, only=["thread"])
    assert "threads" in str(caught.value.remedy)


def test_a_damaged_file_of_choices_is_named(built: Path) -> None:
    path = tuning_file(built, CPU)
    path.parent.mkdir(parents=True)
    path.write_text('{"format_version": 1, "records": [{"machine": {}, "tuning": {"thread": 1}}]}')
    with pytest.raises(UsageError, match=r"not a file of `sdflow tune`") as caught:
        recorded_tuning(built, CPU)
    assert caught.value.where == str(path)


def test_cuda_and_cpu_have_the_options_that_were_found_to_matter_and_other_targets_none() -> None:
    on_cpu = {each.option for each in candidates(CPU, 2)}
    assert on_cpu >= {
        "session.force_spinning_stop",
        "threads",
        "session.intra_op.allow_spinning",
        "optimization",
        "memory_arena",
        "memory_pattern",
    }
    assert [each.value for each in candidates(CPU, 8) if each.option == "threads"] == ["1", "4", "8", "16"]
    tried = {(each.option, each.value) for each in candidates(TARGETS["cuda"], 8)}
    assert {("cudnn_conv_algo_search", "EXHAUSTIVE"), ("sdpa_kernel", "1"), ("fuse_conv_bias", "0")} <= tried
    flash = next(each for each in candidates(TARGETS["cuda"], 8) if each.value == "1" and each.option == "sdpa_kernel")
    assert flash.change(UNTUNED).provider == {"sdpa_kernel": "1"}
    assert candidates(TARGETS["directml"], 8) == []


@pytest.mark.skipif(os.name != "posix", reason="elsewhere a home is found by other means")
def test_without_a_home_a_folder_for_the_choice_is_asked_for(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "SDFLOW_TUNING"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    with pytest.raises(UsageError, match="SDFLOW_TUNING=FOLDER"):
        tuning_file(built, CPU)
    monkeypatch.setenv("SDFLOW_TUNING", str(tmp_path))
    assert tuning_file(built, CPU).parent == tmp_path


def test_a_choice_from_before_there_were_own_kernels_is_read_and_uses_them(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SDFLOW_TUNING", str(tmp_path))
    path = record_tuning(built, CPU, Tuning(threads=1), {})
    content = json.loads(path.read_text())
    del content["records"][0]["tuning"]["own_kernels"]
    path.write_text(json.dumps(content))
    assert recorded_tuning(built, CPU).tuning == Tuning(threads=1, own_kernels=True)
