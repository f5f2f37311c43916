"""A structure: the graph that a chain of passes makes of an architecture, and a recipe for every weight in it.

A chain is run by the passes themselves, on a module without weights, while `recording()` writes down what they do to a
weight. A structure depends on the architecture's config, on the passes, their options and the toolchain, and on nothing
else: all fine-tunes and all LoRAs of an architecture share it. Files:

    model.onnx        the graph; its weights are stubs
    model.onnx.data   large values that belong to the graph itself, if there are any
    recipes.json      for each stub its recipe, and the shapes of all of the module's parameters
    config.json, ...  what the last pass wrote beside its model
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.artifact import MODEL_FILE, Facts
from sdflow.errors import PassError
from sdflow.passes.base import Pass, PassInputs
from sdflow.passes.onnx_files import write_graph
from sdflow.weights.stubs import is_stub, make_stub, stub_recipe

if TYPE_CHECKING:
    from sdflow.weights.recipe import Recipe

RECIPES_FILE = "recipes.json"
FORMAT = 1

ONLY_MOVE_WEIGHTS = ("OnnxConversion", "OrtTransformersOptimization", "OnnxFloatToFloat16")
"""Passes that only move weights or round them, and so can run without. LoraMerge is left to `bind`."""


@dataclass(frozen=True)
class ChainStep:
    """A pass of a chain and its options, as the pass's Config has them."""

    implementation: type[Pass[Any]]
    config: Mapping[str, Any]


@dataclass(frozen=True)
class Recipes:
    """recipes.json. weights: initializer -> recipe. parameters: state_dict key -> shape, of the whole module."""

    weights: Mapping[str, Recipe]
    parameters: Mapping[str, tuple[int, ...]]


def why_weights_are_carried(chain: Sequence[ChainStep]) -> str | None:
    """None for a chain that can be built as structure and weights; otherwise the reason, in words.

    LoRAs are merged into parameters, before anything else happens to them: only there does a merge change places with
    what follows.
    """
    if not chain or chain[0].implementation.name != "OnnxConversion":
        return "the chain does not begin with OnnxConversion"
    for index, step in enumerate(chain):
        name = step.implementation.name
        if step.implementation.takes_loras:
            if name != "LoraMerge" or index != 1:
                return f"{name} does not stand right behind OnnxConversion"
        elif name not in ONLY_MOVE_WEIGHTS or not step.implementation.__module__.startswith("sdflow."):
            return f"{name} may look at the weights"
        elif step.config.get("opt_level"):
            return f"{name} with opt_level {step.config['opt_level']} lets ONNX Runtime fold weights"
    return None


@dataclass(frozen=True)
class StructureRequest:
    """What `build_structure` needs: a submodel's name and config.json, and the chain."""

    submodel: str
    config: Mapping[str, Any]
    chain: Sequence[ChainStep]
    progress: Callable[[str], None] = field(default=lambda phrase: None)


def build_structure(request: StructureRequest, out: Path) -> Facts:
    """Run the chain without weights and write the structure into the empty directory `out`.

    Returns `steps`: the facts of each pass that ran, by name; `weights` and `parameters`, how many there are.
    Raises WeightValueRead when a pass looked at a value, PassError when a pass failed.
    """
    from sdflow.sources.load import parameter_shapes
    from sdflow.weights.faster_fusion import faster_fusion
    from sdflow.weights.recording import recording

    scratch = out / ".steps"
    model: Path | None = None
    steps: dict[str, Facts] = {}
    checkpoint: Mapping[str, Any] = {"kind": "hollow", "config": request.config}
    with recording(), faster_fusion():
        for index, step in enumerate(request.chain):
            if step.implementation.takes_loras:
                continue
            folder = scratch / str(index)
            folder.mkdir(parents=True)
            name = step.implementation.name
            request.progress(name)
            inputs = PassInputs(
                request.submodel,
                model,
                checkpoint if model is None else {},
                progress=lambda phrase, name=name: request.progress(f"{name}: {phrase}"),  # type: ignore[misc]
            )
            steps[name] = step.implementation().run(inputs, folder, step.implementation.Config(**step.config))
            model = folder
    assert model is not None, "a chain begins with OnnxConversion"
    parameters = parameter_shapes(request.submodel, request.config)
    weights = _finish(model, parameters, out)
    shutil.rmtree(scratch)
    return {"steps": steps, "weights": weights, "parameters": len(parameters)}


def _finish(last: Path, parameters: Mapping[str, tuple[int, ...]], out: Path) -> int:
    """Move the last step's files to `out`, the recipes out of the graph's stubs into a file of their own."""
    import onnx

    from sdflow.weights.recipe import params, to_json

    for path in last.iterdir():
        path.rename(out / path.name)
    model = onnx.load(str(out / MODEL_FILE), load_external_data=False)
    weights = {}
    for tensor in model.graph.initializer:
        if is_stub(tensor):
            recipe = stub_recipe(tensor)
            if tuple(tensor.dims) != recipe.shape:
                raise PassError(f"{tensor.name} is {list(tensor.dims)}, its recipe makes {list(recipe.shape)}")
            if strange := [param.key for param in params(recipe) if parameters.get(param.key) != param.shape]:
                raise PassError(f"the recipe of {tensor.name} reads {strange[0]}, which is no parameter of the module")
            weights[tensor.name] = to_json(recipe)
            make_stub(tensor, None)
    write_graph(model, out)
    lines = [f"  {json.dumps(name)}: {json.dumps(recipe)}" for name, recipe in weights.items()]
    shapes = [f"  {json.dumps(key)}: {json.dumps(shape)}" for key, shape in parameters.items()]
    (out / RECIPES_FILE).write_text(
        f'{{"format": {FORMAT},\n"weights": {{\n' + ",\n".join(lines) + '\n},\n"parameters": {\n'
        + ",\n".join(shapes) + "\n}}\n"
    )  # fmt: skip
    return len(weights)


def read_recipes(structure: Path) -> Recipes:
    """recipes.json of a structure. Raises PassError when it is missing, damaged or of another format."""
    from sdflow.weights.recipe import from_json

    where = str(structure / RECIPES_FILE)
    remedy = "Build the structure again."
    try:
        content = json.loads((structure / RECIPES_FILE).read_text())
        if content["format"] != FORMAT:
            raise PassError(f"has format {content['format']}, not {FORMAT}", where=where, remedy=remedy)
        return Recipes(
            {name: from_json(recipe) for name, recipe in content["weights"].items()},
            {key: tuple(shape) for key, shape in content["parameters"].items()},
        )
    except FileNotFoundError as error:
        raise PassError("no such file", where=where, remedy=remedy) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PassError(f"cannot be read: {error}", where=where, remedy=remedy) from error
