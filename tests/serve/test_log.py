"""The log: JSON whoever writes it, kept short where it is a file, and what `status` learns from it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sdflow.serve.deployments import Deployment
from sdflow.serve.log import MOST_BYTES, ROTATED, log_line, rotate

NOISY = """
import ctypes, logging, threading, warnings
from sdflow.serve.log import log_as_json, log_error
log_as_json()
logging.getLogger("uvicorn.error").error("it %s", "broke")
warnings.warn("old")
try:
    1 / 0
except ZeroDivisionError as error:
    log_error(error)
raise ValueError("nobody caught it")
"""


def test_what_libraries_and_python_say_is_json_too() -> None:
    done = subprocess.run([sys.executable, "-c", NOISY], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["event"] for line in lines] == ["log", "log", "error", "error"]
    assert (lines[0]["message"], lines[0]["logger"], lines[0]["level"]) == ("it broke", "uvicorn.error", "error")
    assert lines[1]["message"].strip() == "UserWarning: old"
    assert "1 / 0" in lines[2]["traceback"] or "ZeroDivisionError" in lines[2]["traceback"]
    assert lines[3]["message"] == "nobody caught it"


def test_a_log_file_begins_anew_and_the_lines_before_are_kept(tmp_path: Path) -> None:
    """While another process appends to it."""
    log = tmp_path / "log.txt"
    with log.open("ab", buffering=0) as other:
        other.write(b"x" * MOST_BYTES)
        rotate(log)
        assert not (tmp_path / "log.txt.1").exists()
        other.write(b"{}\n")
        rotate(log)
        other.write(b'{"event": "after"}\n')
    assert (tmp_path / "log.txt.1").stat().st_size == MOST_BYTES + 3
    assert log.read_bytes() == b'{"event": "after"}\n'


def test_a_server_that_was_deployed_keeps_its_log_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log.txt"
    monkeypatch.setenv(ROTATED, str(log))
    with log.open("a") as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        stderr.write("x" * MOST_BYTES)
        log_line("request")
        log_line("ended")
    assert json.loads(log.read_text())["event"] == "ended"
    assert (tmp_path / "log.txt.1").read_text().endswith('"event": "request"}\n')


@pytest.mark.parametrize(("last", "state"), [("ended", "ended"), ("request", "died")])
def test_an_end_in_order_is_told_from_a_death(tmp_path: Path, last: str, state: str) -> None:
    log = tmp_path / "log.txt"
    log.write_text("".join(json.dumps({"event": event}) + "\n" for event in ("serving", "ready", last)))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert Deployment("x", gone.pid, 0.0, "", "", (), None, str(log)).state == state
