"""Models with a provider's compiled form: ONNX Runtime's EPContext models.

    ENGINES/<provider>-<machine>/<model>/context/model.onnx    the graph, whose nodes refer to compiled files next to it

Providers that compile ahead of time do so once per graph with weights, shapes and machine; later sessions load the
result. It is created in a temporary folder and renamed, so an interrupted process leaves no partial result.
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
"""Large weights of nodes that the provider did not compile."""


def load_with_context(ort: Any, model: Path, engines: Path, options: Any, load: Callable[[str], Any]) -> Any:
    """Return a session of `model`'s compiled form, compiling it if not stored, or of `model` if the provider does not
    compile ahead of time.

    engines: folder of this model on this machine. options: session options, with the provider. load: creates a session
    from a file. A stored form that cannot be loaded is recompiled, with a warning. Raises ONNX Runtime's errors for
    `model`.
    """
    kept = engines / CONTEXT / MODEL_FILE
    failures = onnxruntime_errors(ort)
    if kept.is_file():
        try:
            return load(str(kept))
        except failures as error:
            what = f"{kept.parent} cannot be loaded, so {model} is recompiled: {error}"
            warnings.warn(what, SlowerWarning, stacklevel=3)
            with writing("engines", engines, FOLDER_VARIABLE):
                shutil.rmtree(kept.parent)
    if _compile(ort, model, engines, options):
        return load(str(kept))
    return load(str(model))


def _compile(ort: Any, model: Path, engines: Path, options: Any) -> bool:
    """Compile the model; return whether the compiled form exists now."""
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
            if not kept.is_file():  # another process may have been first
                _warn_of_compiling(model, error)
    except onnxruntime_errors(ort) as error:
        _warn_of_compiling(model, error)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return kept.is_file()


def _warn_of_compiling(model: Path, error: Exception) -> None:
    what = f"the compiled form of {model} cannot be stored, so it is compiled at every start: {error}"
    warnings.warn(what, SlowerWarning, stacklevel=5)
