"""Lines of the server's log are whole, also where a signal's handler writes one while another is being written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import signal, time
from sdflow.serve.log import log_line
signal.signal(signal.SIGALRM, lambda *_: log_line("alarm"))
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0005)
end = time.monotonic() + 1
while time.monotonic() < end:
    log_line("line", text="x" * 5000)
signal.setitimer(signal.ITIMER_REAL, 0)
"""


def test_a_handler_may_log_while_a_line_is_being_written(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as stderr:
        done = subprocess.run([sys.executable, "-c", PROGRAM], stderr=stderr, check=False, timeout=60)
    assert done.returncode == 0, log.read_text()[-2000:]
    events = [json.loads(line)["event"] for line in log.read_text().splitlines()]
    assert {"alarm", "line"} == {*events}
