"""Room for all that a run will write is asked for before it begins, not when the disk is full."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_workflows import Bench, Events

from sdflow.build.plan import Plan, make_plan
from sdflow.config import load_workflow
from sdflow.errors import CacheError
from sdflow.passes import registry
from sdflow.run import disk_space
from sdflow.run.run import RunOptions, run_workflow
from sdflow.sources import PlainDigests, load_pipeline, open_checkpoint

pytestmark = pytest.mark.usefixtures("forked_workers")
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
    assert disk_space.bytes_to_write(planned(bench, [0, 1]), bench.cache).binds == {}  # no graph yet, so no size
    path = bench.workflow([], submodels={"text_encoder": {"passes": CHAIN}}, model="synthetic:sd15-tiny?seed=0")
    (steps,) = bench.run(path).values()
    size = (steps[-1].record.artifact.path / "model.onnx.data").stat().st_size
    plan = planned(bench, [0, 1, 2])
    wanted = disk_space.bytes_to_write(plan, bench.cache).binds
    assert len(wanted) == 2
    assert len(disk_space.bytes_to_write(plan, bench.cache, rebuild=True).binds) == 3
    assert size <= sum(wanted.values()) / 2 <= 1.2 * size

    monkeypatch.setattr(disk_space, "free_bytes", lambda root: disk_space.RESERVE + sum(wanted.values()))
    disk_space.require_space(plan, bench.cache)
    monkeypatch.setattr(disk_space, "free_bytes", lambda root: disk_space.RESERVE + sum(wanted.values()) - 1)
    with pytest.raises(CacheError, match=r"2 models of .* together are to be written"):
        disk_space.require_space(plan, bench.cache)
    assert Path(bench.cache.root).is_dir()


def run(bench: Bench, path: Path, **options: bool) -> None:
    """As `sdflow run` does it."""
    workflow = load_workflow(path, catalog=registry.catalog())
    chosen = RunOptions(bench.folder / "out", bench.folder / "results", verify=False, evaluate=False, **options)
    run_workflow(workflow, bench.cache, chosen, Events())


def test_a_chain_that_carries_its_weights_is_counted_from_the_checkpoint(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint("synthetic:sd15-tiny", digests=PlainDigests(), download=False)
    load_pipeline(checkpoint).save_pretrained(bench.folder / "checkpoint")
    path = bench.workflow(
        [],
        submodels={"text_encoder": {"passes": [{"pass": "OnnxConversion"}, {"pass": "OnnxFloatToFloat16"}]}},
        model=str(bench.folder / "checkpoint"),
        carry_weights=True,
    )
    wanted = disk_space.bytes_to_write(bench.plan(path), bench.cache).carried
    total = sum(wanted.values())
    assert len(wanted) == 2

    monkeypatch.setattr(disk_space, "free_bytes", lambda place: disk_space.RESERVE + total - 1)
    with pytest.raises(CacheError, match="2 results of passes that carry the weights, .*are free\n.*--cache"):
        run(bench, path)
    assert not list(bench.folder.glob("cache/v1/objects/*"))
    assert not (bench.folder / "out").exists()

    monkeypatch.setattr(disk_space, "free_bytes", lambda place: disk_space.RESERVE + total)
    run(bench, path)
    (steps,) = bench.run(path).values()
    written = [(step.record.artifact.path / "model.onnx.data").stat().st_size for step in steps]
    assert [size / 2 for size in written] == pytest.approx([written[1], written[1] / 2], rel=0.1)
    assert list(wanted.values()) == pytest.approx(written, rel=0.1)
    assert disk_space.bytes_to_write(bench.plan(path), bench.cache).carried == {}


@pytest.mark.parametrize("apart", [False, True])
def test_copies_are_counted_on_the_disk_that_they_go_to(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    path = bench.workflow([], submodels={"text_encoder": {"passes": CHAIN}})
    run(bench, path)
    (steps,) = bench.run(path).values()
    size = steps[-1].record.artifact.bytes
    out = bench.folder / "out"
    wanted = disk_space.bytes_to_write(bench.plan(path), bench.cache, copied_to=out)
    assert (wanted.binds, wanted.carried, list(wanted.copies.values())) == ({}, {}, [size])

    if apart:
        monkeypatch.setattr(disk_space, "_device", lambda place: 1 + (place == out))
    monkeypatch.setattr(disk_space, "_shares_blocks", lambda place: False)
    asked: list[Path] = []

    def free(place: Path) -> int:
        asked.append(place)
        return disk_space.RESERVE + size - 1

    monkeypatch.setattr(disk_space, "free_bytes", free)
    before = [each.stat().st_ino for each in sorted(out.iterdir())]
    with pytest.raises(CacheError, match="1 copied pipeline of .*are free\n.*--out") as refused:
        run(bench, path, copy=True)
    assert asked == [out if apart else bench.cache.root]
    assert str(asked[0]) in str(refused.value)
    assert [each.stat().st_ino for each in sorted(out.iterdir())] == before

    monkeypatch.setattr(disk_space, "free_bytes", lambda place: disk_space.RESERVE + size)
    run(bench, path, copy=True)
    (copied,) = out.iterdir()
    assert not (copied / "text_encoder").is_symlink()
    assert disk_space.bytes_to_write(bench.plan(path), bench.cache, copied_to=out).copies == {}
