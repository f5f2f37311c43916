"""Worker process that first imports a user script: `python -m sdflow.passes.script_worker`.

Importing runs the script, which may exit, kill its process, print, or never return. Isolated here, that ends only this
process, and the caller reports it. Time and memory are limited.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sdflow.disk.input_file import read_input
from sdflow.disk.locked_folder import scratch_folder
from sdflow.errors import PassError
from sdflow.passes.user_pass import load_user_pass, user_script_files
from sdflow.processes.in_worker import limit_memory, serve_request
from sdflow.processes.workers import Worker, run_worker

SECONDS = 60.0
"""Time limit for importing a script; torch alone may take ten."""
LEAST_MEMORY = 2 * 10**9
"""Memory that a script may always use, however little is free: libraries can be swapped out."""

_tried: set[tuple[str, str, str]] = set()


def try_user_pass(name: str, folder: Path) -> None:
    """Import a script in a separate process, once per content. Raises PassError with the failure."""
    files = user_script_files(name, folder)
    content = hashlib.sha256()
    for path in files:
        try:
            content.update(hashlib.sha256(read_input(path)).digest())
        except OSError as error:
            raise PassError(f"cannot be read: {error.strerror or error}", where=str(path)) from error
    key = (name, str(folder.absolute()), content.hexdigest())
    if key in _tried:
        return
    late = threading.Event()
    timers: list[threading.Timer] = []

    def watch(worker: Worker) -> None:
        def end() -> None:
            late.set()
            worker.kill()

        timers.append(threading.Timer(SECONDS, end))
        timers[0].daemon = True
        timers[0].start()

    with scratch_folder("script") as scratch:
        try:
            run_worker(
                __name__, {"name": name, "folder": str(folder.absolute())}, log=scratch / "log.txt", on_start=watch
            )
        except PassError as error:
            if late.is_set():
                what = f"was not imported within {SECONDS:.0f} s"
            elif error.where is not None:
                raise
            else:
                what = f"when it is imported, {error.what}"
            where = str(next((path for path in files if path.name == Path(name.partition(":")[0]).name), files[0]))
            raise PassError(what, where=where, remedy=error.remedy) from error
        finally:
            for timer in timers:
                timer.cancel()
    _tried.add(key)


def serve(request: Mapping[str, Any], phase: Callable[[str], None]) -> Mapping[str, Any]:
    """Load the requested pass and build its options' JSON schema, as planning does. Memory is limited to what is
    free."""
    import psutil

    limit_memory(max(LEAST_MEMORY, psutil.virtual_memory().available))
    found = load_user_pass(request["name"], Path(request["folder"]))
    found.Config.model_json_schema()
    return {}


if __name__ == "__main__":
    serve_request(serve)
