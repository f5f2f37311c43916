"""The Dockerfile and the example of GitHub Actions: their commands are run, or parsed where that takes Docker or a network."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from small_lora import write_lora
from small_workflows import SMALL_PASSES

from sdflow.cli.app import app
from tests.oci.docker_registry import docker_registry

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs/examples/pipelines.yml"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INSTRUCTIONS = [
    line.partition(" ")[::2] for line in (ROOT / "Dockerfile").read_text().splitlines() if line[:1].isupper()
]


def parse(words: list[str]) -> None:
    """Raises click's errors for a command or an option that is not there."""
    command: Any = typer.main.get_command(app)
    context = command.context_class(command, info_name="sdflow")
    name, command, rest = command.resolve_command(context, words)
    command.parse_args(command.context_class(command, info_name=name, parent=context), list(rest))


def installs(command: str) -> None:
    """What pip is to install exists: extras of sdflow, versions as in constraints.txt."""
    for word in shlex.split(command)[2:]:
        if found := re.fullmatch(r"(?:\.|/src)\[([\w,-]+)\]", word):
            assert set(found[1].split(",")) <= set(PROJECT["optional-dependencies"]), word
        elif "==" in word:
            assert word in (ROOT / "constraints.txt").read_text().splitlines()


def test_the_images_are_built_of_what_is_there() -> None:
    stages = [value.split()[-1] for name, value in INSTRUCTIONS if name == "FROM"]
    assert stages == ["bind", "build", "serve"]
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    sent = [line[1:] for line in lines if line.startswith("!")]
    assert lines[0] == "*"
    for name, value in INSTRUCTIONS:
        if name == "COPY":
            for source in value.split()[:-1]:
                assert (ROOT / source).exists() and any(fnmatch.fnmatch(source, each) for each in sent), source
        if name == "RUN" and value.startswith("pip"):
            installs(value)
    packaged = {PROJECT["readme"], *PROJECT["license-files"], "pyproject.toml", "sdflow"}
    assert packaged <= set(sent), "what the wheel is made of is in the context"


@pytest.mark.parametrize("command", [json.loads(value) for name, value in INSTRUCTIONS if name == "CMD"], ids=str)
def test_the_images_run_commands_that_are_there(command: list[str]) -> None:
    if command[0].startswith("--"):
        done = subprocess.run([sys.executable, "-m", "sdflow", *command], capture_output=True, text=True)
        assert done.returncode == 0 and "OCI registry" in done.stdout
    else:
        parse(command)


def steps() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load(EXAMPLE.read_text())["jobs"]["build"]["steps"]
    return found


def made_of(statement: Any) -> Any:
    """Submodel -> its steps."""
    return statement["predicate"]["buildDefinition"]["internalParameters"]["actions"]


def test_the_example_of_github_actions(tmp_path: Path) -> None:
    """Each of its lines in a shell, with a folder for the bucket and a registry on localhost; docker and pip are not run."""
    job = yaml.safe_load(EXAMPLE.read_text())["jobs"]["build"]
    project = tmp_path / "project"
    project.mkdir()
    write_lora(project / "ink.safetensors")
    (project / "own.py").write_text(SMALL_PASSES.read_text())
    chain = [{"pass": "own.py:Convert", "text": "a"}, {"pass": "own.py:Merge"}]
    content: dict[str, Any] = {
        "model": "synthetic:sd15-tiny",
        "target": ["cpu", "cuda"],
        "submodels": {"unet": {"passes": chain}, "text_encoder": {"passes": chain}},
        "loras": [{"file": "ink.safetensors", "scale": 0.5}],
        "evaluate": {"image": None, "latency": None},
        "verify": False,
    }
    (project / "fox.yaml").write_text(yaml.safe_dump(content))
    with docker_registry(tmp_path / "registry") as registry:
        values = {
            "matrix.target": "cpu", "github.event_name == 'push' && '1' || '0'": "1",
            "github.repository": "me/foxes", "github.actor": "me", "github.server_url": "https://github.com"
        }  # fmt: skip

        def filled(text: str) -> str:
            known = re.sub(r"\$\{\{ (.+?) \}\}", lambda found: values.get(found[1], "secret"), text)
            return known.replace("s3://my-bucket/sdflow", str(tmp_path / "bucket")).replace("ghcr.io", registry.host)

        environment = {**os.environ, "TMPDIR": str(tmp_path), "SDFLOW_CACHE": str(tmp_path / "cache")}
        environment |= {name: filled(value) for name, value in job["env"].items()}
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
        environment["PYTHONPATH"] = str(ROOT)
        lines = [line for step in steps() if "run" in step for line in step["run"].splitlines()]
        ran = []
        (tmp_path / "bucket").mkdir()
        for line in ["sdflow lock fox.yaml", *lines]:
            if line.startswith("pip"):
                installs(line)
                continue
            if "docker login" in line:
                continue
            done = subprocess.run(
                ["bash", "-e", "-c", filled(line)], cwd=project, env=environment, capture_output=True, text=True
            )
            assert done.returncode == 0, f"{line}: {done.stderr}"
            ran.append(line.split()[1])
        assert ran == ["lock", "validate", "run", "provenance", "push"]
        assert json.loads((project / "run.json").read_text())["kind"] == "run"
        statement = json.loads((project / "pipelines/fox-cpu/provenance.json").read_text())
        builder = statement["predicate"]["runDetails"]["builder"]["id"]
        assert builder == "https://github.com/me/foxes/.github/workflows/pipelines.yml"
        built = {step["action"] for steps in made_of(statement).values() for step in steps}
        there = {path.stem for path in (tmp_path / "bucket").rglob("actions/*/*.json")}
        assert built and built <= there, "the bucket has what was built"
