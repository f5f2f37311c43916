"""The passes that workflows can name: sdflow's own, Olive's, and scripts of the user's."""

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
"""Name -> module, in the order of a usual chain. The class has the pass's name."""

APPENDED = {"BindWeights": "sdflow.passes.bind_weights"}
"""Those that sdflow itself puts at the end of a chain."""


@dataclass(frozen=True)
class OptionInfo:
    """An option as `sdflow passes` shows it. `default` is None for required options too."""

    name: str
    type: str
    required: bool
    default: Any
    description: str


@dataclass(frozen=True)
class PassDescription:
    """A pass as `sdflow passes` shows it. origin: "sdflow", "olive" or the path of a script."""

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
            raise PassNotFound(f"{name} is no pass to write down: sdflow puts it at the end of chains that need it")
        found = tried_pass(name, folder)
        return PassInfo(name, found.accepts, found.takes_loras, found.Config, found.quantizes_to)


def catalog() -> PassCatalog:
    """What validation asks about passes."""
    return _Catalog()


def find_pass(name: str, folder: Path) -> type[Pass[Any]]:
    """The class of the pass `name`; for a script, paths start at `folder`.

    Raises PassNotFound with the reason: unknown (and the nearest name), not usable in a chain, or a faulty script.
    """
    if module := (OWN | APPENDED).get(name):
        return getattr(import_module(module), name)  # type: ignore[no-any-return]
    if is_user_pass(name):
        try:
            return load_user_pass(name, folder)
        except PassError as cause:
            raise PassNotFound(str(cause)) from cause
    from sdflow.passes.olive_pass import Unusable, olive_pass  # only where a workflow names one of Olive's

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
    """As `find_pass`; a script is read in a process of its own first, and here only if it can be."""
    if is_user_pass(name) and name not in OWN | APPENDED:
        try:
            try_user_pass(name, folder)
        except PassError as cause:
            raise PassNotFound(str(cause)) from cause
    return find_pass(name, folder)


def describe(name: str, folder: Path) -> PassDescription:
    """What `sdflow passes` shows of a pass. Raises PassNotFound."""
    found = tried_pass(name, folder)
    summary = (found.__doc__ or "").strip().split("\n")[0]
    origin = "sdflow" if name in OWN | APPENDED else name.partition(":")[0] if is_user_pass(name) else "olive"
    try:
        options = tuple(_option(key, field) for key, field in found.Config.model_fields.items())
    except Exception as cause:  # a script's defaults are made here, and may raise anything; ours have no excuse
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
