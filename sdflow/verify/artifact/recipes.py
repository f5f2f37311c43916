"""Find wrong recipes: a damaged structure, and weights that were bound with it.

Each recipe must produce the stub's type and shape from parameters of the module. A weight with a parameter's name must
come from that parameter, and no parameter may be read twice while another of its shape is unread. A recipe that is
wrong but well-formed shows in weights bound before the damage, or in the comparison with PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from sdflow.artifact import MODEL_FILE
from sdflow.errors import CheckpointError, PassError
from sdflow.manifest import Chain
from sdflow.onnx_model.reading import load_graph
from sdflow.passes.bind_weights import BindWeights
from sdflow.store.layout import Layout
from sdflow.store.records import BadRecord, load_action, read_record
from sdflow.verify.artifact.stored import BoundModel, stored_weights
from sdflow.verify.finding import Finding, Level
from sdflow.weights.recipe import Bfloat16, Blockwise, Float16, Recipe, Scales, SumAlong, params
from sdflow.weights.structure import read_parameters, read_recipe

REMEDY = "build the structure again: sdflow cache verify, then sdflow run"


@dataclass(frozen=True)
class RecipeCheck:
    """A submodel's structure and the model bound from it, for `check_recipes` in another process."""

    submodel: str
    structure: Path
    bound: BoundModel


def is_bound(chain: Chain | None) -> bool:
    """Whether the weights were bound to a structure; otherwise its passes carried them."""
    steps = chain.steps if chain is not None else ()
    return len(steps) >= 2 and steps[-1].name == BindWeights.name


def structure_of(chain: Chain | None, cache: Path) -> Path | None:
    """The structure that a submodel's weights were bound to; None if its weights were carried, or if the cache no
    longer has it.

    chain: how the submodel was made, from sdflow.json.
    """
    if chain is None or not is_bound(chain):
        return None
    layout = Layout(cache)
    try:
        stored = load_action(read_record(layout.action(chain.steps[-2].action)))
    except (OSError, BadRecord):
        return None
    files = layout.object(stored.object) / "files"
    return files if files.is_dir() else None


@dataclass(frozen=True)
class Weights:
    """The results of a structure's recipes for a bound model.

    findings: on recipes and stored weights. count: number of weights recomputed. exact: values of weights stored in
    float16 or quantized, before rounding; None if a recipe is damaged. recipes: the structure's, by weight name.
    parameters: shapes of the parameters that they read.
    """

    findings: list[Finding]
    count: int = 0
    exact: Mapping[str, NDArray[Any]] | None = None
    recipes: Mapping[str, Recipe] = field(default_factory=dict)
    parameters: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def check_recipes(structure: Path, submodel: str, bound: BoundModel | None = None, *, keep: bool = False) -> Weights:
    """Check the recipes of a structure, and every tensor of `bound`, which was made with them.

    structure: a directory written by passes without weights. keep: keep the exact values. Memory: the largest tensor,
    or all of them in float32.
    """
    where = str(structure / MODEL_FILE)
    try:
        parameters = read_parameters(structure)
        model = load_graph(structure / MODEL_FILE)
    except PassError as error:
        return Weights([Finding(submodel, "recipe", "error", "parameters.json", error.what, REMEDY)])
    except FileNotFoundError:
        return Weights([Finding(submodel, "recipe", "error", MODEL_FILE, "is missing", REMEDY)])
    found: list[Finding] = []
    recipes: dict[str, Recipe] = {}
    for tensor in model.graph.initializer:
        try:
            recipe = read_recipe(tensor, parameters, where)
        except PassError as error:
            found.append(Finding(submodel, "recipe", "error", tensor.name, error.what, REMEDY))
            continue
        if recipe is not None:
            recipes[tensor.name] = recipe
    damaged = bool(found)
    found += _assignment(submodel, parameters, recipes)
    if bound is None or damaged:
        return Weights(found)
    exact: dict[str, NDArray[Any]] = {}
    name, count = "", 0
    try:
        for each in stored_weights(submodel, structure, recipes, parameters, bound):
            name = each.name
            count += name in recipes
            if each.problem:
                found.append(Finding(submodel, "recipe", "error", name, each.problem, REMEDY))
            if keep and each.exact is not None:
                exact[name] = each.exact
    except (CheckpointError, PassError, OSError, ValueError) as error:
        found.append(Finding(submodel, "recipe", "error", name, f"cannot be computed again: {error}", REMEDY))
        return Weights(found, count)
    return Weights(found, count, exact, recipes, parameters)


def _assignment(
    submodel: str, parameters: Mapping[str, tuple[int, ...]], recipes: Mapping[str, Recipe]
) -> Iterator[Finding]:
    """Check which parameter goes into which weight. Weights may be shared, so a second reader alone is only a
    warning."""
    # Scales are read together with their values, and only values count.
    counted = {name: recipe for name, recipe in recipes.items() if not _beside_values(recipe)}
    keys = {name: {param.key for param in params(recipe)} for name, recipe in counted.items()}
    readers: dict[str, list[str]] = {}
    for name, read in keys.items():
        if name in parameters and read != {name}:
            what = f"is made of {', '.join(sorted(read)) or 'constants'}"
            yield Finding(submodel, "recipe", "error", name, f"{what} and not of the parameter of its name", REMEDY)
        for key in read:
            readers.setdefault(key, []).append(name)
    # Half of a VAE is missing from the graph of the other half.
    parts = {key.split(".")[0] for key in readers}
    unread = [key for key in parameters if key not in readers and key.split(".")[0] in parts]
    for key, names in readers.items():
        if len(names) > 1 and not _different_sums([counted[name] for name in names]):
            missed = next((other for other in unread if parameters[other] == parameters[key]), None)
            what = f"{key} goes into it and into {names[0]}" + (f", and {missed} into nothing" if missed else "")
            level: Level = "error" if missed else "warning"
            yield Finding(
                submodel, "recipe", level, names[1], what, REMEDY if missed else "no problem if the weights are shared"
            )


def _beside_values(recipe: Recipe) -> bool:
    return isinstance(recipe, Scales) or (isinstance(recipe, Blockwise) and recipe.part != "values")


def _different_sums(recipes: Sequence[Recipe]) -> bool:
    """Whether weights of one parameter are different sums of its entries, like SubpixelConv's four kernels, rounded or
    not."""
    sums = [each.of if isinstance(each, Float16 | Bfloat16) else each for each in recipes]
    return all(isinstance(each, SumAlong) for each in sums) and len(set(sums)) == len(sums)
