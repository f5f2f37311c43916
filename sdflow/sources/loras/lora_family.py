"""What a LoRA was made for, from the header of its file: the names of its tensors and the widths of their inputs.

A LoRA of another family has places and shapes of its own. Widths tell most: the keys of cross-attention read text
embeddings, 768 wide in Stable Diffusion 1.x, 1024 in 2.x, 2048 in XL.
"""

from __future__ import annotations

from collections.abc import Mapping

from sdflow.families import ARCHITECTURES, family_of_architecture
from sdflow.families.shared.base import Family
from sdflow.models.base import Config
from sdflow.sources.architectures import architecture_config
from sdflow.sources.loras.lora_names import LoraName
from sdflow.sources.safetensors_file import TensorEntry


def misfit(
    family: Family, configs: Mapping[str, Config], names: Mapping[str, LoraName], header: Mapping[str, TensorEntry]
) -> str | None:
    """The first tensor that says that a LoRA is for another model, and why; None where none does.

    configs: of the model, by part. names: the tensors of the file, parsed.
    """
    for name, parsed in names.items():
        if parsed.submodel not in family.with_loras:
            return f"{name}: {family.title} has no {parsed.submodel}"
        shape = header[name].shape
        if parsed.role != "down" or parsed.submodel not in configs or len(shape) < 2:
            continue
        model, module = family.part(parsed.submodel).model, parsed.module.replace(".", "_")
        if why := model.lora_misfit(configs[parsed.submodel], module, shape[1]):
            return f"{name}: {why}"
    return None


def made_for(names: Mapping[str, LoraName], header: Mapping[str, TensorEntry]) -> tuple[str, ...]:
    """Titles of what sdflow knows and nothing in the LoRA speaks against; none where nothing tells them apart."""
    fitting: dict[str, bool] = {}
    for architecture in ARCHITECTURES:
        family = family_of_architecture(architecture)
        configs = {name: architecture_config(architecture, family.part(name).component) for name in family.with_loras}
        title = family.title_of(configs)
        fitting[title] = fitting.get(title, False) or misfit(family, configs, names, header) is None
    return () if all(fitting.values()) else tuple(title for title, fits in fitting.items() if fits)
