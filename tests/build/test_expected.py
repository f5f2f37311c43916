"""What a run says beforehand: how many steps there are, which are cached, how long the others took last time."""

from __future__ import annotations

import pytest
from small_workflows import Bench

from sdflow.build.listener import Expected
from sdflow.build.plan import make_plan
from sdflow.config import load_workflow
from sdflow.passes import registry
from sdflow.run.options import RunOptions
from sdflow.run.run import run_workflow


def told(bench: Bench, text: str, **how: bool) -> Expected:
    """Of a chain of two passes, the second of which has this option."""
    path = bench.workflow([{"pass": "Convert", "text": "a"}, {"pass": "Append", "text": text}])
    workflow = load_workflow(path, catalog=registry.catalog(), overrides=["verify=false"])
    plan = make_plan(workflow, bench.cache, download=True)
    found = plan.expected(bench.cache, **how)
    options = RunOptions(bench.folder / "out", bench.folder / "results", evaluate=False)
    run_workflow(workflow, bench.cache, options, bench.events)
    return found


def test_a_first_run_knows_its_steps_and_no_time(bench: Bench) -> None:
    found = told(bench, "b")
    assert found.chains == {("small", "unet"): ("small/unet/0", "small/unet/1")}
    assert (found.cached, found.seconds, found.nothing_to_build()) == (frozenset(), {}, None)


def test_a_second_run_has_nothing_to_build_and_a_changed_step_took_so_long_last_time(bench: Bench) -> None:
    told(bench, "b")
    again = told(bench, "b")
    assert again.nothing_to_build() == "nothing to build: all 2 steps are cached"
    changed = told(bench, "c")
    assert changed.cached == {"small/unet/0"}
    assert changed.nothing_to_build() is None
    records = {record.action.content["config"].get("text"): record for record in bench.cache.steps()}
    assert changed.seconds == {"small/unet/1": pytest.approx(records["b"].built["seconds"])}


def test_what_is_built_anew_is_not_taken_for_cached(bench: Bench) -> None:
    told(bench, "b")
    anew = told(bench, "b", anew=True)
    assert anew.cached == frozenset() and set(anew.seconds) == {"small/unet/0", "small/unet/1"}
    assert anew.nothing_to_build() is None
