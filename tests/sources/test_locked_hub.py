"""A lock holds repositories of the hub at their commits: a branch that moves on changes nothing, and nothing else is fetched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.sources.hub_server import Hub, serving

FIRST, SECOND = "a" * 40, "b" * 40
PLANNED = """
import sys
from pathlib import Path
from sdflow.build.lock import locked_plan, write_lock
from sdflow.config import load_workflow
from sdflow.errors import SdflowError
from sdflow.passes import registry
from sdflow.store import Cache
workflow = load_workflow(Path("w.yaml"), catalog=registry.catalog(), overrides=sys.argv[2:])
try:
    if sys.argv[1] == "lock":
        write_lock(workflow, Cache(Path("cache")))
    else:
        plan = locked_plan(workflow, Cache(Path("cache")), download=True).pipelines[0]
        print(plan.checkpoint.provenance["commit"], *(lora.commit for lora in plan.loras))
except SdflowError as error:
    print(error)
"""


@pytest.fixture
def hub(tiny_folder: Path, tmp_path: Path) -> Iterator[Hub]:
    from small_lora import write_lora

    files = {path.relative_to(tiny_folder).as_posix(): path.read_bytes() for path in tiny_folder.rglob("*.*")}
    changed = files | {"unet/config.json": files["unet/config.json"].replace(b"1e-05", b"1e-06")}
    loras = {
        commit: {"ink.safetensors": write_lora(tmp_path / commit, seed=seed).read_bytes()}
        for seed, commit in enumerate((FIRST, SECOND))
    }
    content = {
        "model": "hf:owner/tiny",
        "target": "cpu",
        "extends": "base/tiny.yaml",
        "loras": [{"file": "hf:owner/ink", "weight_name": "ink.safetensors", "scale": 0.5}],
    }
    (tmp_path / "w.yaml").write_text(yaml.safe_dump(content))
    repositories = {"owner/tiny": {FIRST: files, SECOND: changed}, "owner/ink": loras}
    with serving(Hub(repositories, {"main": FIRST})) as served:
        yield served


def run(hub: Hub, folder: Path, home: str, *arguments: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING")) and "proxy" not in k}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / home), "HF_HUB_DISABLE_TELEMETRY": "1"}
    hub.requests.clear()
    done = subprocess.run(
        [sys.executable, "-c", PLANNED, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_locked_build_takes_the_commits_in_the_lock(hub: Hub, tmp_path: Path) -> None:
    run(hub, tmp_path, "here", "lock")
    lock = json.loads((tmp_path / "w.yaml.lock").read_text())
    assert {name: each["commit"] for name, each in lock["inputs"].items()} == {
        "hf:owner/tiny": FIRST, "hf:owner/ink": FIRST
    }  # fmt: skip
    hub.refs["main"] = SECOND
    assert run(hub, tmp_path, "elsewhere", "plan").split() == [FIRST, FIRST]
    assert not any(SECOND in request or request.endswith("/main") for request in hub.requests), hub.requests

    hub.requests.clear()
    assert "hf:owner/tiny@main is not in the lock" in run(hub, tmp_path, "here", "plan", "model=hf:owner/tiny@main")
    assert hub.requests == [], "nothing of it is asked for"

    run(hub, tmp_path, "here", "lock")
    assert SECOND in (tmp_path / "w.yaml.lock").read_text()
    assert run(hub, tmp_path, "here", "plan").split() == [SECOND, SECOND]

    hub.repositories["owner/ink"][SECOND] = hub.repositories["owner/ink"][FIRST]  # a hub that lies of a commit
    assert "ink.safetensors has changed" in run(hub, tmp_path, "third", "plan")
