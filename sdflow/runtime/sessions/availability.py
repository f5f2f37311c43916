"""Find which targets this machine can run, by running a tiny model on each in a separate process.

A provider in `get_available_providers()` was compiled in, but its libraries, driver or device may be missing.
`python -m sdflow.runtime.sessions.availability TARGET` tries one target and prints JSON.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from sdflow.errors import TargetUnavailableError, VerificationError
from sdflow.processes.workers import clean_environment, python_command
from sdflow.targets import TARGETS, Target

_TIMEOUT_SECONDS = 120
_INSTALL = "Install the driver and the libraries that https://onnxruntime.ai/docs/execution-providers/ lists for it."


@dataclass(frozen=True)
class Availability:
    """Whether a target runs on this machine.

    provider: the execution provider that ran. reason, remedy: why it does not run, and how to fix that. emulated: whether
    the GPU is emulated by the processor. accelerator: the hardware's name, for providers that say on which device they
    run.
    """

    target: str
    available: bool
    provider: str | None = None
    reason: str | None = None
    remedy: str | None = None
    emulated: bool = False
    accelerator: str | None = None


def target_availability(names: Sequence[str] = tuple(TARGETS)) -> list[Availability]:
    """Try each target in a separate process, which contains crashes of its libraries."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        return list(pool.map(_try_elsewhere, names))


def try_target(target: Target) -> str:
    """Run a convolution and a product on the target's provider in this process. Return the provider's name.

    Raises TargetUnavailableError with the reason.
    """
    import numpy as np

    from sdflow.machine.onnx_runtime import import_onnxruntime, onnxruntime_errors
    from sdflow.runtime.sessions.session import create_session

    shapes = {"image": (1, 3, 8, 8)}
    ort = import_onnxruntime(target)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "probe.onnx"
        model.write_bytes(_probe_model())
        failures: tuple[type[Exception], ...] = (VerificationError, *onnxruntime_errors(ort))
        try:
            session = create_session(model, target, shapes=shapes)
            (result,) = session.run(None, {"image": np.ones(shapes["image"], np.float32)})
        except failures as error:
            cause = error.__cause__ or error
            raise TargetUnavailableError(
                f"a tiny model does not run: {cause}", where=target.name, remedy=_INSTALL
            ) from error
    if not np.allclose(result, 27.0):
        raise TargetUnavailableError(f"it computes {result.ravel()[:3]} instead of 27", where=target.name)
    return str(session.get_providers()[0])


def _probe_model() -> bytes:
    """Return a model of Conv (weights 1, 3x3, 3 channels) and Mul by one: 27 everywhere for an image of ones."""
    from onnx import TensorProto, helper

    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3, 8, 8])
    result = helper.make_tensor_value_info("result", TensorProto.FLOAT, ["batch", 1, 6, 6])
    weight = helper.make_tensor("weight", TensorProto.FLOAT, [1, 3, 3, 3], [1.0] * 27)
    one = helper.make_tensor("one", TensorProto.FLOAT, [], [1.0])
    nodes = [
        helper.make_node("Conv", ["image", "weight"], ["sums"], name="conv"),
        helper.make_node("Mul", ["sums", "one"], ["result"], name="mul"),
    ]
    graph = helper.make_graph(nodes, "probe", [image], [result], [weight, one])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


def _try_elsewhere(name: str) -> Availability:
    with tempfile.TemporaryDirectory() as home:
        try:
            finished = subprocess.run(
                python_command("sdflow.runtime.sessions.availability", name),
                env=clean_environment(Path(home)),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Availability(name, False, reason=f"the provider did not answer within {_TIMEOUT_SECONDS} s")
    said = loader_errors(finished.stderr)
    if finished.returncode != 0:
        cause = said or finished.stderr.strip()[-400:] or "no message"
        return Availability(name, False, reason=f"the provider crashed (status {finished.returncode}): {cause}")
    found = Availability(**json.loads(finished.stdout.splitlines()[-1]))
    if not found.available and said:
        return Availability(name, False, reason=f"{found.reason}: {said}", remedy=found.remedy)
    return found


def loader_errors(output: str) -> str:
    """Extract ONNX Runtime's messages about libraries that failed to load, and the versions it requires."""
    found = [
        f"{library} cannot be loaded: {cause.strip()}"
        for library, cause in re.findall(r"Failed to load library \S*?([^/\\\s]+) with error: (.+)", output)
    ]
    found += [f"it needs {wanted}" for wanted in re.findall(r"Require (cuDNN \S+ and CUDA [\d.]*\d)", output)]
    return "; ".join(dict.fromkeys(found))


def _main(name: str) -> None:
    from sdflow.machine.onnx_runtime import import_onnxruntime
    from sdflow.machine.plugins import accelerator, is_emulated

    try:
        target = TARGETS[name]
        provider, ort = try_target(target), import_onnxruntime(target)
        found = Availability(
            name,
            True,
            provider=provider,
            emulated=is_emulated(ort, target),
            accelerator=accelerator(ort, target, provider),
        )
    except TargetUnavailableError as error:
        found = Availability(name, False, reason=error.what, remedy=error.remedy)
    print(json.dumps(asdict(found)))


if __name__ == "__main__":
    _main(sys.argv[1])
