"""Run one olive-ai pass on one model, without Olive's engine, cache or telemetry.

Olive writes into the home, current and temporary directories. Here all three point to a scratch directory, and the
result is stored in sdflow's format (`sdflow.onnx_model.files`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdflow.artifact import MODEL_FILE
from sdflow.errors import PassError, SdflowError
from sdflow.onnx_model.files import store_model
from sdflow.passes.weights_on_disk import weights_on_disk
from sdflow.weights.stubs import is_recording

SILENCE = {"OLIVE_DISABLE_TELEMETRY": "1", "CI": "1", "ORT_DISABLE_TELEMETRY": "1"}
"""All are needed to keep `import olive` from contacting a host: with the first alone, it still sends a heartbeat."""

SCRATCH = ".scratch"


@dataclass(frozen=True)
class TorchModel:
    """A PyTorch module as input of a pass.

    load: creates the module. io_config: Olive's input_names, output_names and dynamic_axes.
    dummy_inputs: returns the tracing inputs for a module.
    """

    load: Callable[[], Any]
    io_config: Mapping[str, Any]
    dummy_inputs: Callable[[Any], Any]


def run_olive_pass(
    name: str, options: Mapping[str, Any], model: Path | TorchModel, out: Path, *, keep_weights_on_disk: bool = False
) -> None:
    """Run Olive's pass `name` on `model` (an artifact directory or a module) and write the artifact to `out`.

    Files next to the input's model.onnx (config.json, ...) are copied. keep_weights_on_disk: for passes that use
    onnxruntime.transformers, see `weights_on_disk`. Raises PassError with the cause if the pass fails, rejects its
    options or returns anything but one ONNX model.
    """
    pass_class = olive_pass_class(name)
    with _confined(out / SCRATCH) as scratch, contextlib.ExitStack() as context:
        if keep_weights_on_disk and not is_recording():
            context.enter_context(weights_on_disk(scratch))
        result = _execute(pass_class, name, options, model, scratch / "result")
        store_model(_single_model(name, result, model), out)
    if isinstance(model, Path):
        copy_companions(model, out)


def copy_companions(model: Path, out: Path) -> None:
    """Copy the files of an artifact except its model (config.json, ...) to `out`, without overwriting any."""
    for path in sorted(model.iterdir()):
        if path.is_file() and not path.name.startswith(MODEL_FILE) and not (out / path.name).exists():
            shutil.copyfile(path, out / path.name)


def olive_pass_class(name: str) -> Any:
    """Return the class of Olive's pass `name` (case-insensitive). Raises PassError if olive or a dependency is
    missing."""
    require_silence()
    try:
        from olive.package_config import OlivePackageConfig

        _log_to_stderr()
        return OlivePackageConfig.load_default_config().import_pass_module(name)
    except ImportError as cause:
        raise PassError(f"cannot import: {cause}", where=name, remedy=f"Install {cause.name or 'it'}.") from cause
    except ValueError as cause:
        raise PassError(f"olive-ai has no pass {name!r}", where=name, remedy="See `sdflow passes`.") from cause


def require_silence() -> None:
    """Raise PassError unless this process started with telemetry off; importing olive would report otherwise."""
    wrong = [f"{key}={value}" for key, value in SILENCE.items() if os.environ.get(key) != value]
    if wrong:
        raise PassError(
            f"olive would send telemetry: {' '.join(wrong)} is not set",
            where="olive-ai",
            remedy="Set these before Python starts; `sdflow run` does so for its workers.",
        )


def _execute(pass_class: Any, name: str, options: Mapping[str, Any], model: Path | TorchModel, target: Path) -> Any:
    from olive.hardware import AcceleratorSpec, Device
    from olive.hardware.constants import ExecutionProvider
    from olive.model import ONNXModelHandler
    from olive.model.handler.pytorch import PyTorchModelHandler

    accelerator = AcceleratorSpec(Device.CPU, ExecutionProvider.CPUExecutionProvider)
    if isinstance(model, Path):
        handed_over = ONNXModelHandler(model_path=str(model), onnx_file_name=MODEL_FILE)
    else:
        handed_over = PyTorchModelHandler(
            model_loader=lambda _path: model.load(),  # Olive only accepts functions, not other callables
            io_config=dict(model.io_config),
            dummy_inputs_func=model.dummy_inputs,
        )
    known = pass_class.default_config(accelerator)
    defaults = {"save_as_external_data": True, "all_tensors_to_one_file": True, "size_threshold": 1024}
    given = {key: value for key, value in defaults.items() if key in known} | dict(options)
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise PassError(f"unknown option {', '.join(unknown)}", where=name, remedy=f"It has {', '.join(known)}.")
    with _failures_of(name), _warnings() as said:
        config = pass_class.generate_config(accelerator, given, disable_search=True)
        if not pass_class.validate_config(config, accelerator):
            raise PassError(f"Olive rejects these options. {said()}".strip(), where=name)
        return pass_class(accelerator, config).run(handed_over, str(target))


def _single_model(name: str, result: Any, model: Path | TorchModel) -> Path:
    """Return the result's file. Raises PassError if the pass returned its input: it did nothing, and Olive only logs
    why."""
    path = getattr(result, "model_path", None)
    if type(result).__name__ != "ONNXModelHandler" or path is None:
        raise PassError(f"returned a {type(result).__name__}, not one ONNX model", where=name)
    file = Path(path)
    if isinstance(model, Path) and file.resolve().is_relative_to(model.resolve()):
        raise PassError("returned its input unchanged", where=name, remedy="Leave the pass out, or fix its options.")
    return file


@contextlib.contextmanager
def _failures_of(name: str) -> Iterator[None]:
    """Convert any exception of Olive's code to PassError."""
    try:
        yield
    except SdflowError:
        raise
    except Exception as cause:  # Olive may raise anything
        raise PassError(f"{type(cause).__name__}: {cause}", where=name) from cause


@contextlib.contextmanager
def _confined(scratch: Path) -> Iterator[Path]:
    """Use `scratch` as the current, home and temporary directory while a pass runs, then remove it."""
    scratch.mkdir(parents=True)
    before, environment, temporary = Path.cwd(), dict(os.environ), tempfile.tempdir
    os.environ.update(HOME=str(scratch), USERPROFILE=str(scratch), TMPDIR=str(scratch), XDG_CACHE_HOME=str(scratch))
    tempfile.tempdir = str(scratch)
    os.chdir(scratch)
    try:
        yield scratch
    finally:
        os.chdir(before)
        tempfile.tempdir = temporary
        os.environ.clear()
        os.environ.update(environment)
        shutil.rmtree(scratch)


@contextlib.contextmanager
def _warnings() -> Iterator[Callable[[], str]]:
    """Collect messages of Olive's logger: Olive logs why it rejects options and returns False."""
    lines: list[str] = []
    listener = logging.Handler(logging.INFO)
    listener.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("olive")
    logger.addHandler(listener)
    try:
        yield lambda: " ".join(lines)
    finally:
        logger.removeHandler(listener)


def _log_to_stderr() -> None:
    """Redirect Olive's log from stdout to stderr: stdout is for sdflow's results."""
    for handler in logging.getLogger("olive").handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
            handler.setStream(sys.stderr)


def read_config(model: Path) -> dict[str, Any]:
    """Return config.json of an artifact, or {} if it has none."""
    path = model / "config.json"
    return dict(json.loads(path.read_text())) if path.is_file() else {}
