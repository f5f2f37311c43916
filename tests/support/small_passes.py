"""Passes without torch or onnx, for tests of the plan and the executor: each takes milliseconds and leaves traces.

The folder named by the option `log` gets one file per run of a pass, so that a test can count what really ran.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
import uuid
from pathlib import Path
from typing import Any

from pydantic import Field

from sdflow.artifact import Facts
from sdflow.errors import PassError
from sdflow.passes.base import Pass, PassConfig, PassInputs


class Options(PassConfig):
    """among: goes on when so many passes have begun, itself included."""

    text: str = ""
    sleep: float = 0.0
    among: int = 1
    fail: bool = False
    kill: bool = False
    random: bool = False
    operators: dict[str, int] = Field(default_factory=dict)


LONGEST = 300
"""Seconds for others to begin."""


def traces() -> Path:
    return Path(os.environ["TMPDIR"]) / "ran"


def trace(name: str) -> None:
    traces().mkdir(exist_ok=True)
    (traces() / f"{name}-{uuid.uuid4().hex}").touch()


def model_of(content: Any) -> bytes:
    """A model with an Identity from x to y, and this content as its doc string. Field numbers: onnx.proto."""

    def field(number: int, value: bytes) -> bytes:
        size = len(value)
        return bytes([number << 3 | 2, size & 0x7F | 0x80, size >> 7]) + value

    node = field(1, b"x") + field(2, b"y") + field(4, b"Identity")
    graph = field(1, node) + field(2, b"g") + field(11, field(1, b"x")) + field(12, field(1, b"y"))
    return b"\x08\x08" + field(7, graph) + field(8, b"\x10\x11") + field(6, json.dumps(content).encode())


def content_of(model: Path) -> Any:
    """What `model_of` was given."""
    data = model.read_bytes()
    return json.loads(data[data.index(b"\x42\x82\x00\x10\x11") + 8 :])


def finish(name: str, content: Any, out: Path, config: Options) -> Facts:
    trace(name)
    (out / "model.onnx").write_bytes(model_of(content)[:200])
    time.sleep(config.sleep)
    end = time.monotonic() + LONGEST
    while config.among > 1 and len(list(traces().iterdir())) < config.among:
        if time.monotonic() > end:
            raise PassError(f"no {config.among} passes have begun")
        time.sleep(0.02)
    if config.fail:
        raise PassError("told to fail", remedy="tell it not to")
    if config.kill:
        os.kill(os.getpid(), signal.SIGKILL)
    if config.random:
        (out / "noise").write_text(uuid.uuid4().hex)
    (out / "model.onnx").write_bytes(model_of(content))
    return {"operators": config.operators, "nodes": len(content)}


class Convert(Pass[Options]):
    """Starts a chain: writes its option `text`."""

    name = "Convert"
    version = 1
    accepts = "checkpoint"
    Config = Options

    def run(self, inputs: PassInputs, out: Path, config: Options) -> Facts:
        return finish("Convert", [inputs.submodel, config.text], out, config)


class Append(Pass[Options]):
    """Continues a chain: appends its option `text`; with an empty text its output is its input's content."""

    name = "Append"
    version = 1
    Config = Options

    def run(self, inputs: PassInputs, out: Path, config: Options) -> Facts:
        assert inputs.model is not None
        content = content_of(inputs.model / "model.onnx")
        return finish("Append", content + ([config.text] if config.text else []), out, config)


class Merge(Pass[Options]):
    """Takes LoRAs: appends the digest of each and its scale."""

    name = "Merge"
    version = 1
    takes_loras = True
    Config = Options

    def run(self, inputs: PassInputs, out: Path, config: Options) -> Facts:
        assert inputs.model is not None
        content = content_of(inputs.model / "model.onnx")
        merged = [[hashlib.sha256(lora.path.read_bytes()).hexdigest(), lora.scale] for lora in inputs.loras]
        return finish("Merge", content + merged, out, config)
