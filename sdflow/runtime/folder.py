"""A pipeline folder: what is in it, and its submodels on a target."""

from __future__ import annotations

import json
from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from typing import Any

from sdflow.artifact import CONFIG_FILE, MODEL_FILE, SUBMODELS
from sdflow.errors import UsageError
from sdflow.runtime.device_weights import DeviceWeights
from sdflow.runtime.sessions import DAMAGED, PLAIN, LoadOptions, Shapes, create_session
from sdflow.runtime.submodel import Submodel, place
from sdflow.targets import Target

TAKEN_APART = ("cpu", "cuda")
"""The targets that run parts of a graph (`Submodel.path`). Others compile each graph, at length, for each shape."""


def onnx_submodels(folder: Path) -> list[str]:
    """The submodels of a pipeline folder that hold an ONNX graph. Raises UsageError when there is no pipeline."""
    index = folder / "model_index.json"
    if not index.is_file():
        raise UsageError("there is no pipeline here: model_index.json is missing", where=str(folder))
    components = _read_json(index)
    return [name for name in SUBMODELS if components.get(name) == ["diffusers", "OnnxRuntimeModel"]]


def submodel_config(folder: Path, submodel: str) -> dict[str, Any]:
    """The config.json of one submodel. Raises UsageError when it is missing or damaged."""
    return _read_json(folder / submodel / CONFIG_FILE)


def load_submodel(
    folder: Path,
    submodel: str,
    target: Target,
    *,
    shapes: Shapes | None = None,
    cuda_graphs: Container[str] = SUBMODELS,
    lazy: bool = False,
    options: LoadOptions = PLAIN,
) -> Submodel:
    """One submodel of a pipeline folder on a target. Its sessions are queued on the stream of its place.

    shapes: of its inputs, for targets with static shapes. cuda_graphs: the submodels that may be captured. lazy: load
    the session when it is first needed, as is always done where there will be one for each set of shapes.
    """
    where = place("cuda" if target.session.needs_cuda else "cpu")
    model = (folder / submodel / MODEL_FILE).resolve()
    fixed = target.name == "cuda" and submodel in cuda_graphs
    if where.stream is not None:
        options = replace(options, stream=where.stream.cuda_stream)
    weights = DeviceWeights(model, where.device) if fixed else None

    def load(wanted: Shapes | None, graph: Any = None, capture: bool = False) -> Any:
        held = None
        if weights is not None and graph is not None:
            with where.current():
                held = weights.of(graph)
        return create_session(
            model, target, options, shapes=wanted or shapes, graph=graph, weights=held, capture=capture and fixed
        )

    loaded = Submodel(
        load,
        submodel_config(folder, submodel),
        where,
        static_shapes=target.session.static_shapes,
        path=model if target.name in TAKEN_APART else None,
        fixed=fixed,
        outputs=_WANTED.get(submodel),
        weights=weights,
    )
    if not lazy and not fixed:
        loaded.load(shapes)
    return loaded


_WANTED = {"text_encoder": ("last_hidden_state",)}
"""The other output of CLIP has no use here, and no CUDA kernel for a part of it."""


def load_companions(folder: Path) -> dict[str, Any]:
    """Tokenizer, scheduler and, if there is one, feature extractor of a pipeline folder.

    Raises UsageError for one that is missing or damaged.
    """
    import diffusers
    from transformers import CLIPImageProcessor, CLIPTokenizer

    scheduler = (_read_json(folder / "model_index.json").get("scheduler") or ["", "none"])[-1]
    if not hasattr(diffusers, scheduler):
        raise UsageError(f"diffusers {diffusers.__version__} has no scheduler {scheduler}", where=str(folder))
    classes = {"tokenizer": CLIPTokenizer, "scheduler": getattr(diffusers, scheduler)}
    if (folder / "feature_extractor").is_dir():
        classes["feature_extractor"] = CLIPImageProcessor
    loaded: dict[str, Any] = {"feature_extractor": None}
    for name, cls in classes.items():
        if not (folder / name).is_dir():
            raise UsageError("there is no such folder", where=str(folder / name), remedy=DAMAGED)
        try:
            loaded[name] = cls.from_pretrained(folder / name)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"cannot be loaded: {error}", where=str(folder / name), remedy=DAMAGED) from error
    return loaded


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"cannot be read: {error}", where=str(path), remedy=DAMAGED) from error
