"""What an assembled pipeline does on its target: where its nodes run, how fast, with how much memory, and a picture."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sdflow import errors
from sdflow.config.workflow import EvaluateSpec
from sdflow.errors import SdflowError, TargetUnavailableError
from sdflow.evaluate.result import EvaluationResult, append_result
from sdflow.evaluate.worker import Request
from sdflow.runtime.process import clean_environment, python_command

__all__ = ["EvaluationResult", "append_result", "evaluate"]

_LAST_LINES = 12


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
    Raises TargetUnavailableError when required; VerificationError when the provider cannot run a graph; SdflowError
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
        result = _in_worker(request, progress)
    except TargetUnavailableError as error:
        if required:
            raise
        return EvaluationResult(name=name, target=target, measured=False, reason=error.what)
    if results is not None:
        append_result(results / f"{name}.jsonl", result)
    return result


def _in_worker(request: Request, progress: Callable[[str], None]) -> EvaluationResult:
    with tempfile.TemporaryDirectory(prefix="sdflow-") as scratch, tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            python_command("sdflow.evaluate.worker"),
            env=clean_environment(Path(scratch)),
            cwd=scratch,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(request.to_json()).encode() + b"\n")
            process.stdin.flush()  # and left open: the worker ends when it is closed
            for line in process.stdout:
                message = json.loads(line)
                if "progress" in message:
                    progress(message["progress"])
                elif "error" in message:
                    raise _error(message["error"])
                else:
                    return EvaluationResult.from_json(message["result"])
            status = process.wait()
        finally:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()
        output.seek(0)
        said = output.read().decode(errors="replace").strip().splitlines()[-_LAST_LINES:]
        ended = f"signal {-status}" if status < 0 else f"status {status}"
        raise SdflowError(
            f"the evaluation ended with {ended}:\n    " + "\n    ".join(said or ["(it printed nothing)"]),
            where=request.name,
            remedy="Signal 9 is often a lack of memory: see `sdflow doctor`." if status == -9 else None,
        )


def _error(content: dict[str, Any]) -> SdflowError:
    error_class: type[SdflowError] = getattr(errors, content.pop("type"))
    return error_class(content["what"], where=content["where"], remedy=content["remedy"])
