"""Every command where extras of sdflow are not installed: it works, or says in words which `pip install` brings what it lacks.

The environments are those that pip would make, with links to the packages of the tests' own (tests/support/light_install.py).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from light_install import ROOT, LightInstall, light_install
from terminal import commands

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the environments are of links")

TINY = str(ROOT / "workflows/tiny_cpu.yaml")
LORA = str(ROOT / "samples/loras/stripes.safetensors")
ALL = "pip install 'sdflow[cpu]', or cuda, directml or migraphx in place of cpu"
SERVER = ALL.replace("[cpu]", "[cpu,serve]")
REMOTE = "pip install 'sdflow[remote]'"

WITH_BASE: dict[str, tuple[tuple[str, ...], int, str]] = {
    "run": ((TINY,), 2, "pip install 'sdflow[cpu]'"),
    "verify": (("pipelines/x",), 2, ALL),
    "bake": (("--base", "x", "--lora", LORA, "--out", "y", "--verify"), 2, "pip install 'sdflow[build]'"),
    "plan": ((TINY,), 0, "0 of 14 steps are cached"),
    "explain": ((TINY,), 0, "are not installed"),
    "lock": (("tiny",), 0, "1 pipeline"),
    "provenance": (("x",), 2, "not an sdflow pipeline"),
    "push": (("oci://localhost/x:1", "x"), 2, "pip install 'sdflow[oci]'"),
    "pull": (("oci://localhost/x:1",), 2, "pip install 'sdflow[oci]'"),
    "validate": ((TINY,), 0, "valid (tiny_cpu)"),
    "schema": ((), 0, '"$schema"'),
    "passes": ((), 0, "OrtTransformersOptimization"),
    "targets": ((), 0, "pip install onnxruntime-gpu"),
    "doctor": ((), 1, "pip install 'sdflow[cpu]'"),
    "generate": (("x", "-p", "y"), 2, ALL),
    "export": (("x", "--one-file", "y.onnx"), 2, ALL),
    "bench": (("x",), 2, ALL),
    "tune": (("x",), 2, ALL),
    "inspect": ((LORA,), 0, "LoRA"),
    "init": (("--model", "sample:shapes"), 0, "workflow.yaml: written"),
    "serve": (("x",), 2, SERVER),
    "deploy": (("x", "y"), 2, SERVER),
    "query": (("x", "y"), 2, "no such deployment"),
    "status": ((), 0, "nothing is deployed"),
    "terminate": (("x",), 2, "no such deployment"),
    "selftest": ((), 2, ALL),
    "cache ls": ((), 0, "0 entries"),
    "cache push": (("--url", "https://localhost/x"), 2, REMOTE),
    "cache pull": (("--url", "s3://x/y"), 2, "pip install 'sdflow[remote,s3]'"),
    "cache key": (("key.pem",), 2, "pip install 'sdflow[sign]'"),
    "sign": ((".", "--key", "key.pem"), 2, "pip install 'sdflow[sign]'"),
    "cache export": (("x.sdflow", "--structures", TINY), 2, "pip install 'sdflow[build]'"),
    "cache import": (("x.sdflow",), 2, "no such file"),
    "cache verify": ((), 0, "intact: "),
    "cache gc": ((), 0, "removed 0 entries"),
    "cache clean": (("--yes",), 0, "is empty"),
    "cache engines": ((), 0, "kept: 0 B"),
}
"""Command -> its arguments, its exit status, and what it says."""

AFRESH = ("inspect", "lock", "run")
"""Commands that a Python of their own runs: what they import is not there from others."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> LightInstall:
    return light_install(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def said_with_base(base: LightInstall) -> dict[str, subprocess.CompletedProcess[str]]:
    """What each command says there."""
    commands = {name: (*name.split(), *arguments) for name, (arguments, *_) in WITH_BASE.items()}
    together = {name: command for name, command in commands.items() if name not in AFRESH}
    done = dict(zip(together, base.run_all([*together.values()]), strict=True))
    return done | {name: base.run(*commands[name]) for name in AFRESH}


def test_every_command_is_tried_without_any_extra() -> None:
    assert set(WITH_BASE) == set(commands())


@pytest.mark.parametrize("command", WITH_BASE)
def test_with_the_base_alone_a_command_works_or_names_the_extra(
    said_with_base: dict[str, subprocess.CompletedProcess[str]], command: str
) -> None:
    _, status, says = WITH_BASE[command]
    done = said_with_base[command]
    told = done.stdout + done.stderr
    assert "Traceback" not in told
    assert done.returncode == status, told
    assert says in told


def test_results_of_others_are_read_with_the_base_alone(base: LightInstall) -> None:
    (base.folder / "result.json").write_text("{}")
    assert "is not a self-test report" in says(base, "selftest", "--show", "result.json")
    assert "not a result of `sdflow bench`" in says(base, "bench", "--compare", "result.json", "result.json")
    assert ALL in says(base, "bench", "--list")


def says(install: LightInstall, *arguments: str) -> str:
    """What a command says that fails for what is not installed."""
    done = install.run(*arguments)
    assert "Traceback" not in done.stderr
    assert done.returncode in (2, 3), done.stderr + done.stdout
    return done.stderr


def test_a_remote_that_is_a_folder_or_an_archive_needs_no_extra(base: LightInstall, tmp_path: Path) -> None:
    for url in (tmp_path / "folder", tmp_path / "archive.zip"):
        done = base.run("cache", "push", "--url", str(url))
        assert done.returncode == 0, done.stderr
        assert "0 of 0 results were new" in done.stdout


def test_the_server_names_its_extra_where_the_rest_is_there(tmp_path: Path) -> None:
    install = light_install(tmp_path, "build", "bind")
    for command in (("serve", "x"), ("deploy", "x", "y")):
        told = says(install, *command)
        assert "needs fastapi, httpx, prometheus-client, python-multipart, uvicorn, which are not installed" in told
        assert "pip install 'sdflow[serve]'" in told
    assert "pip install 'sdflow[serve]'" in says(install, "generate", "x", "--interactive")


def test_a_run_on_ray_names_its_extra(tmp_path: Path) -> None:
    install = light_install(tmp_path, "build", "bind", "serve")
    assert "pip install 'sdflow[ray]'" in says(install, "run", TINY, "--on", "ray")


def test_a_store_names_its_extra_where_the_remote_s_is_there(tmp_path: Path) -> None:
    install = light_install(tmp_path, "remote")
    for url, extra in (("s3://x/y", "s3"), ("gs://x/y", "gs"), ("abfs://x/y", "az")):
        told = says(install, "cache", "ls", "--url", url)
        assert f"pip install 'sdflow[{extra}]'" in told
