"""Find wrong recipes: a damaged structure, and weights that were bound with it.

Each recipe must produce the stub's type and shape from parameters of the module. A weight with a parameter's name must
come from that parameter, and no parameter may be read twice while another of its shape is unread. A recipe that is
wrong but well-formed shows in weights bound before the damage, or in the comparison with PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sdflow.artifact import MODEL_FILE
from sdflow.errors import PassError
from sdflow.manifest import Chain
from sdflow.onnx_model.reading import load_graph
from sdflow.passes.bind_weights import BindWeights
from sdflow.store.layout import Layout
from sdflow.store.records import BadRecord, load_action, read_record
from sdflow.verify.artifact.stored import BoundModel, CannotCompute, StoredWeights, stored_weights
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
class Checked:
    """The result of checking a structure's recipes and a model bound with them.

    findings: on recipes and stored weights. count: number of weights recomputed. damaged: a recipe or parameter cannot be
    read, so that weights were not all compared.
    """

    findings: list[Finding]
    count: int = 0
    damaged: bool = False


def check_recipes(
    structure: Path,
    submodel: str,
    bound: BoundModel | None = None,
    use: Callable[[StoredWeights], None] = lambda weights: None,
) -> Checked:
    """Check the recipes of a structure, and every tensor of `bound`, which was made with them.

    structure: a directory written by passes without weights. use: gets the weights first, and may compute exact ones;
    those that it does not compute are compared after it.
    """
    where = str(structure / MODEL_FILE)
    try:
        parameters = read_parameters(structure)
        model = load_graph(structure / MODEL_FILE)
    except PassError as error:
        return Checked([Finding(submodel, "recipe", "error", "parameters.json", error.what, REMEDY)], damaged=True)
    except FileNotFoundError:
        return Checked([Finding(submodel, "recipe", "error", MODEL_FILE, "is missing", REMEDY)], damaged=True)
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
        return Checked(found, damaged=damaged)
    opened: list[StoredWeights] = []
    failed: dict[str, str] = {}
    try:
        with stored_weights(submodel, structure, recipes, parameters, bound) as weights:
            opened.append(weights)
            use(weights)
            weights.compare()
    except CannotCompute as error:
        failed[error.name] = str(error)
    problems = {name: what for each in opened for name, what in each.problems.items()} | failed
    found += (Finding(submodel, "recipe", "error", name, what, REMEDY) for name, what in problems.items())
    return Checked(found, sum(each.count for each in opened), bool(failed))


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
