"""Structure once, weights in seconds: what a chain shares, when it carries its weights, and that both give the same."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from forked_workers import forking
from small_lora import write_lora
from small_workflows import SMALL_PASSES, TESTS, Bench, Events
from started_python import StartedPython

from sdflow.artifact import Record
from sdflow.build.compared_base import compared_base
from sdflow.build.execute import Executor
from sdflow.build.listener import FinishedStep
from sdflow.build.step import Step
from sdflow.errors import InputChanged, PassError, WorkflowError
from sdflow.store import Cache
from sdflow.store.stat_cache import SHA256, Known, identity
from sdflow.weights.stream import PAGE_SUMS

TEXT_ENCODER = "small/text_encoder"
OPTIMIZE = {"pass": "OrtTransformersOptimization", "model_type": "clip"}
CHAIN = ({"pass": "OnnxConversion"}, {"pass": "LoraMerge"}, OPTIMIZE)


@pytest.fixture(scope="module")
def shared(started_python: StartedPython | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """The small text encoder's chain, built once; tests that follow find it in the cache."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("shared")
        patch.setenv("TMPDIR", str(folder))
        patch.setenv("PYTHONPATH", str(TESTS.parent))
        bench = Bench(folder)
        with forking(started_python):
            bench.run(workflow(bench))
        bench.events.heard.clear()
        yield bench


def workflow(bench: Bench, *passes: dict[str, Any], **more: Any) -> Path:
    """A workflow of the text encoder alone."""
    return bench.workflow([], submodels={"text_encoder": {"passes": list(passes or CHAIN)}}, **more)


def outcomes(steps: tuple[FinishedStep, ...]) -> dict[str, str]:
    return {step.step.name: step.outcome for step in steps}


def files(steps: tuple[FinishedStep, ...]) -> dict[str, bytes]:
    """The content of the last artifact."""
    return {path.name: path.read_bytes() for path in steps[-1].record.artifact.path.iterdir()}


@pytest.mark.usefixtures("forked_workers")
def test_another_checkpoint_executes_only_bindweights(shared: Bench) -> None:
    first = shared.run(workflow(shared))[TEXT_ENCODER]
    assert set(outcomes(first).values()) == {"cached"}
    second = shared.run(workflow(shared, model="synthetic:sd15-tiny?seed=1"))[TEXT_ENCODER]
    assert outcomes(second) == {
        "OnnxConversion": "cached", "OrtTransformersOptimization": "cached", "BindWeights": "built"
    }  # fmt: skip
    assert files(first)["model.onnx.data"] != files(second)["model.onnx.data"]
    assert second[0].record.artifact.bytes < 200_000, "a graph without weights"


def test_plan_and_explain_name_the_checkpoint_that_changed(shared: Bench) -> None:
    shared.run(workflow(shared))
    (pipeline,) = shared.plan(workflow(shared, model="synthetic:sd15-tiny?seed=2")).pipelines
    reasons = {planned.step.name: planned.reasons for planned in pipeline.steps(shared.cache)}
    assert reasons == {
        "OnnxConversion": (), "OrtTransformersOptimization": (), "BindWeights": ("checkpoint seed: 0 -> 2",)
    }  # fmt: skip
    assert pipeline.notes == ()


@pytest.mark.usefixtures("forked_workers")
def test_carried_weights_give_the_same_bytes_with_and_without_loras(shared: Bench) -> None:
    lora = write_lora(shared.folder / "both.safetensors", ["text_encoder"])
    for loras in ([], [{"file": str(lora), "scale": 0.7}]):
        bound = shared.run(workflow(shared, loras=loras))[TEXT_ENCODER]
        carried = shared.run(workflow(shared, loras=loras), "carry_weights=true")[TEXT_ENCODER]
        assert [step.step.weights for step in carried] == ["carried"] * (2 + bool(loras))
        assert files(bound) == files(carried)
    (note,) = shared.plan(workflow(shared), "carry_weights=true").pipelines[0].notes
    assert note.startswith("text_encoder: ")
    assert note.endswith("carry_weights: true")


@pytest.mark.usefixtures("forked_workers")
def test_a_lora_executes_only_bindweights_and_starts_from_the_model_without_it(shared: Bench) -> None:
    first = shared.run(workflow(shared))[TEXT_ENCODER]
    lora = {"file": str(write_lora(shared.folder / "ink.safetensors", ["text_encoder"], seed=1)), "scale": 0.5}
    from_base = shared.run(workflow(shared, loras=[lora]))[TEXT_ENCODER]
    assert outcomes(from_base)["BindWeights"] == "built"
    assert list(outcomes(from_base).values()).count("built") == 1
    assert from_base[-1].record.facts["touched"] == 4
    assert from_base[-1].record.facts["computed"] < first[-1].record.facts["computed"]
    checked = shared.run(workflow(shared, loras=[lora]), check=True)[TEXT_ENCODER]
    assert outcomes(checked)["BindWeights"] == "checked", "computed from nothing it has the same bytes"


@pytest.mark.usefixtures("forked_workers")
def test_a_new_scale_builds_nothing_but_bindweights(shared: Bench) -> None:
    lora = {"file": str(write_lora(shared.folder / "scale.safetensors", ["text_encoder"], seed=2))}
    shared.run(workflow(shared, loras=[{**lora, "scale": 0.1}]))
    steps = shared.run(workflow(shared, loras=[{**lora, "scale": 0.2}]))[TEXT_ENCODER]
    assert [name for name, outcome in outcomes(steps).items() if outcome == "built"] == ["BindWeights"]


@pytest.mark.parametrize(
    ("passes", "reason"),
    [
        (({"pass": "OnnxConversion"}, {"pass": "OnnxPeepholeOptimizer"}), "OnnxPeepholeOptimizer may look at"),
        (({"pass": "OnnxConversion"}, {"pass": f"{SMALL_PASSES}:Append"}), "Append may look at the weights"),
        (({"pass": "OnnxConversion"}, {**OPTIMIZE, "opt_level": 1}), "opt_level 1 lets ONNX Runtime fold weights"),
    ],
)
def test_a_chain_with_another_pass_carries_its_weights_and_says_so(
    bench: Bench, passes: tuple[dict[str, Any], ...], reason: str
) -> None:
    (pipeline,) = bench.plan(workflow(bench, *passes)).pipelines
    assert [planned.step.weights for planned in pipeline.steps(bench.cache)] == ["carried"] * 2
    (note,) = pipeline.notes
    assert note.startswith("text_encoder: ")
    assert reason in note


# Python imports this in every process. It is a fusion that reads a value, as a later release may have one.
NOSY = """
import importlib.util, sys

class Finder:
    def find_spec(self, name, path, target=None):
        if name != "fusion_quickgelu":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            import onnx
            load(module)
            original = module.FusionQuickGelu.fuse

            def nosy(self, *arguments):
                weight = next(each for each in self.model.model.graph.initializer if len(each.dims) == 2)
                if onnx.numpy_helper.to_array(weight).max() > 0:
                    original(self, *arguments)

            module.FusionQuickGelu.fuse = nosy

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


def test_a_pass_that_looks_at_a_weight_gets_the_weights_and_the_output_says_so(
    shared: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(NOSY)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(TESTS.parent)]))
    # Another option, as what is in the cache already was built without that fusion.
    path = workflow(shared, CHAIN[0], {**OPTIMIZE, "optimization_options": {"enable_bias_gelu": False}}, name="small")
    shared.events.heard.clear()
    steps = shared.run(path)[TEXT_ENCODER]
    (note,) = (text for kind, text in shared.events.heard if kind == "note")
    assert "OrtTransformersOptimization" in note
    assert "reads the values of" in note
    assert "with its weights carried" in note
    assert [step.step.weights for step in steps] == ["carried", "carried"]
    assert steps[-1].record.facts["operators"]["QuickGelu"] == 2

    shared.events.heard.clear()
    again = shared.run(path)[TEXT_ENCODER]
    assert set(outcomes(again).values()) == {"cached"}, "the second run executes no pass"
    assert any(kind == "note" for kind, _ in shared.events.heard)
    (pipeline,) = shared.plan(path).pipelines
    assert [(planned.step.weights, planned.state) for planned in pipeline.steps(shared.cache)] == [
        ("carried", "cached")
    ] * 2


def kill_workers(over: threading.Event) -> None:
    """Kill every worker that a server of this process forks."""
    while not over.is_set():
        for server in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                for worker in server.children():
                    worker.kill()


def test_a_killed_bind_leaves_nothing_and_the_next_run_goes_on(shared: Bench) -> None:
    """The graph is there already: whatever works is a bind. One may be done before it is seen, then another's turn comes."""
    over = threading.Event()
    killer = threading.Thread(target=kill_workers, args=(over,))
    killer.start()
    try:
        for seed in range(30, 40):
            path = workflow(shared, model=f"synthetic:sd15-tiny?seed={seed}")
            try:
                shared.run(path)
            except PassError as error:
                said = str(error)
                break
        else:
            raise AssertionError("no bind was killed")
    finally:
        over.set()
        killer.join()
    assert re.search(r"text_encoder/2 BindWeights.*SIGKILL", said), said
    assert list((shared.folder / "cache/v1/staging").iterdir()) == []
    assert outcomes(shared.run(path)[TEXT_ENCODER])["BindWeights"] == "built"


def with_lora(bench: Bench, seed: int, **options: Any) -> tuple[FinishedStep, ...]:
    """A run with a LoRA that no other test has."""
    lora = {"file": str(write_lora(bench.folder / f"{seed}.safetensors", ["text_encoder"], seed=seed)), "scale": 0.5}
    return bench.run(workflow(bench, loras=[lora]), **options)[TEXT_ENCODER]


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("noted", ["digest", "digest and sums"])
def test_a_flipped_bit_in_the_base_is_found_while_it_is_copied(shared: Bench, noted: str) -> None:
    lora = {
        "file": str(write_lora(shared.folder / "bit.safetensors", ["text_encoder"], seed=5)),
        "scale": len(noted) / 9,
    }
    base = shared.run(workflow(shared))[TEXT_ENCODER][-1].record
    data = base.artifact.path / "model.onnx.data"
    compared = compared_base(base, shared.cache.stat)
    assert compared is not None and compared.sums is not None
    sound = data.read_bytes()
    stat = data.stat()
    data.chmod(0o644)
    with data.open("r+b") as stream:  # in what the LoRA does not touch, and so that nobody sees it in the file's stat
        stream.seek(len(sound) // 2)
        stream.write(bytes([sound[len(sound) // 2] ^ 1]))
    data.chmod(0o444)
    os.utime(data, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    cache = shared.cache
    cache.stat.remember([Known(data, SHA256, identity(data.stat()), digest_file_of(sound))])
    if "sums" in noted:
        cache.stat.remember([Known(data, PAGE_SUMS, identity(data.stat()), compared.sums)])
    cache.stat.close()
    steps = shared.run(workflow(shared, loras=[lora]))[TEXT_ENCODER]
    assert outcomes(steps)["BindWeights"] == "built"
    assert not data.exists(), "it went to quarantine"
    assert files(steps) == files(shared.run(workflow(shared, loras=[lora]), "carry_weights=true")[TEXT_ENCODER])
    again = shared.run(workflow(shared))[TEXT_ENCODER]
    assert outcomes(again)["BindWeights"] == "built"
    assert files(again)["model.onnx.data"] == sound


def sums_of(record: Record, cache: Cache) -> str | None:
    found = compared_base(record, cache.stat)
    assert found is not None
    return found.sums


def test_a_base_whose_stat_has_changed_is_hashed_and_its_sums_are_noted_again(shared: Bench) -> None:
    base = shared.run(workflow(shared))[TEXT_ENCODER][-1].record
    noted = sums_of(base, shared.cache)
    assert noted is not None
    data = base.artifact.path / "model.onnx.data"
    os.utime(data)
    assert sums_of(base, shared.cache) is None
    assert outcomes(with_lora(shared, 11))["BindWeights"] == "built"
    assert sums_of(base, shared.cache) == noted


def test_rehash_believes_no_sums(shared: Bench) -> None:
    base = shared.run(workflow(shared))[TEXT_ENCODER][-1].record
    assert sums_of(base, shared.cache) is not None
    assert sums_of(base, Cache(shared.folder / "cache", rehash=True)) is None


def test_sums_that_are_wrong_are_forgotten(shared: Bench) -> None:
    """The base is sound, so it stays; the next run hashes it."""
    base = shared.run(workflow(shared))[TEXT_ENCODER][-1].record
    data = base.artifact.path / "model.onnx.data"
    shared.cache.stat.remember([Known(data, PAGE_SUMS, identity(data.stat()), "0" * 64)])
    with pytest.raises(PassError, match="does not have the content"):
        with_lora(shared, 12)
    assert data.exists()
    assert outcomes(with_lora(shared, 12))["BindWeights"] == "built"
    assert sums_of(base, shared.cache) not in (None, "0" * 64)


@dataclass
class Touching(Events):
    """Renews the stat of a file while a bind writes."""

    file: Path = Path()

    def phase(self, step: Step, phrase: str) -> None:
        if phrase.startswith("weights"):
            self.file.chmod(0o644)
            self.file.chmod(0o444)


def test_a_base_that_changes_under_a_bind_is_refused(shared: Bench) -> None:
    """Its sums were believed for its stat: what is written counts only if that is still the same."""
    base = shared.run(workflow(shared))[TEXT_ENCODER][-1].record
    assert sums_of(base, shared.cache) is not None
    touching = Touching(file=base.artifact.path / "model.onnx.data")
    with pytest.raises(InputChanged, match=r"model\.onnx\.data"):
        with_lora(Bench(shared.folder, touching), 13)
    assert outcomes(with_lora(shared, 13))["BindWeights"] == "built"


def digest_file_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.mark.usefixtures("forked_workers")
def test_many_loras_for_two_targets_are_two_structures_and_a_bind_each(shared: Bench) -> None:
    loras = {
        f"l{seed}": [{"file": str(write_lora(shared.folder / f"l{seed}.safetensors", ["text_encoder"], seed))}]
        for seed in range(10, 13)
    }
    other = {"passes": {"OrtTransformersOptimization": {"optimization_options": {"enable_gelu": False}}}}
    path = workflow(shared, matrix={"loras": loras, "target": ["cpu", "cuda"]}, targets={"cuda": other})
    plan = shared.plan(path)
    finished = Executor(shared.cache, shared.events, jobs=2).run_all(
        plan.pipelines, lambda pipeline, steps, begun, group: (pipeline.pipeline.name, steps["text_encoder"])
    )
    assert [name for name, _ in finished] == [
        f"small-l{seed}-{target}" for seed in (10, 11, 12) for target in ("cpu", "cuda")
    ]
    built = Counter(step.step.name for _, steps in finished for step in steps if step.outcome == "built")
    assert built == {"BindWeights": 6, "OrtTransformersOptimization": 1}, "the other structure was in the cache"
    assert len({steps[-1].record.artifact.digest for _, steps in finished}) == 3 * 2


@pytest.mark.usefixtures("forked_workers")
def test_a_recipe_damaged_on_purpose_is_found_and_built_again(shared: Bench) -> None:
    structure = shared.run(workflow(shared))[TEXT_ENCODER][1].record.artifact.path / "model.onnx"
    structure.chmod(0o644)
    content = structure.read_bytes()
    structure.write_bytes(content.replace(b"layers.0.mlp.fc1.bias", b"layers.1.mlp.fc1.bias", 1))
    steps = shared.run(workflow(shared, model="synthetic:sd15-tiny?seed=4"))[TEXT_ENCODER]
    assert outcomes(steps) == {
        "OnnxConversion": "cached", "OrtTransformersOptimization": "built", "BindWeights": "built"
    }  # fmt: skip
    assert (steps[1].record.artifact.path / "model.onnx").read_bytes() == content


def test_bindweights_cannot_be_written_into_a_workflow(bench: Bench) -> None:
    path = workflow(bench, {"pass": "OnnxConversion"}, {"pass": "BindWeights"})
    with pytest.raises(WorkflowError, match="sdflow appends it to chains that need it"):
        bench.plan(path)
