"""The files for operators: what they say is what `sdflow serve` takes, and what systemd, nginx and Compose read."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import socket
import subprocess
import time
from base64 import b64decode
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
import yaml

from sdflow.cli.app import app
from sdflow.serve.limits import Limits
from tests.serve.conftest import RunningServer

ROOT = Path(__file__).parents[2]
FILES = ROOT / "integrations" / "server"
LITELLM = shutil.which("litellm")


def read(arguments: list[str]) -> dict[str, Any]:
    """The options of `sdflow serve` as it reads them."""
    assert arguments[0] == "serve"
    commands: Any = typer.main.get_command(app)
    found: dict[str, Any] = commands.commands["serve"].make_context("serve", arguments[1:]).params
    return found


def unit() -> configparser.ConfigParser:
    found = configparser.ConfigParser(strict=False, interpolation=None)
    found.optionxform = str  # type: ignore[assignment, method-assign]
    found.read_string((FILES / "sdflow.service").read_text().replace("\\\n", " "))
    return found


def seconds(text: str) -> int:
    found = re.fullmatch(r"(\d+)s?", text)
    assert found is not None
    return int(found[1])


def test_the_unit_starts_a_server_and_waits_for_its_drain() -> None:
    service = unit()["Service"]
    command = shlex.split(service["ExecStart"])
    assert command[0].endswith("/bin/sdflow")
    given = read(command[1:])
    assert seconds(service["TimeoutStopSec"]) > given["drain_timeout"]
    assert given["api_key_file"] != given["admin_key_file"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """With a program that is there."""
    text = (FILES / "sdflow.service").read_text()
    made = tmp_path / "sdflow.service"
    made.write_text(text.replace("/srv/sdflow/.venv/bin/sdflow", "/bin/true").replace("User=sdflow", "User=root"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(made)], capture_output=True, text=True, check=False
    )
    own = [line for line in done.stderr.splitlines() if "sdflow.service" in line]
    assert own == [], own


def test_compose_starts_a_server_that_is_looked_at() -> None:
    made = yaml.safe_load((ROOT / "compose.yaml").read_text())
    service = made["services"]["sdflow"]
    assert service["build"] == {"context": ".", "target": "serve"}
    given = read(service["command"])
    assert seconds(service["stop_grace_period"]) > given["drain_timeout"]
    (ports,) = service["ports"]
    assert ports == f"127.0.0.1:8000:{given['port']}" and given["host"] == "0.0.0.0"
    mounted = {volume.split(":")[1]: volume.split(":")[0] for volume in service["volumes"]}
    for path in (
        given["api_key_file"],
        given["admin_key_file"],
        given["cache"],
        given["pipeline_folder"],
        *given["pipeline"],
    ):
        assert any(path.is_relative_to(place) for place in mounted), path
    assert set(mounted.values()) == {"./pipelines", "./keys", "./cache"}, "what the comments at its top name"
    compile(service["healthcheck"]["test"][-1], "healthcheck", "exec")
    assert service["healthcheck"]["test"][-1].count(f":{given['port']}/readyz") == 1


def test_the_limits_of_nginx_are_the_servers() -> None:
    text = (FILES / "nginx.conf").read_text()
    sizes = dict(re.findall(r"client_max_body_size (\d+)([mg]);", text))
    assert {int(size) << {"m": 20, "g": 30}[unit] for size, unit in sizes.items()} == {Limits.body, Limits.lora_bytes}
    (waits,) = re.findall(r"proxy_read_timeout (\d+)s;", text)
    assert int(waits) > Limits.seconds


def test_litellm_knows_where_the_server_is() -> None:
    made = yaml.safe_load((FILES / "litellm.yaml").read_text())
    (model,) = made["model_list"]
    assert model["litellm_params"]["api_base"].endswith(":8000/v1")
    assert model["model_info"]["mode"] == "image_generation"
    assert made["litellm_settings"]["request_timeout"] > Limits.seconds


@pytest.mark.slow  # LiteLLM takes half a minute to start
@pytest.mark.skipif(
    LITELLM is None, reason="no litellm on the PATH: pip install 'litellm[proxy]==1.108.7' in its own venv"
)
def test_litellm_in_front_checks_the_key_limits_the_rate_and_counts_the_cost(
    server: RunningServer, tmp_path: Path
) -> None:
    """With the shipped file, but for the addresses and three requests a minute."""
    text = (FILES / "litellm.yaml").read_text()
    made = (
        re.sub(r"rpm: \d+", "rpm: 3", text)
        .replace("http://127.0.0.1:8000", server.url)
        .replace("num_retries: 2", "num_retries: 0")
    )
    (tmp_path / "litellm.yaml").write_text(made.replace("openai/default", "openai/tiny"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {**os.environ, "SDFLOW_KEY": "none", "LITELLM_MASTER_KEY": "sk-master"}
    command = [str(LITELLM), "--config", str(tmp_path / "litellm.yaml"), "--host", "127.0.0.1", "--port", str(port)]
    body = {"model": "images", "prompt": "a fox", "size": "64x64"}
    with subprocess.Popen(command, env=environment, cwd=tmp_path) as process, httpx.Client(timeout=120) as client:
        try:
            client.base_url = httpx.URL(f"http://127.0.0.1:{port}")
            wait_for(client, process)
            client.headers = httpx.Headers({"Authorization": "Bearer sk-wrong"})
            assert client.post("/v1/images/generations", json=body).status_code in (400, 401)
            client.headers = httpx.Headers({"Authorization": "Bearer sk-master"})
            refused = client.post("/v1/images/generations", json={**body, "size": "65x64"})
            assert refused.status_code == 400 and "multiples of" in refused.text, "the server's own words"
            drawn = [client.post("/v1/images/generations", json=body) for _ in range(4)]
        finally:
            process.terminate()
    assert [each.status_code for each in drawn].count(429) >= 1
    image = drawn[0]
    assert image.status_code == 200 and image.headers["x-litellm-response-cost"] == "0.01"
    assert b64decode(image.json()["data"][0]["b64_json"]).startswith(b"\x89PNG")


def wait_for(client: httpx.Client, process: subprocess.Popen[bytes]) -> None:
    """Until LiteLLM answers."""
    end = time.monotonic() + 180
    while time.monotonic() < end and process.poll() is None:
        with suppress(httpx.TransportError):
            if client.get("/health/readiness").status_code == 200:
                return
        time.sleep(0.5)
    raise AssertionError(f"LiteLLM does not answer; its status is {process.poll()}")
