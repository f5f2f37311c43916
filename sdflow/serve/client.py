"""Deployed servers from Python: deploy, query, terminate.

from sdflow.serve.client import deploy, query, terminate

deploy("shapes", ["pipelines/shapes_cpu"])
query("shapes", "a large red circle", steps=20)[0].save("circle.png")
terminate("shapes")
"""

from __future__ import annotations

import io
import json
import urllib.error
import urllib.request
from base64 import b64decode
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.errors import UsageError
from sdflow.serve import deployments
from sdflow.serve.deployments import Deployment, find_deployment, terminate
from sdflow.serve.server import read_key

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Deployment", "deploy", "query", "query_files", "terminate"]


def deploy(name: str, pipelines: Sequence[Path | str], **options: Any) -> Deployment:
    """Start a server in the background. options: of `sdflow serve`, `max_queue=8` for `--max-queue 8`, `no_auth=True` for
    `--no-auth`, a list for one that is repeatable.

    Raises UsageError as `sdflow deploy`.
    """
    key = options.pop("api_key_file", None)
    given = [each for name, value in {"port": 0, **options}.items() for each in _spelled(name, value)]
    folders = [Path(each) for each in pipelines]
    return deployments.deploy(name, folders, given, key_file=None if key is None else Path(key))


def _spelled(name: str, value: Any) -> list[str]:
    """An option as the command takes it."""
    option = name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{option}" if value else f"--no-{option}"]
    values = value if isinstance(value, list | tuple) else [value]
    return [each for one in values for each in (f"--{option}", str(one))]


def query(name: str, prompt: str, **fields: Any) -> list[Image]:
    """Images from a deployed server. fields: of `/v1/images/generations`. Raises UsageError as the server refuses."""
    import PIL.Image

    return [PIL.Image.open(io.BytesIO(content)) for content, _ in query_files(name, prompt, **fields)]


def query_files(name: str, prompt: str, **fields: Any) -> list[tuple[bytes, int]]:
    """The same as files, each with its seed."""
    deployed = find_deployment(name)
    body = json.dumps({"prompt": prompt, **fields, "response_format": "b64_json"}).encode()
    headers = {"Content-Type": "application/json"}
    if deployed.key_file is not None:
        headers["Authorization"] = f"Bearer {read_key(Path(deployed.key_file))}"
    url = f"{_reachable(deployed.url)}/v1/images/generations"
    try:
        # Straight there: a proxy knows nothing of this machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(urllib.request.Request(url, body, headers)) as answer:
            data = json.loads(answer.read())["data"]
    except urllib.error.HTTPError as error:
        raise UsageError(_said(error), where=name) from error
    except OSError as error:
        raise UsageError(f"{url} does not answer: {error}", where=name, remedy="See its log: sdflow status.") from error
    return [(b64decode(each["b64_json"]), each["seed"]) for each in data]


def _reachable(url: str) -> str:
    """Of a server that listens at all addresses, this machine's own."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def _said(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP status {error.code}"
