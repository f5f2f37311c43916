"""Many pipelines in one run: side by side, each told in a line."""

from __future__ import annotations

import pytest
from small_workflows import Bench

from sdflow.config import load_workflow
from sdflow.errors import PassError
from sdflow.passes import registry
from sdflow.report.run import print_run
from sdflow.run.options import RunOptions
from sdflow.run.run import RunResult, run_workflow


def run(bench: Bench, **options: object) -> RunResult:
    """Four pipelines of one step each."""
    models = [f"synthetic:sd15-tiny?seed={seed}" for seed in range(4)]
    path = bench.workflow([{"pass": "Convert", "text": "a", **options}], matrix={"model": models})
    workflow = load_workflow(path, catalog=registry.catalog(), overrides=["verify=false"])  # its graphs are none
    folders = {"out": bench.folder / "out", "results": bench.folder / "results"}
    return run_workflow(workflow, bench.cache, RunOptions(**folders, evaluate=False, jobs=2), bench.events)


def test_every_pipeline_is_told_in_a_line_with_its_time(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(bench)
    names = [f"small-sd15-tiny-seed{seed}" for seed in range(4)]
    assert [pipeline.plan.pipeline.name for pipeline in result.pipelines] == names
    print_run(result, {}, as_json=False)
    printed = capsys.readouterr().out
    for name, pipeline in zip(names, result.pipelines, strict=True):
        (line,) = (line for line in printed.splitlines() if line.split()[:1] == [name])
        assert f"{pipeline.seconds:.2f} s" in line or f"{pipeline.seconds:.1f} s" in line
        assert (pipeline.folder / "unet").exists()
        assert any(text.startswith(f"{name}: done in ") for kind, text in bench.events.heard if kind == "note")
    assert bench.ran() == ["Convert"] * 4


def test_a_pipeline_that_fails_ends_the_others(bench: Bench) -> None:
    with pytest.raises(PassError, match="told to fail"):
        run(bench, fail=True)
    assert len(bench.ran()) <= 2, "those that had not begun did not begin"
    assert list((bench.folder / "cache/v1/staging").iterdir()) == []
