"""Workflows made of small passes (tests/support/small_passes.py), planned and run in a folder of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from sdflow.build.execute import Executor
from sdflow.build.listener import Expected, FinishedStep
from sdflow.build.plan import Plan, make_plan
from sdflow.build.step import Step
from sdflow.config import load_workflow
from sdflow.passes import registry
from sdflow.store import Cache

TESTS = Path(__file__).parents[1]
SMALL_PASSES = TESTS / "support/small_passes.py"


@dataclass
class Events:
    """A listener that keeps what it hears."""

    heard: list[tuple[str, str]] = field(default_factory=list)

    def expected(self, expected: Expected) -> None: ...

    def doing(self, what: str, phase: str) -> None:
        self.heard.append(("doing", f"{what}: {phase}"))

    def note(self, text: str) -> None:
        self.heard.append(("note", text))

    def started(self, step: Step) -> None:
        self.heard.append(("started", step.id))

    def phase(self, step: Step, phrase: str) -> None:
        self.heard.append(("phase", phrase))

    def memory(self, step: Step, resident: int) -> None: ...

    def finished(self, result: FinishedStep) -> None:
        self.heard.append((result.outcome, result.step.id))


@dataclass
class Bench:
    """A folder with a cache, in which workflows of small passes are planned and run."""

    folder: Path
    events: Events = field(default_factory=Events)

    @property
    def cache(self) -> Cache:
        return Cache(self.folder / "cache")

    def workflow(self, passes: Sequence[Mapping[str, Any]], name: str = "small", **more: Any) -> Path:
        """Write a workflow whose UNet has these passes; `pass: Append` names one of tests/support/small_passes.py."""
        steps = [{**step, "pass": f"{SMALL_PASSES}:{step['pass']}"} for step in passes]
        content = {
            "model": "synthetic:sd15-tiny",
            "target": "cpu",
            "submodels": {"unet": {"passes": steps}},
            "evaluate": {"image": None, "latency": None},
            **more,
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    def plan(self, path: Path, *overrides: str) -> Plan:
        return make_plan(load_workflow(path, catalog=registry.catalog(), overrides=overrides), self.cache)

    def run(self, path: Path, *overrides: str, **options: Any) -> dict[str, tuple[FinishedStep, ...]]:
        plan = self.plan(path, *overrides)
        results: dict[str, tuple[FinishedStep, ...]] = {}
        for pipeline in plan.pipelines:
            executor = Executor(self.cache, self.events, **options)
            results.update({f"{pipeline.pipeline.name}/{k}": v for k, v in executor.run(pipeline).items()})
        return results

    def ran(self) -> list[str]:
        """The passes that really ran since the last call."""
        folder = self.folder / "ran"
        names = sorted(path.name.split("-")[0] for path in folder.iterdir()) if folder.exists() else []
        for path in folder.iterdir() if folder.exists() else []:
            path.unlink()
        return names


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(TESTS.parent))
    return Bench(tmp_path)


CHAIN = ({"pass": "Convert", "text": "a"}, {"pass": "Append", "text": "b"}, {"pass": "Append", "text": "c"})


@pytest.fixture
def chain() -> Callable[..., list[dict[str, Any]]]:
    """The three-step chain Convert a, Append b, Append c, with further options for the step of an index."""

    def make(index: int = 0, **options: Any) -> list[dict[str, Any]]:
        steps = [dict(step) for step in CHAIN]
        steps[index].update(options)
        return steps

    return make
