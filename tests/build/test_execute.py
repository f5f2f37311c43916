"""The executor: runs what is not cached, and nothing else; a failure publishes nothing."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from small_lora import write_lora
from small_passes import content_of
from small_workflows import SMALL_PASSES, Bench, Events
from until import until

from sdflow.build import execute
from sdflow.build.step import Step
from sdflow.errors import PassError, VerificationError, WorkflowError
from sdflow.passes.base import BINDS, TRACES
from sdflow.report.build import print_explanation

SUBMODELS = ("unet", "text_encoder")
FOR_EVER, SOON = 800, 400
"""Seconds. A test that waits for the first has failed; nothing is timed by the second."""
Chain = Callable[..., list[dict[str, Any]]]


def test_a_second_run_executes_no_pass(bench: Bench, chain: Chain) -> None:
    workflow = bench.workflow(chain())
    first = bench.run(workflow)["small/unet"]
    assert bench.ran() == ["Append", "Append", "Convert"]
    second = bench.run(workflow)["small/unet"]
    assert bench.ran() == []
    assert [step.outcome for step in second] == ["cached"] * 3
    assert [step.record.artifact.digest for step in first] == [step.record.artifact.digest for step in second]
    assert content_of(second[-1].record.artifact.path / "model.onnx") == ["unet", "a", "b", "c"]


def test_a_changed_option_rebuilds_from_its_step_on(bench: Bench, chain: Chain) -> None:
    bench.run(bench.workflow(chain()))
    bench.ran()
    bench.run(bench.workflow(chain(1, text="B")))
    assert bench.ran() == ["Append", "Append"]


def test_a_rebuild_that_gives_the_same_bytes_ends_there(bench: Bench, chain: Chain) -> None:
    bench.run(bench.workflow(chain()))
    bench.ran()
    steps = bench.run(bench.workflow(chain(1, sleep=0.01)))["small/unet"]
    assert bench.ran() == ["Append"], "the option changed, the bytes did not: the step after it is a hit"
    assert [step.outcome for step in steps] == ["cached", "built", "cached"]


def test_moving_and_renaming_a_workflow_rebuilds_nothing(bench: Bench, chain: Chain) -> None:
    bench.run(bench.workflow(chain()))
    bench.ran()
    bench.run(bench.workflow(chain(), name="other"))
    assert bench.ran() == []


def test_a_failure_is_never_cached(bench: Bench, chain: Chain) -> None:
    for _ in range(2):
        with pytest.raises(PassError, match=r"small/unet/1 .*told to fail"):
            bench.run(bench.workflow(chain(1, fail=True)))
    assert bench.ran() == ["Append", "Append", "Convert"], "the conversion was kept, the failure ran again"


FAILED = re.compile(r"failed \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ: ")


def explained(bench: Bench, workflow: Path, *overrides: str) -> list[str]:
    """What `sdflow explain` says of the second step, with its time taken out."""
    plan = bench.plan(workflow, *overrides)
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        print_explanation([plan], bench.cache, only="unet/1", as_json=False)
    return written.getvalue().splitlines()


def test_explain_says_that_a_step_failed_and_with_which_error(bench: Bench, chain: Chain) -> None:
    workflow = bench.workflow(chain(1, fail=True))
    assert "first build" not in explained(bench, workflow)[0], "its input is not built yet"
    for _ in range(2):
        with pytest.raises(PassError, match="told to fail"):
            bench.run(workflow)
        said, *error = explained(bench, workflow)
        assert re.search(r"\(both\): failed \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$", said)
        assert [line.strip() for line in error] == ["told to fail", "tell it not to"]
        (reason,) = [step.reasons for step in bench.plan(workflow).pipelines[0].steps(bench.cache) if step.failure]
        assert FAILED.sub("", reason[0]) == "told to fail"
    mended = bench.workflow(chain(1, fail=False))
    assert explained(bench, mended)[-1].strip() == "changed since: option fail: true -> false"
    bench.run(mended)
    assert "unchanged, built" in explained(bench, mended)[0]
    assert len(explained(bench, mended)) == 1


def test_explain_says_that_a_step_was_killed(bench: Bench, chain: Chain) -> None:
    workflow = bench.workflow(chain(1, kill=True))
    with pytest.raises(PassError):
        bench.run(workflow)
    assert "SIGKILL" in "\n".join(explained(bench, workflow))


def test_a_failure_after_a_build_is_explained_until_the_step_is_right_again(bench: Bench, chain: Chain) -> None:
    right, wrong = chain(1, operators={"GroupNorm": 3}), chain(1, operators={"GroupNorm": 3}, expect={"GroupNorm": 4})
    bench.run(bench.workflow(right))
    with pytest.raises(PassError):
        bench.run(bench.workflow(wrong))
    said = explained(bench, bench.workflow(wrong))
    assert "unchanged, built" in said[0] and "; failed " in said[0]
    assert any("GroupNorm: expected 4, found 3" in line for line in said[1:])
    bench.run(bench.workflow(right))
    assert len(explained(bench, bench.workflow(right))) == 1


def test_a_failure_is_part_of_no_key_and_needs_no_writable_cache(bench: Bench, chain: Chain) -> None:
    workflow = bench.workflow(chain(1, fail=True))
    keys = [step.action for step in bench.plan(workflow).pipelines[0].steps(bench.cache)]
    with pytest.raises(PassError):
        bench.run(workflow)
    again = next(iter(bench.plan(workflow).pipelines[0].steps(bench.cache)))
    assert again.action == keys[0], "the key of a step that is cached meanwhile"
    for note in (bench.folder / "cache/v1/steps").glob("*-failed.json"):
        note.write_text(note.read_text()[:-9])  # a damaged one is as none
    assert "first build" in explained(bench, workflow)[0]


def test_a_killed_pass_is_an_error_and_leaves_nothing(bench: Bench, chain: Chain) -> None:
    with pytest.raises(PassError, match="SIGKILL"):
        bench.run(bench.workflow(chain(1, kill=True)))
    assert list((bench.folder / "cache/v1/staging").iterdir()) == []


def test_keep_failed_leaves_the_unfinished_files(bench: Bench, chain: Chain) -> None:
    with pytest.raises(PassError) as caught:
        bench.run(bench.workflow(chain(1, fail=True)), keep_failed=True)
    kept = Path(str(caught.value.remedy).split("kept in ")[1])
    assert [content_of(path) for path in kept.rglob("model.onnx")] == [["unet", "a", "b"]]


def test_an_operator_count_that_differs_from_expect_fails_and_is_not_cached(bench: Bench, chain: Chain) -> None:
    workflow = bench.workflow(chain(2, operators={"GroupNorm": 3}, expect={"GroupNorm": 4, "NhwcConv": 1}))
    for _ in range(2):
        with pytest.raises(PassError, match=r"GroupNorm: expected 4, found 3; NhwcConv: expected 1, found 0"):
            bench.run(workflow)
    assert bench.ran() == ["Append", "Append", "Append", "Convert"]


def test_expect_is_checked_on_cached_results_too(bench: Bench, chain: Chain) -> None:
    bench.run(bench.workflow(chain(2, operators={"GroupNorm": 3}, expect={"GroupNorm": 3})))
    with pytest.raises(PassError, match="expected 4, found 3"):
        bench.run(bench.workflow(chain(2, operators={"GroupNorm": 3}, expect={"GroupNorm": 4})))


def test_clean_cache_builds_this_workflows_steps_anew_and_no_others(bench: Bench, chain: Chain) -> None:
    other = bench.workflow(chain(2, text="other"), name="other")
    bench.run(other)
    workflow = bench.workflow(chain())
    bench.run(workflow)
    bench.ran()
    bench.run(workflow, rebuild=True)
    assert bench.ran() == ["Append", "Append", "Convert"]
    bench.run(other)
    assert bench.ran() == []


def test_a_failing_rebuild_loses_nothing(bench: Bench, chain: Chain, tmp_path: Path) -> None:
    workflow = bench.workflow(chain())
    bench.run(workflow)
    (tmp_path / "ran").rename(tmp_path / "moved")
    (tmp_path / "ran").touch()  # the passes' trace folder is now a file: every pass fails
    with pytest.raises(PassError):
        bench.run(workflow, rebuild=True)
    (tmp_path / "ran").unlink()
    bench.run(workflow)
    assert bench.ran() == []


def test_check_builds_again_and_compares(bench: Bench, chain: Chain) -> None:
    workflow = bench.workflow(chain())
    bench.run(workflow)
    bench.ran()
    steps = bench.run(workflow, check=True)["small/unet"]
    assert bench.ran() == ["Append", "Append", "Convert"]
    assert [step.outcome for step in steps] == ["checked"] * 3


def test_check_finds_a_pass_that_is_not_deterministic(bench: Bench, chain: Chain) -> None:
    workflow = bench.workflow(chain(1, random=True))
    bench.run(workflow)
    with pytest.raises(VerificationError, match="small/unet/1"):
        bench.run(workflow, check=True)


def test_a_corrupt_input_is_found_before_a_pass_reads_it_and_is_built_again(bench: Bench, chain: Chain) -> None:
    bench.run(bench.workflow(chain()))
    bench.ran()
    victim = bench.run(bench.workflow(chain()))["small/unet"][1].record.artifact.path / "model.onnx"
    before = victim.stat()
    victim.chmod(0o644)
    content = bytearray(victim.read_bytes())
    content[3] ^= 1
    victim.write_bytes(content)
    os.utime(victim, ns=(before.st_atime_ns, before.st_mtime_ns))
    steps = bench.run(bench.workflow(chain(2, text="C")))["small/unet"]
    assert bench.ran() == ["Append", "Append"], "the corrupt step and the changed one"
    assert content_of(steps[-1].record.artifact.path / "model.onnx") == ["unet", "a", "b", "C"]


def test_the_lora_key_holds_content_and_scale_but_no_name(bench: Bench, chain: Chain, tmp_path: Path) -> None:
    steps = [{"pass": "Convert", "text": "a"}, {"pass": "Merge"}]
    lora = write_lora(tmp_path / "style.safetensors", ["unet"])

    def run(path: Path, scale: float) -> list[str]:
        bench.run(bench.workflow(steps, loras=[{"file": str(path), "scale": scale}]))
        return bench.ran()

    assert run(lora, 0.5) == ["Convert", "Merge"]
    assert run(lora.rename(tmp_path / "renamed.safetensors"), 0.5) == []
    assert run(tmp_path / "renamed.safetensors", 0.6) == ["Merge"]
    assert run(write_lora(tmp_path / "renamed.safetensors", ["unet"], seed=1), 0.6) == ["Merge"]


def test_a_lora_that_changes_nothing_in_a_submodel_is_no_part_of_its_key(
    bench: Bench, chain: Chain, tmp_path: Path
) -> None:
    steps = [{"pass": "Convert", "text": "a"}, {"pass": "Merge"}]
    lora = write_lora(tmp_path / "style.safetensors", ["text_encoder"])
    both = {
        name: {"passes": [{**step, "pass": f"{SMALL_PASSES}:{step['pass']}"} for step in steps]} for name in SUBMODELS
    }
    for scale, ran in ((0.5, ["Convert", "Convert", "Merge", "Merge"]), (0.6, ["Merge"])):
        bench.run(bench.workflow(steps, loras=[{"file": str(lora), "scale": scale}], submodels=both))
        assert bench.ran() == ran, "another scale merges into the text encoder only"


def test_a_lora_without_a_step_to_merge_it_is_an_error_at_its_place(bench: Bench, chain: Chain, tmp_path: Path) -> None:
    lora = write_lora(tmp_path / "style.safetensors", ["unet", "text_encoder"])
    steps = {"unet": ["Convert", "Merge"], "text_encoder": ["Convert"]}
    chains = {name: {"passes": [{"pass": f"{SMALL_PASSES}:{step}"} for step in made]} for name, made in steps.items()}
    with pytest.raises(WorkflowError, match=r"small\.yaml:\d+:\d+: the LoRA .* changes the text_encoder"):
        bench.run(bench.workflow([], loras=[{"file": str(lora)}], submodels=chains))


def test_an_interrupted_run_leaves_nothing_and_the_next_goes_on(
    bench: Bench, chain: Chain, interruptible: None
) -> None:
    workflow = bench.workflow(chain(1, sleep=FOR_EVER))
    command = [sys.executable, "-m", "sdflow", "run", str(workflow), "--cache", str(bench.folder / "cache")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=bench.folder)
    traces = bench.folder / "ran"
    until(lambda: process.poll() is not None or len(list(traces.glob("Append*"))) == 1)
    assert process.poll() is None, process.stderr.read() if process.stderr else ""
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=SOON)
    assert process.returncode == 130
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert list((bench.folder / "cache/v1/staging").iterdir()) == []
    bench.ran()
    bench.run(bench.workflow(chain(1, sleep=0)))
    assert bench.ran() == ["Append", "Append"], "the conversion that was finished is kept"


def two_chains(bench: Bench, first: Mapping[str, Any], second: Mapping[str, Any]) -> Path:
    """A workflow of two chains of one step each, with these options."""
    chains = {"unet": first, "text_encoder": second}
    steps = {name: {"passes": [{"pass": f"{SMALL_PASSES}:Convert", **options}]} for name, options in chains.items()}
    return bench.workflow([], submodels=steps)


def test_ctrl_c_ends_two_running_workers_at_once_and_leaves_nothing(bench: Bench, interruptible: None) -> None:
    cache, waiting = bench.folder / "cache", two_chains(bench, {"sleep": FOR_EVER}, {"sleep": FOR_EVER})
    command = [sys.executable, "-m", "sdflow", "run", str(waiting), "--cache", str(cache), "--jobs", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=bench.folder)
    traces = bench.folder / "ran"
    until(lambda: process.poll() is not None or len(list(traces.glob("*"))) == 2)
    assert process.poll() is None, process.stderr.read() if process.stderr else ""
    workers = psutil.Process(process.pid).children()
    assert len(workers) == 2
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=SOON)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert not any(worker.is_running() for worker in workers)
    assert list((cache / "v1/staging").iterdir()) == []


def test_a_failing_chain_stops_the_others(bench: Bench, children: Callable[..., Any]) -> None:
    begun = time.monotonic()
    with pytest.raises(PassError, match=r"small/text_encoder/0 .*told to fail"):
        bench.run(two_chains(bench, {"sleep": FOR_EVER}, {"among": 2, "fail": True}), jobs=2)
    assert time.monotonic() - begun < FOR_EVER
    assert bench.ran() == ["Convert", "Convert"]
    assert children() == []
    assert list((bench.folder / "cache/v1/staging").iterdir()) == []


def test_only_passes_of_sdflows_own_have_packages_imported_before_they_start(bench: Bench, chain: Chain) -> None:
    own = bench.workflow([], submodels={"unet": {"passes": [{"pass": "OnnxConversion"}]}}, name="own")
    script, *_ = bench.plan(bench.workflow(chain())).pipelines[0].chains[0].steps
    traced, bound = bench.plan(own).pipelines[0].chains[0].steps
    assert (script.imported, traced.imported, bound.imported) == ((), TRACES, BINDS)


@dataclass
class Counter(Events):
    """Counts the workers, a few times a second: there were no fewer."""

    children: Callable[[], list[psutil.Process]] = field(kw_only=True)
    most: int = 0

    def memory(self, step: Step, resident: int) -> None:
        self.most = max(self.most, len(self.children()))


def test_chains_that_carry_weights_run_one_after_the_other_unless_jobs_says_otherwise(
    bench: Bench, children: Callable[..., Any]
) -> None:
    counting = Bench(bench.folder, Counter(children=children))
    counting.run(two_chains(bench, {"sleep": 1}, {"sleep": 1}))
    assert counting.events.most <= 1  # type: ignore[attr-defined]
    bench.ran()
    bench.run(two_chains(bench, {"among": 2}, {"among": 2}), jobs=2)  # neither ends before the other has begun
    assert bench.ran() == ["Convert", "Convert"]


def test_an_interrupt_does_not_wait_for_another_process(bench: Bench, chain: Chain, interruptible: None) -> None:
    path = bench.workflow(chain())
    (pipeline,) = bench.plan(path).pipelines
    (first, *_) = pipeline.steps(bench.cache)
    assert first.action is not None
    command = [sys.executable, "-m", "sdflow", "run", str(path), "--cache", str(bench.folder / "cache")]
    with bench.cache.lock(first.action):
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=bench.folder)
        assert process.stderr is not None
        assert any("another process is building it" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=SOON)
    assert process.returncode == 130


def test_the_longest_chain_builds_first_though_it_has_the_most_to_look_up(
    bench: Bench, chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute, "ARRIVAL_SECONDS", 60)

    def both(text: str) -> Path:
        chains = {"text_encoder": chain(0, text=text)[:1], "unet": chain(2, text=text)}
        named = {
            submodel: [{**step, "pass": f"{SMALL_PASSES}:{step['pass']}"} for step in steps]
            for submodel, steps in chains.items()
        }
        return bench.workflow([], submodels={submodel: {"passes": steps} for submodel, steps in named.items()})

    bench.run(both("c"))
    bench.events.heard.clear()
    bench.run(both("d"), jobs=1)
    assert [step for kind, step in bench.events.heard if kind == "started"] == ["small/unet/2", "small/text_encoder/0"]
