"""Detect few-step models and LoRAs by their published names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sdflow.families.shared.few_steps import CONSISTENT, FewSteps, known_lora, known_model
from sdflow.sources.checkpoint import Checkpoint
from sdflow.sources.reference import HubReference, LocalReference, SyntheticReference, parse_reference
from sdflow.sources.safetensors_file import read_metadata

_NAMELESS = ("pytorch_lora_weights", "adapter_model")
"""diffusers' and PEFT's file names for any LoRA; the folder or repository has the name."""

_METADATA = ("modelspec.title", "ss_output_name")
"""https://github.com/Stability-AI/ModelSpec; kohya's sd-scripts."""


def few_steps(checkpoint: Checkpoint, loras: Sequence[tuple[str, str | None, Path]]) -> dict[str, Any]:
    """The defaults for generating that the names of a model and its LoRAs imply (`sdflow.manifest.form.Said`), and the
    reason, `because`; the last LoRA wins. Empty if there are none.

    loras: reference, weight name and file of each.
    """
    if (denoiser := _from_elsewhere(checkpoint)) is not None:
        found, because = few_steps_of_denoiser(checkpoint, denoiser), denoiser
    else:
        found, because = few_steps_of_model(checkpoint), checkpoint.reference
    for reference, weight_name, path in loras:
        if made := few_steps_of_lora(reference, weight_name, path):
            found, because = made, weight_name or Path(reference).name
    return {} if found is None else {**found.changes(), "because": f"{because} is {found.what}"}


def few_steps_of_model(checkpoint: Checkpoint) -> FewSteps | None:
    """The few-step settings of a published model. It has its own scheduler, unless it is a single file."""
    found = known_model(_model_names(checkpoint))
    if found is None or checkpoint.provenance.get("kind") == "single_file":
        return found
    return found.with_its_own_scheduler()


def few_steps_of_denoiser(checkpoint: Checkpoint, name: str) -> FewSteps | None:
    """The few-step settings of a checkpoint with a published few-step denoiser of this name, which has no scheduler."""
    family = checkpoint.family
    configs = {part: submodel.load["config"] for part, submodel in checkpoint.submodels.items()}
    found = known_model([name, _made_of(configs[family.denoiser])])
    return CONSISTENT if found is None and family.guidance_width(configs) is not None else found


def few_steps_of_lora(reference: str, weight_name: str | None, path: Path) -> FewSteps | None:
    """The few-step settings of a published LoRA. path: of its file."""
    return known_lora(_lora_names(reference, weight_name, path))


def few_steps_of_file(path: Path, metadata: Mapping[str, str]) -> FewSteps | None:
    """The few-step settings of the LoRA in this file."""
    return known_lora(_file_names(path, metadata))


def _model_names(checkpoint: Checkpoint) -> Iterator[str]:
    parsed = parse_reference(checkpoint.reference)
    if isinstance(parsed, HubReference):
        yield (parsed.file or parsed.repository).rpartition("/")[2]
    elif isinstance(parsed, SyntheticReference):
        yield parsed.architecture
    elif isinstance(parsed, LocalReference):
        yield parsed.path.name
    for submodel in checkpoint.submodels.values():
        yield _made_of(submodel.load["config"])


def _made_of(config: Mapping[str, Any]) -> str:
    """The original model's name, as diffusers records it."""
    return Path(str(config.get("_name_or_path") or "")).name


def _from_elsewhere(checkpoint: Checkpoint) -> str | None:
    """The name of the denoiser's source, if it replaces the checkpoint's own."""
    component = checkpoint.family.part(checkpoint.family.denoiser).component
    found = checkpoint.provenance.get("components", {}).get(component)
    if found is None:
        return None
    return Path(next(found[key] for key in ("file", "repository", "path", "architecture", "name") if key in found)).name


def _lora_names(reference: str, weight_name: str | None, path: Path) -> Iterator[str]:
    yield Path(weight_name or path.name).name
    parsed = parse_reference(reference)
    if isinstance(parsed, HubReference):
        yield parsed.repository.rpartition("/")[2]
        yield from _titles(read_metadata(path))
    else:
        yield from _file_names(path, read_metadata(path))


def _file_names(path: Path, metadata: Mapping[str, str]) -> Iterator[str]:
    yield path.name
    if path.stem in _NAMELESS:
        yield path.absolute().parent.name
    yield from _titles(metadata)


def _titles(metadata: Mapping[str, str]) -> Iterator[str]:
    return (metadata[key] for key in _METADATA if key in metadata)
