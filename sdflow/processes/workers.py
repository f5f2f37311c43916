"""Run work in a separate process: clean environment, no network, ended with its parent.

A pass or an evaluation may crash, leak, start threads or write into the home directory; its effects stay in its
process, and its memory is returned. The parent sends one JSON request on standard input and keeps the pipe open: when
it closes, because the parent finished or died, the worker ends at once. The worker answers with JSON lines: any number
of `{"phase": ...}`, then `{"result": ...}` or `{"error": ...}`. Everything else that it prints goes to the log file.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import sdflow
from sdflow import errors
from sdflow.disk.locked_folder import scratch_folder
from sdflow.errors import PassError, SdflowError
from sdflow.processes.process_tree import kill_session

_KEPT = frozenset((
    "PATH", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "LANGUAGE", "TZ", "TMPDIR",
    "TEMP", "TMP", "SYSTEMROOT", "WINDIR", "SYSTEMDRIVE", "COMSPEC", "PATHEXT", "NUMBER_OF_PROCESSORS",
    "PROCESSOR_ARCHITECTURE", "PROCESSOR_IDENTIFIER",
))  # fmt: skip

_KEPT_PREFIXES = (
    "LC_",
    "CUDA_",
    "NVIDIA_",
    "NCCL_",
    "CUBLAS_",
    "CUDNN_",
    "HIP_",
    "ROCR_",
    "ROCM_",
    "HSA_",
    "MIGRAPHX_",
    "OMP_",
    "MKL_",
    "VK_",  # Vulkan's drivers, for WebGPU
    "ORT_WEBGPU_",
)

_SILENCED = {
    "CI": "1",  # the only switch that stops all of olive-ai's telemetry
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "OLIVE_DISABLE_TELEMETRY": "1",
    "ORT_DISABLE_TELEMETRY": "1",  # also keeps ONNX Runtime from writing a device id into the home directory
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",  # logs of killed processes are read
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_OFFLINE": "1",
}

POLL_SECONDS = 0.2

_ENDED = b"ended\n"


@dataclass(frozen=True)
class WorkerResult:
    """A worker's return value, run time in seconds, and peak resident memory in bytes."""

    value: Any
    seconds: float
    peak_memory: int


class Worker(Protocol):
    """The process of a worker."""

    pid: int

    def kill(self) -> None: ...

    def wait(self) -> int:
        """Wait for its end. Returns its exit status, or minus the signal's number if it was killed."""


Descriptors = tuple[int, int, int]
"""A worker's standard input, output and error."""

Start = Callable[[str, Sequence[str], Mapping[str, str], Path, Descriptors], Worker]
"""Starts `python -m` with a module and its arguments; environment, home and current folder, descriptors."""

SIDE_BY_SIDE = {"OMP_WAIT_POLICY": "PASSIVE", "OPENBLAS_NUM_THREADS": "1"}
"""Environment for workers that share cores. torch's waiting threads otherwise spin, and take a core from a busy worker:
two traces on two cores took 16 s, now 9. OpenBLAS's threads wait for one another; passes that compute a lot have their
own threads."""


def run_worker(
    module: str,
    request: Mapping[str, Any],
    *,
    log: Path,
    environment: Mapping[str, str] | None = None,
    on_phase: Callable[[str], None] = lambda phrase: None,
    on_memory: Callable[[int], None] = lambda rss: None,
    on_start: Callable[[Worker], None] = lambda worker: None,
    start: Start | None = None,
) -> WorkerResult:
    """Run `python -m module` on a request and wait for its result.

    log: file for everything the worker prints. environment: additional variables, unless the user set them.
    on_phase: called with each phase the worker announces; on_memory: with its resident bytes, a few times a second,
        from another thread. on_start: called with the process; if it raises, the worker is ended. start: `spawn` by default.

    Raises the worker's SdflowError, OSError if the disk is full, or PassError if it crashed or was killed. The worker
    process is gone on return, however this call ends.
    """
    started = time.perf_counter()
    with scratch_folder("home") as home, log.open("wb") as sink:
        variables = dict(environment or {}) | clean_environment(home)
        with _started(start or spawn, module, variables, home, sink) as (worker, requests, answers, ended):
            on_start(worker)
            with _watched(worker, on_memory, ended):
                try:
                    requests.write(json.dumps(request).encode() + b"\n")
                    requests.flush()
                except BrokenPipeError:
                    pass  # it died at start: the empty answer below reports it, with the log
                for line in answers:
                    if line == _ENDED:
                        break
                    try:
                        message = json.loads(line)
                    except ValueError:
                        continue  # killed while writing
                    if "phase" in message:
                        on_phase(message["phase"])
                    elif "error" in message:
                        raise rebuilt_error(message["error"], log)
                    elif "result" in message:
                        return WorkerResult(message["result"], time.perf_counter() - started, message["peak_memory"])
                worker.kill()  # its remaining processes; before waiting, while the pid is still its own
                raise _death(worker.wait(), log)


def spawn(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], home: Path, descriptors: Descriptors
) -> Worker:
    """Start a new Python process for a module of sdflow, in `home`."""
    stdin, stdout, stderr = descriptors
    return _Spawned(
        python_command(module, *arguments),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=environment,
        cwd=home,
        start_new_session=True,  # Ctrl-C reaches only the parent, which ends the worker in order
    )


class _Spawned(subprocess.Popen[bytes]):
    """A worker that is killed together with everything it started."""

    def kill(self) -> None:
        if self.returncode is None:  # not waited for yet: the pid is still its own
            kill_session(self.pid)
            super().kill()


def python_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of sdflow without importing from the current folder (-P)."""
    return [sys.executable, "-P", "-m", module, *arguments]


def clean_environment(home: Path) -> dict[str, str]:
    """The environment of a worker: paths of programs, libraries and devices; no secrets, proxies or telemetry."""

    def is_kept(name: str) -> bool:
        return name.upper() in _KEPT or name.upper().startswith(_KEPT_PREFIXES)

    kept = {name: value for name, value in os.environ.items() if is_kept(name)}
    here = str(Path(sdflow.__file__).parents[1])
    if "site-packages" not in Path(here).parts:  # a checkout, which the new process must find too
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, [here, kept.get("PYTHONPATH")]))
    homes = dict.fromkeys(("HOME", "USERPROFILE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HOME"), str(home))
    return (
        kept | _SILENCED | homes | {"TORCHINDUCTOR_CACHE_DIR": str(home / "torchinductor")}
    )  # otherwise in the system's temporary folder


@contextmanager
def _started(
    start: Start, module: str, environment: Mapping[str, str], home: Path, sink: IO[bytes]
) -> Iterator[tuple[Worker, IO[bytes], IO[bytes], int]]:
    """Yield a worker, the pipes to and from it, and a descriptor to write to when it has ended: processes that it
    started may hold its end of the pipe open. The worker is gone at the end."""
    theirs, to_worker = os.pipe()
    from_worker, answers = os.pipe()
    requests = open(to_worker, "wb")  # noqa: SIM115, PTH123  (closing it may fail, below)
    with open(from_worker, "rb") as stream:  # noqa: PTH123  (a descriptor)
        try:
            worker = start(module, (), environment, home, (theirs, answers, sink.fileno()))
        except BaseException:
            os.close(answers)
            raise
        finally:
            os.close(theirs)
        try:
            yield worker, requests, stream, answers
        finally:
            worker.kill()
            worker.wait()
            os.close(answers)
            with suppress(BrokenPipeError):  # unread input
                requests.close()


@contextmanager
def _watched(worker: Worker, on_memory: Callable[[int], None], ended: int) -> Iterator[None]:
    """Poll a worker's memory a few times a second, and write to `ended` when the process is gone."""
    import psutil

    done = threading.Event()

    def watch() -> None:
        try:
            process = psutil.Process(worker.pid)
            while process.status() != psutil.STATUS_ZOMBIE:
                if done.wait(POLL_SECONDS):
                    return
                on_memory(process.memory_info().rss)
        except psutil.NoSuchProcess:
            pass
        os.write(ended, b"\n" + _ENDED)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def rebuilt_error(error: Mapping[str, Any], log: Path) -> Exception:
    """The exception of an `error_message`. log: the worker's output, for errors other than sdflow's."""
    if error["errno"] in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return OSError(error["errno"], os.strerror(error["errno"]))  # the caller that owns the disk adds the remedy
    kind = getattr(errors, error["kind"], None)
    if isinstance(kind, type) and issubclass(kind, SdflowError):
        return kind(error["what"], where=error["where"], remedy=error["remedy"])
    return PassError(f"{error['kind']}: {error['what']}", remedy=_last_output(log))


def _death(status: int, log: Path) -> PassError:
    if status < 0:
        name = signal.Signals(-status).name
        likely = ", most likely because memory ran out" if name == "SIGKILL" else ""
        return PassError(f"the process was killed by {name}{likely}", remedy=_last_output(log))
    return PassError(f"the process ended with status {status} and no result", remedy=_last_output(log))


def _last_output(log: Path, lines: int = 25) -> str | None:
    text = log.read_text(errors="replace").splitlines()
    return "\n".join(["its last output:", *(f"  | {line}" for line in text[-lines:])]) if text else None
