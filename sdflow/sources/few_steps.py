"""Whether a model or a LoRA is one that draws in few steps: by the names under which it comes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sdflow.families.few_steps import FewSteps, known_lora, known_model
from sdflow.sources.checkpoint import Checkpoint
from sdflow.sources.reference import HubReference, LocalReference, SyntheticReference, parse_reference
from sdflow.sources.safetensors_file import read_metadata

_NAMELESS = ("pytorch_lora_weights", "adapter_model")
"""How diffusers and peft call the file of any LoRA: its folder or repository has the name."""

_METADATA = ("modelspec.title", "ss_output_name")
"""https://github.com/Stability-AI/ModelSpec; kohya's sd-scripts."""


def few_steps(checkpoint: Checkpoint, loras: Sequence[tuple[str, str | None, Path]]) -> dict[str, Any]:
    """What the names of a model and of its LoRAs say of how it draws (`sdflow.families.defaults.SAID`), and `because`; the
    last LoRA has the last word. Empty where they say nothing.

    loras: reference, weight name and file of each.
    """
    found, because = few_steps_of_model(checkpoint), checkpoint.reference
    for reference, weight_name, path in loras:
        if made := few_steps_of_lora(reference, weight_name, path):
            found, because = made, weight_name or Path(reference).name
    return {} if found is None else {**found.changes(), "because": f"{because} is {found.what}"}


def few_steps_of_model(checkpoint: Checkpoint) -> FewSteps | None:
    """How a model draws that was published to draw in few steps. Its scheduler is its own, but for a single file's."""
    found = known_model(_model_names(checkpoint))
    if found is None or checkpoint.provenance.get("kind") == "single_file":
        return found
    return found.with_its_own_scheduler()


def few_steps_of_lora(reference: str, weight_name: str | None, path: Path) -> FewSteps | None:
    """How a model draws with a LoRA that was published to make it draw in few steps. path: of its file."""
    return known_lora(_lora_names(reference, weight_name, path))


def _model_names(checkpoint: Checkpoint) -> Iterator[str]:
    parsed = parse_reference(checkpoint.reference)
    if isinstance(parsed, HubReference):
        yield parsed.repository.rpartition("/")[2]
    elif isinstance(parsed, SyntheticReference):
        yield parsed.architecture
    elif isinstance(parsed, LocalReference):
        yield parsed.path.name
    # What it was made of, as diffusers writes it.
    for submodel in checkpoint.submodels.values():
        yield Path(str(submodel.load["config"].get("_name_or_path") or "")).name


def _lora_names(reference: str, weight_name: str | None, path: Path) -> Iterator[str]:
    yield Path(weight_name or path.name).name
    parsed = parse_reference(reference)
    if isinstance(parsed, HubReference):
        yield parsed.repository.rpartition("/")[2]
    elif path.stem in _NAMELESS:
        yield path.parent.name
    metadata = read_metadata(path)
    yield from (metadata[key] for key in _METADATA if key in metadata)
