"""Read files of LoRAs and related adapters, without torch: the weights they change, and the layers for each."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path

from sdflow.digest import digest_json
from sdflow.disk.input_file import is_regular, is_there, no_file
from sdflow.errors import CheckpointError
from sdflow.families import DEFAULT, FAMILIES, any_family
from sdflow.sources.checkpoint import Checkpoint, FileDigests, listing
from sdflow.sources.hub import choose_file, hub_file
from sdflow.sources.loras.adapter_modules import AdapterModule, Unfit, read_at_once
from sdflow.sources.loras.layers import Layer
from sdflow.sources.loras.lora_header import made_for, misfit, read_lora_header
from sdflow.sources.loras.lora_names import LAZY, Places, Role, peft_module, spellings
from sdflow.sources.loras.peft_metadata import METADATA_KEY
from sdflow.sources.reference import PICKLE_SUFFIXES, HubReference, LocalReference, parse_reference
from sdflow.sources.safetensors_file import read_float_tensors, read_numbers
from sdflow.sources.weight_files import ADAPTER_CONFIG


def find_lora(reference: str, weight_name: str | None = None, *, download: bool) -> Path:
    """The .safetensors file of a LoRA: a file, a folder that contains it, or hf:owner/name[@revision].

    weight_name: the file in a folder or repository; optional if there is only one.
    Raises CheckpointNotLocal as `open_checkpoint` does, CheckpointError if it is missing, ambiguous or pickled.
    """
    parsed = parse_reference(reference)
    if isinstance(parsed, HubReference) and parsed.architecture is None:
        weight_name = weight_name or parsed.file or None
        _refuse_pickle(weight_name or "", reference)
        return hub_file(parsed, weight_name, download=download)
    if not isinstance(parsed, LocalReference) or parsed.architecture is not None:
        raise CheckpointError("not a LoRA", where=reference, remedy="Name a file, a folder or hf:owner/name.")
    path = parsed.path
    if is_there(path) and path.is_dir():
        names = [file.relative_to(path).as_posix() for file in path.rglob("*.*") if file.is_file()]
        path = path / choose_file(names, weight_name, str(path))
    elif weight_name is not None:
        raise CheckpointError(
            f"is not a folder, so it cannot contain {weight_name}",
            where=str(path),
            remedy="Name only the file, or its folder.",
        )
    elif not is_regular(path):
        raise CheckpointError(no_file(path), where=str(path), remedy="Check the path of the LoRA.")
    _refuse_pickle(path.name, str(path))
    return path


def _refuse_pickle(name: str, where: str) -> None:
    if name.lower().endswith(PICKLE_SUFFIXES):
        raise CheckpointError(
            "pickled LoRAs are not supported: a pickle can run any code when it is loaded",
            where=where,
            remedy="Convert it: safetensors.torch.save_file(torch.load(file, weights_only=True), 'x.safetensors').",
        )


def lora_submodels(path: Path) -> tuple[str, ...]:
    """The submodels that a LoRA file changes, from only its header and configuration.

    Raises CheckpointError for a file that is not a LoRA, or of an unsupported kind.
    """
    submodels = {parsed.submodel for parsed in read_lora_header(path).names.values()}
    return tuple(name for name in any_family.submodels_with_loras() if name in submodels)


def lora_digest(path: Path, digests: FileDigests) -> str:
    """The digest of a LoRA's content: its file, and PEFT's configuration next to it, if any."""
    whole = digests.digest(path)
    if not read_lora_header(path).has_config:
        return whole
    return digest_json({"file": whole, "config": digests.digest(path.with_name(ADAPTER_CONFIG))})


def lora_files(path: Path) -> list[Path]:
    """The files covered by `lora_digest`."""
    return [path, *([path.with_name(ADAPTER_CONFIG)] if read_lora_header(path).has_config else [])]


def require_made_for(path: Path, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if a LoRA's header shows that it is for another kind of model.

    `read_lora`, which sees every shape, finds remaining mismatches.
    """
    found = read_lora_header(path)
    names, header = found.names, found.entries
    configs = {name: source.load["config"] for name, source in checkpoint.submodels.items()}
    why = misfit(checkpoint.family, configs, names, header)
    if why is None:
        return
    own = checkpoint.family.title_of(configs)
    others = made_for(names, header)
    kind = f"a LoRA for {' or '.join(others)}" if others and own not in others else "not a LoRA for this model"
    raise CheckpointError(
        f"is {kind}, but {checkpoint.reference} is {own} ({why})",
        where=str(path),
        remedy=f"Use a LoRA made for {own}.",
    )


def read_lora(
    path: Path, shapes: Mapping[str, Mapping[str, tuple[int, ...]]], family: str = DEFAULT
) -> dict[str, dict[str, Layer]]:
    """The layers of a LoRA file: submodel -> state_dict key -> layer.

    shapes: for each requested submodel, the shapes of its whole state_dict. Tensors for other submodels are ignored.
        family: of the model.
    Raises CheckpointError for tensors that match nothing, lack their partner, or have a wrong shape, naming the first
    and the model that the LoRA is for; and for kinds of adapters that are not merged.
    """
    header = read_lora_header(path)
    names, configs = header.names, header.configs
    models = {name: FAMILIES[family].part(name).model for name in shapes}
    vectors = {parsed.submodel for parsed in names.values() if parsed.role in LAZY}
    tables = {name: spellings(models[name], keys, norms=name in vectors) for name, keys in shapes.items()}
    groups: dict[tuple[str, Places], dict[Role, str]] = {}
    problems: list[str] = []
    for name, parsed in names.items():
        if parsed.submodel not in FAMILIES[family].with_loras:
            problems.append(f"{name}: there is no {parsed.submodel}")
        if parsed.submodel not in tables:
            continue
        places = tables[parsed.submodel].get(parsed.module)
        if places is None:
            problems.append(f"{name}: the {parsed.submodel} has no such module")
        elif (other := groups.setdefault((parsed.submodel, places), {}).setdefault(parsed.role, name)) != name:
            problems.append(f"{name}: {other} is for the same weight")
    tensors = read_float_tensors(path, [name for group in groups.values() for name in read_at_once(group)])
    alphas = read_numbers(
        path,
        [
            group["alpha"]
            for group in groups.values()
            if "alpha" in group and prod(header.entries[group["alpha"]].shape) == 1
        ],
    )
    peft_names = {
        (submodel, places): peft_module(models[submodel], places, names[next(iter(group.values()))])
        for (submodel, places), group in groups.items()
    }
    for submodel, said in configs.items():
        known = [module for (of, places), module in peft_names.items() if of == submodel]
        said.require_quick(known, str(path))
    ranks: list[str] = []
    layers: dict[str, dict[str, Layer]] = {submodel: {} for submodel in shapes}
    for (submodel, places), group in groups.items():
        config, module = configs.get(submodel), peft_names[submodel, places]
        values = {role: tensors[name] for role, name in group.items() if name in tensors}
        found = AdapterModule(
            path,
            group,
            values,
            header.entries,
            alphas.get(group.get("alpha", "")),
            places,
            shapes[submodel],
            config,
            module,
        )
        try:
            made = found.layers()
        except Unfit as error:
            problems.append(str(error))
            continue
        if twice := sorted(made.keys() & layers[submodel].keys()):
            problems.append(f"{next(iter(group.values()))}: there are others for {' and '.join(twice)}")
            continue
        if config is not None and config.dora and "up" in group and "magnitude" not in group:
            problems.append(f"{group['up']}: its lora_magnitude_vector is missing, but its configuration has use_dora")
        rank = found.rank()
        if config is not None and rank is not None and config.rank(module) != rank[1]:
            ranks.append(f"{rank[0]}: {rank[1]}, not {config.rank(module)}")
        layers[submodel] |= made
    if problems:
        others = " or ".join(made_for(names, header.entries))
        raise CheckpointError(
            f"{len(problems)} of its parts do not match the model: {listing(problems)}",
            where=str(path),
            remedy=f"Use a LoRA made for this architecture ({FAMILIES[family].title})."
            + (f" This one was made for {others}." if others else ""),
        )
    if ranks:  # diffusers rejects such a file too, and its alphas may be equally wrong
        raise CheckpointError(
            f"{len(ranks)} of its tensors differ in rank from its {METADATA_KEY}: {listing(ranks)}",
            where=str(path),
            remedy="Correct r and rank_pattern there; the first pattern that matches a module applies.",
        )
    return layers
