"""The page of a run, of what was really built."""

from __future__ import annotations

from small_workflows import Bench

from sdflow.config import load_workflow
from sdflow.passes import registry
from sdflow.report.run_page import page, write_run_page
from sdflow.run.options import RunOptions
from sdflow.run.run import PipelineResult, run_workflow


def built(bench: Bench) -> PipelineResult:
    path = bench.workflow([{"pass": "Convert", "text": "a"}, {"pass": "Append", "text": "b"}])
    workflow = load_workflow(path, catalog=registry.catalog(), overrides=["verify=false"])
    options = RunOptions(bench.folder / "out", bench.folder / "results", evaluate=False)
    (result,) = run_workflow(workflow, bench.cache, options, bench.events).pipelines
    return result


def test_it_says_what_was_built_and_that_it_was_neither_verified_nor_measured(bench: Bench) -> None:
    text = page(built(bench))
    assert '<span class="verdict warn">built, not verified</span> 2 of 2 steps ran, in ' in text
    assert "<dt>model</dt><dd>synthetic:sd15-tiny" in text
    assert "<td>unet</td><td>2 built</td>" in text
    assert [f"{name}</td>" in text for name in ("Convert", "Append")] == [True, True]
    assert "Latency" not in text and "Verification against" not in text
    assert '<span class="verdict warn">built, not verified</span> 0 of 2 steps ran, in ' in page(built(bench))


def test_it_is_written_beside_the_measurements(bench: Bench) -> None:
    result = built(bench)
    path = write_run_page(result, bench.folder / "results")
    assert path == bench.folder / "results/small.html"
    assert path.read_text().startswith("<!doctype html>")
