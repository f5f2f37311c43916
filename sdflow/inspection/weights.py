"""Identify weight files other than adapters: a checkpoint, a part of one, another known network, or unknown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sdflow.errors import CheckpointError
from sdflow.families import ARCHITECTURES, family_of_architecture
from sdflow.families.shared.few_steps import known_model, spelled
from sdflow.families.shared.predictions import what_it_says
from sdflow.inspection.adapters import details_from_metadata
from sdflow.inspection.contents import Contents
from sdflow.inspection.description import DRAWS_WITH, Description
from sdflow.inspection.lines import (
    architecture_for,
    base_of,
    lines_for_component,
    net_lines,
    partial_lines,
    quoted,
    title_of,
    titles_of,
    workflow,
)
from sdflow.models.image_encoder import projection_of, read_width, token_count
from sdflow.sources.architectures import architecture_config
from sdflow.sources.components.adapters import PREFIXES, require_adapter
from sdflow.sources.embedding import embedding_shapes
from sdflow.sources.equal_shapes import choose
from sdflow.sources.recognition import (
    CHECKPOINT,
    COMPONENT,
    EMBEDDING,
    IP_ADAPTER,
    NET_KIND,
    UNKNOWN,
    Recognized,
    current_shapes,
    fitting_architectures,
)

# Layers that read text; their input width identifies the models they are for.
_READS_TEXT = ("attn2.to_k.weight", "to_k_ip.weight")


def inspect_weights(contents: Contents, found: Recognized) -> Description:
    """Describe a recognized file, with workflow lines that use it."""
    path = str(contents.path)
    if found.kind == CHECKPOINT:
        return _checkpoint(contents, found)
    if found.kind == COMPONENT:
        return _component(contents, found)
    if found.kind == EMBEDDING:
        return _embedding(contents, found)
    if found.kind == UNKNOWN:
        return Description(path, UNKNOWN, precision=contents.precision, notes=(_why(contents),))
    titles = _by_width(contents.shapes)
    if found.kind == IP_ADAPTER:
        return _ip_adapter(contents, titles)
    net = _net(titles)
    lines = net_lines(net, path, pickled=contents.pickled) if net is not None and found.kind == NET_KIND else None
    return Description(path, found.kind, titles, precision=contents.precision, workflow=lines)


def _checkpoint(contents: Contents, found: Recognized) -> Description:
    path, architecture = str(contents.path), found.architectures[0]
    family = family_of_architecture(architecture)
    wanted = [name for name, parts in family.components.items() if not parts[0].optional]
    missing = tuple(name.replace("_", " ") for name in wanted if name not in found.components)
    notes: tuple[str, ...] = ()
    try:
        said = what_it_says({**contents.shapes, **current_shapes(contents.shapes)}, contents.metadata)
        architecture, notes = choose(contents.path, found.architectures, said, None)
    except CheckpointError as error:
        notes = (f"{error.what}.", *([error.remedy] if error.remedy else []))
    held, lines = [name for name in family.exchangeable if name in found.components], None
    if not missing:
        lines = workflow([base_of(architecture)], "", model=quoted(path), pickled=contents.pickled)
    elif held and held == [*family.exchangeable]:  # a workflow takes all of them from one source
        lines = partial_lines(architecture, held, path, pickled=contents.pickled)
        notes += (f"Its {' and '.join(held)} can replace those of a folder or repository.",)
    few = known_model([contents.path.name])
    details = {} if few is None else {DRAWS_WITH: f"{spelled(few.changes())} ({few.what})"}
    return Description(
        path, CHECKPOINT, titles_of([architecture]), architecture, contents.precision, missing, details, notes, lines
    )


def _component(contents: Contents, found: Recognized) -> Description:
    """Describe a part of a checkpoint, or a component with its own architecture, whole or half."""
    path, architecture = str(contents.path), found.architectures[0]
    titles = () if found.alone else titles_of(found.architectures)
    lines, notes = lines_for_component(found, path, contents.pickled), list[str]()
    if found.half is not None:
        notes.append(f"It is its {found.half}; the file of the other half must be next to it.")
    for other, component in found.also:
        notes.append(
            f"It is the {component} of {title_of(other)} too: `components: {{{component}: {quoted(path)}}}` with "
            f"{base_of(other)}."
        )
    if lines is None:
        exchangeable = ", ".join(family_of_architecture(architecture).exchangeable)
        notes.append(
            f"It is not a whole model. sdflow takes whole checkpoints, and as separate components: {exchangeable}."
        )
    elif len(titles) > 1:
        notes.append(
            "Models of several generations have one of these shapes; their configurations scale latents differently."
        )
    return Description(path, found.title, titles, architecture, contents.precision, notes=tuple(notes), workflow=lines)


def _embedding(contents: Contents, found: Recognized) -> Description:
    words = embedding_shapes(contents.shapes)
    assert words is not None, "it was recognized as one"
    option = f"--embedding {contents.path}" + (" --allow-pickle" if contents.pickled else "")
    command = f'sdflow generate PIPELINE {option} --prompt "... {contents.path.stem} ..."'
    return Description(
        str(contents.path),
        EMBEDDING,
        titles_of(found.architectures),
        precision=contents.precision,
        details={
            "vectors": max(count for count, _ in words.values()),
            "width": " and ".join(str(width) for _, width in words.values()),
            **details_from_metadata(contents.metadata),
        },
        notes=() if found.architectures else ("No supported model reads vectors of this width.",),
        command=command if found.architectures else None,
    )


def _ip_adapter(contents: Contents, titles: tuple[str, ...]) -> Description:
    """Its kind, its number of tokens per image, and workflow lines if it is supported."""
    path, architecture = str(contents.path), architecture_for(titles)
    details, notes, lines = {}, [], None
    try:
        require_adapter(contents.path, contents.shapes)
        projection = projection_of(
            {
                name.removeprefix(PREFIXES[0]): shape
                for name, shape in contents.shapes.items()
                if name.startswith(PREFIXES[0])
            },
            path,
        )
    except CheckpointError as error:
        notes.append(f"sdflow does not support it: {error.what}.")
    else:
        details = {"projection": projection["_class_name"], "tokens of an image": token_count(projection)}
        details["reads embeddings of width"] = read_width(projection)
        if architecture is not None and family_of_architecture(architecture).prompter is not None:
            entry = f"ip_adapters:\n  - {{file: {quoted(path)}}}"
            lines = workflow([base_of(architecture)], entry, pickled=contents.pickled)
            notes.append("It needs its image encoder: the folder next to it where diffusers looks, or `encoder`.")
    return Description(path, IP_ADAPTER, titles, None, contents.precision, (), details, tuple(notes), lines)


def _by_width(shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """The generations whose denoisers read text of the same width as this network."""
    widths = {shape[1] for name, shape in shapes.items() if name.endswith(_READS_TEXT) and len(shape) == 2}
    found = []
    for architecture in ARCHITECTURES:
        family = family_of_architecture(architecture)
        config = architecture_config(architecture, family.part(family.denoiser).component)
        if config.get("cross_attention_dim") in widths:
            found.append(architecture)
    return titles_of(found)


def _net(titles: Sequence[str]) -> str | None:
    """The architecture for a ControlNet; None if the family has none."""
    architecture = architecture_for(titles)
    if architecture is None or family_of_architecture(architecture).net is None:
        return None
    return architecture


def _why(contents: Contents) -> str:
    """Why it is not a checkpoint, with the nearest architecture, in words."""
    try:
        fitting_architectures(contents.path, contents.shapes)
    except CheckpointError as error:
        names = ", ".join(sorted(contents.shapes)[:3])
        return f"{error.what}. It holds {len(contents.shapes)} tensors: {names}, ..."
    raise AssertionError("a file that fits an architecture is no unknown one")
