"""Merge LoRAs into the reference's modules with diffusers and PEFT, without sdflow's own reader.

Two steps come first: names that diffusers does not know are converted to kohya's or PEFT's, and a layer's alpha in the
file is multiplied into its factors, W + scale * (alpha / rank) * up @ down, because diffusers gives some layers other
layers' alphas (docs/baking.md). Nothing is dropped: a tensor that matches nothing is an error.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.errors import VerificationError
from sdflow.families.shared.base import Family
from sdflow.families.shared.original_unet_names import KOHYA, ORIGINAL, diffusers_names, is_original
from sdflow.verify.reference.merged_adapters import is_plain, merge_adapters

if TYPE_CHECKING:
    import torch

Tensors = dict[str, "torch.Tensor"]

METADATA = "lora_adapter_metadata"
"""Header key under which diffusers' save_lora_weights stores PEFT's configuration."""
PEFT_CONFIG = "adapter_config.json"
"""File that PEFT's save_pretrained writes next to the tensors."""
PEFT_PREFIX = "base_model.model."
OLDER = "text_model."
"""Prefix of text encoder modules before transformers 5."""
TEXT_LAYERS = "encoder.layers."
"""Their prefix since."""
ADAPTER = "verified"

_FACTORS = (
    (".lora_down.weight", ".lora_up.weight"),
    (".lora_A.weight", ".lora_B.weight"),
    (".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight"),
    (".lora.down.weight", ".lora.up.weight"),
    ("_lora.down.weight", "_lora.up.weight"),
)
_WHICH = ("exclude_modules", "layers_to_transform", "layers_pattern")
_ALPHAS = (".lora_linear_layer.alpha", ".lora.alpha", "_lora.alpha", ".alpha")


def merge_lora(
    module: Any,
    component: str,
    family: Family,
    denoiser: Mapping[str, Any],
    path: Path,
    scale: float,
    deferred: dict[str, list[Any]] | None = None,
) -> int:
    """Add a LoRA file to the module of a component, in place. Returns the number of changed layers; 0 if the file has
    no part for it.

    denoiser: its config, by whose levels diffusers numbers the blocks of the original UNet. deferred: instead of
    merging, collect PEFT's layers here, by the name of the weight that each changes.
    Raises VerificationError for a tensor that matches nothing.
    """
    from safetensors import safe_open
    from safetensors.torch import load_file

    with safe_open(path, "pt") as stream:
        said = (stream.metadata() or {}).get(METADATA)
    tensors = {name: tensor.float() for name, tensor in load_file(path).items()}
    metadata = None if said is None else _for_components(json.loads(said), tensors, family)
    if all(name.startswith(PEFT_PREFIX) for name in tensors):
        tensors, config = _from_peft(tensors, path, family)
        metadata = config if metadata is None else metadata
    if not is_plain(tensors):
        said_of_it = {name: value for name, value in (metadata or {}).items() if name.startswith(f"{component}.")}
        fields = {name.partition(".")[2]: value for name, value in said_of_it.items()}
        if not hasattr(module, OLDER.removesuffix(".")):
            fields = _current(fields)
        place = partial(_placed, module=module, component=component, family=family, denoiser=denoiser, path=path)
        try:
            return merge_adapters(tensors, fields, lambda factors: place(factors)[0], module, scale, path, deferred)
        except (ValueError, TypeError, KeyError, IndexError, RuntimeError) as error:
            raise VerificationError(f"diffusers and PEFT cannot merge it: {error!r}"[:300], where=str(path)) from error
    tensors, folded = _without_alphas(tensors, path)
    if folded and metadata is not None:
        if folded < _count(tensors):
            raise VerificationError("has alphas of some layers, and its header those of others", where=str(path))
        metadata = None
    own, older = _placed(tensors, module, component, family, denoiser, path)
    if not own:
        return 0
    is_denoiser = component == family.part(family.denoiser).component
    whole = {f"{component}.{name}": each for name, each in own.items()}
    said_of_it = {name: value for name, value in (metadata or {}).items() if name.startswith(f"{component}.")}
    configured = (_current(said_of_it) if older else said_of_it) or None
    if configured is not None:  # the tensors define the modules
        modules = {name.rpartition(".lora_")[0] for name in own}
        which = {"target_modules": sorted(modules), **dict.fromkeys(_WHICH)}
        configured |= {f"{component}.{field}": value for field, value in which.items()}
    options = {"metadata": configured, "low_cpu_mem_usage": True}
    try:
        if is_denoiser:
            family.load_lora(whole, module, ADAPTER, **options)
        else:
            family.lora_loader().load_lora_into_text_encoder(whole, None, module, component, 1.0, ADAPTER, **options)
        _fuse(module, _count(own), scale, path, deferred)
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise VerificationError(f"diffusers and PEFT cannot merge it: {error}", where=str(path)) from error
    return _count(own)


def _placed(
    tensors: Tensors, module: Any, component: str, family: Family, denoiser: Mapping[str, Any], path: Path
) -> tuple[Tensors, bool]:
    """The factors for the module, by PEFT's names in it, and whether the file uses transformers' older, longer names.
    Every layer of the file must belong to some module."""
    tensors = _past_diffusers_reader(tensors, family, denoiser)
    placed: Tensors = {}
    count = 0
    for part in _by_style(tensors, family):
        try:
            found, layers = family.lora_state(part, denoiser)
        except (ValueError, KeyError, IndexError) as error:
            raise VerificationError(f"diffusers cannot read its names: {error!r}"[:300], where=str(path)) from error
        count += layers
        placed |= found
    if count != _count(tensors):
        raise VerificationError(f"diffusers places {count} of its {_count(tensors)} layers", where=str(path))
    own = {
        name.removeprefix(f"{component}."): each for name, each in placed.items() if name.startswith(f"{component}.")
    }
    older = any(name.startswith(OLDER) for name in own) and not hasattr(module, OLDER.removesuffix("."))
    is_denoiser = component == family.part(family.denoiser).component
    return _in_shape(_peft_names(own, is_denoiser, older), module, path) if own else own, older


def _count(tensors: Mapping[str, Any]) -> int:
    return sum(name.endswith(tuple(down for down, _ in _FACTORS)) for name in tensors)


def _from_peft(tensors: Tensors, path: Path, family: Family) -> tuple[Tensors, dict[str, Any] | None]:
    """A file of PEFT's save_pretrained, which holds one module, under diffusers' names; with the configuration next to
    it."""
    named = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in tensors.items()}
    config = path.with_name(PEFT_CONFIG)
    said = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else None
    component = _component((said or {}).get("auto_mapping") or {}, named, family)
    metadata = None if said is None else {f"{component}.{field}": value for field, value in said.items()}
    return {f"{component}.{name}": tensor for name, tensor in named.items()}, metadata


def _component(mapping: Mapping[str, Any], names: Collection[str], family: Family) -> str:
    """The component that PEFT wrapped: by the class in its configuration, otherwise by the modules' names."""
    named = mapping.get("base_model_class")
    parts = [family.part(name) for name in (family.denoiser, *family.text)]
    if (found := next((part for part in parts if part.model.class_name == named), None)) is not None:
        return found.component
    text = all(name.startswith((OLDER, TEXT_LAYERS)) for name in names)
    return family.part(family.text[0] if text else family.denoiser).component


def _for_components(metadata: dict[str, Any], names: Collection[str], family: Family) -> dict[str, Any]:
    """PEFT's configuration from a header, with the component's prefix on every field, which diffusers'
    save_lora_adapter omits because it saves only the denoiser."""
    if any(name.startswith(tuple(f"{component}." for component in family.components)) for name in (*metadata, *names)):
        return metadata
    return {f"{family.part(family.denoiser).component}.{field}": value for field, value in metadata.items()}


def _without_alphas(tensors: Tensors, path: Path) -> tuple[Tensors, int]:
    """The factors with alpha / rank multiplied in, for layers with an alpha, and the number of these. Without one,
    alpha equals the rank, as in kohya's scripts, which introduced alphas."""
    found = dict(tensors)
    alphas = [name for name in tensors if name.endswith(_ALPHAS)]
    for name in alphas:
        stem = name.removesuffix(next(suffix for suffix in _ALPHAS if name.endswith(suffix)))
        pair = next(((stem + down, stem + up) for down, up in _FACTORS if stem + down in tensors), None)
        if pair is None or pair[1] not in tensors:
            raise VerificationError(f"{name} does not belong to a layer", where=str(path))
        down, up = pair
        found[up] = tensors[up] * (float(found.pop(name)) / len(tensors[down]))
    return found, len(alphas)


def _past_diffusers_reader(tensors: Tensors, family: Family, denoiser: Mapping[str, Any]) -> Tensors:
    """Use diffusers' module names where its LoRA reader mistakes names: those of the original UNet, and the two layers
    of add_embedding, which it maps to one."""
    factors = {name: found for name in tensors if (found := _stem_and_role(name)) is not None}
    stems = {stem for stem, _ in factors.values()}
    modules = diffusers_names([stem for stem in stems if is_original(stem)], denoiser)
    modules |= {stem: stem.replace("_linear", ".linear") for stem in stems if stem.startswith("add_embedding_")}
    component = family.part(family.denoiser).component
    return {
        f"{component}.{modules[found[0]]}.lora_{found[1]}.weight"
        if (found := factors.get(name)) and found[0] in modules
        else name: tensor
        for name, tensor in tensors.items()
    }


def _stem_and_role(name: str) -> tuple[str, str] | None:
    """The module, with underscores for dots, and PEFT's letter of a denoiser's factor in kohya's or ComfyUI's names."""
    prefix = next((each for each in (KOHYA[0], ORIGINAL) if name.startswith(each)), None)
    ends = [(end, letter) for pair in _FACTORS for end, letter in zip(pair, "AB", strict=True) if name.endswith(end)]
    if prefix is None or not ends:
        return None
    end, letter = ends[0]
    return name.removeprefix(prefix).removesuffix(end).replace(".", "_"), letter


def _by_style(tensors: Tensors, family: Family) -> list[Tensors]:
    """Separate kohya's names from diffusers', since diffusers reads one style at a time."""
    kohya, dotted = {}, {}
    components = tuple(f"{component}." for component in family.components)
    for name, tensor in tensors.items():
        if name.startswith(ORIGINAL):
            down, up = next((pair for pair in _FACTORS if name.endswith(pair)), ("", ""))
            stem = name.removeprefix(ORIGINAL).removesuffix(down).removesuffix(up)
            role = _FACTORS[0][name.endswith(up)]
            kohya[f"{KOHYA[0]}{stem.replace('.', '_')}{role}"] = tensor
        elif name.startswith(KOHYA):
            kohya[name] = tensor
        else:  # diffusers' first files held only the denoiser's attention, without a prefix
            whole = name if name.startswith(components) else f"{family.part(family.denoiser).component}.{name}"
            dotted[whole.replace(".lora_down.", ".lora_A.").replace(".lora_up.", ".lora_B.")] = tensor
    return [part for part in (kohya, dotted) if part]


def _peft_names(tensors: Tensors, is_denoiser: bool, older: bool) -> Tensors:
    """Rename factors to PEFT's names in this module, with diffusers' own conversion. older: the file has transformers'
    longer names."""
    from diffusers.utils.state_dict_utils import (
        DIFFUSERS_OLD_TO_PEFT,
        DIFFUSERS_TO_PEFT,
        convert_state_dict,
        convert_unet_state_dict_to_peft,
    )

    if is_denoiser:
        converted: Tensors = convert_unet_state_dict_to_peft(tensors)
        return converted
    # diffusers chooses its table by one layer's name, which not every file has.
    converted = convert_state_dict(tensors, {**DIFFUSERS_OLD_TO_PEFT, **DIFFUSERS_TO_PEFT})
    return {name.removeprefix(OLDER): tensor for name, tensor in converted.items()} if older else converted


def _in_shape(tensors: Tensors, module: Any, path: Path) -> Tensors:
    """Reshape factors between linear layers and 1x1 convolutions, which are equivalent."""
    shaped = {}
    for name, tensor in tensors.items():
        try:
            dims = module.get_submodule(name.rpartition(".lora_")[0]).weight.dim()
        except AttributeError as error:
            raise VerificationError(f"{name} has no place in the model: {error}", where=str(path)) from error
        if dims == 2 and tensor.dim() == 4 and tensor.shape[2:] == (1, 1):
            tensor = tensor[:, :, 0, 0]
        elif dims == 4 and tensor.dim() == 2:
            tensor = tensor[:, :, None, None]
        shaped[name] = tensor.contiguous()
    return shaped


def _current(value: Any) -> Any:
    """PEFT's configuration with the module names of this transformers release."""
    if isinstance(value, Mapping):
        return {_current(name): _current(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_current(each) for each in value]
    return value.replace(OLDER, "").replace(r"text_model\.", "") if isinstance(value, str) else value


def _fuse(module: Any, layers: int, scale: float, path: Path, deferred: dict[str, list[Any]] | None) -> None:
    """Merge the injected layers, and remove PEFT's wrappers."""
    from diffusers.utils.peft_utils import recurse_remove_peft_layers
    from peft.tuners.tuners_utils import BaseTunerLayer

    injected = {name: each for name, each in module.named_modules() if isinstance(each, BaseTunerLayer)}
    if len(injected) != layers:
        raise VerificationError(f"PEFT injects {len(injected)} of its {layers} layers", where=str(path))
    for name, layer in injected.items():
        if scale != 1.0:
            layer.scale_layer(scale)
        if deferred is not None:
            deferred.setdefault(f"{name}.weight", []).append(layer)
        else:  # in a new tensor: the module's may be a read-only map of the checkpoint
            layer.merge(safe_merge=True)
    recurse_remove_peft_layers(module)
    del module.peft_config
    if hasattr(module, "_hf_peft_config_loaded"):
        module._hf_peft_config_loaded = False
    module.requires_grad_(False)
