"""Workflow lines for inspected files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import yaml

from sdflow.disk.shipped import shipped_workflow
from sdflow.families import ARCHITECTURES, COMPONENT_ARCHITECTURES, MARKED_ARCHITECTURES, family_of_architecture
from sdflow.families.shared.base import Family
from sdflow.models.base import Config
from sdflow.sources.config_recognition import configs_of
from sdflow.sources.recognition import Recognized

TARGET = "cpu"
USUAL = "sd15"
"""Default architecture for a workflow, if the model is unknown."""
UNNAMED_MODEL = "hf:owner/name"
"""Placeholder for a model that the user has to name."""


def by_part(family: Family, configs: Mapping[str, Config]) -> dict[str, Config]:
    """Select the parts' configurations by component."""
    return {part.name: configs[part.component] for part in family.parts if part.component in configs}


def title_of(architecture: str) -> str:
    """The model generation of a shipped architecture."""
    family = family_of_architecture(architecture)
    return family.title_of(by_part(family, configs_of(architecture)))


def titles_of(architectures: Iterable[str]) -> tuple[str, ...]:
    """The generations of several architectures, without duplicates."""
    return tuple(dict.fromkeys(map(title_of, architectures)))


def architecture_for(titles: Sequence[str]) -> str | None:
    """The usual architecture of the first known generation."""
    return next((name for title in titles for name in ARCHITECTURES if title_of(name) == title), None)


def base_of(architecture: str) -> str:
    """The shipped workflow for an architecture; if there is none, or it has random weights, the chains of its
    generation."""
    if architecture in COMPONENT_ARCHITECTURES:
        return f"base/{architecture.removesuffix('-tiny')}.yaml"
    architecture = MARKED_ARCHITECTURES.get(architecture, architecture)
    own = f"base/{architecture.replace('-', '_')}.yaml"
    if shipped_workflow(own) is not None and not (model_of(own) or "").startswith("synthetic:"):
        return own
    return chains_of(family_of_architecture(architecture), configs_of(architecture))


def chains_of(family: Family, configs: Mapping[str, Config]) -> str:
    """The workflow with the chains for models with these configurations, by component."""
    return f"base/{family.chains_of(by_part(family, configs))}.yaml"


def quoted(text: str) -> str:
    """Quote text as a YAML value, also within braces, where a comma would end it."""
    return str(yaml.safe_dump([text], default_flow_style=True, width=10**9)).removesuffix("\n")[1:-1]


def workflow(bases: Sequence[str], entry: str, *, model: str | None = None, pickled: bool = False) -> str:
    """A workflow over these bases, with its model if they name none, and one more entry."""
    over = bases[0] if len(bases) == 1 else f"[{', '.join(bases)}]"
    lines = [f"extends: {over}", *([] if model is None else [f"model: {model}"]), f"target: {TARGET}"]
    return "\n".join([*lines, *([entry] if entry else []), *(["allow_pickle: true"] if pickled else []), ""])


def lora_lines(architecture: str | None, lora: str) -> str:
    """Lines for a LoRA, over the base's model, if that is known."""
    entry = f"loras:\n  - {{file: {quoted(lora)}, scale: 1.0}}"
    return f"{entry}\n" if architecture is None else workflow([base_of(architecture)], entry)


def partial_lines(architecture: str, held: Sequence[str], file: str, *, pickled: bool) -> str:
    """Lines for components in a file, with a folder or repository for the others: the base's, or `UNNAMED_MODEL`."""
    base = base_of(architecture)
    model = None if model_of(base) is not None else f"{UNNAMED_MODEL}    # a folder or repository that has the rest"
    components = ", ".join(f"{component}: {quoted(file)}" for component in held)
    return workflow([base], f"components: {{{components}}}", model=model, pickled=pickled)


def model_of(base: str) -> str | None:
    """The model in a shipped workflow; None if it only has chains."""
    path = shipped_workflow(base)
    assert path is not None
    model: str | None = yaml.safe_load(path.read_text(encoding="utf-8")).get("model")
    return model


def net_lines(architecture: str, reference: str, *, pickled: bool) -> str:
    """Lines for a ControlNet, with a placeholder name."""
    return workflow([base_of(architecture)], f"controlnets: {{mine: {quoted(reference)}}}", pickled=pickled)


def lines_for_component(found: Recognized, reference: str, pickled: bool) -> str | None:
    """Lines for a recognized component that replaces or extends a model's; None if no model takes it. A component
    outside all models has its own chains."""
    if not found.architectures:
        return None
    architecture, component = found.architectures[0], found.components[0]
    family = None if found.alone else family_of_architecture(architecture)
    if family is None or component in (*family.exchangeable, *family.exchangeable_texts):
        bases = [*([base_of(USUAL)] if architecture in COMPONENT_ARCHITECTURES else []), base_of(architecture)]
        return workflow(bases, f"components: {{{component}: {quoted(reference)}}}", pickled=pickled)
    if family.net is not None and component == family.net.component:
        return net_lines(architecture, reference, pickled=pickled)
    return None
