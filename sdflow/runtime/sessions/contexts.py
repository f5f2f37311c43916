"""Models that hold what a provider compiled: EPContext models, as ONNX Runtime calls them.

    ENGINES/<provider>-<machine>/<model>/context/model.onnx    the graph, whose nodes point to what was compiled beside it

A provider that compiles ahead does so once for a graph with its weights, its shapes and a machine; later sessions load the
result. It is made in a folder of its own and renamed, so that a process that is killed leaves nothing that looks whole.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sdflow.artifact import MODEL_FILE
from sdflow.disk.user_folder import writing
from sdflow.errors import SlowerWarning
from sdflow.machine.onnx_runtime import onnxruntime_errors
from sdflow.runtime.sessions.engine_cache import FOLDER_VARIABLE

CONTEXT = "context"
REST_FILE = "rest.data"
"""Holds the large weights of nodes that the provider left over."""


def load_with_context(ort: Any, model: Path, engines: Path, options: Any, load: Callable[[str], Any]) -> Any:
    """A session of what the provider compiled of `model`, compiled now if it is not kept; of `model` itself where the provider
    compiles nothing ahead.

    engines: the folder of this model on this machine. options: the session's, with the provider. load: makes the session of
    a file.
    What is kept and cannot be loaded is compiled again, and a warning says so. Raises what ONNX Runtime raises, for `model`.
    """
    kept = engines / CONTEXT / MODEL_FILE
    failures = onnxruntime_errors(ort)
    if kept.is_file():
        try:
            return load(str(kept))
        except failures as error:
            what = f"{kept.parent} cannot be loaded, so {model} is compiled again: {error}"
            warnings.warn(what, SlowerWarning, stacklevel=3)
            with writing("engines", engines, FOLDER_VARIABLE):
                shutil.rmtree(kept.parent)
    if _compile(ort, model, engines, options):
        return load(str(kept))
    return load(str(model))


def _compile(ort: Any, model: Path, engines: Path, options: Any) -> bool:
    """Whether the provider's compiled model is there now."""
    kept = engines / CONTEXT / MODEL_FILE
    scratch = engines / f".{CONTEXT}-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        with writing("engines", engines, FOLDER_VARIABLE):
            scratch.mkdir()
        compiler = ort.ModelCompiler(
            options,
            str(model),
            embed_compiled_data_into_model=False,
            external_initializers_file_path=REST_FILE,
            flags=ort.OrtCompileApiFlags.ERROR_IF_NO_NODES_COMPILED,
        )
        compiler.compile_to_file(str(scratch / MODEL_FILE))
        try:
            scratch.rename(kept.parent)
        except OSError as error:
            if not kept.is_file():  # another process may have been first: theirs is as good
                _warn_of_compiling(model, error)
    except onnxruntime_errors(ort) as error:
        _warn_of_compiling(model, error)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return kept.is_file()


def _warn_of_compiling(model: Path, error: Exception) -> None:
    what = f"nothing that is compiled of {model} can be kept, so it is compiled at every start: {error}"
    warnings.warn(what, SlowerWarning, stacklevel=5)
