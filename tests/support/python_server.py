"""The process that `started_python` forks others from: it has imported large packages, and sdflow's modules.

A request is a packet of JSON with four descriptors: the line of the new process, and its standard input, output and error. The
process id is answered on its line, and at its end the exit status. The id stays its own until the other end of the line is
closed, as with a child that nobody has waited for. Requests may come from any process that holds the other end of the socket.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.spawn import spawn_main
from pathlib import Path
from typing import Any, Literal, NoReturn

PACKAGES = (
    "torch",
    "torch._dynamo",
    "torch.onnx.utils",
    "onnx",
    "onnx_ir",
    "onnxruntime",
    "onnxruntime.transformers.optimizer",
    "numpy",
    "PIL.Image",
    "olive.package_config",
    "transformers",
    "transformers.models.clip.modeling_clip",
    "transformers.models.clip.tokenization_clip",
    "transformers.models.t5.modeling_t5",
    "transformers.models.qwen3.modeling_qwen3",
    "diffusers",
    "diffusers.models.unets.unet_2d_condition",
    "diffusers.models.autoencoders.autoencoder_kl",
    "diffusers.models.autoencoders.autoencoder_tiny",
    "diffusers.models.autoencoders.autoencoder_kl_flux2",
    "diffusers.models.transformers.transformer_flux",
    "diffusers.models.transformers.transformer_flux2",
    "diffusers.models.transformers.transformer_sd3",
    "diffusers.models.transformers.transformer_z_image",
    "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion",
    "diffusers.pipelines.stable_diffusion.safety_checker",
    "diffusers.schedulers",
    *("asyncio", "filelock", "psutil", "pydantic", "rich.console", "scipy.integrate", "torchsde", "typer", "yaml"),
)
ROOT = Path(__file__).parents[2]
LONGEST = 1 << 20
Kind = Literal["command", "terminal", "worker"]
"""At a terminal, a process has a session of its own, and the terminal that is its standard input. A worker has a session too."""


@dataclass(frozen=True)
class Line:
    """Asks the server for processes. Forked processes hold one too."""

    socket: socket.socket

    def start(
        self,
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        descriptors: tuple[int, int, int],
        kind: Kind = "command",
    ) -> Started:
        """`python -m` with the arguments, its standard streams these descriptors."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {
            "arguments": list(arguments), "folder": str(folder), "environment": dict(environment), "kind": kind,
        }  # fmt: skip
        with theirs:
            socket.send_fds(self.socket, [json.dumps(request).encode()], [theirs.fileno(), *descriptors])
        return (_StartedWorker if kind == "worker" else Started)(ours)

    def spawn(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        home: Path,
        descriptors: tuple[int, int, int],
    ) -> Started:
        """In place of `sdflow.processes.workers.spawn`."""
        return self.start((module, *arguments), home, environment, descriptors, "worker")


class Started:
    """A process that the server has forked; what `subprocess.Popen` tells of one, as far as it is asked here."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self.returncode: int | None = None
        said = line.recv(32)
        assert said, "the process that starts others has ended"
        self.pid = int(said)

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._line], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            said = self._line.recv(32)
            self.returncode = int(said) if said else -signal.SIGKILL  # the server took it along
            self._line.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _StartedWorker(Started):
    """Killed with everything that it has started."""

    def kill(self) -> None:
        from sdflow.processes.process_tree import kill_session

        if self.returncode is None:
            kill_session(self.pid)
            super().kill()


@dataclass
class _Child:
    pid: int
    ended: int
    line: socket.socket
    has_ended: bool = False
    wanted: bool = True


def serve(requests: socket.socket, line: Line) -> Callable[[], object]:
    """Fork a process for each request until standard input closes. Returns what to run, in such a process."""
    gc.disable()  # what is imported is no garbage
    for name in PACKAGES:
        importlib.import_module(name)
    _import_sdflow()
    _import_schedulers()
    _compute_on_one_thread()
    tempfile.tempdir = None  # each process has its own
    gc.collect()
    gc.enable()
    gc.set_threshold(10_000)  # as in tests/conftest.py
    gc.freeze()  # a collection in a forked process leaves the packages' pages shared
    poller = select.poll()
    poller.register(0)
    poller.register(requests, select.POLLIN)
    children: dict[int, _Child] = {}  # by the descriptors of its end and of its line
    while True:
        for found, _ in poller.poll():
            if found == 0:  # who started this has ended
                for child in children.values():
                    with suppress(ProcessLookupError):
                        os.kill(child.pid, signal.SIGKILL)
                os._exit(0)
            elif found == requests.fileno():
                message, descriptors, _, _ = socket.recv_fds(requests, LONGEST, 4)
                if pid := os.fork():
                    for each in descriptors[1:]:
                        os.close(each)
                    child = _Child(pid, os.pidfd_open(pid), socket.socket(fileno=descriptors[0]))
                    with suppress(BrokenPipeError):
                        child.line.send(str(pid).encode())
                    for each in (child.ended, child.line.fileno()):
                        children[each] = child
                    poller.register(child.ended, select.POLLIN)
                    poller.register(child.line, select.POLLRDHUP)
                    continue
                requests.close()
                for each in {id(child): child for child in children.values()}.values():
                    os.close(each.ended)
                    each.line.close()
                return _begin(json.loads(message), descriptors, line)
            elif found in children:
                _note(children, poller, found)


def _import_sdflow() -> None:
    """All modules, but for those whose packages are not here: of the environment they look at PYTHONPATH alone while they
    are imported, for families (`sdflow.disk.shipped`)."""
    sys.path.insert(0, str(ROOT))
    import sdflow

    for module in pkgutil.walk_packages(sdflow.__path__, "sdflow."):
        if not module.name.endswith("__main__"):
            with suppress(ImportError):
                importlib.import_module(module.name)
    del sys.path[0]


def _import_schedulers() -> None:
    """diffusers imports each when it is first asked for, and every verification of a folder tries all."""
    import diffusers

    from sdflow.families.shared.schedulers import SAMPLERS

    for each in SAMPLERS.values():
        getattr(diffusers, each.scheduler)


def _compute_on_one_thread() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    from one_thread import one_thread_by_default

    one_thread_by_default()
    del sys.path[0]


def _note(children: dict[int, _Child], poller: Any, found: int) -> None:
    """That a process has ended, or that nobody waits for it any more."""
    child = children[found]
    poller.unregister(found)
    if found == child.ended:
        done = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert done is not None
        status = done.si_status if done.si_code == os.CLD_EXITED else -done.si_status
        child.has_ended = True
        with suppress(BrokenPipeError):
            child.line.send(str(status).encode())
    else:
        child.wanted = False
    if child.has_ended and not child.wanted:
        del children[child.ended], children[child.line.fileno()]
        os.waitpid(child.pid, 0)
        os.close(child.ended)
        child.line.close()


def _begin(request: Mapping[str, Any], descriptors: Sequence[int], line: Line) -> Callable[[], object]:
    """Make a forked process what a new Python would be. Returns what to run."""
    import fcntl
    import termios

    os.close(descriptors[0])
    kind, environment, folder = request["kind"], request["environment"], request["folder"]
    if kind != "command":
        os.setsid()
    for number, descriptor in enumerate(descriptors[1:]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if kind == "terminal":
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it runs with `&`
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and nohup this one
    os.environ.clear()
    os.environ.update(environment)
    _read_verbosity(environment)
    os.chdir(folder)
    more = [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]
    if {*more} - {str(ROOT)}:  # there may be families: sdflow's modules are imported anew
        for name in [each for each in sys.modules if each.partition(".")[0] == "sdflow"]:
            del sys.modules[name]
    if request["arguments"][:2] == ["sdflow", "serve"]:
        sys.path.insert(0, str(Path(__file__).parent))
        from forked_children import fork_children

        del sys.path[0]
        if (child := fork_children()) is not None:
            _open_standard_streams()
            return partial(spawn_main, **child)
    _open_standard_streams()
    module, *sys.argv[1:] = request["arguments"]
    # As `python -m` does, and for workers `python -P -m`.
    paths = [] if kind == "worker" else [folder]
    sys.path[:0] = [*paths, *more]
    if module.startswith("sdflow") and module != "sdflow.processes.worker_server":  # which forks its own
        from sdflow.processes import worker_group, workers

        workers.spawn = worker_group.spawn = line.spawn
    if not hasattr(sys.modules.get(module), "__path__"):
        sys.modules.pop(module, None)  # what is run is not there under its own name
    return partial(runpy.run_module, module, run_name="__main__", alter_sys=True)


def _read_verbosity(environment: Mapping[str, str]) -> None:
    """transformers does at its import, which was in the process that is forked."""
    from transformers.utils import logging

    logging.set_verbosity(logging.log_levels.get(environment.get("TRANSFORMERS_VERBOSITY", ""), logging.WARNING))


def _open_standard_streams() -> None:
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = os.fdopen(
            number,
            "r" if name == "stdin" else "w",
            buffering=1 if name == "stderr" or os.isatty(number) else -1,
            encoding="utf-8",
            errors="backslashreplace" if name == "stderr" else "surrogateescape",
            closefd=False,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _end(ended: SystemExit | None) -> NoReturn:
    """As Python ends, but for taking apart every module: that takes longer than many a command."""
    code = ended.code if ended is not None else None
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except ValueError:  # it is closed
            continue
        except OSError:
            code = code or 120
    os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    asking, answering = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    run = serve(answering, Line(asking))
    try:
        run()
        ended: SystemExit | None = None
    except SystemExit as error:
        ended = error
    _end(ended)
