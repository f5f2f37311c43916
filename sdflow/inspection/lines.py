"""Lines of a workflow for what was found."""

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
"""The architecture of a workflow where nothing says which model it is for."""
UNNAMED_MODEL = "hf:owner/name"
"""Stands for a model that the user has to name."""


def by_part(family: Family, configs: Mapping[str, Config]) -> dict[str, Config]:
    """Of configurations by component, those of the parts."""
    return {part.name: configs[part.component] for part in family.parts if part.component in configs}


def title_of(architecture: str) -> str:
    """The generation of models that a shipped architecture is of."""
    family = family_of_architecture(architecture)
    return family.title_of(by_part(family, configs_of(architecture)))


def titles_of(architectures: Iterable[str]) -> tuple[str, ...]:
    """The generations of several, each once."""
    return tuple(dict.fromkeys(map(title_of, architectures)))


def architecture_for(titles: Sequence[str]) -> str | None:
    """The usual architecture of the first of these generations that is known."""
    return next((name for title in titles for name in ARCHITECTURES if title_of(name) == title), None)


def base_of(architecture: str) -> str:
    """The workflow that ships with sdflow for an architecture; else, and where that one has random weights, the chains of its
    generation."""
    if architecture in COMPONENT_ARCHITECTURES:
        return f"base/{architecture.removesuffix('-tiny')}.yaml"
    architecture = MARKED_ARCHITECTURES.get(architecture, architecture)
    own = f"base/{architecture.replace('-', '_')}.yaml"
    if shipped_workflow(own) is not None and not (model_of(own) or "").startswith("synthetic:"):
        return own
    return chains_of(family_of_architecture(architecture), configs_of(architecture))


def chains_of(family: Family, configs: Mapping[str, Config]) -> str:
    """The workflow with the chains for models of these configurations, by component."""
    return f"base/{family.chains_of(by_part(family, configs))}.yaml"


def quoted(text: str) -> str:
    """A text as a YAML value, also between braces, where a comma would end it."""
    return str(yaml.safe_dump([text], default_flow_style=True, width=10**9)).removesuffix("\n")[1:-1]


def workflow(bases: Sequence[str], entry: str, *, model: str | None = None, pickled: bool = False) -> str:
    """A workflow over these bases: its model, where they name none, and one more entry."""
    over = bases[0] if len(bases) == 1 else f"[{', '.join(bases)}]"
    lines = [f"extends: {over}", *([] if model is None else [f"model: {model}"]), f"target: {TARGET}"]
    return "\n".join([*lines, *([entry] if entry else []), *(["allow_pickle: true"] if pickled else []), ""])


def lora_lines(architecture: str | None, lora: str) -> str:
    """For a LoRA, over the model of the base, if it is known which."""
    entry = f"loras:\n  - {{file: {quoted(lora)}, scale: 1.0}}"
    return f"{entry}\n" if architecture is None else workflow([base_of(architecture)], entry)


def partial_lines(architecture: str, held: Sequence[str], file: str, *, pickled: bool) -> str:
    """For the components that a file holds of a model, beside a folder or repository with the others: that of the base, or
    `UNNAMED_MODEL`."""
    base = base_of(architecture)
    model = None if model_of(base) is not None else f"{UNNAMED_MODEL}    # a folder or repository that has the rest"
    components = ", ".join(f"{component}: {quoted(file)}" for component in held)
    return workflow([base], f"components: {{{components}}}", model=model, pickled=pickled)


def model_of(base: str) -> str | None:
    """The model that a shipped workflow names itself; None for one of chains alone."""
    path = shipped_workflow(base)
    assert path is not None
    model: str | None = yaml.safe_load(path.read_text(encoding="utf-8")).get("model")
    return model


def net_lines(architecture: str, reference: str, *, pickled: bool) -> str:
    """For a net that stands beside the denoiser, under a name of the user's."""
    return workflow([base_of(architecture)], f"controlnets: {{mine: {quoted(reference)}}}", pickled=pickled)


def lines_for_component(found: Recognized, reference: str, pickled: bool) -> str | None:
    """For a component that was recognized, in place of the model's own or beside it; None where no model takes it. One that is
    of no model has chains of its own."""
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
