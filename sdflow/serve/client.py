"""Deploy, query and terminate servers from Python.

from sdflow.serve.client import deploy, query, terminate

deploy("shapes", ["pipelines/shapes_cpu"])
query("shapes", "a large red circle", steps=20)[0].save("circle.png")
terminate("shapes")
"""

from __future__ import annotations

import io
import json
import ssl
from base64 import b64decode, b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sdflow.disk.input_file import read_input
from sdflow.errors import UsageError, os_errors_as
from sdflow.machine.packages import EXTRAS, require_packages
from sdflow.prompts.limits import report
from sdflow.serve import deployments
from sdflow.serve.deployments import Deployment, find_deployment, terminate
from sdflow.serve.keys import read_keys

if TYPE_CHECKING:
    from httpx import Response
    from PIL.Image import Image

MOST_IMAGE = 1 << 30
"""Maximum bytes of an uploaded file; the server has its own limit."""

__all__ = ["Deployment", "deploy", "query", "terminate"]


def deploy(name: str, pipelines: Sequence[Path | str], **options: Any) -> Deployment:
    """Start a server in the background. options: those of `sdflow serve`: `max_queue=8` for `--max-queue 8`,
    `no_auth=True` for `--no-auth`, a list for a repeatable option.

    Raises UsageError like `sdflow deploy`.
    """
    key = options.pop("api_key_file", None)
    given = [each for name, value in {"port": 0, **options}.items() for each in _as_options(name, value)]
    folders = [Path(each) for each in pipelines]
    return deployments.deploy(name, folders, given, key_file=None if key is None else Path(key))


def _as_options(name: str, value: Any) -> list[str]:
    option = name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{option}" if value else f"--no-{option}"]
    values = value if isinstance(value, list | tuple) else [value]
    return [each for one in values for each in (f"--{option}", str(one))]


def query(name: str, prompt: str, **fields: Any) -> list[Image]:
    """Generate images on a deployed server. fields: those of `/v1/images/generations`, or of `/v1/images/edits` with
    `image` (and `mask`). `image`, `mask` and `references` are paths or file contents. Warns with TruncatedPrompt if a
    prompt was truncated. Raises UsageError for a rejected request or an unreadable file."""
    import PIL.Image

    answers = query_answers(name, prompt, **fields)
    report(dict.fromkeys(warning for each in answers for warning in each.warnings))
    return [PIL.Image.open(io.BytesIO(each.file)) for each in answers]


class Answer(NamedTuple):
    """A generated image file. warnings: what was truncated from its prompts."""

    file: bytes
    seed: int
    warnings: tuple[str, ...]


def query_answers(name: str, prompt: str, **fields: Any) -> list[Answer]:
    """Like `query`, but return each image's file, seed and warnings."""
    deployed = find_deployment(name)
    require_packages("query", *EXTRAS["serve"])
    import httpx

    files = {each: _content(each, fields.pop(each)) for each in ("image", "mask") if fields.get(each) is not None}
    if references := fields.pop("references", None):
        fields["references"] = [b64encode(_content("references", each)).decode() for each in references]
    request = {"prompt": prompt, **fields, "response_format": "b64_json"}
    # As ASCII: the server refuses what JSON or UTF-8 cannot hold, in its own words.
    path, body = "generations", dict[str, Any](content=json.dumps(request).encode())
    headers = {"Content-Type": "application/json"}
    if files:  # a form carries lists as JSON
        given = {each: value for each, value in request.items() if value is not None}
        texts = [json.dumps(value) if isinstance(value, list | tuple) else str(value) for value in given.values()]
        path, body = "edits", {"data": dict(zip(given, texts, strict=True)), "files": files}
        headers = {}
    if deployed.key_file is not None:
        headers["Authorization"] = f"Bearer {read_keys(Path(deployed.key_file))[0]}"
    url = f"{_reachable(deployed.url)}/v1/images/{path}"
    try:
        # No proxy: it could not reach a server on this machine.
        with httpx.Client(trust_env=False, timeout=None, verify=ssl.create_default_context()) as client:
            answer = client.post(url, headers=headers, **body)
            found = answer.json()["data"] if answer.is_success else []
    except (httpx.HTTPError, ValueError) as error:
        raise UsageError(
            f"no answer from {url}: {str(error) or type(error).__name__}",
            where=name,
            remedy="See its log: sdflow status.",
        ) from error
    if not answer.is_success:
        raise UsageError(_error_message(answer), where=name)
    return [Answer(b64decode(each["b64_json"]), each["seed"], tuple(each.get("warnings", ()))) for each in found]


def _content(name: str, given: Path | str | bytes) -> bytes:
    if isinstance(given, bytes):
        return given
    with os_errors_as("cannot be read", given):
        return read_input(Path(given), MOST_IMAGE)


def _reachable(url: str) -> str:
    """Replace a wildcard address with the loopback address."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def _error_message(answer: Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP status {answer.status_code}"
