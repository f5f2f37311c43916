"""What an assembled pipeline does on its target: where its nodes run, how fast, with how much memory, and an image.

The end of `sdflow run`: a benchmark of one engine, whose images nothing is compared with (`sdflow verify` did that).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sdflow.bench.evaluate_worker import REQUEST, Request
from sdflow.bench.evaluation import EvaluationResult, append_result
from sdflow.config.workflow import EvaluateSpec
from sdflow.disk.locked_folder import scratch_folder
from sdflow.errors import TargetUnavailableError, UsageError
from sdflow.machine.providers import require_package
from sdflow.processes.workers import run_worker
from sdflow.runtime.kernels.library import FOLDER_VARIABLE, kernel_folder
from sdflow.targets import TARGETS

WORKER = "sdflow.bench.evaluate_worker"


def evaluate(
    folder: Path,
    spec: EvaluateSpec,
    target: str,
    *,
    name: str | None = None,
    results: Path | None = None,
    image: Path | None = None,
    required: bool = False,
    threads: int | None = None,
    engine_cache: Path | None = None,
    progress: Callable[[str], None] = lambda phrase: None,
) -> EvaluationResult:
    """Evaluate a pipeline folder in a process of its own, anew each time.

    results: the folder where `<name>.jsonl` gets one more line. image: the PNG file; `<name>.png` there when None.
    required: a target that this machine cannot run is an error; otherwise the result says so and nothing is recorded.
    engine_cache: where the provider keeps compiled engines. progress: called with a short phrase for each phase.
    Raises TargetUnavailableError when required; VerificationError when the provider cannot run a graph; PassError
    when the process dies. Nodes that fell to another provider are the result's `failure`.
    """
    name = name or folder.name
    if image is None and results is not None:
        image = results / f"{name}.png"
    request = Request(
        folder=folder.absolute(),
        name=name,
        target=target,
        spec=spec,
        image=image.absolute() if image else None,
        engine_cache=engine_cache.absolute() if engine_cache else None,
        threads=threads,
    )
    try:
        require_package(TARGETS[target])
        result = _in_worker(request, progress)
    except TargetUnavailableError as error:
        if required:
            raise
        return EvaluationResult(name=name, target=target, measured=False, reason=error.what, remedy=error.remedy)
    if results is not None:
        append_result(results / f"{name}.jsonl", result)
    return result


def _in_worker(request: Request, progress: Callable[[str], None]) -> EvaluationResult:
    with scratch_folder("log") as folder:
        worker = run_worker(
            WORKER,
            REQUEST.dump_python(request, mode="json"),
            log=folder / "log.txt",
            environment=_kernels(),
            on_phase=progress,
        )
    return EvaluationResult.from_json(worker.value)


def _kernels() -> dict[str, str]:
    """Where this user's compiled kernels are: the worker has a home of its own, for a while."""
    try:
        return {FOLDER_VARIABLE: str(kernel_folder().absolute())}
    except UsageError:
        return {}
