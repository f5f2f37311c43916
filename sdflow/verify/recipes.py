"""Recipes that do not give what they should: a damaged structure, and weights that were bound by it.

What can be told of a recipe alone: that it is one, that it makes the stub's type and shape, and that it reads parameters
of the module. What can be told of all together: that a weight that kept its parameter's name is made of that parameter,
that none is read twice while another of its shape is read never. One that is damaged but still whole, say a square
matrix that is not transposed, is told by the model that was bound before the damage; if the damage was there first, by
the comparison with PyTorch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.artifact import MODEL_FILE
from sdflow.errors import CheckpointError, PassError
from sdflow.families import DEFAULT
from sdflow.manifest import Chain
from sdflow.passes.bind_weights import BindWeights
from sdflow.store.layout import Layout
from sdflow.store.records import BadRecord, load_action
from sdflow.verify.finding import Finding, Level
from sdflow.weights.lora import LoraInput

if TYPE_CHECKING:
    from sdflow.weights.recipe import Recipe

REMEDY = "build the structure again: sdflow cache verify, then sdflow run"


@dataclass(frozen=True)
class BoundModel:
    """A model that was bound from a structure, and what it was bound with.

    checkpoint: as `open_checkpoint` gives it (`load`). loras: in the order of the workflow.
    """

    folder: Path
    checkpoint: Mapping[str, Any]
    loras: Sequence[LoraInput] = ()


@dataclass(frozen=True)
class RecipeCheck:
    """A structure of a submodel, and what was bound from it, for `check_recipes` in another process."""

    submodel: str
    structure: Path
    bound: BoundModel

    def to_json(self) -> dict[str, Any]:
        loras = [{"path": str(lora.path), "scale": lora.scale} for lora in self.bound.loras]
        bound = {"folder": str(self.bound.folder), "checkpoint": dict(self.bound.checkpoint), "loras": loras}
        return {"submodel": self.submodel, "structure": str(self.structure), "bound": bound}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RecipeCheck:
        bound = value["bound"]
        loras = [LoraInput(Path(lora["path"]), lora["scale"]) for lora in bound["loras"]]
        model = BoundModel(Path(bound["folder"]), bound["checkpoint"], loras)
        return cls(value["submodel"], Path(value["structure"]), model)


def structure_of(chain: Chain | None, cache: Path) -> Path | None:
    """The structure that a submodel's weights were bound to.

    chain: what made the submodel, as sdflow.json tells. None when its weights were carried, or when the cache has it no
    more.
    """
    steps = chain.steps if chain is not None else ()
    if len(steps) < 2 or steps[-1].name != BindWeights.name:
        return None
    layout = Layout(cache)
    try:
        stored = load_action(layout.action(steps[-2].action).read_bytes())
    except (OSError, BadRecord):
        return None
    files = layout.object(stored.object) / "files"
    return files if files.is_dir() else None


def check_recipes(
    structure: Path, submodel: str, bound: BoundModel | None = None, *, sample: int | None = 24
) -> list[Finding]:
    """What is wrong with the recipes of a structure, and with the weights of `bound`, which was made by them.

    structure: a directory that passes wrote without weights. sample: how many tensors of `bound` to compute again,
    chosen by their names, always the same; None for all. Memory: the largest of them.
    """
    import onnx

    from sdflow.onnx_model.files import initializers_and_constants
    from sdflow.weights.structure import read_parameters, read_recipe

    where = str(structure / MODEL_FILE)
    try:
        parameters = read_parameters(structure)
        model = onnx.load(where, load_external_data=False)
    except PassError as error:
        return [Finding(submodel, "recipe", "error", "parameters.json", error.what, REMEDY)]
    except FileNotFoundError:
        return [Finding(submodel, "recipe", "error", MODEL_FILE, "is missing", REMEDY)]
    found: list[Finding] = []
    recipes: dict[str, Recipe] = {}
    for tensor, _ in initializers_and_constants(model):
        try:
            recipe = read_recipe(tensor, parameters, where)
        except PassError as error:
            found.append(Finding(submodel, "recipe", "error", tensor.name, error.what, REMEDY))
            continue
        if recipe is not None:
            recipes[tensor.name] = recipe
    found += _assignment(submodel, parameters, recipes)
    if bound is not None:
        found += _compare(submodel, parameters, recipes, bound, sample)
    return found


def _assignment(
    submodel: str, parameters: Mapping[str, tuple[int, ...]], recipes: Mapping[str, Recipe]
) -> Iterator[Finding]:
    """Which parameter goes into which weight. Shared weights are possible, so a second reader alone is a warning."""
    from sdflow.weights.recipe import params

    keys = {name: {param.key for param in params(recipe)} for name, recipe in recipes.items()}
    readers: dict[str, list[str]] = {}
    for name, read in keys.items():
        if name in parameters and read != {name}:
            what = f"is made of {', '.join(sorted(read)) or 'constants'}"
            yield Finding(submodel, "recipe", "error", name, f"{what} and not of the parameter of its name", REMEDY)
        for key in read:
            readers.setdefault(key, []).append(name)
    # Half of a VAE is not in the graph of its other half.
    parts = {key.split(".")[0] for key in readers}
    unread = [key for key in parameters if key not in readers and key.split(".")[0] in parts]
    for key, names in readers.items():
        if len(names) > 1:
            missed = next((other for other in unread if parameters[other] == parameters[key]), None)
            what = f"{key} goes into it and into {names[0]}" + (f", and {missed} into nothing" if missed else "")
            level: Level = "error" if missed else "warning"
            yield Finding(
                submodel, "recipe", level, names[1], what, REMEDY if missed else "shared weights? then all is well"
            )


def _compare(
    submodel: str,
    parameters: Mapping[str, tuple[int, ...]],
    recipes: Mapping[str, Recipe],
    bound: BoundModel,
    sample: int | None,
) -> Iterator[Finding]:
    """Compute tensors of the bound model again."""
    import numpy as np
    import onnx

    from sdflow.onnx_model.files import initializers_and_constants, raw_values
    from sdflow.weights.lora import Merged, read_loras
    from sdflow.weights.recipe import evaluate
    from sdflow.weights.tensors import open_tensors

    model = onnx.load(str(bound.folder / MODEL_FILE), load_external_data=False)
    tensors = {tensor.name: tensor for tensor, _ in initializers_and_constants(model)}
    for name in recipes.keys() - tensors.keys():
        yield Finding(
            submodel, "recipe", "error", name, "the structure has a recipe for it and the model no tensor", REMEDY
        )
    chosen = sorted(recipes.keys() & tensors.keys(), key=lambda name: hashlib.sha256(name.encode()).digest())[:sample]
    name = ""
    try:
        with open_tensors(submodel, bound.checkpoint, parameters) as checkpoint:
            family = bound.checkpoint.get("family", DEFAULT)
            merged = Merged(checkpoint, read_loras(submodel, bound.loras, parameters, family))
            for name in chosen:
                values = np.ascontiguousarray(evaluate(recipes[name], merged.read)).tobytes()
                if values != raw_values(tensors[name], bound.folder):
                    what = "its recipe gives other values than the model has"
                    yield Finding(submodel, "recipe", "error", name, what, REMEDY)
    except (CheckpointError, PassError, OSError, ValueError) as error:
        yield Finding(submodel, "recipe", "error", name, f"cannot be computed again: {error}", REMEDY)
