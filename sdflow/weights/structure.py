"""A structure: the graph that passes build for an architecture, with a recipe in place of every weight.

Passes run unchanged on a module without weights, while `recording()` records their operations on weights. The result
only depends on the architecture's config, the passes, their options and the toolchain, so all fine-tunes and LoRAs of
an architecture share it. `bind` combines it with a checkpoint. Files:

    model.onnx        the graph; its weights are stubs with recipes (`sdflow.weights.stubs`)
    model.onnx.data   large values of the graph itself, if any
    parameters.json   shapes of all parameters of the module, by state_dict key
    config.json, ...  other files that the passes wrote
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.errors import PassError
from sdflow.families import DEFAULT
from sdflow.onnx_model.stub import is_stub
from sdflow.weights.stubs import stub_recipe

if TYPE_CHECKING:
    from sdflow.weights.recipe import Recipe

PARAMETERS_FILE = "parameters.json"

REMEDY = "Rebuild the structure."

NEEDS = ("torch", "onnx-ir", "sympy")
"""Distributions that `without_weights` needs with any pass."""


def hollow(load: Mapping[str, Any]) -> dict[str, Any]:
    """Return the input with which `load_module` creates the same module without weights. load: see
    `SubmodelCheckpoint`."""
    return {"kind": "hollow", "family": load.get("family", DEFAULT), "config": dict(load["config"])}


@contextmanager
def without_weights() -> Iterator[None]:
    """Passes that run inside write structures. Raises WeightValueRead at the end if one read a weight's value."""
    from sdflow.weights.faster_fusion import faster_fusion
    from sdflow.weights.recording import recording

    with recording(), faster_fusion():
        yield


def write_parameters(submodel: str, load: Mapping[str, Any], out: Path) -> None:
    """Write parameters.json: the shapes of all parameters of the submodel's module."""
    from sdflow.sources.load import parameter_shapes

    lines = [f"  {json.dumps(key)}: {json.dumps(shape)}" for key, shape in parameter_shapes(submodel, load).items()]
    (out / PARAMETERS_FILE).write_text("{\n" + ",\n".join(lines) + "\n}\n")


def read_parameters(structure: Path) -> dict[str, tuple[int, ...]]:
    """Read parameters.json of a structure. Raises PassError if it is missing or damaged."""
    path = structure / PARAMETERS_FILE
    try:
        return {key: tuple(int(size) for size in shape) for key, shape in json.loads(path.read_text()).items()}
    except FileNotFoundError as error:
        raise PassError("no such file", where=str(path), remedy=REMEDY) from error
    except (ValueError, TypeError, AttributeError) as error:
        raise PassError(f"cannot be read: {error}", where=str(path), remedy=REMEDY) from error


def read_recipe(tensor: Any, parameters: Mapping[str, tuple[int, ...]], where: str) -> Recipe | None:
    """Return the recipe of a stub, or None for a tensor with values.

    Raises PassError if it is damaged, has another shape or type, or reads something that is not a parameter of the
    module.
    """
    from onnx import helper

    from sdflow.weights.recipe import params

    if not is_stub(tensor):
        return None
    try:
        recipe = stub_recipe(tensor)
    except (ValueError, StopIteration) as error:
        raise PassError(f"{tensor.name} has no recipe: {error}", where=where, remedy=REMEDY) from error
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type).name
    if (recipe.shape, recipe.dtype) != (tuple(tensor.dims), dtype):
        found, wanted = f"{recipe.dtype} {list(recipe.shape)}", f"{dtype} {list(tensor.dims)}"
        raise PassError(f"the recipe of {tensor.name} makes {found}, not {wanted}", where=where, remedy=REMEDY)
    if strange := [param.key for param in params(recipe) if parameters.get(param.key) != param.shape]:
        raise PassError(
            f"the recipe of {tensor.name} reads {strange[0]}, which is not a parameter of that shape",
            where=where,
            remedy=REMEDY,
        )
    return recipe
