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
    """The workflow that ships with sdflow for an architecture, at full size; else the chains of its generation."""
    if architecture in COMPONENT_ARCHITECTURES:
        return f"base/{architecture.removesuffix('-tiny')}.yaml"
    architecture = MARKED_ARCHITECTURES.get(architecture, architecture)
    own = f"base/{architecture.replace('-', '_')}.yaml"
    if shipped_workflow(own) is not None:
        return own
    return chains_of(family_of_architecture(architecture), configs_of(architecture))


def chains_of(family: Family, configs: Mapping[str, Config]) -> str:
    """The workflow with the chains for models of these configurations, by component."""
    return f"base/{family.chains_of(by_part(family, configs))}.yaml"


def quoted(text: str) -> str:
    """A text as a YAML value, also between braces, where a comma would end it."""
    return str(yaml.safe_dump([text], default_flow_style=True, width=10**9)).removesuffix("\n")[1:-1]


def model_lines(bases: Sequence[str], model: str) -> str:
    """For a model that is all there. bases: the workflow with its chains, and those of components of another class."""
    over = bases[0] if len(bases) == 1 else f"[{', '.join(bases)}]"
    return f"extends: {over}\nmodel: {quoted(model)}\ntarget: {TARGET}\n"


def lora_lines(architecture: str | None, lora: str) -> str:
    """For a LoRA, over the model of the base, if it is known which."""
    over = "" if architecture is None else f"extends: {base_of(architecture)}\ntarget: {TARGET}\n"
    return f"{over}loras:\n  - {{file: {quoted(lora)}, scale: 1.0}}\n"


def component_lines(architecture: str, component: str, reference: str) -> str:
    """For a component in place of the model's own. architecture: of a model, or of such a component alone, which has chains of
    its own."""
    alone = architecture in COMPONENT_ARCHITECTURES
    over = f"[{base_of(USUAL)}, {base_of(architecture)}]" if alone else base_of(architecture)
    return f"extends: {over}\ntarget: {TARGET}\ncomponents: {{{component}: {quoted(reference)}}}\n"


def partial_lines(architecture: str, held: Sequence[str], file: str) -> str:
    """For the components that a file holds of a model, beside a folder or repository with the others: that of the base, or
    `UNNAMED_MODEL`."""
    base = base_of(architecture)
    model = (
        "" if model_of(base) is not None else f"model: {UNNAMED_MODEL}    # a folder or repository that has the rest\n"
    )
    components = ", ".join(f"{component}: {quoted(file)}" for component in held)
    return f"extends: {base}\n{model}target: {TARGET}\ncomponents: {{{components}}}\n"


def model_of(base: str) -> str | None:
    """The model that a shipped workflow names itself; None for one of chains alone."""
    path = shipped_workflow(base)
    assert path is not None
    model: str | None = yaml.safe_load(path.read_text(encoding="utf-8")).get("model")
    return model


def adapter_lines(architecture: str, reference: str) -> str:
    """For an IP-Adapter beside the model."""
    return f"extends: {base_of(architecture)}\ntarget: {TARGET}\nip_adapters:\n  - {{file: {quoted(reference)}}}\n"


def net_lines(architecture: str, reference: str) -> str:
    """For a net that stands beside the denoiser, under a name of the user's."""
    return f"extends: {base_of(architecture)}\ntarget: {TARGET}\ncontrolnets: {{mine: {quoted(reference)}}}\n"


def lines_for_component(found: Recognized, reference: str, pickled: bool) -> str | None:
    """For a component that was recognized, in place of the model's own or beside it; None where no model takes it."""
    if not found.architectures:
        return None
    architecture, component = found.architectures[0], found.components[0]
    family = None if found.alone else family_of_architecture(architecture)
    if family is None or component in family.exchangeable:
        lines = component_lines(architecture, component, reference)
    elif family.net is not None and component == family.net.component:
        lines = net_lines(architecture, reference)
    else:
        return None
    return lines + ("allow_pickle: true\n" if pickled else "")
