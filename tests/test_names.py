"""A model family is one place: outside sdflow/models and sdflow/families no module names a submodel, or a class of diffusers or
transformers. And what is private to a module is used there alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import diffusers
import pytest
import transformers

from sdflow.families import FAMILIES, SUBMODELS

PACKAGE = Path(__file__).parents[1] / "sdflow"
HOMES = ("models", "families")

EXCEPTIONS: dict[tuple[str, str], str] = {
    ("cli/app.py", "unet"): "an example in the help",
    ("cli/generate.py", "vae"): "of the option --vae-tiles",
    ("config/override.py", "unet"): "an example in a remedy",
    ("export/tokenizer.py", "CLIPTokenizer"): "an operator of onnxruntime-extensions",
    ("passes/ort_transformers_optimization.py", "unet"): "a value of Olive's option model_type",
    ("passes/ort_transformers_optimization.py", "vae"): "a value of Olive's option model_type",
    ("runtime/generate.py", "safety_checker"): "a key of the settings that images carry; earlier ones have it",
}
"""(module, name) -> why it stands there."""

TAKEN_FROM = re.compile(r"(?<![\w.])(?:diffusers|transformers)\.[\w.]+")
"""A path into one of the libraries, in a string."""


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def submodels() -> frozenset[str]:
    """The submodels of all families, and the folders of checkpoints that they lie in."""
    return frozenset(SUBMODELS) | {part.component for family in FAMILIES.values() for part in family.parts}


@cache
def classes() -> frozenset[str]:
    """What the families say of their classes, and every class that the libraries offer, unless sdflow has one of that name."""
    ours = {node.name for path in modules() for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)}
    offered = {name for library in (diffusers, transformers) for name in dir(library) if is_class_name(name)}
    named = {
        name
        for family in FAMILIES.values()
        for name in (
            *family.classes,
            *family.assembled_as.values(),
            *(part.model.class_name for part in family.parts),
            *(companion.class_name for companion in family.companions.values() if companion.class_name),
        )
    }
    return frozenset(offered - ours | named)


def is_class_name(name: str) -> bool:
    return bool(re.match(r"[A-Z]\w*[a-z]", name))


def docstrings(module: ast.AST) -> set[ast.AST]:
    """String constants that are statements: docstrings, also of what stands above them."""
    return {
        node.value for node in ast.walk(module) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def texts(module: ast.AST) -> Iterator[tuple[str, int, bool]]:
    """Every name and every string but docstrings, the line, and whether it is a name."""
    free = docstrings(module)
    for node in ast.walk(module):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in free:
            yield node.value, line, False
        for name in (
            "id",
            "attr",
            "arg",
            "name",
            "asname",
        ):  # `global`, `nonlocal` and `except ... as` name what has an `id`
            value = getattr(node, name, None)
            if isinstance(value, str):
                yield value, line, True


def named_models(module: ast.AST) -> Iterator[tuple[str, int]]:
    """The submodels and classes that a module names, and the lines. A submodel's name in capitals is a name too, and in a
    string a word of prose."""
    for text, line, is_name in texts(module):
        yield from ((word, line) for word in re.findall(r"\w+", text) if word in classes())
        words = [text.lower()] if is_name else re.findall(r"\w+", text)
        yield from ((word, line) for word in words if word in submodels())
        if not is_name:
            yield from ((path, line) for path in TAKEN_FROM.findall(text))
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("diffusers", "transformers"):
            yield from ((alias.name, node.lineno) for alias in node.names if is_class_name(alias.name))


def test_only_models_and_families_name_a_model() -> None:
    found = {
        (relative(path), name): line
        for path in modules()
        if relative(path).split("/")[0] not in HOMES
        for name, line in named_models(tree(path))
    }
    told = [f"{path}:{line}: {name}" for (path, name), line in found.items() if (path, name) not in EXCEPTIONS]
    assert not told, "ask the family for it (sdflow/families/base.py):\n" + "\n".join(told)
    assert not EXCEPTIONS.keys() - found.keys(), "these are named no more: take them out of EXCEPTIONS"


@pytest.mark.parametrize(
    ("planted", "name"),
    [
        ("x = {'unet': 1}", "unet"),
        ("x = f'{folder}/vae/config.json'", "vae"),
        ("x = configs.text_encoder", "text_encoder"),
        ("run(safety_checker=None)", "safety_checker"),
        ("def f(vae_decoder): ...", "vae_decoder"),
        ("def unet(): ...", "unet"),
        ("UNET = 1", "unet"),
        ("import torch as vae", "vae"),
        ("x = diffusers.UNet2DConditionModel", "UNet2DConditionModel"),
        ("from diffusers.models.somewhere import NotAtTheTop", "NotAtTheTop"),
        ("from transformers import CLIPTokenizer", "CLIPTokenizer"),
        ("x = ['diffusers', 'OnnxRuntimeModel']", "OnnxRuntimeModel"),
        ("x = 'OnnxStableDiffusionPipeline'", "OnnxStableDiffusionPipeline"),
        ("import_module('diffusers.models.unets')", "diffusers.models.unets"),
    ],
)
def test_a_planted_name_is_found(planted: str, name: str) -> None:
    assert name in {found for found, _ in named_models(ast.parse(planted))}


def test_prose_is_free() -> None:
    code = '"""The unet of a StableDiffusionPipeline."""\nx = "the VAE, and the text encoder"  # the vae\n"""vae"""'
    assert not list(named_models(ast.parse(code)))


def private_names(module: ast.AST) -> set[str]:
    """The names with one underscore in front that a module gives: functions, classes, methods, attributes, variables."""
    given = {
        node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else node.attr
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        or (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    }
    given |= {node.id for node in ast.walk(module) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return {name for name in given if is_private(name)}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def borrowed(module: ast.AST) -> Iterator[tuple[str, int]]:
    """Private names of others that a module uses: it imports them, or reads them from an object that is not `self`."""
    own = private_names(module)
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE.name:
            yield from ((alias.name, node.lineno) for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            yield from () if ast.unparse(node.value) in ("self", "cls") else ((node.attr, node.lineno),)


def test_private_names_stay_in_their_module() -> None:
    """What torch, ONNX Runtime and Olive call private is theirs; where sdflow must reach for it, a comment there says why."""
    ours = {name for path in modules() for name in private_names(tree(path))}
    told = [
        f"{relative(path)}:{line}: {name}" for path in modules() for name, line in borrowed(tree(path)) if name in ours
    ]
    assert not told, "\n".join(told)


def test_a_borrowed_name_is_found() -> None:
    code = (
        "from sdflow.build.chain import _step\nself._own = other._own = other._theirs\nself._inherited()\ncls.__name__"
    )
    assert list(borrowed(ast.parse(code))) == [("_step", 1), ("_theirs", 2)]
