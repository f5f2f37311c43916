"""Runs one pass of olive-ai, by its name, on one model: no engine, no cache, no telemetry.

Olive writes into the home directory, the current directory and the temporary directory as it likes; here it sees a
scratch directory in place of all three, and the result is put into the one form of `sdflow.onnx_model.files`.
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
"""Importing olive contacts a host unless all of these are set: with the first alone it still tries a heartbeat."""

SCRATCH = ".scratch"


@dataclass(frozen=True)
class TorchModel:
    """A PyTorch module as a pass's input.

    load: makes the module. io_config: Olive's: input_names, output_names, dynamic_axes.
    dummy_inputs: module -> the inputs to trace it with.
    """

    load: Callable[[], Any]
    io_config: Mapping[str, Any]
    dummy_inputs: Callable[[Any], Any]


def run_olive_pass(
    name: str, options: Mapping[str, Any], model: Path | TorchModel, out: Path, *, keep_weights_on_disk: bool = False
) -> None:
    """Run Olive's pass `name` on `model` (an artifact's directory, or a module) and write the artifact into `out`.

    Files beside the input's model.onnx (config.json, ...) are copied along. `keep_weights_on_disk`: for passes of
    onnxruntime.transformers, see `weights_on_disk`. Raises PassError with the cause when the pass fails, refuses its
    options or gives something other than one ONNX model.
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
    """Copy the small files of an artifact (config.json, ...), not its model, to `out`."""
    for path in sorted(model.iterdir()):
        if path.is_file() and not path.name.startswith(MODEL_FILE) and not (out / path.name).exists():
            shutil.copyfile(path, out / path.name)


def olive_pass_class(name: str) -> Any:
    """The class of Olive's pass `name`, in any case. Raises PassError when olive or what the pass needs is missing."""
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
    """Raise PassError unless this process was started with telemetry off: olive must not be imported otherwise."""
    wrong = [f"{key}={value}" for key, value in SILENCE.items() if os.environ.get(key) != value]
    if wrong:
        raise PassError(
            f"olive would report to its makers: {' '.join(wrong)} is not set",
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
            model_loader=lambda _path: model.load(),  # Olive calls functions, not other callables
            io_config=dict(model.io_config),
            dummy_inputs_func=model.dummy_inputs,
        )
    known = pass_class.default_config(accelerator)
    defaults = {"save_as_external_data": True, "all_tensors_to_one_file": True, "size_threshold": 1024}
    given = {key: value for key, value in defaults.items() if key in known} | dict(options)
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise PassError(f"has no option {', '.join(unknown)}", where=name, remedy=f"It knows {', '.join(known)}.")
    with _failures_of(name), _warnings() as said:
        config = pass_class.generate_config(accelerator, given, disable_search=True)
        if not pass_class.validate_config(config, accelerator):
            raise PassError(f"Olive refuses these options. {said()}".strip(), where=name)
        return pass_class(accelerator, config).run(handed_over, str(target))


def _single_model(name: str, result: Any, model: Path | TorchModel) -> Path:
    """The file of the result. A pass that hands its input back did nothing; Olive only logs why."""
    path = getattr(result, "model_path", None)
    if type(result).__name__ != "ONNXModelHandler" or path is None:
        raise PassError(f"gave a {type(result).__name__}, not one ONNX model", where=name)
    file = Path(path)
    if isinstance(model, Path) and file.resolve().is_relative_to(model.resolve()):
        raise PassError("returned its input unchanged", where=name, remedy="Leave the pass out, or fix its options.")
    return file


@contextlib.contextmanager
def _failures_of(name: str) -> Iterator[None]:
    """Whatever another project's pass raises becomes a PassError that carries its cause."""
    try:
        yield
    except SdflowError:
        raise
    except Exception as cause:  # Another project's pass may raise anything; the cause goes along.
        raise PassError(f"{type(cause).__name__}: {cause}", where=name) from cause


@contextlib.contextmanager
def _confined(scratch: Path) -> Iterator[Path]:
    """Make `scratch` the current, home and temporary directory while a pass runs, and remove it afterwards."""
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
    """What Olive's logger said meanwhile: it logs the reason of a refusal and returns False."""
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
    """Olive logs to standard output, which belongs to sdflow's results."""
    for handler in logging.getLogger("olive").handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
            handler.setStream(sys.stderr)


def read_config(model: Path) -> dict[str, Any]:
    """config.json of an artifact, {} when it has none."""
    path = model / "config.json"
    return dict(json.loads(path.read_text())) if path.is_file() else {}
