"""Files that change between the moment in which their digest is taken and the one in which they are read.

What was read then is not what the key says. So the run ends, and nothing of it is kept: no artifact, no verdict, no pipeline.
"""

from __future__ import annotations

import os
import py_compile
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from small_lora import write_lora
from small_workflows import SMALL_PASSES, Bench, Events

from sdflow.artifact import Record
from sdflow.bench.run import BenchRequest
from sdflow.bench.run import bench as measure
from sdflow.bench.sweep import Settings, SweepPoint
from sdflow.build.assemble import assemble
from sdflow.build.execute import Executor
from sdflow.build.plan import Plan
from sdflow.build.step import Step
from sdflow.config import load_workflow
from sdflow.config.workflow import VerifySpec
from sdflow.disk.file_stamp import check_stamps, file_stamp
from sdflow.errors import InputChanged, UsageError
from sdflow.manifest import Origin
from sdflow.passes import registry
from sdflow.passes.user_pass import load_user_pass
from sdflow.run.bake import bake
from sdflow.run.options import RunOptions
from sdflow.run.run import run_workflow
from sdflow.sources import PlainDigests, open_checkpoint
from sdflow.store import Cache
from sdflow.verify import Subject, verify

pytestmark = pytest.mark.usefixtures("forked_workers")
CHANGED = "has changed since the build was planned"


def edit(path: Path) -> None:
    """Another last byte. Size and mtime are put back."""
    before = path.stat()
    with path.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        last = stream.read(1)[0]
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([last ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def replace_by(other: Path, path: Path) -> None:
    """Another file in its place, of the same size and mtime."""
    before = path.stat()
    fresh = shutil.copy(other, path.with_name(f"{path.name}.new"))
    os.utime(fresh, ns=(before.st_atime_ns, before.st_mtime_ns))
    Path(fresh).replace(path)
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


@dataclass
class AtTheStart(Events):
    """Does something when the step of this pass starts, before its process does."""

    name: str = ""
    does: Callable[[], object] = field(default=lambda: None)

    def started(self, step: Step) -> None:
        super().started(step)
        if step.name.endswith(self.name):
            self.does()


def run(bench: Bench, plan: Plan, events: Events | None = None) -> Record:
    """The last step's record of the one chain of the one pipeline."""
    (pipeline,) = plan.pipelines
    (steps,) = Executor(bench.cache, events or Events()).run(pipeline).values()
    return steps[-1].record


def passes_of(cache: Cache) -> list[str]:
    return sorted(entry.pass_name for entry in cache.entries())


@pytest.fixture
def loras(tmp_path: Path) -> tuple[Path, Path]:
    """Two LoRAs of one size."""
    made = [write_lora(tmp_path / f"{name}.safetensors", ["unet"], seed) for seed, name in enumerate(("ink", "other"))]
    assert made[0].stat().st_size == made[1].stat().st_size
    return made[0], made[1]


MERGE = [{"pass": "Convert", "text": "a"}, {"pass": "Merge"}]


@pytest.mark.parametrize("when", ["after planning", "as the step starts"])
def test_a_lora_replaced_after_planning_is_never_cached_under_the_other_ones_key(
    bench: Bench, loras: tuple[Path, Path], when: str
) -> None:
    lora, other = loras
    kept = shutil.copy(lora, bench.folder / "kept")
    workflow = bench.workflow(MERGE, loras=[{"file": str(lora), "scale": 0.5}])
    plan = bench.plan(workflow)
    if when == "after planning":
        replace_by(other, lora)
    events = AtTheStart(name="Merge", does=lambda: replace_by(other, lora) if when != "after planning" else None)
    with pytest.raises(InputChanged, match=CHANGED):
        run(bench, plan, events)
    assert passes_of(bench.cache) == ["Convert"]
    replace_by(Path(kept), lora)
    bench.ran()
    again = run(bench, bench.plan(workflow))
    assert bench.ran() == ["Merge"]
    fresh = Bench(bench.folder / "fresh")
    fresh.folder.mkdir()
    assert run(fresh, bench.plan(workflow)).artifact.digest == again.artifact.digest


SWAPPING = """
import json, os
from pathlib import Path
from sdflow.passes.base import Pass, PassConfig

class Swapping(Pass[PassConfig]):
    name, version, takes_loras, accepts, Config = "Swapping", 1, True, "checkpoint", PassConfig

    def run(self, inputs, out, config):
        (lora,) = inputs.loras
        held = lora.path.with_name("held")
        lora.path.rename(held)
        lora.path.with_name("other.safetensors").rename(lora.path)
        (out / "model.onnx").write_bytes(lora.path.read_bytes())
        lora.path.rename(lora.path.with_name("other.safetensors"))
        held.rename(lora.path)
        return {}
"""


def test_a_lora_replaced_while_it_is_read_and_put_back_is_never_cached(bench: Bench, loras: tuple[Path, Path]) -> None:
    """The pass itself does it: it reads another file, and the first one is back when it ends."""
    lora, _ = loras
    before = lora.read_bytes()
    script = bench.folder / "swapping.py"
    script.write_text(SWAPPING)
    chain = {"unet": {"passes": [{"pass": str(script)}]}}
    with pytest.raises(InputChanged, match=CHANGED):
        run(bench, bench.plan(bench.workflow([], loras=[{"file": str(lora)}], submodels=chain)))
    assert lora.read_bytes() == before
    assert passes_of(bench.cache) == []


def test_a_failure_of_a_pass_that_read_a_changed_file_is_told_as_such(bench: Bench, loras: tuple[Path, Path]) -> None:
    plan = bench.plan(bench.workflow([MERGE[0], {**MERGE[1], "fail": True}], loras=[{"file": str(loras[0])}]))
    with pytest.raises(InputChanged, match=CHANGED):
        run(bench, plan, AtTheStart(name="Merge", does=lambda: edit(loras[0])))


@pytest.mark.parametrize("name", ["mine.py", "beside.py"])
def test_a_script_edited_after_planning_is_never_cached_under_the_old_key(bench: Bench, name: str) -> None:
    script = bench.folder / "mine.py"
    script.write_text(f"{SMALL_PASSES.read_text()}\nimport beside  # noqa\n")
    (bench.folder / "beside.py").write_text("WORD = 1\n")
    plan = bench.plan(bench.workflow([], submodels={"unet": {"passes": [{"pass": f"{script}:Convert"}]}}))
    edit(bench.folder / name)
    with pytest.raises(InputChanged, match=CHANGED):
        run(bench, plan)
    assert passes_of(bench.cache) == []


def test_what_a_script_imports_is_compiled_from_its_source(tmp_path: Path) -> None:
    """Compiled code beside it counts as its own when size and second are equal: here it is of another source."""
    (tmp_path / "mine.py").write_text(
        "import word_beside\nfrom sdflow.passes.base import Pass, PassConfig\n"
        "class Mine(Pass[PassConfig]):\n    name, version, Config = word_beside.WORD, 1, PassConfig\n"
        "    def run(self, inputs, out, config): return {}\n"
    )
    beside = tmp_path / "word_beside.py"
    beside.write_text("WORD = 'old'\n")
    before = beside.stat()
    py_compile.compile(str(beside))
    beside.write_text("WORD = 'new'\n")
    os.utime(beside, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert load_user_pass("mine.py", tmp_path).name == "new"
    (tmp_path / "other").mkdir()
    (tmp_path / "other/word_beside.py").write_text("WORD = 'of another folder'\n")
    shutil.copy(tmp_path / "mine.py", tmp_path / "other/yours.py")
    assert load_user_pass("yours.py", tmp_path / "other").name == "of another folder"


# A real checkpoint


@pytest.fixture(scope="module")
def saved(tiny_torch: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "tiny"
    tiny_torch.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


WEIGHTS = "text_encoder/model.safetensors"


def test_a_checkpoint_edited_before_bindweights_reads_it_is_never_cached(bench: Bench, folder: Path) -> None:
    """The graph is there; then the planned run finds other weights, of the same size and time."""
    chain = {"text_encoder": {"passes": [{"pass": "OnnxConversion"}, {"pass": "LoraMerge"}]}}
    workflow = bench.workflow([], submodels=chain, model=str(folder))
    plan = bench.plan(workflow)
    with pytest.raises(InputChanged, match=CHANGED):
        run(bench, plan, AtTheStart(name="BindWeights", does=lambda: edit(folder / WEIGHTS)))
    assert passes_of(bench.cache) == ["OnnxConversion"]
    edited = run(bench, bench.plan(workflow))
    edit(folder / WEIGHTS)  # once more: as it was
    assert run(bench, bench.plan(workflow)).artifact.digest != edited.artifact.digest
    assert passes_of(bench.cache) == ["BindWeights", "BindWeights", "OnnxConversion"]


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer/tokenizer_config.json"])
def test_a_verification_of_what_has_changed_meanwhile_is_not_kept(
    folder: Path, tiny_artifacts: Any, tmp_path: Path, name: str
) -> None:
    checkpoint = open_checkpoint(str(folder), digests=PlainDigests(), download=False)
    pipeline, cache = tmp_path / "pipeline", Cache(tmp_path / "cache")
    assemble(pipeline, parts=tiny_artifacts, companions=checkpoint.companions, origin=Origin("tiny", "cpu"))
    subject = Subject("tiny", "cpu", pipeline, checkpoint)
    changed: list[str] = []

    def once(phrase: str) -> None:
        if not changed and "loading text_encoder" in phrase:
            changed.append(phrase)
            edit(folder / name)

    spec = VerifySpec(steps=1, height=64, width=64)
    with pytest.raises(InputChanged, match=CHANGED):
        verify(subject, spec, cache, submodels=["text_encoder"], threads=1, progress=once)
    assert changed
    assert cache.entries() == []


def test_a_verification_of_a_folder_that_is_exchanged_meanwhile_is_not_kept(
    tiny_checkpoint: Any, tiny_artifacts: Any, tmp_path: Path
) -> None:
    pipeline, cache = tmp_path / "pipeline", Cache(tmp_path / "cache")
    parts = {"parts": tiny_artifacts, "companions": tiny_checkpoint.companions}
    assemble(pipeline, **parts, origin=Origin("tiny", "cpu"), copy=True)
    subject = Subject("tiny", "cpu", pipeline, tiny_checkpoint)

    def exchange(phrase: str) -> None:
        if "comparing" in phrase:
            assemble(pipeline, **parts, origin=Origin("other", "cpu"), copy=True)

    spec = VerifySpec(steps=1, height=64, width=64)
    with pytest.raises(InputChanged, match="has changed since its verification began"):
        verify(subject, spec, cache, submodels=["text_encoder"], threads=1, progress=exchange)
    assert passes_of(cache) == ["VerifyReference"]


def test_a_tokenizer_that_changes_before_it_is_copied_is_not_assembled(bench: Bench, folder: Path) -> None:
    @dataclass
    class AtTheEnd(Events):
        def finished(self, result: Any) -> None:
            edit(folder / "tokenizer/tokenizer_config.json")

    workflow = bench.workflow([MERGE[0]], model=str(folder))
    options = RunOptions(bench.folder / "pipelines", bench.folder / "results", verify=False, evaluate=False)
    loaded = load_workflow(workflow, catalog=registry.catalog())
    with pytest.raises(InputChanged, match=CHANGED):
        run_workflow(loaded, bench.cache, options, AtTheEnd())
    assert not (bench.folder / "pipelines/small").exists()


def test_a_base_whose_checkpoint_has_changed_is_not_baked(bench: Bench, folder: Path, loras: tuple[Path, Path]) -> None:
    """One opening: what is compared with the base's manifest is what is planned with."""
    workflow = bench.workflow(MERGE, model=str(folder), loras=[{"file": str(loras[0])}])
    options = RunOptions(bench.folder / "pipelines", bench.folder / "results", verify=False, evaluate=False)
    run_workflow(load_workflow(workflow, catalog=registry.catalog()), bench.cache, options, Events())
    before = passes_of(bench.cache)
    edit(folder / "unet/diffusion_pytorch_model.safetensors")
    base, out = bench.folder / "pipelines/small", bench.folder / "baked"
    with pytest.raises(UsageError, match="differs from the one that this pipeline was built from"):
        bake(base, [f"{loras[1]}:0.5"], out, bench.cache, Events())
    assert passes_of(bench.cache) == before
    assert not out.exists()


def test_a_measurement_of_a_folder_that_changes_meanwhile_gives_no_figures(tiny_pipeline: Path, tmp_path: Path) -> None:
    pipeline = Path(shutil.copytree(tiny_pipeline, tmp_path / "pipeline"))

    def say(text: str) -> None:
        if "round 1" in text:
            edit(pipeline / "tokenizer/vocab.json")

    request = BenchRequest(
        pipeline, [SweepPoint(1, 64, 64, 1)], Settings(rounds=1, threads=1), engines=["ort-cpu"], check=False
    )
    with pytest.raises(InputChanged, match="has changed since the measurement began"):
        measure(request, say)


# Stamps


def test_a_stamp_tells_any_later_write_however_soon(tmp_path: Path) -> None:
    """A file that was written this moment is waited for: a write within the same tick of the clock would leave no trace."""
    path = tmp_path / "file"
    for number in range(30):
        path.write_bytes(b"%04d" % number)
        stamp = file_stamp(path)
        check_stamps([stamp])
        before = path.stat()
        path.write_bytes(b"%04d" % (number + 1))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        with pytest.raises(InputChanged, match=CHANGED):
            check_stamps([stamp])


def test_a_stamp_tells_a_file_that_is_gone_and_another_in_its_place(tmp_path: Path) -> None:
    path, other = tmp_path / "file", tmp_path / "other"
    path.write_bytes(b"a")
    other.write_bytes(b"a")
    stamp = file_stamp(path)
    replace_by(other, path)
    with pytest.raises(InputChanged, match=CHANGED):
        check_stamps([stamp])
    path.unlink()
    with pytest.raises(InputChanged, match="cannot be read any more"):
        check_stamps([stamp])
