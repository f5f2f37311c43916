"""Checkpoints and parts of them, by the tensors that tell one architecture from another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sdflow.errors import CheckpointError
from sdflow.families import ARCHITECTURES, COMPONENT_ARCHITECTURES, family_of_architecture
from sdflow.families.base import Family
from sdflow.families.few_steps import known_model, spelled
from sdflow.families.part import Part
from sdflow.inspection.contents import Contents
from sdflow.inspection.description import CHECKPOINT, DRAWS_WITH, UNKNOWN, Description
from sdflow.inspection.lines import (
    adapter_lines,
    architecture_for,
    base_of,
    component_lines,
    model_lines,
    net_lines,
    part_alone,
    titles_of,
)
from sdflow.models.base import Shapes
from sdflow.models.image_encoder import projection_of, read_width, token_count
from sdflow.sources.architectures import architecture_config
from sdflow.sources.components.adapters import PREFIXES, require_adapter
from sdflow.sources.components.halves import half_of
from sdflow.sources.recognition import Fingerprint, choose, current_shapes, fitting_architectures, what_it_says

_IMAGE_PROMPTS = "IP-Adapter"
# Networks that are neither a family's nor its parts, by how a name in their files begins.
_OTHERS = (
    ("controlnet_cond_embedding.", "ControlNet"),
    ("controlnet_down_blocks.", "ControlNet"),
    ("control_model.", "ControlNet"),
    ("lllite_", "ControlNet-LLLite"),
    ("ip_adapter.", _IMAGE_PROMPTS),
    ("image_proj.", _IMAGE_PROMPTS),
    ("adapter.body.", "T2I-Adapter"),
    ("double_blocks.", "denoiser of Flux"),
    ("encoder.block.0.layer.0.SelfAttention.", "T5 text encoder"),
    ("body.0.rdb1.", "upscaler (ESRGAN)"),
)
# What reads text in them: the width of its input tells for which models they are.
_READS_TEXT = ("attn2.to_k.weight", "to_k_ip.weight")


@dataclass(frozen=True)
class _Match:
    """What of an architecture a file holds: components; whether in files' original layout with everything's prefix."""

    architecture: str
    components: tuple[str, ...]


def inspect_weights(contents: Contents) -> Description:
    """A file that is no adapter: a checkpoint, a part of one, another network that is known, or unknown."""
    path, shapes = str(contents.path), {**contents.shapes, **current_shapes(contents.shapes)}
    for begin, kind in _OTHERS:
        if any(name.removeprefix("model.diffusion_model.").startswith(begin) for name in shapes):
            titles = _by_width(shapes)
            if kind == _IMAGE_PROMPTS:
                return _adapter(contents, shapes, titles)
            net = _net(titles)
            lines = net_lines(net, path) + _pickles(contents) if kind == "ControlNet" and net is not None else None
            return Description(path, kind, titles, precision=contents.precision, workflow=lines)
    for architecture in COMPONENT_ARCHITECTURES:
        part, config = part_alone(architecture)
        if _holds(shapes, part.model.distinguishing_shapes(config)):
            lines = component_lines(architecture, part.component, path) + _pickles(contents)
            return Description(path, part.component, (), architecture, contents.precision, workflow=lines)
        if (half := half_of(shapes, part.model.halves(config))) is not None:
            lines = component_lines(architecture, part.component, path) + _pickles(contents)
            beside = (f"It is its {half}; the file of the other half must lie beside it.",)
            return Description(path, part.component, (), architecture, contents.precision, notes=beside, workflow=lines)
    matches = [_match(architecture, shapes) for architecture in ARCHITECTURES]
    most = max(len(match.components) for match in matches)
    if most == 0:
        return Description(path, UNKNOWN, precision=contents.precision, notes=(_why(contents),))
    fitting = [match for match in matches if len(match.components) == most]
    family = family_of_architecture(fitting[0].architecture)
    if most == 1:
        return _part(contents, fitting)
    wanted = [name for name, parts in family.components.items() if not parts[0].optional]
    missing = tuple(name.replace("_", " ") for name in wanted if name not in fitting[0].components)
    notes: tuple[str, ...] = ()
    architecture = fitting[0].architecture
    try:
        names = [match.architecture for match in fitting]
        architecture, notes = choose(contents.path, names, what_it_says(shapes, contents.metadata), None)
    except CheckpointError as error:
        notes = (f"{error.what}.", *([error.remedy] if error.remedy else []))
    lines = None if missing else model_lines([base_of(architecture)], path) + _pickles(contents)
    few = known_model([contents.path.name])
    details = {} if few is None else {DRAWS_WITH: f"{spelled(few.changes())} ({few.what})"}
    return Description(
        path, CHECKPOINT, titles_of([architecture]), architecture, contents.precision, missing, details, notes, lines
    )


def _adapter(contents: Contents, shapes: Shapes, titles: tuple[str, ...]) -> Description:
    """An IP-Adapter: its kind, how many tokens it makes of an image, and lines of a workflow if it is one that sdflow takes."""
    path, architecture = str(contents.path), architecture_for(titles)
    details, notes, lines = {}, [], None
    try:
        require_adapter(contents.path, shapes)
        found = {
            name.removeprefix(PREFIXES[0]): shape for name, shape in shapes.items() if name.startswith(PREFIXES[0])
        }
        projection = projection_of(found, path)
    except CheckpointError as error:
        notes.append(f"sdflow does not take it: {error.what}.")
    else:
        details = {"projection": projection["_class_name"], "tokens of an image": token_count(projection)}
        details["reads embeddings of width"] = read_width(projection)
        if architecture is not None and family_of_architecture(architecture).prompter is not None:
            lines = adapter_lines(architecture, path) + _pickles(contents)
            notes.append(
                "It is read with its image encoder: the folder that diffusers looks for beside it, or `encoder`."
            )
    return Description(path, _IMAGE_PROMPTS, titles, None, contents.precision, (), details, tuple(notes), lines)


def _match(architecture: str, shapes: Shapes) -> _Match:
    family = family_of_architecture(architecture)
    parts = [parts[0] for parts in family.components.values() if parts[0].layouts]
    configs = {part.component: architecture_config(architecture, part.component) for part in parts}
    prints = family.fingerprint(configs)
    whole = tuple(part.component for part in parts if any(_holds(shapes, each) for each in _prefixed(prints, part)))
    if whole:
        # A part that no fingerprint has, as it tells nothing: there where its names are.
        return _Match(
            architecture,
            tuple(part.component for part in parts if part.component in whole or _lies(shapes, prints, part)),
        )
    alone = [part.component for part in parts if _is_alone(part, family, architecture, prints, shapes)]
    return _Match(architecture, tuple(alone[:1]))


def _lies(shapes: Shapes, prints: Fingerprint, part: Part) -> bool:
    """Whether a file has tensors under a prefix of this part, which no fingerprint has."""
    prefixes = tuple(layout.prefix for layout in part.layouts)
    return not any(name.startswith(prefixes) for name in prints) and any(name.startswith(prefixes) for name in shapes)


def _is_alone(part: Part, family: Family, architecture: str, prints: Fingerprint, shapes: Shapes) -> bool:
    """Whether a file holds this part and nothing else: by the library's names, or the original ones without a prefix."""
    telling = part.model.distinguishing_shapes(architecture_config(architecture, part.component))
    if telling and _holds({part.model.current_name(name): shape for name, shape in shapes.items()}, telling):
        return True
    return any(
        _holds(shapes, {name.removeprefix(layout.prefix): shape for name, shape in each.items()})
        for layout, each in zip(part.layouts, _prefixed(prints, part), strict=True)
    )


def _prefixed(prints: Fingerprint, part: Part) -> list[Fingerprint]:
    """What of a fingerprint lies under each of the part's prefixes."""
    return [
        {name: shape for name, shape in prints.items() if name.startswith(layout.prefix)} for layout in part.layouts
    ]


def _holds(shapes: Shapes, wanted: Fingerprint) -> bool:
    return any(wanted.values()) and all(shapes.get(name) == shape for name, shape in wanted.items())


def _part(contents: Contents, fitting: list[_Match]) -> Description:
    (component,) = fitting[0].components
    fitting = [match for match in fitting if match.components == (component,)]
    architectures = [match.architecture for match in fitting]
    path, kind = str(contents.path), component.replace("_", " ")
    exchangeable = family_of_architecture(architectures[0]).exchangeable
    if component in exchangeable:
        lines = component_lines(architectures[0], component, path) + _pickles(contents)
        several = (
            "Models of several generations have one of these shapes; their configurations scale latents differently."
        )
        notes = (several,) if len(titles_of(architectures)) > 1 else ()
    else:
        lines = None
        notes = (
            f"Alone it is no model. sdflow takes whole checkpoints, and from elsewhere only: {', '.join(exchangeable)}.",
        )
    return Description(
        path, kind, titles_of(architectures), architectures[0], contents.precision, notes=notes, workflow=lines
    )


def _pickles(contents: Contents) -> str:
    return "allow_pickle: true\n" if contents.pickled else ""


def _by_width(shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """The generations whose denoisers read text of the width that a network beside them reads."""
    widths = {shape[1] for name, shape in shapes.items() if name.endswith(_READS_TEXT) and len(shape) == 2}
    found = []
    for architecture in ARCHITECTURES:
        family = family_of_architecture(architecture)
        config = architecture_config(architecture, family.part(family.denoiser).component)
        if config.get("cross_attention_dim") in widths:
            found.append(architecture)
    return titles_of(found)


def _net(titles: Sequence[str]) -> str | None:
    """The architecture beside which such a net can stand; None where the family has none."""
    architecture = architecture_for(titles)
    if architecture is None or family_of_architecture(architecture).net is None:
        return None
    return architecture


def _why(contents: Contents) -> str:
    """What it is not, and the nearest, in words."""
    try:
        fitting_architectures(contents.path, contents.shapes)
    except CheckpointError as error:
        names = ", ".join(sorted(contents.shapes)[:3])
        return f"{error.what}. It holds {len(contents.shapes)} tensors: {names}, ..."
    raise AssertionError("a file that fits an architecture is no unknown one")
