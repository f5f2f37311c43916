"""Room for all that a run will bind is asked for before it begins, not when the disk is full."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_workflows import Bench

from sdflow import disk_space
from sdflow.config import load_workflow
from sdflow.errors import CacheError
from sdflow.passes import registry
from sdflow.plan import Plan, make_plan

CHAIN = [{"pass": "OnnxConversion"}, {"pass": "LoraMerge"}]


def planned(bench: Bench, seeds: list[int]) -> Plan:
    path = bench.workflow(
        [],
        submodels={"text_encoder": {"passes": CHAIN}},
        matrix={"model": [f"synthetic:sd15-tiny?seed={seed}" for seed in seeds]},
    )
    return make_plan(load_workflow(path, catalog=registry.catalog()), bench.cache)


def test_all_binds_of_a_matrix_are_counted_and_what_is_there_is_not(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert disk_space.bytes_to_bind(planned(bench, [0, 1]), bench.cache) == {}  # no graph yet, so no size
    path = bench.workflow([], submodels={"text_encoder": {"passes": CHAIN}}, model="synthetic:sd15-tiny?seed=0")
    (steps,) = bench.run(path).values()
    size = (steps[-1].record.artifact.path / "model.onnx.data").stat().st_size
    plan = planned(bench, [0, 1, 2])
    wanted = disk_space.bytes_to_bind(plan, bench.cache)
    assert len(wanted) == 2
    assert len(disk_space.bytes_to_bind(plan, bench.cache, rebuild=True)) == 3
    assert size <= sum(wanted.values()) / 2 <= 1.2 * size

    monkeypatch.setattr(disk_space, "free_bytes", lambda root: disk_space.RESERVE + sum(wanted.values()))
    disk_space.require_space(plan, bench.cache)
    monkeypatch.setattr(disk_space, "free_bytes", lambda root: disk_space.RESERVE + sum(wanted.values()) - 1)
    with pytest.raises(CacheError, match=r"2 models of .* together are to be written"):
        disk_space.require_space(plan, bench.cache)
    assert Path(bench.cache.root).is_dir()
