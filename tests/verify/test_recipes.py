"""A recipe that was damaged on purpose is found, and told from one that was not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from sdflow.manifest import Chain, FinishedPass
from sdflow.onnx_model.files import data_span, is_external
from sdflow.onnx_model.stub import is_stub
from sdflow.store import Cache
from sdflow.verify.artifact.recipes import check_recipes, structure_of
from sdflow.verify.artifact.stored import OTHER_VALUES, BoundModel
from sdflow.verify.artifact.unrounded import rounded
from sdflow.weights.bind import BindRequest, bind
from sdflow.weights.half import to_float16
from sdflow.weights.recipe import Float16, Recipe, Reshape, Transpose
from sdflow.weights.stubs import make_stub, stub_recipe
from tests.store.builds import make_action, publish
from tests.verify.told import Told, assert_told
from tests.weights.conftest import Builder, synthetic

SUBMODEL = "text_encoder"


@pytest.fixture
def structure(built: Builder, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built.structure(SUBMODEL, "cuda"), tmp_path / "structure"))


@pytest.fixture
def bound(structure: Path, tmp_path: Path) -> BoundModel:
    """The model that was bound from the structure, before any damage."""
    out = tmp_path / "bound"
    out.mkdir()
    bind(BindRequest(SUBMODEL, structure, synthetic(SUBMODEL)), out)
    return BoundModel(out, synthetic(SUBMODEL))


def wrong(name: str, *what: str) -> Told:
    return Told("error", "recipe", SUBMODEL, name, what, ("sdflow cache verify", "sdflow run"))


def damage(structure: Path, wanted: Callable[[Recipe], bool], edit: Callable[[Any, Recipe], None]) -> str:
    """Edit the first stub whose recipe is wanted; returns its name."""
    path = structure / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    tensor = next(one for one in model.graph.initializer if is_stub(one) and wanted(stub_recipe(one)))
    edit(tensor, stub_recipe(tensor))
    path.write_bytes(model.SerializeToString())
    return str(tensor.name)


def recipe_entry(tensor: Any) -> Any:
    return next(entry for entry in tensor.external_data if entry.key == "recipe")


def moved(recipe: Recipe) -> bool:
    """A square matrix, transposed and rounded."""
    return isinstance(recipe, Float16) and isinstance(recipe.of, Transpose) and recipe.shape[0] == recipe.shape[1]


def test_a_good_structure_and_its_model_have_nothing_to_say(structure: Path, bound: BoundModel) -> None:
    assert check_recipes(structure, SUBMODEL, bound).findings == []


def test_a_recipe_that_is_none(structure: Path) -> None:
    name = damage(structure, lambda recipe: True, lambda tensor, _: setattr(recipe_entry(tensor), "value", "{}"))
    assert_told(check_recipes(structure, SUBMODEL).findings, wrong(name, name, "not a recipe"))


def test_a_recipe_of_another_shape(structure: Path) -> None:
    def widen(tensor: Any, recipe: Recipe) -> None:
        tensor.dims[0] += 1
        shapes.update(made=list(recipe.shape), wanted=list(tensor.dims))

    shapes: dict[str, list[int]] = {}
    name = damage(structure, moved, widen)
    (finding,) = check_recipes(structure, SUBMODEL).findings
    assert_told([finding], wrong(name, name, "float16"))
    assert str(shapes["made"]) in finding.what
    assert str(shapes["wanted"]) in finding.what


def test_a_recipe_that_reads_no_parameter_of_the_module(structure: Path) -> None:
    def misspell(tensor: Any, recipe: Recipe) -> None:
        entry = recipe_entry(tensor)
        entry.value = entry.value.replace(".weight", ".wait")

    name = damage(structure, moved, misspell)
    (finding,) = check_recipes(structure, SUBMODEL).findings
    assert_told([finding], wrong(name, name, "not a parameter"))
    assert ".wait" in finding.what


def test_a_recipe_that_reads_the_neighbours_weight(structure: Path) -> None:
    def neighbour(tensor: Any, recipe: Recipe) -> None:
        entry = recipe_entry(tensor)
        assert "layers.0" in entry.value
        entry.value = entry.value.replace("layers.0", "layers.1")

    def in_the_first_layer(recipe: Recipe) -> bool:
        return moved(recipe) and "layers.0" in recipe.of.of.key  # type: ignore[union-attr]

    name = damage(structure, in_the_first_layer, neighbour)
    other = name.replace("layers.0", "layers.1")
    assert_told(
        check_recipes(structure, SUBMODEL).findings,
        wrong(name, f"made of {other}"),
        wrong(other, f"{other} goes into", f"into {name}"),
    )


def test_a_whole_recipe_with_other_values_is_told_by_the_model_bound_before(structure: Path, bound: BoundModel) -> None:
    def not_transposed(tensor: Any, recipe: Recipe) -> None:
        assert isinstance(recipe, Float16)
        assert isinstance(recipe.of, Transpose)
        make_stub(tensor, Float16(recipe.smallest, recipe.largest, Reshape(recipe.shape, recipe.of.of)))

    name = damage(structure, moved, not_transposed)
    assert check_recipes(structure, SUBMODEL).findings == [], "shapes, types and parameters are as they should be"
    assert_told(check_recipes(structure, SUBMODEL, bound).findings, wrong(name, "other values"))


def test_a_weight_that_was_changed_after_it_was_bound(structure: Path, bound: BoundModel) -> None:
    path = bound.folder / "model.onnx.data"
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    graph = onnx.load(bound.folder / "model.onnx", load_external_data=False).graph
    (first,) = [tensor.name for tensor in graph.initializer if is_external(tensor) and data_span(tensor)[1] == 0]
    assert_told(check_recipes(structure, SUBMODEL, bound).findings, wrong(first, "other values"))


def test_the_weights_of_another_checkpoint(structure: Path, bound: BoundModel) -> None:
    other = BoundModel(bound.folder, synthetic(SUBMODEL, seed=1))
    found = check_recipes(structure, SUBMODEL, other)
    assert {(finding.level, finding.what) for finding in found.findings} == {("error", OTHER_VALUES)}
    assert len(found.findings) > found.count / 2, "all but those that every seed has, such as norms of 1"


def test_the_structure_of_a_pipelines_submodel_is_found_in_the_cache(structure: Path, tmp_path: Path) -> None:
    cache, action = Cache(tmp_path / "cache"), make_action()
    record = publish(cache, action, {path.name: path.read_bytes() for path in structure.iterdir()})
    names = {"OrtTransformersOptimization": action.digest, "BindWeights": "x"}
    steps = tuple(FinishedPass(name, digest, {}, {}, {}) for name, digest in names.items())
    assert structure_of(Chain(None, steps), cache.root) == record.artifact.path
    assert structure_of(Chain(None, steps[:1]), cache.root) is None, "its weights were carried"
    assert structure_of(Chain(None, steps), tmp_path / "another") is None


def test_missing_parameters(structure: Path) -> None:
    (structure / "parameters.json").unlink()
    assert_told(check_recipes(structure, SUBMODEL).findings, wrong("parameters.json", "no such file"))


def test_parameters_of_another_architecture(structure: Path) -> None:
    path = structure / "parameters.json"
    path.write_text(json.dumps({key: [*shape, 1] for key, shape in json.loads(path.read_text()).items()}))
    found = check_recipes(structure, SUBMODEL).findings
    assert found
    assert all((finding.check, finding.level) == ("recipe", "error") for finding in found)
    assert all("not a parameter of that shape" in finding.what for finding in found)


@pytest.mark.parametrize("limits", [(5.96e-08, 65504.0), (1e-7, 1e4)])
def test_what_rounds_a_weight_and_what_looks_at_it_agree_to_the_bit(limits: tuple[float, float]) -> None:
    """They share no code."""
    ends = [
        0.0,
        np.inf,
        1e9,
        65520,
        65519.9,
        65504,
        10001,
        1e4,
        9999,
        1.1e-7,
        9.9e-8,
        5.97e-8,
        5.95e-8,
        3e-8,
        2.9e-8,
        1e-12,
    ]
    random = np.random.default_rng(0).standard_normal(10_000) * 10.0 ** np.random.default_rng(1).uniform(-9, 6, 10_000)
    exact = np.array([*ends, *(-each for each in ends), *random], np.float32)
    assert np.array_equal(rounded(exact, *limits).view(np.uint16), to_float16(exact, *limits).view(np.uint16))
