"""A server in the background: started, asked, listed, ended, from commands and from Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import typer
from typer.testing import CliRunner
from until import PATIENCE, until

from sdflow.cli.app import app
from sdflow.disk.locked_folder import alone_in
from sdflow.errors import UsageError
from sdflow.prompts.limits import TruncatedPrompt
from sdflow.serve import client
from sdflow.serve.deployments import Deployment, deploy, deployments, find_deployment, terminate

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where deployments are noted for these tests; none is left."""
    folder = tmp_path_factory.mktemp("deployments")
    os.environ["SDFLOW_DEPLOYMENTS"] = str(folder)
    yield folder
    for each in deployments():
        terminate(each.name)
    del os.environ["SDFLOW_DEPLOYMENTS"]


def sdflow(*arguments: str) -> subprocess.CompletedProcess[str]:
    """As a command."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "sdflow", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def here(*arguments: str) -> str:
    """What a command prints, run in this process. Raises what it raises."""
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False).stdout


def test_it_is_deployed_queried_and_terminated(tiny_pipeline: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    done = sdflow("deploy", "tiny", str(tiny_pipeline), "--api-key-file", str(key))
    assert done.returncode == 0, done.stderr
    found = find_deployment("tiny")
    assert found.url in done.stdout and found.pipelines == ("tiny",)
    assert psutil.Process(found.pid).ppid() != os.getpid(), "it outlives the command"
    with pytest.raises(UsageError, match=f"already running at {found.url}"):
        here("deploy", "tiny", str(tiny_pipeline))
    out = tmp_path / "images"
    drawn = here("query", "tiny", "a", "--size", "64x64", "--steps", "1", "--seed", "3", "--out", str(out))
    assert drawn.split() == [str(out / "001-3.png")]
    (image,) = client.query("tiny", "a", size="64x64", steps=1, seed=3)
    assert image.size == (64, 64)
    with pytest.warns(TruncatedPrompt, match="reads 77: the rest is ignored: '"):
        client.query("tiny", "an otter " * 100, size="64x64", steps=1)
    said = CliRunner().invoke(
        app, ["query", "tiny", "an otter " * 100, "--size", "64x64", "--steps", "1", "--out", str(out)]
    )
    assert said.stderr.startswith("warning: a prompt has 202 tokens") and "warning" not in said.stdout
    start = ("--image", str(out / "001-3.png"), "--mask", str(out / "001-3.png"), "--strength", "0.5")
    more = ("--steps", "4", "--scheduler", "ddim", "--prompt-syntax", "plain", "-n", "2", "--seed", "5")
    again = here("query", "tiny", "a", *start, *more, "--out", str(tmp_path / "again"))
    assert [Path(each).name for each in again.split()] == ["001-5.png", "002-6.png"]
    for wrong, says in (
        (("--lora", "ink:much"), "'much' is not a scale"),
        (("--lora", "ink:0.5", "--lora", "pen"), "no LoRA named 'ink'"),
        (("--mask", "m.png"), "needs an image to start from"),
        (("--image", "m.png"), "cannot be read"),
    ):
        with pytest.raises(UsageError, match=says):
            here("query", "tiny", "a", *wrong)
    with pytest.raises(UsageError, match="steps is 1000; the maximum is 150"):
        client.query("tiny", "a", steps=1000)
    assert "running" in here("status")
    body = {"prompt": "a", "size": "64x64", "steps": 20, "stream": True, "progress": True}
    url, headers = f"{found.url}/v1/images/generations", {"Authorization": "Bearer secret"}
    with httpx.stream("POST", url, json=body, headers=headers, timeout=PATIENCE) as answer:
        lines = answer.iter_lines()
        next(lines)
        ending = threading.Thread(target=lambda: terminate("tiny"))
        ending.start()
        assert "event: image_generation.completed" in list(lines), "what was begun is finished"
    ending.join(PATIENCE)
    assert not found.running
    assert here("status") == "nothing is deployed\n"


def test_every_option_of_serve_is_one_of_deploy() -> None:
    """And it reaches the server as it was said."""
    commands: Any = typer.main.get_command(app)
    served, deployed = ({each.name: each for each in commands.commands[name].params} for name in ("serve", "deploy"))
    assert deployed.keys() == {*served, "name", "json"}
    for name in served:
        same = [(each.opts, each.secondary_opts, each.nargs) for each in (served[name], deployed[name])]
        assert same[0] == same[1]


def test_options_reach_the_server_as_they_were_said(tiny_pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once, of every kind, read by `serve` as it reads its own; and none that was not said."""
    given: list[list[str]] = []

    def started(name: str, pipelines: Any, options: list[str], key_file: Path | None) -> Deployment:
        given.append(options)
        return Deployment(name, 1, 0.0, "", "", (), None, "")

    monkeypatch.setattr("sdflow.serve.deployments.deploy", started)
    monkeypatch.delenv("SDFLOW_CACHE", raising=False)  # a cache that stands there is passed on too
    said = "--lanes 2 --max-queue 8 --deadline 2.5 --loras l --cache c --cors-origin http://a --cors-origin http://b"
    flags = "--no-safety-checker --no-check --log-prompts --open --batch-sizes 1,2 --host 127.0.0.1"
    here("deploy", "x", str(tiny_pipeline), *said.split(), *flags.split(), "--json")
    here("deploy", "x", str(tiny_pipeline))
    whole = said.replace("--loras l --cache c", f"--loras {Path('l').absolute()} --cache {Path('c').absolute()}")
    assert sorted(given[0]) == sorted(["--port", "0", *whole.split(), *flags.split()])
    assert given[1] == ["--port", "0"]
    serve: Any = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    read = serve.make_context("serve", [str(tiny_pipeline), *given[0]]).params
    assert (read["lanes"], read["deadline"], read["checker"], read["open_page"]) == (2, 2.5, False, True)
    assert (read["cors_origin"], read["port"]) == (["http://a", "http://b"], 0)


@pytest.mark.slow  # another server
def test_one_that_died_is_told_and_may_be_deployed_again(tiny_pipeline: Path, tmp_path: Path) -> None:
    """Deployed from Python, with a key that is known again, and known of before it is ready."""
    (tmp_path / "key").write_text("secret\n")
    options = {"batch_sizes": "1", "api_key_file": tmp_path / "key", "log_prompts": True}
    deploying = threading.Thread(target=client.deploy, args=("frail", [tiny_pipeline]), kwargs=options)
    deploying.start()
    until(lambda: any(each.running for each in deployments()))
    with pytest.raises(UsageError, match="are still loading"):
        client.query("frail", "a")
    deploying.join(PATIENCE)
    made = find_deployment("frail")
    (image,) = client.query("frail", "a", size="64x64", steps=1)
    assert image.size == (64, 64)
    os.kill(made.pid, signal.SIGKILL)
    until(lambda: not made.running)
    with pytest.raises(UsageError, match=rf"process {made.pid} died(.|\n)*ready"):
        find_deployment("frail")
    (told,) = deployments()
    assert (told.name, told.running) == ("frail", False)
    assert terminate("frail").pid == made.pid
    assert deployments() == []


@pytest.mark.slow  # another server
def test_one_that_is_ended_while_it_starts_is_told_and_leaves_nothing(tiny_pipeline: Path, deployed: Path) -> None:
    said: list[str] = []

    def start() -> None:
        try:
            client.deploy("early", [tiny_pipeline], batch_sizes="1")
        except UsageError as error:
            said.append(error.what)

    deploying = threading.Thread(target=start)
    deploying.start()
    until(lambda: any(each.running for each in deployments()))
    both = [threading.Thread(target=terminate, args=("early",)) for _ in range(2)]
    for each in both:
        each.start()
    for each in [*both, deploying]:
        each.join(PATIENCE)
    assert said == ["it was stopped before it was ready"]
    assert not (deployed / "early").exists()


def test_a_pid_that_is_another_process_by_now_is_not_taken_for_it() -> None:
    this = psutil.Process()
    same = Deployment("x", this.pid, this.create_time(), "", "", (), None, "")
    other = Deployment("x", this.pid, this.create_time() - 100, "", "", (), None, "")
    assert same.running and not other.running


def test_a_server_that_cannot_start_says_why(tiny_pipeline: Path) -> None:
    with pytest.raises(UsageError, match="it failed to start:\n(.|\n)*is not a list of batch sizes"):
        client.deploy(
            "broken",
            [tiny_pipeline],
            batch_sizes="0",
            log_prompts=True,
            threads=None,
            cors_origin=["http://a", "http://b"],
        )
    assert deployments() == []


def test_a_name_that_is_being_deployed_is_taken(deployed: Path, tiny_pipeline: Path) -> None:
    (deployed / "busy").mkdir()
    with alone_in(deployed / "busy"), pytest.raises(UsageError, match="another command is deploying it"):
        deploy("busy", [tiny_pipeline])


@pytest.mark.parametrize("name", ["../x", "", "a b", ".x"])
def test_a_name_that_cannot_be(name: str, tiny_pipeline: Path) -> None:
    with pytest.raises(UsageError, match="is not a valid name"):
        deploy(name, [tiny_pipeline])


def test_a_name_that_is_not_deployed() -> None:
    with pytest.raises(UsageError, match="no such deployment; known: none"):
        client.query("nobody", "a")
