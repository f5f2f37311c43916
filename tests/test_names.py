"""A model family is one place: outside sdflow/models and sdflow/families no module names a submodel, a class of diffusers or
transformers, an input or output of a graph, what a scheduler of diffusers calls its way of noising or what a denoiser predicts,
or how kohya begins the names of modules; nor does it hold a number of channels or tokens, of pixels a latent, or a scale of
latents.

And what is private to a module is used there alone."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import diffusers
import pytest
import transformers

from sdflow.families import FAMILIES, any_family
from sdflow.families.shared.base import Family
from sdflow.sources.architectures import architecture_config

PACKAGE = Path(__file__).parents[1] / "sdflow"
HOMES = ("models", "families")

EXCEPTIONS: dict[tuple[str, str], str] = {
    ("cli/app.py", "unet"): "an example in the help",
    ("cli/arguments.py", "unet"): "an example in the help",
    ("config/override.py", "unet"): "an example in a remedy",
    ("export/tokenizer.py", "CLIPTokenizer"): "an operator of onnxruntime-extensions",
    ("passes/ort_transformers_optimization.py", "unet"): "a value of Olive's option model_type",
    ("passes/ort_transformers_optimization.py", "vae"): "a value of Olive's option model_type",
    ("runtime/generate.py", "safety_checker"): "a key of the settings that images carry; earlier ones have it",
    ("serve/api_error.py", "controlnet"): "a path of A1111's API",
    ("serve/http/webui_fields.py", "controlnet"): "a script of A1111's API",
    ("serve/http/webui_lists.py", "controlnet"): "a script of A1111's API",
    ("serve/http/webui_lists.py", "vae"): "a path of A1111's API",
}
"""(module, name) -> why it stands there."""

SCHEDULERS_OWN = frozenset(
    (
        *("scale_model_input", "add_noise", "scale_noise", "init_noise_sigma", "alphas_cumprod"),
        *("prediction_type", "scaling_factor", "shift_factor", "calculate_shift", "use_dynamic_shifting"),
        *("v_prediction", "flow_prediction", "use_karras_sigmas", "timestep_spacing", "block_out_channels"),
    )
)
"""How schedulers and VAEs of diffusers turn latents into noise and back; which of it a family does, its noising and its latents
know."""

WAYS_EXCEPTIONS: dict[tuple[str, str], str] = {
    ("runtime/files/folder.py", "block_out_channels"): "an entry of config.json that is checked before it is read",
    ("runtime/files/folder.py", "scaling_factor"): "an entry of config.json that is checked before it is read",
    ("sources/checkpoint.py", "scaling_factor"): "a fact of a checkpoint, and an entry in a remedy",
    ("sources/companion_entries.py", "prediction_type"): "an entry of config.json that is checked before it is read",
    ("sources/companion_entries.py", "timestep_spacing"): "an entry of config.json that is checked before it is read",
    ("sources/components/component.py", "scaling_factor"): "a fact of a checkpoint",
}

PORT_EXCEPTIONS: dict[tuple[str, str], str] = {
    ("config/reference.py", "sample"): "a scheme of references",
    ("export/browser.py", "guidance"): "a key of pipeline.json",
    ("export/conditions.py", "input_ids"): "an input of the exported graph, which programs feed",
    ("export/parts.py", "timestep"): "an input of the exported graphs, which programs feed",
    ("selftest/__init__.py", "sample"): "the name of the pipeline that it draws with",
    ("sources/components/component_source.py", "sample"): "a scheme of references",
    ("sources/opening.py", "sample"): "a scheme of references",
    ("sources/reference.py", "sample"): "a scheme of references",
}
"""(module, word) -> what it means there."""

EPSILON = "epsilon"
"""What a denoiser predicts, and an attribute of operators that normalize."""
PREDICTED = (EPSILON, "flow", "velocity")

OPERATORS = {
    (path, EPSILON): "an attribute of operators"
    for path in (
        *("passes/activation_scaling.py", "passes/conv_bias_fusion.py", "verify/lowering/normalization.py"),
        *("runtime/bands/norms.py", "runtime/kernels/float8.py"),
        *("runtime/kernels/float8_proof.py", "runtime/kernels/replace.py", "runtime/kernels/residuals.py"),
        *("runtime/kernels/rotary.py", "runtime/kernels/rotary_definitions.py", "runtime/kernels/rotary_graph.py"),
        *("runtime/kernels/transformer_definitions.py", "runtime/kernels/proof.py"),
    )
}

KOHYA = re.compile(r"lora_(?:unet|transformer|te\d?|prior)_")
"""How kohya begins the names of a model's modules in LoRAs."""

MODELS_OWN = frozenset((75, 77, 768, 0.18215, 0.13025, 1.5305, 0.0609, 0.3611, 0.1159))
"""Tokens that CLIP reads, without begin and end and with them, and its width; factors and shifts of the latents of Stable
Diffusion, XL, 3 and FLUX."""

ORDINARY_NUMBERS = frozenset((4, 8, 9, 16, 32, 64, 128, 256, 512))
"""Channels of latents, without and with a mask's, and packed into patches; pixels a latent; tokens that T5 and Qwen3 read: such
numbers where names beside them speak of that."""

SPEAKS_OF_LATENTS = re.compile(r"latent|channel|token|vae|scale_factor")

NUMBER_EXCEPTIONS: dict[tuple[str, str], str] = {
    ("onnx_model/phases.py", "4"): "the pixels that one becomes when an image doubles",
    ("passes/subpixel_conv.py", "4"): "the pixels that one becomes when an image doubles",
    ("runtime/kernels/definitions.py", "4"): "the pixels that one becomes when an image doubles",
    ("runtime/kernels/definitions.py", "77"): "shapes that a kernel is verified with",
    ("runtime/kernels/rotary_definitions.py", "75"): "shapes that a kernel is verified with",
    ("bench/tune.py", "75"): "a percentile",
    ("samples/score.py", "75.0"): "a distance of colours",
    ("runtime/kernels/float8_proof.py", "77"): "shapes that a kernel is verified with",
    ("runtime/kernels/replace.py", "4"): "channels of a group that a kernel takes",
    ("runtime/kernels/replace.py", "8"): "values that a thread reads at once",
    ("runtime/kernels/replace.py", "32"): "groups of channels that a kernel takes",
    ("bench/draw_functions.py", "128"): "channels of convolutions that diffusion-fast quantizes",
    ("samples/prompts.py", "4"): "of the latents of the sample, which are drawn from its own checkpoint",
    ("verify/reference/selection.py", "8"): "rows and columns of latents, of any model",
    ("verify/reference/selection.py", "32"): "tokens of a short text, for any model",
    ("verify/reference/selection.py", "512"): "channels of layers that are compared at fewer sizes",
}
"""(module, number) -> what it is there."""

ORDINARY = ("images",)
"""Ports whose name is an ordinary word, too."""

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
    return frozenset(any_family.submodels()) | {part.component for family in FAMILIES.values() for part in family.parts}


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


@cache
def ports() -> frozenset[str]:
    """Every input and output of the families' graphs, by the configs that sdflow ships."""
    found = set()
    for family in FAMILIES.values():
        for part in family.parts:
            if part.layouts:
                for architecture in family.architectures:
                    io = part.ports({**architecture_config(architecture, part.component), **part.config})
                    found |= {port.name for port in (*io.inputs, *io.outputs)}
    assert {"sample", "timestep", "out_sample", "latent_sample", "input_ids"} <= found
    return frozenset(found - set(ORDINARY))


def named_ports(module: ast.AST) -> Iterator[tuple[str, int]]:
    """The ports that a module names, as strings or as arguments of `bound`, and the lines."""
    yield from ((text, line) for text, line, is_name in texts(module) if not is_name and text in ports())
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "bound":
            yield from ((each.arg, node.lineno) for each in node.keywords if each.arg in ports())


def named_ways(module: ast.AST) -> Iterator[tuple[str, int]]:
    """What of diffusers' ways of noising a module names, and the lines."""
    yield from (
        (word, line) for text, line, _ in texts(module) for word in re.findall(r"\w+", text) if word in SCHEDULERS_OWN
    )


def named_predictions(module: ast.AST) -> Iterator[tuple[str, int]]:
    """Where a module names what is predicted, by diffusers' words, and the lines."""
    yield from ((text, line) for text, line, is_name in texts(module) if text in PREDICTED and not is_name)


def named_prefixes(module: ast.AST) -> Iterator[tuple[str, int]]:
    """The beginnings of a model's modules in kohya's LoRAs that a module names, and the lines."""
    yield from ((found, line) for text, line, is_name in texts(module) if not is_name for found in KOHYA.findall(text))


def named_numbers(module: ast.AST) -> Iterator[tuple[str, int]]:
    """The numbers of models in a module, and the lines."""
    above = {below: node for node in ast.walk(module) for below in ast.iter_child_nodes(node)}
    for node in ast.walk(module):
        if isinstance(node, ast.Tuple | ast.List) and is_shape_of_latents(node):
            yield str(node.elts[-3].value), node.lineno
        if not isinstance(node, ast.Constant) or type(node.value) not in (int, float):
            continue
        beside: ast.AST = node
        while beside in above and not isinstance(
            beside, ast.stmt | ast.keyword | ast.Compare | ast.arguments | ast.Call
        ):
            beside = above[beside]
        spoken = any(SPEAKS_OF_LATENTS.search(text.lower()) for text, _, is_name in texts(beside) if is_name)
        if node.value in MODELS_OWN or (node.value in ORDINARY_NUMBERS and spoken):
            yield str(node.value), node.lineno


def is_shape_of_latents(node: ast.Tuple | ast.List) -> bool:
    """([images,] channels, rows, columns) in numbers, of 4 or 16 channels and a square."""
    numbers = [each.value if isinstance(each, ast.Constant) else None for each in node.elts]
    return len(numbers) in (3, 4) and numbers[-3] in (4, 16) and numbers[-1] == numbers[-2] is not None


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
    require_homes_alone(named_models, EXCEPTIONS, "ask the family for it (sdflow/families/shared/base.py)")


def test_only_models_and_families_name_a_port() -> None:
    require_homes_alone(named_ports, PORT_EXCEPTIONS, "ask the ports for it, by its role (sdflow/models/ports.py)")


def test_only_models_and_families_name_a_way_of_noising() -> None:
    require_homes_alone(named_ways, WAYS_EXCEPTIONS, "ask the family's noising or latents (sdflow/families)")


def test_only_models_and_families_name_what_a_denoiser_predicts() -> None:
    require_homes_alone(named_predictions, OPERATORS, "ask sdflow/families/shared for it")


def test_only_models_and_families_name_a_beginning_of_lora_modules() -> None:
    require_homes_alone(named_prefixes, {}, "ask the family's parts for it (`Part.lora`)")


def test_only_models_and_families_hold_a_number_of_channels_or_tokens() -> None:
    require_homes_alone(named_numbers, NUMBER_EXCEPTIONS, "ask the family's latents or the model's ports for it")


def require_homes_alone(
    named: Callable[[ast.AST], Iterable[tuple[str, int]]], exceptions: Mapping[tuple[str, str], str], remedy: str
) -> None:
    found = {
        (relative(path), name): line
        for path in modules()
        if relative(path).split("/")[0] not in HOMES
        for name, line in named(tree(path))
    }
    told = [f"{path}:{line}: {name}" for (path, name), line in found.items() if (path, name) not in exceptions]
    assert not told, f"{remedy}:\n" + "\n".join(told)
    assert not exceptions.keys() - found.keys(), "these are named no more: take them out of the exceptions"


@pytest.mark.parametrize(
    ("planted", "name"),
    [
        ("x = run({'timestep': t})", "timestep"),
        ("x = outputs['last_hidden_state']", "last_hidden_state"),
        ("x = model.bound(latent_sample=(1, 4, 8, 8))", "latent_sample"),
    ],
)
def test_a_planted_port_is_found(planted: str, name: str) -> None:
    assert name in {found for found, _ in named_ports(ast.parse(planted))}


@pytest.mark.parametrize(
    ("planted", "name"),
    [
        ("x = scheduler.add_noise(image, noise, timestep)", "add_noise"),
        ("x = getattr(scheduler, 'init_noise_sigma', 1.0)", "init_noise_sigma"),
        ("x = config['scaling_factor']", "scaling_factor"),
        ("kind = 'v_prediction' if spoken else None", "v_prediction"),
        ("widths = config['block_out_channels']", "block_out_channels"),
    ],
)
def test_a_planted_way_of_noising_is_found(planted: str, name: str) -> None:
    assert name in {found for found, _ in named_ways(ast.parse(planted))}


@pytest.mark.parametrize(
    ("planted", "number"),
    [
        ("x = torch.zeros(1, tokens=77)", "77"),
        ("x = mean * 0.18215", "0.18215"),
        ("MOST_WORDS = 75", "75"),
        ("x = rows.shape[1] == 768", "768"),
        ("latent_channels = 4", "4"),
        ("def first(channels: int = 16): ...", "16"),
        ("inpainting = denoiser_channels == 9", "9"),
        ("rows = height // 8 if vae else height", "8"),
        ("x = np.zeros((1, 4, 64, 64))", "4"),
        ("x = np.zeros((16, 128, 128))", "16"),
        ("packed_channels = 128", "128"),
        ("def padded(ids, tokens=512): ...", "512"),
    ],
)
def test_a_planted_number_is_found(planted: str, number: str) -> None:
    assert number in {found for found, _ in named_numbers(ast.parse(planted))}


def test_a_planted_prediction_and_a_planted_beginning_are_found() -> None:
    assert [*named_predictions(ast.parse("kind = prediction(config, 'epsilon')"))] == [(EPSILON, 1)]
    assert [*named_predictions(ast.parse("kind = prediction(config, 'flow')"))] == [("flow", 1)]
    assert [*named_predictions(ast.parse("epsilon = 1e-5"))] == []
    assert [*named_prefixes(ast.parse("x = name.removeprefix('lora_te1_')"))] == [("lora_te1_", 1)]


@pytest.mark.parametrize("planted", ["THREADS = 4", "x = rows[:8]", "x = np.zeros((2, 3, 4))", "f(latents, threads=4)"])
def test_an_ordinary_number_is_free(planted: str) -> None:
    assert not list(named_numbers(ast.parse(planted)))


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


def test_no_family_inherits_from_another() -> None:
    """Nor does it read another's module: what families share lies in modules of its own."""
    modules_of = {type(family).__module__ for family in FAMILIES.values()}
    for family in FAMILIES.values():
        (base,) = type(family).__bases__
        assert base is Family or base.__module__.startswith("sdflow.families.shared."), type(family)
        assert base.__module__ not in modules_of, type(family)
        imported = {
            name
            for node in ast.walk(tree(Path(inspect.getfile(type(family)))))
            if isinstance(node, ast.ImportFrom)
            for name in (str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names))
        }
        assert not imported & (modules_of - {type(family).__module__}), type(family)


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
