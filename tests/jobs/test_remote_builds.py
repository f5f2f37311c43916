"""Workflows whose steps other machines have built: planned, run, and asked for by the commands."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from small_workflows import Bench
from typer.testing import CliRunner

from sdflow.artifact import Action
from sdflow.cli.app import app
from sdflow.config import load_workflow
from sdflow.errors import WorkflowError
from sdflow.passes import registry
from sdflow.store import Cache
from sdflow.store.remote import RemoteSpec, remote_from_environment

Chain = Callable[..., list[dict[str, Any]]]


@dataclass
class Sharing(Bench):
    """A bench whose cache has the remote `shared` beside it, and its own name."""

    name: str = "cache"

    @property
    def cache(self) -> Cache:
        return Cache(self.folder / self.name, remote=RemoteSpec(str(self.folder / "shared"), push=True))


@pytest.fixture
def machines(bench: Bench) -> Sequence[Sharing]:
    return [Sharing(bench.folder, name=name) for name in ("one", "other")]


def outcomes(results: Mapping[str, Any]) -> list[str]:
    (steps,) = results.values()
    return [step.outcome for step in steps]


def test_what_another_machine_built_is_planned_fetched_and_not_run(machines: Sequence[Sharing], chain: Chain) -> None:
    one, other = machines
    path = one.workflow(chain())
    assert outcomes(one.run(path)) == ["built"] * 3
    one.ran()
    (pipeline,) = other.plan(path).pipelines
    planned = list(pipeline.steps(other.cache))
    assert [step.state for step in planned] == ["remote"] * 3
    assert planned[0].reasons == (f"fetched from {one.folder / 'shared'}",)
    assert outcomes(other.run(path)) == ["fetched"] * 3
    assert other.ran() == []
    assert outcomes(other.run(path)) == ["cached"] * 3
    assert [text for kind, text in one.events.heard if kind == "note"] == []


@pytest.mark.slow
def test_a_step_behind_what_was_fetched_is_built(machines: Sequence[Sharing], chain: Chain) -> None:
    one, other = machines
    one.run(one.workflow(chain()))
    one.ran()
    path = other.workflow(chain(2, text="z"), name="small")
    assert outcomes(other.run(path)) == ["fetched", "fetched", "built"]
    assert other.ran() == ["Append"]


@pytest.mark.slow
def test_an_expectation_that_only_the_remote_misses_is_no_failure(machines: Sequence[Sharing], chain: Chain) -> None:
    """Its facts are its own word."""
    from sdflow.store.records import dump, load

    one, other = machines
    path = one.workflow(chain(1, operators={"Conv": 3}, expect={"Conv": 3}))
    one.run(path)
    for entry in one.folder.glob("shared/*/actions/*/*.json"):
        body = load(entry.read_bytes())
        entry.write_bytes(dump({**body, "facts": {**body["facts"], "operators": {}}}))
    assert outcomes(other.run(path)) == ["fetched", "built", "fetched"]
    notes = [text for kind, text in other.events.heard if kind == "note"]
    assert len(notes) == 1
    assert "not taken from the remote cache" in notes[0]


@pytest.mark.slow
def test_check_builds_what_was_fetched_again_and_compares(machines: Sequence[Sharing], chain: Chain) -> None:
    one, other = machines
    path = one.workflow(chain())
    one.run(path)
    one.ran()
    assert outcomes(other.run(path, check=True)) == ["checked"] * 3
    assert other.ran() == ["Append", "Append", "Convert"]


@pytest.mark.slow
def test_anew_means_anew(machines: Sequence[Sharing], chain: Chain) -> None:
    one, other = machines
    path = one.workflow(chain())
    one.run(path)
    assert outcomes(other.run(path, rebuild=True)) == ["built"] * 3


def asked(*words: object, status: int = 0) -> Any:
    result = CliRunner().invoke(app, [*map(str, words)])
    assert (result.exit_code or (1 if result.exception else 0)) == status, (result.output, result.exception)
    return result


def test_the_commands(machines: Sequence[Sharing], chain: Chain) -> None:
    one, other = machines
    shared = one.folder / "elsewhere"
    path = one.workflow(chain(), cache={"remote": str(shared)})
    one.run(path)
    asked("cache", "push", path, "--cache", one.folder / "one")
    entries = json.loads(asked("cache", "ls", "--remote", "--url", shared, "--json").stdout)["entries"]
    assert len(entries) == 3
    plan = json.loads(asked("plan", path, "--cache", other.folder / "new", "--json").stdout)
    assert [step["state"] for step in plan["steps"]] == ["remote"] * 3
    assert f"3 come from {shared}" in asked("plan", path, "--cache", other.folder / "new").stdout
    pulled = json.loads(asked("cache", "pull", path, "--cache", other.folder / "new", "--json").stdout)
    assert len(pulled["fetched"]) == 3
    pulled = json.loads(asked("cache", "pull", "--url", shared, "--cache", other.folder / "new", "--json").stdout)
    assert pulled["missing"] == 0
    sent = json.loads(asked("cache", "push", "--url", shared, "--cache", one.folder / "one", "--json").stdout)
    assert (sent["cached"], sent["pushed"], sent["bytes"]) == (3, 0, 0)
    gone = json.loads(asked("cache", "gc", "--remote", "--older-than", "0s", "--url", shared, "--json").stdout)
    assert gone["actions"] == 3
    assert not list(shared.rglob("*.json"))


def test_a_verdict_that_somebody_has_put_there_is_not_pulled(tmp_path: Path) -> None:
    stranger = Cache(tmp_path / "stranger", remote=RemoteSpec(str(tmp_path / "shared"), push=True))
    built = {"seconds": 1, "peak_memory": 1, "finished": ""}
    with stranger.lease():
        for content in ({"verification": "a digest"}, {"user_scripts": {}}):
            with stranger.staging(Action(content)) as staging:
                (staging.files / "verification.json").write_text("{}")
                stranger.offer(staging.publish({}, built))
    done = asked("cache", "pull", "--url", tmp_path / "shared", "--cache", tmp_path / "mine", "--json")
    assert json.loads(done.stdout)["fetched"] == [Action({"user_scripts": {}}).digest]


def test_the_commands_want_a_remote(tmp_path: Path) -> None:
    for command in ("push", "pull"):
        assert "no remote cache is named" in str(asked("cache", command, status=1).exception)
    assert "only be shrunk by the age" in str(asked("cache", "gc", "--remote", "--url", tmp_path, status=1).exception)


# In the workflow and the environment


def remote_of(bench: Bench, **cache: Any) -> RemoteSpec | None:
    path = bench.workflow([{"pass": "Convert"}], cache=cache)
    return load_workflow(path, catalog=registry.catalog()).remote


def test_a_workflow_names_its_remote(bench: Bench) -> None:
    assert remote_of(bench, remote="s3://bucket/prefix") == RemoteSpec("s3://bucket/prefix")
    assert remote_of(bench, remote="s3://bucket/prefix", push=True) == RemoteSpec("s3://bucket/prefix", push=True)
    assert remote_of(bench, remote={"url": "../shared", "timeout": 5}) == RemoteSpec(
        str((bench.folder / "../shared").resolve()), timeout=5
    )
    assert remote_of(bench, remote=None) is None


@pytest.mark.parametrize(
    ("cache", "said"),
    [
        ({"remote": "s4://bucket"}, "'s4://bucket' is not the URL of a remote cache"),
        ({"remote": "s4://me:secret@bucket?sig=x"}, "'s4://bucket' is not the URL"),
        ({"remot": "s3://bucket"}, "unknown option 'remot'"),
        ({"remote": 3}, "'remote' must be text"),
        ({"remote": {"url": "x", "timeout": 0}}, "timeout"),
        ({"remote": "x", "push": "yes"}, "'push' must be a valid boolean"),
    ],
)
def test_mistakes_are_told_where_they_are(bench: Bench, cache: dict[str, Any], said: str) -> None:
    with pytest.raises(WorkflowError, match="small.yaml:") as caught:
        remote_of(bench, **cache)
    assert said in str(caught.value)
    assert "secret" not in str(caught.value)


def test_the_environment_names_another_remote() -> None:
    said = RemoteSpec("s3://bucket", push=True)
    assert remote_from_environment(said, {}) == said
    assert remote_from_environment(said, {"SDFLOW_REMOTE_CACHE": ""}) is None
    assert remote_from_environment(said, {"SDFLOW_REMOTE_CACHE": "gs://b"}) == RemoteSpec("gs://b")
    pushing = {"SDFLOW_REMOTE_CACHE": "gs://b", "SDFLOW_REMOTE_CACHE_PUSH": "1"}
    assert remote_from_environment(None, pushing) == RemoteSpec("gs://b", push=True)
