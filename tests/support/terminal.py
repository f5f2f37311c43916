"""A command in a pseudo-terminal, and the screen that its user would see."""

from __future__ import annotations

import os
import re
import select
import signal
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pexpect
import pyte
from python_server import Started
from started_python import StartedPython
from until import PATIENCE

ROOT = Path(__file__).parents[2]
KEPT = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "TMPDIR")
COLOUR = re.compile(rb"\x1b\[(?:[\d;]*;)?(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;[\d;]*)?m")
"""An SGR sequence that sets a colour."""


@dataclass
class Terminal:
    """A folder and a home directory, in which `sdflow` is started at a terminal of this size.

    started: forks it. None: it is a new Python, as it is where the environment is for Python itself.
    """

    folder: Path
    columns: int = 80
    rows: int = 40
    environment: dict[str, str] = field(default_factory=dict)
    started: StartedPython | None = None

    def start(self, *arguments: str) -> Session:
        """`sdflow` with these arguments."""
        if self.started is None or any(name.startswith("PYTHON") for name in self.environment):
            return self.start_command(sys.executable, "-m", "sdflow", *arguments)
        forked = Forked(
            self.started, ("sdflow", *arguments), self.folder, self._environment(), (self.rows, self.columns)
        )
        return Session(forked, self.columns, self.rows)

    def start_command(self, *command: str) -> Session:
        spawned = pexpect.spawn(
            command[0],
            list(command[1:]),
            cwd=self.folder,
            env=self._environment(),
            dimensions=(self.rows, self.columns),
            timeout=PATIENCE,
            preexec_fn=_heed_signals,
        )
        return Session(spawned, self.columns, self.rows)

    def _environment(self) -> dict[str, str]:
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        kept = {name: value for name, value in os.environ.items() if name in KEPT}
        given = {
            "TERM": "xterm-256color",
            "LANG": "C.UTF-8",
            "HOME": str(home),
            "SDFLOW_CACHE": "cache",
            "PYTHONPATH": str(ROOT),
        }
        return {**kept, **given, "ORT_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "1", **self.environment}

    def run(self, *arguments: str) -> Session:
        """The same, to its end."""
        session = self.start(*arguments)
        session.end()
        return session


def _heed_signals() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it runs with `&`
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and nohup this one


class Forked:
    """A command at a pseudo-terminal, forked: what is used here of `pexpect.spawn`."""

    def __init__(
        self,
        started: StartedPython,
        arguments: tuple[str, ...],
        folder: Path,
        environment: dict[str, str],
        size: tuple[int, int],
    ) -> None:
        self._ours, theirs = os.openpty()
        _set_size(theirs, *size)
        self._process: Started = started.line.start(arguments, folder, environment, (theirs,) * 3, "terminal")
        os.close(theirs)
        self.pid = self._process.pid
        self.exitstatus: int | None = None
        self.signalstatus: int | None = None

    def read_nonblocking(self, size: int, timeout: float) -> bytes:
        if not select.select([self._ours], [], [], timeout)[0]:
            raise pexpect.TIMEOUT("nothing to read")
        try:
            return os.read(self._ours, size)
        except OSError as error:  # the other end is closed
            raise pexpect.EOF("ended") from error

    def send(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def sendintr(self) -> None:
        self.send("\x03")

    def setwinsize(self, rows: int, columns: int) -> None:
        _set_size(self._ours, rows, columns)

    def hang_up(self) -> None:
        os.close(self._ours)
        self._ours = -1

    def wait(self) -> None:
        status = self._process.wait(PATIENCE)
        self.exitstatus, self.signalstatus = (status, None) if status >= 0 else (None, -status)

    def close(self) -> None:
        self.wait()
        if self._ours != -1:
            self.hang_up()


def _set_size(terminal: int, rows: int, columns: int) -> None:
    import fcntl
    import termios

    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


class Session:
    """A command that runs. All that it has printed is in `screen`, and what has left that at the top."""

    def __init__(self, spawned: Any, columns: int, rows: int) -> None:
        self.spawned = spawned
        self.screen = pyte.HistoryScreen(columns, rows, history=10_000, ratio=0.5)
        self.stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self.widest = columns

    @property
    def shown(self) -> list[str]:
        """Every line, from the first that was printed, without the empty ones at the end."""
        above: list[Any] = list(self.screen.history.top)
        lines = ["".join(line[x].data for x in range(self.widest)).rstrip() for line in above]
        lines += [line.rstrip() for line in self.screen.display]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    @property
    def text(self) -> str:
        return "\n".join(self.shown)

    @property
    def words(self) -> str:
        """The text without its lines: what is wrapped between words is whole again."""
        return " ".join(self.text.split())

    @property
    def cursor_is_hidden(self) -> bool:
        return bool(self.screen.cursor.hidden)

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Reads until it holds. Fails when the command ends before."""
        end = time.monotonic() + PATIENCE
        while not holds():
            assert self._read(), f"ended before {what}:\n{self.text}"
            assert time.monotonic() < end, f"not {what}:\n{self.text}"

    def until_shown(self, phrase: str) -> None:
        self.until(lambda: phrase in self.text, f"{phrase!r} was shown")

    def _read(self) -> bool:
        """Whether it still runs."""
        try:
            data = self.spawned.read_nonblocking(1 << 16, timeout=0.1)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        self.raw += data
        self.stream.feed(data)
        return True

    def type(self, keys: str) -> None:
        self.spawned.send(keys)

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.spawned.sendintr()

    def resize(self, columns: int, rows: int) -> None:
        self.screen.resize(rows, columns)
        self.widest = max(self.widest, columns)
        self.spawned.setwinsize(rows, columns)

    def hang_up(self) -> None:
        """The terminal is closed."""
        if isinstance(self.spawned, Forked):
            self.spawned.hang_up()
            return
        self.spawned.ptyproc.fileobj.close()
        self.spawned.child_fd = -1
        self.spawned.closed = True

    def end(self) -> int:
        """Reads until it ends; its exit status, or that of the signal, negative."""
        while self._read():
            continue
        self.spawned.close()
        status = self.spawned.exitstatus
        return -self.spawned.signalstatus if status is None else status

    @property
    def status(self) -> int:
        return self.end() if self.spawned.exitstatus is None else self.spawned.exitstatus

    @property
    def printed(self) -> list[str]:
        """Every line as it was printed, frames of what is drawn again among them, without escape sequences."""
        plain = _SEQUENCE.sub("\r", self.raw.decode())
        return [line.rstrip() for line in re.split(r"[\r\n]+", plain) if line.strip()]

    def broken(self) -> list[str]:
        """Lines that the terminal broke in the middle of a word, although their words fit."""
        return [
            line
            for line in self.printed
            if len(line) > self.widest and max(map(len, line.split())) <= self.widest - self.widest // 4
        ]


_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\x1b[=>]")


def commands() -> list[str]:
    """Every command of the command line, as "run" and "cache ls"."""
    import typer

    from sdflow.cli.app import app

    def walk(command: Any, path: tuple[str, ...]) -> Any:
        below = getattr(command, "commands", None)
        if below is None:
            yield " ".join(path)
        for name, each in (below or {}).items():
            yield from walk(each, (*path, name))

    return sorted(walk(typer.main.get_command(app), ()))
