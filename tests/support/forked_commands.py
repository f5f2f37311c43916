"""Runs commands of sdflow, each in a process that is forked from this one, which has imported all of sdflow that can be imported
where it runs. Standard input: a list of the commands' arguments. Standard output: status, standard output and error of each.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import runpy
import sys
import tempfile
from contextlib import suppress


def import_sdflow() -> None:
    import sdflow

    for module in pkgutil.walk_packages(sdflow.__path__, "sdflow."):
        if not module.name.endswith("__main__"):
            with suppress(ImportError):  # the command that needs it meets the same
                importlib.import_module(module.name)


def run(arguments: list[str]) -> tuple[int, str, str]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error:
        if not (child := os.fork()):
            os.dup2(out.fileno(), 1)
            os.dup2(error.fileno(), 2)
            os._exit(run_here(arguments))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        error.seek(0)
        return status, out.read().decode(), error.read().decode()


def run_here(arguments: list[str]) -> int:
    """As `python -m sdflow` does. Returns its exit status."""
    sys.argv[1:] = arguments
    code: object = 0
    try:
        runpy.run_module("sdflow", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code
    except BaseException:  # noqa: BLE001  (as Python itself shows it)
        sys.excepthook(*sys.exc_info())
        code = 1
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code or 0


if __name__ == "__main__":
    import_sdflow()
    json.dump([run(arguments) for arguments in json.load(sys.stdin)], sys.stdout)
