"""The worker's side of `sdflow.processes.workers`: read the request, answer, end with the parent, deny network."""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from sdflow.errors import PassError, SdflowError
from sdflow.processes.process_tree import adopt_orphans, kill_descendants


def error_message(error: BaseException) -> dict[str, Any]:
    """An error as a message from a worker; `rebuilt_error` reverses it."""
    known = error if isinstance(error, SdflowError) else None
    return {
        "kind": type(error).__name__,
        "what": str(error) if known is None else known.what,
        "where": None if known is None else known.where,
        "remedy": None if known is None else known.remedy,
        "errno": error.errno if isinstance(error, OSError) else None,
    }


def serve_request(work: Callable[[Mapping[str, Any], Callable[[str], None]], Any]) -> NoReturn:
    """The worker's side: read the request, run `work(request, phase)`, answer, exit. Never returns."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # library output goes to the log, not between the answers
    request = json.loads(sys.stdin.buffer.readline() or b"null")
    if request is None:
        os._exit(1)
    adopt_orphans()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    deny_network()

    def answer(**message: Any) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        kill_descendants(os.getpid())
        with suppress(OSError):  # the log may be on the full disk
            traceback.print_exception(kind, error, trace)
            sys.stderr.flush()
        if isinstance(error, ImportError):
            from sdflow.machine.packages import of_missing_module

            error = of_missing_module(error) or error
        answer(error=error_message(error))
        os._exit(1)

    sys.excepthook = report  # the parent reports to the user
    result = work(request, lambda phrase: answer(phase=phrase))
    kill_descendants(os.getpid())  # before the result counts: remaining processes could still write
    answer(result=result, peak_memory=peak_memory())
    with suppress(OSError):
        sys.stderr.flush()
    os._exit(0)  # no exit handlers: some libraries send their telemetry there


def _end_with_parent() -> None:
    # A raw read: a buffered one holds a lock that the interpreter wants at exit.
    while os.read(0, 4096):
        continue
    try:
        kill_descendants(os.getpid())
    finally:
        os._exit(1)


def deny_network() -> None:
    """Make every host lookup and connection of this process raise PassError, except to local sockets."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
            raise PassError(
                f"a pass tried to look up the host {arguments[0]!r}", remedy="Passes must work without network."
            )
        if event == "socket.connect" and isinstance(arguments[1], tuple):
            raise PassError(f"a pass tried to connect to {arguments[1]!r}", remedy="Passes must work without network.")

    sys.addaudithook(hook)


def limit_memory(most: int) -> None:
    """Limit this process's own memory to `most` bytes: allocations beyond raise MemoryError. File mappings do not
    count. Has no effect on Windows, which has no such limit, and is not enforced on macOS."""
    if sys.platform == "win32":
        return
    import resource

    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def peak_memory() -> int:
    """The peak resident memory of this process so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # unlike ru_maxrss, VmHWM is reset by exec
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import psutil

    info = psutil.Process().memory_info()
    return int(getattr(info, "peak_wset", info.rss))
