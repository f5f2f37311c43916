"""`sdflow verify` and what `sdflow run` does with it: whole pipelines, real processes, a real cache."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import cast

import onnx
import pytest
import yaml
from started_python import StartedPython

from sdflow.artifact import Artifact
from sdflow.build.assemble import assemble
from sdflow.build.step import LoraFile
from sdflow.config import load_workflow
from sdflow.config.workflow import ImageSpec, VerifySpec
from sdflow.errors import SdflowError, TargetUnavailableError, UsageError, VerificationError
from sdflow.manifest import Origin, read_manifest
from sdflow.passes import registry
from sdflow.run.options import RunOptions
from sdflow.run.run import run_workflow
from sdflow.runtime.files.recorded_tuning import record_tuning
from sdflow.runtime.sessions.tuning import Tuning
from sdflow.sources import Checkpoint
from sdflow.store import Cache
from sdflow.targets import TARGETS, Target
from sdflow.verify import Subject, Verification, Verified, own_image, subject_of_folder, verify
from sdflow.verify.artifact.on_device import run_on_device
from sdflow.verify.artifact.recipes import structure_of
from sdflow.verify.reference.cases import read_cases
from sdflow.verify.report.html import page
from sdflow.verify.result import DeviceVerdict
from tests.store.faults import in_process, read_only
from tests.support.forked_workers import forking
from tests.support.small_workflows import Events
from tests.verify.sample_artifacts import ROOT

pytestmark = pytest.mark.usefixtures("forked_workers")
SPEC = VerifySpec(steps=2, height=64, width=64)
BREAKING = Path(__file__).parent / "breaking_pass.py"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return Cache(tmp_path_factory.mktemp("verify") / "cache")


@pytest.fixture(scope="module")
def subject(
    tiny_checkpoint: Checkpoint, tiny_artifacts: dict[str, Artifact], tmp_path_factory: pytest.TempPathFactory
) -> Subject:
    folder = tmp_path_factory.mktemp("pipelines") / "tiny"
    assemble(
        folder, parts=tiny_artifacts, companions=tiny_checkpoint.companions, origin=Origin("tiny", "cpu"), copy=True
    )
    return Subject("tiny", "cpu", folder, tiny_checkpoint, image=ImageSpec(guidance_scale=7.5))


@pytest.fixture(scope="module")
def first(subject: Subject, cache: Cache, started_python: StartedPython | None) -> Verified:
    with forking(started_python):
        return verify(subject, SPEC, cache, threads=1)


def test_a_good_pipeline_passes_submodel_by_submodel_and_as_an_image(first: Verified) -> None:
    result = first.result
    assert result.passed, result.failure()
    assert list(result.submodels) == ["text_encoder", "unet", "vae_encoder", "vae_decoder", "safety_checker"]
    for part in result.submodels.values():
        assert all(
            output.distance <= 1e-4 < output.yardstick for output in part.outputs if output.name != "has_nsfw_concepts"
        )
    assert result.image is not None
    assert result.image.psnr is None or result.image.psnr > 80
    assert result.image.ssim == pytest.approx(1, abs=1e-6)
    assert not result.cached
    assert "700.3" in " ".join(result.coverage)


def test_the_sample_is_verified_as_it_is_sampled() -> None:
    sampling = json.loads((ROOT / "samples/settings.json").read_text())["sampling"]
    assert own_image("sample:shapes").guidance_scale == sampling["guidance"]


def test_an_unknown_target_is_refused_before_anything_is_computed(subject: Subject, cache: Cache) -> None:
    with pytest.raises(UsageError, match="--target: no target is named cudda"):
        subject_of_folder(subject.folder, cache, target="cudda")


def test_a_second_verification_comes_from_the_cache_whole(subject: Subject, cache: Cache, first: Verified) -> None:
    phases: list[str] = []
    again = verify(subject, SPEC, cache, progress=phases.append)
    assert phases == [], "no process was started"
    assert again.result == dataclasses.replace(first.result, cached=True)
    assert sorted(again.images) == ["artifact.png", "difference.png", "pytorch.png"]
    assert again.images == first.images


@pytest.mark.parametrize("what", ["artifact", "tokenizer"])
def test_what_is_verified_is_in_the_key(
    what: str, subject: Subject, cache: Cache, first: Verified, tmp_path: Path
) -> None:
    folder = shutil.copytree(subject.folder, tmp_path / "tiny")
    changed = folder / ("unet/config.json" if what == "artifact" else "tokenizer/tokenizer_config.json")
    changed.chmod(0o644)
    changed.write_text(changed.read_text() + "\n")
    phases: list[str] = []
    verify(dataclasses.replace(subject, folder=folder), SPEC, cache, submodels=["text_encoder"], progress=phases.append)
    assert "text_encoder: comparing with PyTorch" in phases


def test_another_scheduler_is_found_by_the_image_and_a_failure_is_not_kept(
    subject: Subject, cache: Cache, first: Verified, tmp_path: Path
) -> None:
    folder = shutil.copytree(subject.folder, tmp_path / "tiny")
    path = folder / "scheduler/scheduler_config.json"
    path.chmod(0o644)
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"beta_schedule": "linear"}))
    wrong = dataclasses.replace(subject, folder=folder)
    for _ in range(2):
        found = verify(wrong, SPEC, cache, threads=1).result
        assert not found.cached
    file = "scheduler/scheduler_config.json"
    assert [where for where, _, _ in found.problems] == ["image", f"{file}", f"{file}"]
    assert "PSNR" in found.failure()
    assert 'beta_schedule is "linear", expected "scaled_linear"' in found.failure()
    with pytest.raises(VerificationError) as raised:
        found.raise_for_failure()
    assert raised.value.exit_code == 4


FOLDER_FAULTS = {
    "no index": (lambda folder: (folder / "model_index.json").unlink(), "is missing"),
    "no class": (
        lambda folder: change_index(folder, _class_name="NoSuchPipeline"),
        '_class_name is "NoSuchPipeline", expected "OnnxStableDiffusionPipeline"',
    ),
    "a component of no class": (
        lambda folder: change_index(folder, scheduler=["diffusers", "NoSuch"]),
        'scheduler is ["diffusers", "NoSuch"], expected ["diffusers", "PNDMScheduler"]',
    ),
}


def change_index(folder: Path, **values: object) -> None:
    path = folder / "model_index.json"
    path.chmod(0o644)
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("fault", FOLDER_FAULTS)
def test_a_verification_of_the_cache_is_about_the_whole_folder(
    fault: str, subject: Subject, cache: Cache, first: Verified, tmp_path: Path
) -> None:
    folder = shutil.copytree(subject.folder, tmp_path / "tiny")
    damage, told = FOLDER_FAULTS[fault]
    damage(folder)
    only = None if fault == "no index" else ["text_encoder"]
    verified = verify(dataclasses.replace(subject, folder=folder), SPEC, cache, submodels=only, threads=1)
    assert not verified.result.cached
    assert ("model_index.json", told) in {(where, what) for where, what, _ in verified.result.problems}
    assert page(verified.result, verified.images), "there is a report all the same"


@pytest.mark.parametrize("how", ["passes", "does not pass", "raises"])
def test_a_verification_leaves_nothing_in_the_temporary_folder(
    how: str, subject: Subject, cache: Cache, first: Verified, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    written: list[list[str]] = []

    def look(phrase: str) -> None:
        written.append([path.name.split("-")[1] for path in temporary.glob("sdflow-*")])

    def verified(subject: Subject) -> Verified:
        return verify(subject, SPEC, cache, submodels=["text_encoder"], fresh=True, threads=1, progress=look)

    if how == "raises":
        path = tmp_path / "gone.safetensors"
        gone = LoraFile("gone", path, "0" * 64, 1.0, ("unet",), {"path": str(path)})
        with pytest.raises(SdflowError, match="gone"):
            verified(dataclasses.replace(subject, loras=[gone]))
    else:
        folder = shutil.copytree(subject.folder, tmp_path / "tiny")
        if how == "does not pass":
            (folder / "text_encoder/model.onnx").write_bytes(b"")
        assert verified(dataclasses.replace(subject, folder=folder)).result.passed is (how == "passes")
    assert any("verify" in each for each in written), "there was one while it ran"
    assert list(temporary.iterdir()) == []


def test_the_artifacts_run_with_a_provider_that_is_here(subject: Subject, cache: Cache, first: Verified) -> None:
    phases: list[str] = []
    names = ["text_encoder", "unet"]
    found = verify(subject, SPEC, cache, submodels=names, threads=1, run_on="cpu", progress=phases.append)
    assert found.result.passed, found.result.failure()
    for name in names:
        assert f"{name}: on cpu" in phases
        device, here = found.result.submodels[name].device, found.result.submodels[name].outputs
        assert device is not None
        assert [each.name for each in device.outputs] == [each.name for each in here]
        assert all(each.passed and each.distance > 0 for each in device.outputs)
    assert "With the provider's own kernels" in page(found.result, found.images)
    assert Verification.from_json(found.result.to_json()) == found.result
    kept = verify(subject, SPEC, cache, submodels=names, threads=1).result
    assert kept.cached is False, "the cache does not know one device from another: what ran there is not kept"
    phases.clear()
    again = verify(subject, SPEC, cache, submodels=names, threads=1, run_on="cpu", progress=phases.append)
    assert phases == [f"{name}: on cpu" for name in names], "the rest is known"
    assert not again.result.cached and again.images.keys() == found.images.keys()
    assert {
        name: dataclasses.replace(each, device=None) for name, each in again.result.submodels.items()
    } == kept.submodels
    assert all(each.device is not None and not each.device.problems for each in again.result.submodels.values())


def test_the_provider_runs_with_what_was_tuned_as_a_pipeline_does(
    subject: Subject, cache: Cache, first: Verified, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SDFLOW_TUNING", str(tmp_path))
    result, cases = first.result.submodels["text_encoder"], read_cases(reference_of(cache), "text_encoder")

    def device(tuning: Tuning) -> DeviceVerdict:
        return run_on_device(result, subject.folder, subject.checkpoint.family, "cpu", cases, None, None, tuning)

    chosen = Tuning(threads=1, optimization="ORT_ENABLE_BASIC")
    tuned = device(chosen)
    assert (tuned.tuned, tuned.problems) == ("threads=1, optimization=ORT_ENABLE_BASIC", ())
    submodels = {"text_encoder": dataclasses.replace(result, device=tuned)}
    told = page(dataclasses.replace(first.result, submodels=submodels), first.images)
    assert "own kernels, tuned: threads=1, optimization=ORT_ENABLE_BASIC" in told
    wrong = Tuning(threads=2, session={"session.intra_op_thread_affinities": "nonsense"})
    assert "on cpu it fails at its loading" in device(wrong).problems[0][0], "what was chosen reaches the session"
    record_tuning(subject.folder, TARGETS["cpu"], chosen, {})
    found = verify(subject, SPEC, cache, submodels=["text_encoder"], threads=1, run_on="cpu").result
    there = found.submodels["text_encoder"].device
    assert there is not None and there.tuned == tuned.tuned, "though the process that verifies has another home"


def test_an_artifact_that_the_provider_computes_otherwise_fails_there_alone(
    subject: Subject, cache: Cache, first: Verified, tmp_path: Path
) -> None:
    """What is wrong with a provider is not seen on the CPU: the run beside it is given the right graph."""
    folder = shutil.copytree(subject.folder, tmp_path / "tiny")
    result = first.result.submodels["text_encoder"]
    cases = read_cases(reference_of(cache), "text_encoder")
    graph = folder / "text_encoder/model.onnx"
    graph.chmod(0o644)
    model = onnx.load(graph, load_external_data=False)
    (gelu,) = [node for node in model.graph.node if node.op_type == "Sigmoid"][:1]
    gelu.op_type = "Tanh"
    graph.write_bytes(model.SerializeToString())
    device = run_on_device(result, folder, subject.checkpoint.family, "cpu", cases, None)
    assert "on cpu, last_hidden_state is" in device.problems[0][0]
    graph.write_bytes(b"")
    device = run_on_device(result, folder, subject.checkpoint.family, "cpu", cases, None)
    assert device.outputs == ()
    assert "on cpu it fails at its loading" in device.problems[0][0]


def test_a_provider_that_wants_static_shapes_runs_every_case(
    subject: Subject, cache: Cache, first: Verified, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = TARGETS["cpu"]
    fixed = dataclasses.replace(cpu, session=dataclasses.replace(cpu.session, static_shapes=True))
    monkeypatch.setitem(cast("dict[str, Target]", TARGETS), "cpu", fixed)
    cases = read_cases(reference_of(cache), "text_encoder")
    result = first.result.submodels["text_encoder"]
    device = run_on_device(result, subject.folder, subject.checkpoint.family, "cpu", cases, None)
    assert device.problems == ()
    assert [each.name for each in device.outputs] == [each.name for each in result.outputs]


def reference_of(cache: Cache) -> Path:
    """Any that has the text encoder: its cases are the same in all."""
    return next(path.parent for path in cache.root.rglob("text_encoder.npz"))


def test_a_provider_that_is_not_here_is_refused_before_anything_is_computed(subject: Subject, cache: Cache) -> None:
    phases: list[str] = []
    with pytest.raises(TargetUnavailableError, match="--run-on directml: the artifacts cannot run there") as raised:
        verify(subject, SPEC, cache, run_on="directml", progress=phases.append)
    assert raised.value.exit_code == 5
    assert raised.value.remedy
    assert phases == []


def test_a_truncated_data_file_is_found(subject: Subject, cache: Cache, first: Verified, tmp_path: Path) -> None:
    folder = shutil.copytree(subject.folder, tmp_path / "tiny")
    data = folder / "text_encoder/model.onnx.data"
    data.chmod(0o644)
    data.write_bytes(data.read_bytes()[:-4096])
    found = verify(dataclasses.replace(subject, folder=folder), SPEC, cache, submodels=["text_encoder"]).result
    assert not found.passed
    assert "cut off" in found.failure()


def test_a_submodel_that_is_not_there_is_said(subject: Subject, cache: Cache) -> None:
    with pytest.raises(UsageError, match="no unett"):
        verify(subject, SPEC, cache, submodels=["unett"])


def test_a_size_that_the_unet_cannot_have_is_said(subject: Subject, cache: Cache) -> None:
    with pytest.raises(UsageError, match=r"verify\.height is 72"):
        verify(subject, VerifySpec(height=72), cache)


def test_the_page_needs_nothing_else_and_shows_everything(first: Verified) -> None:
    text = page(first.result, first.images)
    assert re.findall(r'(?:src|href)="(?!data:)', text) == [], "nothing is loaded from elsewhere"
    assert text.count("data:image/png;base64,") == 3
    assert "<svg" in text
    assert "amplified 10 times" in text
    assert "http" not in text
    for name in first.result.submodels:
        assert name in text


def test_json_comes_back_as_it_was(first: Verified) -> None:
    written = json.loads(json.dumps(first.result.to_json(), allow_nan=False))
    assert written["format_version"] == 2
    assert written["passed"] is True
    assert Verification.from_json(written) == first.result


# In `sdflow run`


def _workflow(folder: Path, passes: list[dict[str, object]]) -> Path:
    path = folder / "small.yaml"
    content = {
        "model": "synthetic:sd15-tiny",
        "target": "cpu",
        "submodels": {"text_encoder": {"passes": passes}},
        "evaluate": {"image": None, "latency": None},
        "verify": {"steps": 2, "height": 64, "width": 64},
    }
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_run_whose_verification_fails_assembles_nothing_and_leaves_what_was_there(
    cache: Cache, tmp_path: Path
) -> None:
    conversion: dict[str, object] = {"pass": "OnnxConversion", "target_opset": 17}
    options = RunOptions(out=tmp_path / "pipelines", results=tmp_path / "results")

    def run(passes: list[dict[str, object]], **more: bool) -> None:
        loaded = load_workflow(_workflow(tmp_path, passes), catalog=registry.catalog())
        run_workflow(loaded, cache, dataclasses.replace(options, **more), Events())

    run([conversion])
    folder = options.out / "small"
    good = (folder / "sdflow.json").read_bytes()
    assert json.loads(good)["verified"] == "quick"

    broken = [conversion, {"pass": f"{BREAKING}:ZeroBias"}]
    with pytest.raises(VerificationError) as raised:
        run(broken)
    message = str(raised.value)
    assert raised.value.exit_code == 4
    assert "text_encoder: last_hidden_state is" in message
    assert "Nothing was assembled" in message
    assert (folder / "sdflow.json").read_bytes() == good
    report = options.results / "small.verify.html"
    assert "FAILED" in report.read_text()
    assert json.loads((options.results / "small.verify.json").read_text())["passed"] is False

    run(broken, verify=False)
    assert json.loads((folder / "sdflow.json").read_text())["verified"] is None


def test_a_damaged_recipe_and_a_wrong_block_are_found(tmp_path: Path) -> None:
    """The weights that are there are good; what the next checkpoint would be bound by is not."""
    cache = Cache(tmp_path / "cache")
    path = _workflow(tmp_path, [{"pass": "OnnxConversion", "target_opset": 17}])
    options = RunOptions(out=tmp_path / "pipelines", results=tmp_path / "results")
    loaded = load_workflow(path, catalog=registry.catalog())
    (built,) = run_workflow(loaded, cache, options, Events()).pipelines
    assert built.verification is not None
    assert built.verification.passed

    folder = options.out / "small"
    structure = structure_of(read_manifest(folder).origin.chains["text_encoder"], cache.root)
    assert structure is not None
    graph = structure / "model.onnx"
    good = graph.read_bytes()
    name = b"layers.0.self_attn.q_proj.weight"
    assert good.count(name) >= 1
    graph.chmod(0o644)
    model = onnx.load_from_string(good)
    changed = [
        entry
        for tensor in model.graph.initializer
        for entry in tensor.external_data
        if entry.key == "recipe" and name.decode() in entry.value
    ]
    for entry in changed:
        entry.value = entry.value.replace("q_proj.weight", "k_proj.weight")
    assert changed
    graph.write_bytes(model.SerializeToString())

    found = verify(subject_of_folder(folder, cache), SPEC, cache, submodels=["text_encoder"], threads=1).result
    assert not found.passed
    assert "k_proj.weight" in found.failure()
    assert "build the structure again" in found.failure()

    graph.write_bytes(good)
    bound = folder / "text_encoder/model.onnx"
    model = onnx.load(bound, load_external_data=False)
    (sigmoid, *_) = [node for node in model.graph.node if node.op_type == "Sigmoid"]
    sigmoid.op_type = "Tanh"
    bound.write_bytes(model.SerializeToString())
    found = verify(subject_of_folder(folder, cache), SPEC, cache, submodels=["text_encoder"], threads=1).result
    block = found.submodels["text_encoder"].block
    assert block is not None
    assert "layers.0" in block.first
    assert block.first in found.failure()


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("", VerifySpec()),
        ("verify: off", None),
        ("verify: false", None),
        ("verify:", None),
        ("verify: full", VerifySpec(level="full")),
        ("verify: {steps: 3, height: 128, width: 64}", VerifySpec(steps=3, height=128, width=64)),
    ],
)
def test_the_section_of_the_workflow(written: str, expected: VerifySpec | None, tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(f"extends: {ROOT}/workflows/tiny_cpu.yaml\n{written}\n")
    (pipeline,) = load_workflow(path, catalog=registry.catalog()).pipelines
    assert pipeline.verify == expected


def test_what_differs_for_a_target_and_set_come_after_the_files(tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    overlay = "targets: {cpu: {verify: {steps: 5}}}"
    path.write_text(f"extends: {ROOT}/workflows/tiny_cpu.yaml\nverify: {{level: full}}\n{overlay}\n")
    load = {"catalog": registry.catalog()}
    (pipeline,) = load_workflow(path, **load).pipelines
    assert pipeline.verify == VerifySpec(level="full", steps=5)
    (pipeline,) = load_workflow(path, overrides=["verify.steps=7"], **load).pipelines
    assert pipeline.verify == VerifySpec(level="full", steps=7)


def test_a_read_only_cache_is_verified_with_and_keeps_nothing(subject: Subject, tmp_path: Path) -> None:
    """Nor does it end the run: what it holds can be used."""
    cache = Cache(tmp_path / "cache")
    cache.gc()
    (cache.root / "v1/staging").mkdir(parents=True, exist_ok=True)

    def run() -> None:
        read_only(cache.root)
        if Cache(cache.root).writable:
            return  # this process may neither mount nor give up its rights
        said: list[str] = []
        found = verify(subject, SPEC, Cache(cache.root), submodels=["text_encoder"], threads=1, progress=said.append)
        assert found.result.passed
        assert "the cache is read-only: the result is not saved" in said

    assert in_process(run)
    assert cache.entries() == []
