"""Builds the PyTorch module of a submodel, or the whole pipeline, from what `open_checkpoint` found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sdflow.errors import CheckpointError
from sdflow.sources.checkpoint import CLASS_OF, COMPONENT_OF, Checkpoint, check_stamps, listing
from sdflow.sources.ldm_names import ldm_unet_names, ldm_vae_names
from sdflow.sources.synthetic import canonical_name, tensors_for

if TYPE_CHECKING:
    import torch
    from diffusers import StableDiffusionPipeline

# What a library raises for a configuration or a file that it cannot make sense of.
_REJECTIONS = (ValueError, TypeError, KeyError, AttributeError, IndexError, RuntimeError, ArithmeticError, OSError)
# Older releases saved the first, a buffer that is 0, 1, 2, ...; the others are CLIP's contrastive head.
UNUSED = ("embeddings.position_ids", "text_projection.weight", "logit_scale")
# diffusers before 0.18 named the VAE's attention layers so.
_OLD_VAE_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


def submodel_config(submodel: str, load: Mapping[str, Any]) -> dict[str, Any]:
    """The submodel's config.json (diffusers' or transformers'). vae_encoder and vae_decoder: that of the whole VAE."""
    del submodel  # every load holds the one config it needs
    return dict(load["config"])


def load_module(submodel: str, load: Mapping[str, Any]) -> torch.nn.Module:
    """The submodel's module in float32 and eval mode on the CPU, no gradients.

    text_encoder: CLIPTextModel; unet: UNet2DConditionModel; vae_encoder and vae_decoder: AutoencoderKL;
    safety_checker: StableDiffusionSafetyChecker.
    Raises CheckpointError naming the tensors that are missing, unexpected or of a wrong shape.
    """
    import torch

    component = COMPONENT_OF[submodel]
    where = load["files"][0]["path"] if "files" in load else f"{load['kind']} {component}"
    module = _empty_module(component, submodel_config(submodel, load), where)
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    if load["kind"] == "hollow":
        tensors = _hollow_tensors(module)
    elif load["kind"] == "synthetic":
        arrays = tensors_for(CLASS_OF[component], load, expected)
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    else:
        check_stamps(load["files"])
        found = _read_files([Path(stamp["path"]) for stamp in load["files"]], load["pickled"], load.get("prefix", ""))
        tensors = _fit(component, found, expected, where, original="prefix" in load)
        check_stamps(load["files"])
    module.load_state_dict(tensors, strict=True, assign=True)
    return module.eval().requires_grad_(False)


def parameter_shapes(submodel: str, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """state_dict key -> shape of the submodel's module (of the whole VAE for its halves)."""
    module = _empty_module(COMPONENT_OF[submodel], dict(config), f"config of {submodel}")
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def _hollow_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A tensor of the right shape for every parameter, in the memory of one number: each has strides of 0.

    Each has a value of its own, so that nothing takes two for one. The load {"kind": "hollow", "config": ...} is for
    tracing the architecture without a checkpoint.
    """
    import torch

    expected = module.state_dict()
    if odd := [name for name, tensor in expected.items() if not tensor.is_floating_point()]:
        raise CheckpointError(f"its tensors {listing(odd)} are not of a floating-point type", where="hollow")
    return {
        name: torch.full((1,) * tensor.dim(), (index + 1) / (100 * len(expected))).expand(tensor.shape)
        for index, (name, tensor) in enumerate(expected.items())
    }


def load_pipeline(checkpoint: Checkpoint) -> StableDiffusionPipeline:
    """diffusers' pipeline in float32 on the CPU from the same parts: the reference that ONNX pipelines are held to."""
    import diffusers
    from transformers import CLIPImageProcessor, CLIPTokenizer

    parts = {
        component: load_module(submodel, checkpoint.submodels[submodel].load)
        for submodel, component in COMPONENT_OF.items()
        if submodel in checkpoint.submodels and submodel != "vae_encoder"
    }
    folders = {name: str(folder) for name, folder in checkpoint.companions.items()}
    where = checkpoint.reference
    with _rejections(where, "its scheduler, tokenizer or feature extractor cannot be loaded"):
        scheduler = getattr(diffusers, checkpoint.facts["scheduler"]).from_pretrained(folders["scheduler"])
        tokenizer = CLIPTokenizer.from_pretrained(folders["tokenizer"], local_files_only=True)
        extractor = (
            CLIPImageProcessor.from_pretrained(folders["feature_extractor"], local_files_only=True)
            if "feature_extractor" in folders
            else None
        )
    pipeline: Any = diffusers.StableDiffusionPipeline
    return cast(
        "StableDiffusionPipeline",
        pipeline(
            vae=parts["vae"],
            text_encoder=parts["text_encoder"],
            tokenizer=tokenizer,
            unet=parts["unet"],
            scheduler=scheduler,
            safety_checker=parts.get("safety_checker"),
            feature_extractor=extractor,
            requires_safety_checker="safety_checker" in parts,
        ),
    )


@contextmanager
def _rejections(where: str, what: str, remedy: str | None = None) -> Iterator[None]:
    from huggingface_hub.errors import StrictDataclassError  # of transformers' configurations

    try:
        yield
    except (StrictDataclassError, *_REJECTIONS) as error:
        raise CheckpointError(f"{what}: {error}", where=where, remedy=remedy) from error


def _empty_module(component: str, config: dict[str, Any], where: str) -> torch.nn.Module:
    """The module with its parameters on the meta device: no memory, no random initialisation."""
    from accelerate import init_empty_weights

    module: torch.nn.Module
    with (
        _rejections(where, f"its configuration does not make a {CLASS_OF[component]}"),
        init_empty_weights(include_buffers=False),
    ):
        if component == "unet":
            from diffusers import UNet2DConditionModel

            module = cast(Any, UNet2DConditionModel).from_config(config)
        elif component == "vae":
            from diffusers import AutoencoderKL

            module = cast(Any, AutoencoderKL).from_config(config)
        elif component == "text_encoder":
            from transformers import CLIPTextConfig, CLIPTextModel

            module = CLIPTextModel(CLIPTextConfig.from_dict(config))
        else:
            from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
            from transformers import CLIPConfig

            module = StableDiffusionSafetyChecker(CLIPConfig.from_dict(config))
    return module


def _read_files(files: list[Path], pickled: bool, prefix: str) -> dict[str, torch.Tensor]:
    """The tensors whose names begin with the prefix, under their names without it."""
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        part = _read_pickle(file, prefix) if pickled else _read_safetensors(file, prefix)
        twice = sorted(set(part) & set(tensors))
        if twice:
            raise CheckpointError(f"holds tensors that another shard holds too: {listing(twice)}", where=str(file))
        tensors |= part
    return tensors


def _read_safetensors(file: Path, prefix: str) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as stream:
            names = [name for name in stream.keys() if name.startswith(prefix)]  # noqa: SIM118 (not a dict)
            return {name.removeprefix(prefix): stream.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"not a valid safetensors file: {error}", where=str(file), remedy="Download or write the file again."
        ) from error


def _read_pickle(file: Path, prefix: str) -> dict[str, torch.Tensor]:
    tensors = load_pickle(file, "cpu")
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def load_pickle(file: Path, device: str) -> dict[str, torch.Tensor]:
    """The tensors of a pickle, read with weights_only=True: nothing but tensors and plain data is ever built.

    device: "cpu", or "meta" for names and shapes alone. Values are read as they are used, but from files of the oldest
    format (torch before 1.6), which are read whole. Raises CheckpointError for anything else.
    """
    import pickle
    import zipfile

    import torch

    try:
        in_parts = device == "cpu" and zipfile.is_zipfile(file)
        value = torch.load(file, map_location=device, weights_only=True, mmap=in_parts)
    except (pickle.UnpicklingError, EOFError, *_REJECTIONS) as error:
        raise CheckpointError(
            f"not a pickle of weights alone: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            where=str(file),
            remedy="It may be damaged, or run code when loaded. Use a .safetensors file of these weights.",
        ) from error
    value = value.get("state_dict", value) if isinstance(value, dict) else value
    if not isinstance(value, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in value.values()):
        raise CheckpointError("not a pickled dict of tensors", where=str(file), remedy="Use a .safetensors file.")
    return value


def _fit(
    component: str,
    found: Mapping[str, torch.Tensor],
    expected: Mapping[str, tuple[int, ...]],
    where: str,
    original: bool,
) -> dict[str, torch.Tensor]:
    """The file's tensors under the module's names, in float32. Each must find its place and each place its tensor.

    original: the file has the names of the original layout.
    """
    import torch

    place = places(component, expected, original=original)
    tensors: dict[str, torch.Tensor] = {}
    unexpected, misshapen = [], []
    for name, tensor in found.items():
        target = place.get(current_name(component, name))
        if target is None:
            if not name.endswith(UNUSED):
                unexpected.append(name)
            continue
        if target in tensors:
            unexpected.append(name)
            continue
        if component == "vae" and len(expected[target]) == 2 and set(tensor.shape[2:]) == {1}:
            tensor = tensor.flatten(1)  # attention as 1x1 convolutions: the original layout, and the oldest files
        if tuple(tensor.shape) != expected[target]:
            misshapen.append(f"{name} is {list(tensor.shape)} where {list(expected[target])} belongs")
            continue
        tensors[target] = tensor.to(torch.float32).contiguous()
    missing = [] if misshapen else sorted(set(expected) - set(tensors))
    wrong = [
        f"{label} {listing(sorted(names))}"
        for label, names in (("missing:", missing), ("unexpected:", unexpected), ("of a wrong shape:", misshapen))
        if names
    ]
    if wrong:
        raise CheckpointError(
            f"its tensors do not fit {CLASS_OF[component]} as configured; {'; '.join(wrong)}",
            where=where,
            remedy="The weights and the configuration belong to different models, or the file is incomplete.",
        )
    return tensors


def places(component: str, keys: Iterable[str], *, original: bool) -> dict[str, str]:
    """The name that a file's tensor has after `current_name` -> the key in the module's state_dict.

    original: the file has the names of the original layout, without their prefix.
    """
    if original and component in ("unet", "vae"):
        names = ldm_unet_names(keys) if component == "unet" else ldm_vae_names(keys)
        return {theirs: ours for ours, theirs in names.items()}
    return {canonical_name(key): key for key in keys}


def current_name(component: str, name: str) -> str:
    """A tensor's name without what older releases called otherwise."""
    if component == "vae":
        parts = name.split(".")
        if len(parts) >= 2 and "attentions" in parts and parts[-2] in _OLD_VAE_ATTENTION:
            parts[-2] = _OLD_VAE_ATTENTION[parts[-2]]
            return ".".join(parts)
    return canonical_name(name)
