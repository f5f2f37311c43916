"""`open_checkpoint`: open and identify a checkpoint, without torch, diffusers or transformers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sdflow.disk.input_file import is_regular, is_there, no_file
from sdflow.disk.shipped import sample_folder
from sdflow.errors import CheckpointError, UsageError
from sdflow.manifest import Origin
from sdflow.sources.checkpoint import Access, Checkpoint, FileDigests
from sdflow.sources.components.adapters import with_adapters
from sdflow.sources.components.component import require_omittable, with_component
from sdflow.sources.components.nets import has_nets, with_nets
from sdflow.sources.fitting import require_loadable
from sdflow.sources.folder import open_folder
from sdflow.sources.hub import hub_weights, open_hub
from sdflow.sources.reference import (
    AdapterReference,
    HubReference,
    SampleReference,
    SyntheticReference,
    parse_reference,
)
from sdflow.sources.single_file import open_single_file
from sdflow.sources.synthetic import open_synthetic

_WITHIN = ("components", "controlnets", "ip_adapters")
"""Entries of a provenance that map names to provenances."""


def open_checkpoint(
    reference: str,
    *,
    digests: FileDigests,
    download: bool,
    allow_pickle: bool = False,
    components: Mapping[str, str | None] | None = None,
    nets: Mapping[str, str] | None = None,
    adapters: Sequence[AdapterReference] = (),
) -> Checkpoint:
    """Find a checkpoint and identify its submodels.

    components: component -> the source that replaces it; None leaves it out. nets: the pipeline's names of ControlNets
        -> their sources. adapters: IP-Adapters. download: whether the hub may be used; otherwise only its local cache
        is.

    Raises CheckpointNotLocal for a missing hub checkpoint that must not be downloaded, CheckpointError for anything
    else missing, damaged or unsupported.
    """
    access = Access(digests, download, allow_pickle)
    others = {name: source for name, source in (components or {}).items() if source is not None}
    left_out = frozenset(components or {}) - others.keys()
    checkpoint = _open(reference, access, left_out, others.keys())
    require_omittable(checkpoint, left_out)
    for component, source in others.items():
        checkpoint = with_component(checkpoint, component, source, access)
    if not nets and has_nets(checkpoint.index):
        note = f"{reference} has ControlNets, which are left out; name those to use under `controlnets`."
        checkpoint = replace(checkpoint, notes=(*checkpoint.notes, note))
    if nets:
        checkpoint = with_nets(checkpoint, nets, access)
    if adapters:
        checkpoint = with_adapters(checkpoint, adapters, access)
    require_loadable(checkpoint.submodels)
    return checkpoint


def _open(reference: str, access: Access, left_out: Collection[str], replaced: Collection[str]) -> Checkpoint:
    """replaced: components from other sources, whose weights may be missing in a folder or repository."""
    parsed = parse_reference(reference)
    if isinstance(parsed, SyntheticReference):
        return open_synthetic(reference, parsed.architecture, parsed.seed, left_out=left_out)
    if isinstance(parsed, SampleReference):
        origin, safe = {"kind": "sample", "name": parsed.name}, replace(access, allow_pickle=False)
        return open_folder(sample_folder(parsed.name), reference, safe, origin=origin, left_out=left_out)
    if isinstance(parsed, HubReference) and parsed.file:
        file, origin = hub_weights(parsed, download=access.download)
        return open_single_file(
            file,
            reference,
            access,
            architecture=parsed.architecture,
            left_out=left_out,
            origin=origin,
            spelled=parsed.with_architecture,
        )
    if isinstance(parsed, HubReference):
        return open_hub(parsed, reference, access, left_out, replaced)
    path = parsed.path
    if is_there(path) and path.is_dir():
        if parsed.architecture is not None:
            raise CheckpointError(
                "is a folder, whose config names the architecture",
                where=str(path),
                remedy=f"Leave out #{parsed.architecture}.",
            )
        return open_folder(path, reference, access, left_out=left_out, replaced=replaced)
    if is_regular(path):
        return open_single_file(path, reference, access, architecture=parsed.architecture, left_out=left_out)
    raise CheckpointError(
        no_file(path),
        where=str(path),
        remedy="Name a folder, a .safetensors or .gguf file, hf:owner/name[@revision], synthetic:sd15 or sample:NAME.",
    )


def reopen_checkpoint(origin: Origin, where: str, *, digests: FileDigests) -> Checkpoint:
    """The checkpoint of a manifest with its replaced components; hub repositories at the commits that were used.

    where: of the manifest, for messages. Raises UsageError if the manifest does not name it, or its content has
    changed; CheckpointError if it cannot be opened.
    """
    model = origin.pinned_model(where)
    checkpoint = open_checkpoint(
        model,
        digests=digests,
        download=False,
        allow_pickle=origin.allow_pickle,
        components=origin.pinned_components(),
        nets=origin.pinned_nets(),
        adapters=[AdapterReference(**each) for each in origin.pinned_adapters()],
    )
    require_same_checkpoint(checkpoint, origin, where)
    return replace(checkpoint, said=origin.said)


def require_same_checkpoint(checkpoint: Checkpoint, origin: Origin, where: str) -> None:
    """Raise UsageError if a checkpoint's content differs from the manifest's."""
    if _content(checkpoint.provenance) != _content(origin.checkpoint or {}):
        model = origin.pinned_model(where)
        also = {**origin.components, **origin.controlnets}
        others = "".join(f", {name} {reference or 'left out'}" for name, reference in also.items())
        others += "".join(f", the IP-Adapter {each['file']}" for each in origin.ip_adapters)
        raise UsageError(
            f"the checkpoint {model}{others} differs from the one that this pipeline was built from",
            where=where,
            remedy="Restore the original files, or run its workflow again.",
        )


def _content(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The provenance without names whose meaning may change, such as hub branches."""
    kept = {key: value for key, value in provenance.items() if key not in ("revision", *_WITHIN)}
    within = {key: {name: _content(each) for name, each in provenance.get(key, {}).items()} for key in _WITHIN}
    return {**kept, **within}
