"""A checkpoint in one file in the original (CompVis) layout: UNet, VAE and text encoder, told apart by prefixes.

Such a file holds no configuration. The architecture is the shipped one whose tensors have the file's shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from sdflow.errors import CheckpointError
from sdflow.sources.architectures import ARCHITECTURES, architecture_config, companion_folder
from sdflow.sources.checkpoint import (
    CLASS_OF,
    COMPONENT_OF,
    Checkpoint,
    FileDigests,
    SubmodelCheckpoint,
    config_digest,
    file_stamp,
    pipeline_facts,
    side_by_side,
)
from sdflow.sources.folder import refuse_pickle
from sdflow.sources.reference import PICKLE_SUFFIXES
from sdflow.sources.safetensors_file import TensorEntry, digest_tensors, read_header

Shapes = Mapping[str, tuple[int, ...]]

PREFIXES = {
    "unet": "model.diffusion_model.",
    "vae": "first_stage_model.",
    "text_encoder": "cond_stage_model.transformer.",
}
# What else is known by its tensors, so that the refusal can name it: how a name begins -> what it is.
_OTHERS = (
    ("lora_", "a LoRA: name it under `loras`"),
    ("joint_blocks.", "Stable Diffusion 3"),
    ("double_blocks.", "Flux"),
    ("control_model.", "a ControlNet"),
    ("conditioner.embedders.1.", "Stable Diffusion XL"),
    ("conditioner.embedders.0.", "the refiner of Stable Diffusion XL"),
    ("cond_stage_model.model.", "Stable Diffusion 2.x, with OpenCLIP's text encoder"),
    ("down_blocks.", "a UNet in diffusers' layout: name the folder that holds model_index.json"),
    ("encoder.down_blocks.", "a VAE in diffusers' layout: name the folder that holds model_index.json"),
    ("text_model.encoder.", "a text encoder alone"),
)


def open_single_file(path: Path, *, reference: str, digests: FileDigests, allow_pickle: bool) -> Checkpoint:
    """The checkpoint in a .safetensors file, or in a pickle when those are allowed.

    A pickle's first opening loads torch to read its shapes; what was found is remembered in `digests`.
    Raises CheckpointError for a damaged file, and for an architecture that is not supported, naming it if it is known.
    """
    pickled = path.suffix in PICKLE_SUFFIXES
    stamp = file_stamp(path)  # before the digests: a file that changes in between is then refused when it is loaded
    if pickled:
        refuse_pickle(path, allow_pickle)
        architecture = digests.value(path, "single-file-architecture-1", lambda file: _find(file, _pickle_shapes(file)))
    elif path.suffix == ".safetensors":
        header = read_header(path)
        architecture = _find(path, {name: entry.shape for name, entry in header.items()})
    else:
        raise CheckpointError(
            f"a file of the unknown kind {path.suffix!r}", where=str(path), remedy="Use a .safetensors file."
        )
    parts = {}
    entries = {} if pickled else {part: _under(header, prefix) for part, prefix in PREFIXES.items()}
    whole, *sums = side_by_side([
        partial(digests.digest, path),
        *(
            partial(digests.value, path, f"tensors-1/{part}", partial(digest_tensors, entries=found))
            for part, found in entries.items()
        ),
    ])  # fmt: skip
    tensors = dict(zip(entries, sums, strict=True))
    for component, prefix in PREFIXES.items():
        config = architecture_config(architecture, component)
        content = {"file": whole} if pickled else {"tensors": tensors[component]}
        parts[component] = SubmodelCheckpoint(
            identity={
                "kind": "single_file",
                "class": CLASS_OF[component],
                "config": config_digest(config),
                **content,
            },
            load={
                "kind": "files",
                "config": config,
                "files": [stamp],
                "pickled": pickled,
                "prefix": prefix,
            },
        )
    configs = {name: architecture_config(architecture, name) for name in ("unet", "vae", "scheduler")}
    notes = [f"{path.name} has the shapes of {architecture}; it holds no safety checker."]
    if pickled:
        notes.append(f"{path.name} is pickled; it is loaded with weights_only=True.")
    return Checkpoint(
        reference=reference,
        provenance={
            "kind": "single_file",
            "path": str(path.absolute()),
            "architecture": architecture,
            "files": {path.name: whole},
        },
        submodels={name: parts[component] for name, component in COMPONENT_OF.items() if component in parts},
        companions={name: companion_folder(architecture, name) for name in ("tokenizer", "scheduler")},
        facts={**pipeline_facts(configs), "requires_safety_checker": False},
        notes=tuple(notes),
    )


def _under(header: Mapping[str, TensorEntry], prefix: str) -> dict[str, TensorEntry]:
    return {name: entry for name, entry in header.items() if name.startswith(prefix)}


def _pickle_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    from sdflow.sources.load import load_pickle

    return {name: tuple(tensor.shape) for name, tensor in load_pickle(path, "meta").items()}


def _fingerprint(architecture: str) -> dict[str, tuple[int, ...]]:
    """Tensors of a file in the original layout whose shapes together say which architecture it is."""
    unet, vae, text = (architecture_config(architecture, name) for name in ("unet", "vae", "text_encoder"))
    width, deepest = unet["block_out_channels"][0], unet["block_out_channels"][-1]
    u, v, t = PREFIXES["unet"], PREFIXES["vae"], f"{PREFIXES['text_encoder']}text_model."
    attention = "1.transformer_blocks.0.attn2.to_k.weight"
    return {
        f"{u}input_blocks.0.0.weight": (width, unet["in_channels"], 3, 3),
        f"{u}input_blocks.1.{attention}": (width, unet["cross_attention_dim"]),
        f"{u}middle_block.{attention}": (deepest, unet["cross_attention_dim"]),
        f"{u}out.2.weight": (unet["out_channels"], width, 3, 3),
        f"{v}encoder.conv_in.weight": (vae["block_out_channels"][0], vae["in_channels"], 3, 3),
        f"{v}decoder.conv_in.weight": (vae["block_out_channels"][-1], vae["latent_channels"], 3, 3),
        f"{t}embeddings.token_embedding.weight": (text["vocab_size"], text["hidden_size"]),
        f"{t}embeddings.position_embedding.weight": (text["max_position_embeddings"], text["hidden_size"]),
    }


def _find(path: Path, shapes: Shapes) -> str:
    # Files converted with transformers 5 lack the `text_model.` of all others.
    bare = PREFIXES["text_encoder"]
    shapes = {
        f"{bare}text_model.{name.removeprefix(bare)}"
        if name.startswith(bare) and not name.startswith(f"{bare}text_model.")
        else name: shape
        for name, shape in shapes.items()
    }
    prints = {architecture: _fingerprint(architecture) for architecture in ARCHITECTURES}
    for architecture, wanted in prints.items():
        if all(shapes.get(name) == shape for name, shape in wanted.items()):
            return architecture
    raise CheckpointError(
        f"not an architecture that sdflow knows: {_description(shapes, prints['sd15'])}",
        where=str(path),
        remedy="Supported in one file: Stable Diffusion 1.x with its VAE and text encoder. Other checkpoints may work "
        "as a diffusers folder.",
    )


def _description(shapes: Shapes, wanted: Shapes) -> str:
    for part, what in _OTHERS:
        if any(name.removeprefix(PREFIXES["unet"]).startswith(part) for name in shapes):
            return f"this is {what}"
    missing = [prefix for prefix in PREFIXES.values() if not any(name.startswith(prefix) for name in shapes)]
    if missing:
        return f"it holds no tensors under {', '.join(missing)}"
    name = next(name for name, shape in wanted.items() if shapes.get(name) != shape)
    if name not in shapes:
        return f"it holds no tensor {name}"
    inpainting = (
        " (an inpainting UNet)" if name.endswith("input_blocks.0.0.weight") and shapes[name][1:2] == (9,) else ""
    )
    return f"{name} is {list(shapes[name])}{inpainting}, in Stable Diffusion 1.x it is {list(wanted[name])}"
