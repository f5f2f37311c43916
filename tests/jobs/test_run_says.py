"""What `sdflow run` says first, and what it says of a target that is not here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from started_python import Command

ONE_SUBMODEL = """\
extends: base/tiny.yaml
target: directml
submodels: {unet: null, vae_encoder: null, vae_decoder: null, safety_checker: null}
evaluate: {image: null, latency: {warmup: 0, runs: 1}}
"""


@pytest.mark.skipif(sys.platform == "win32", reason="DirectML may be here")
def test_a_run_says_what_is_to_be_built_and_how_to_run_what_cannot_run_here(sdflow: Command, tmp_path: Path) -> None:
    (tmp_path / "text.yaml").write_text(ONE_SUBMODEL)
    arguments = ("run", "text.yaml", "--no-verify")
    first = sdflow(*arguments, folder=tmp_path, SDFLOW_CACHE="", XDG_CACHE_HOME=str(tmp_path / "xdg"))
    assert first.returncode == 0, first.stderr
    made, begins, *_ = first.stderr.splitlines()
    users = tmp_path / "xdg/sdflow/builds"
    assert made == f"creating the cache in {users} (change it with --cache or SDFLOW_CACHE)"
    assert (users / "v1/objects").is_dir() and not (tmp_path / "cache").exists()
    steps = begins.partition(" steps to build, then measurement")[0]
    count = int(steps.partition(" of ")[2])
    assert steps == f"{count} of {count}"
    lines = first.stdout.splitlines()
    said = lines[lines.index("not measured: it runs on Windows only") :]
    assert said[1:5] == [
        "  To run it on a Windows machine, copy the models into the folder:",
        "    sdflow run text.yaml --no-verify --copy --no-evaluate",
        "  Take pipelines/text to a Windows machine, and there:",
        '    sdflow generate text --prompt "..."',
    ]
    again = sdflow(*said[2].split()[1:], folder=tmp_path, SDFLOW_CACHE=str(users))
    assert again.returncode == 0, again.stderr
    assert again.stderr.splitlines()[0] == f"nothing to build: all {count} steps are cached"
    assert json.loads((tmp_path / "pipelines/text/sdflow.json").read_text())["copied"]
    copied = sdflow(*arguments, "--copy", folder=tmp_path, SDFLOW_CACHE=str(users))
    nothing, follows = copied.stderr.splitlines()[:2]
    assert nothing == f"nothing to build: all {count} steps are cached"
    assert follows == "then measurement (skip the measurement with --no-evaluate)"
    assert "copy the models" not in copied.stdout and "Take pipelines/text to a Windows machine" in copied.stdout
    told = json.loads(sdflow(*arguments, "--json", folder=tmp_path, SDFLOW_CACHE=str(users)).stdout)["pipelines"][0][
        "evaluation"
    ]
    assert (told["measured"], told["reason"]) == (False, "it runs on Windows only")
    assert "take the pipeline folder there" in told["remedy"]
