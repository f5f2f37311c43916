"""The passes that workflows can name: sdflow's, Olive's, and user scripts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from sdflow.config.catalog import PassCatalog, PassInfo, PassNotFound
from sdflow.errors import PassError
from sdflow.passes.base import Pass, PassConfig
from sdflow.passes.script_worker import try_user_pass
from sdflow.passes.user_pass import is_user_pass, load_user_pass

OWN = {
    "OnnxConversion": "sdflow.passes.onnx_conversion",
    "LoraMerge": "sdflow.passes.lora_merge",
    "ActivationScaling": "sdflow.passes.activation_scaling",
    "OrtTransformersOptimization": "sdflow.passes.ort_transformers_optimization",
    "ConvBiasFusion": "sdflow.passes.conv_bias_fusion",
    "NhwcResize": "sdflow.passes.nhwc_resize",
    "SeparateQkv": "sdflow.passes.separate_qkv",
    "SubpixelConv": "sdflow.passes.subpixel_conv",
    "OnnxFloatToFloat16": "sdflow.passes.float16",
    "QuantizeInt8": "sdflow.passes.quantize_int8",
    "QuantizeFp8": "sdflow.passes.quantize_fp8",
    "QuantizeInt4": "sdflow.passes.quantize_int4",
}
"""Pass name -> module, in the usual order of a chain. The class has the same name as the pass."""

APPENDED = {"BindWeights": "sdflow.passes.bind_weights"}
"""Passes that sdflow appends to chains itself."""


@dataclass(frozen=True)
class OptionInfo:
    """An option as shown by `sdflow passes`. `default` is also None for required options."""

    name: str
    type: str
    required: bool
    default: Any
    description: str


@dataclass(frozen=True)
class PassDescription:
    """A pass as shown by `sdflow passes`. origin: "sdflow", "olive" or the path of a script."""

    name: str
    origin: str
    accepts: str
    summary: str
    options: tuple[OptionInfo, ...]


class _Catalog:
    def names(self) -> Sequence[str]:
        from sdflow.passes.olive_pass import olive_names

        return [*OWN, *(name for name in olive_names() if name not in OWN)]

    def find(self, name: str, folder: Path) -> PassInfo:
        if name in APPENDED:
            raise PassNotFound(f"{name} cannot be named in a workflow: sdflow appends it to chains that need it")
        found = tried_pass(name, folder)
        return PassInfo(name, found.accepts, found.takes_loras, found.Config, found.quantizes_to)


def catalog() -> PassCatalog:
    """Return the catalog that validation queries."""
    return _Catalog()


def find_pass(name: str, folder: Path) -> type[Pass[Any]]:
    """Return the class of pass `name`. folder: base of relative script paths.

    Raises PassNotFound if the name is unknown (with the closest match), unusable in a chain, or a faulty script.
    """
    if module := (OWN | APPENDED).get(name):
        return getattr(import_module(module), name)  # type: ignore[no-any-return]
    if is_user_pass(name):
        try:
            return load_user_pass(name, folder)
        except PassError as cause:
            raise PassNotFound(str(cause)) from cause
    from sdflow.passes.olive_pass import Unusable, olive_pass  # only loaded if a workflow names an Olive pass

    try:
        return olive_pass(name)
    except Unusable as cause:
        raise PassNotFound(str(cause)) from cause
    except KeyError:
        by_case = {known.lower(): known for known in _Catalog().names()}
        near = get_close_matches(name.lower(), by_case, n=1)
        hint = f"; did you mean {by_case[near[0]]}?" if near else ""
        raise PassNotFound(f"there is no pass {name!r}{hint}") from None


def tried_pass(name: str, folder: Path) -> type[Pass[Any]]:
    """Like `find_pass`, but first load a script in a separate process, and here only if that succeeds."""
    if is_user_pass(name) and name not in OWN | APPENDED:
        try:
            try_user_pass(name, folder)
        except PassError as cause:
            raise PassNotFound(str(cause)) from cause
    return find_pass(name, folder)


def describe(name: str, folder: Path) -> PassDescription:
    """Describe a pass for `sdflow passes`. Raises PassNotFound."""
    found = tried_pass(name, folder)
    summary = (found.__doc__ or "").strip().split("\n")[0]
    origin = "sdflow" if name in OWN | APPENDED else name.partition(":")[0] if is_user_pass(name) else "olive"
    try:
        options = tuple(_option(key, field) for key, field in found.Config.model_fields.items())
    except Exception as cause:  # a script's default factories run here and may raise anything
        if not is_user_pass(name):
            raise
        raise PassNotFound(f"{name}: its options cannot be described: {type(cause).__name__}: {cause}") from cause
    return PassDescription(name, origin, found.accepts, summary, options)


def _option(name: str, field: FieldInfo) -> OptionInfo:
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    if isinstance(default, PassConfig):
        default = default.model_dump()
    return OptionInfo(name, _type_name(field.annotation), field.is_required(), default, field.description or "")


def _type_name(annotation: Any) -> str:
    is_class = isinstance(annotation, type) and not hasattr(annotation, "__args__")
    text = annotation.__name__ if is_class else str(annotation)
    text = re.sub(r"Annotated\[(\w+), .*?\)\]", r"\1", text)
    for prefix in ("typing.", "collections.abc.", "sdflow.passes."):
        text = text.replace(prefix, "")
    return text
