"""A pipeline folder: what is in it, and its submodels on a target."""

from __future__ import annotations

import json
from collections.abc import Container
from pathlib import Path
from typing import Any

from sdflow.artifact import CONFIG_FILE, MODEL_FILE, SUBMODELS
from sdflow.errors import UsageError
from sdflow.runtime.sessions import Shapes, create_session
from sdflow.runtime.submodel import Submodel, place
from sdflow.targets import Target

TAKEN_APART = ("cpu", "cuda")
"""The targets that run parts of a graph (`Submodel.path`). Others compile each graph, at length, for each shape."""


def onnx_submodels(folder: Path) -> list[str]:
    """The submodels of a pipeline folder that hold an ONNX graph. Raises UsageError when there is no pipeline."""
    index = folder / "model_index.json"
    if not index.is_file():
        raise UsageError("there is no pipeline here: model_index.json is missing", where=str(folder))
    components: dict[str, Any] = json.loads(index.read_text(encoding="utf-8"))
    return [name for name in SUBMODELS if components.get(name) == ["diffusers", "OnnxRuntimeModel"]]


def submodel_config(folder: Path, submodel: str) -> dict[str, Any]:
    """The config.json of one submodel."""
    config: dict[str, Any] = json.loads((folder / submodel / CONFIG_FILE).read_text(encoding="utf-8"))
    return config


def load_submodel(
    folder: Path,
    submodel: str,
    target: Target,
    *,
    shapes: Shapes | None = None,
    cuda_graphs: Container[str] = SUBMODELS,
    lazy: bool = False,
    **session_options: Any,
) -> Submodel:
    """One submodel of a pipeline folder on a target; further options are those of `create_session`.

    shapes: of its inputs, for targets with static shapes. cuda_graphs: the submodels that may be captured. lazy: load
    the session when it is first needed, as is always done where there will be one for each set of shapes.
    """
    where = place("cuda" if target.session.needs_cuda else "cpu")
    model = (folder / submodel / MODEL_FILE).resolve()
    fixed = target.name == "cuda" and submodel in cuda_graphs
    if where.stream is not None:
        session_options["stream"] = where.stream.cuda_stream

    def load(wanted: Shapes | None, graph: Any = None, capture: bool = False) -> Any:
        options = {**session_options, "capture": capture and fixed}
        return create_session(model, target, graph=graph, shapes=wanted or shapes, **options)

    loaded = Submodel(
        load,
        submodel_config(folder, submodel),
        where,
        static_shapes=target.session.static_shapes,
        path=model if target.name in TAKEN_APART else None,
        fixed=fixed,
        outputs=_WANTED.get(submodel),
    )
    if not lazy and not fixed:
        loaded.load(shapes)
    return loaded


_WANTED = {"text_encoder": ("last_hidden_state",)}
"""The other output of CLIP has no use here, and no CUDA kernel for a part of it."""


def load_companions(folder: Path) -> dict[str, Any]:
    """Tokenizer, scheduler and, if there is one, feature extractor of a pipeline folder."""
    import diffusers
    from transformers import CLIPImageProcessor, CLIPTokenizer

    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    _, scheduler = index["scheduler"]
    if not hasattr(diffusers, scheduler):
        raise UsageError(f"diffusers {diffusers.__version__} has no scheduler {scheduler}", where=str(folder))
    extractor = folder / "feature_extractor"
    return {
        "tokenizer": CLIPTokenizer.from_pretrained(folder / "tokenizer"),
        "scheduler": getattr(diffusers, scheduler).from_pretrained(folder / "scheduler"),
        "feature_extractor": CLIPImageProcessor.from_pretrained(extractor) if extractor.is_dir() else None,
    }
