"""`open_checkpoint`: from a reference to an identified checkpoint, without torch, diffusers or transformers."""

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
"""Entries of a provenance that hold provenances by name."""


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

    components: component -> where it comes from in place of the checkpoint's own; None: it is left out. nets: ControlNets, by
        the names that the pipeline will have for them, and where they come from. adapters: IP-Adapters. download: whether
        the hub may be asked; without it, only what the local hub cache holds is found.
    Raises CheckpointNotLocal for a hub checkpoint that is not there and may not be downloaded, CheckpointError for
    everything else that is missing, damaged or not supported.
    """
    access = Access(digests, download, allow_pickle)
    others = {name: source for name, source in (components or {}).items() if source is not None}
    left_out = frozenset(components or {}) - others.keys()
    checkpoint = _open(reference, access, left_out, others.keys())
    require_omittable(checkpoint, left_out)
    for component, source in others.items():
        checkpoint = with_component(checkpoint, component, source, access)
    if not nets and has_nets(checkpoint.index):
        note = f"{reference} has ControlNets, which are left out: name those that you want under `controlnets`."
        checkpoint = replace(checkpoint, notes=(*checkpoint.notes, note))
    if nets:
        checkpoint = with_nets(checkpoint, nets, access)
    if adapters:
        checkpoint = with_adapters(checkpoint, adapters, access)
    require_loadable(checkpoint.submodels)
    return checkpoint


def _open(reference: str, access: Access, left_out: Collection[str], replaced: Collection[str]) -> Checkpoint:
    """replaced: components that come from elsewhere: of a folder or repository their weights may be missing."""
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
                "is a folder, which names its architecture itself",
                where=str(path),
                remedy=f"Leave out #{parsed.architecture}.",
            )
        return open_folder(path, reference, access, left_out=left_out, replaced=replaced)
    if is_regular(path):
        return open_single_file(path, reference, access, architecture=parsed.architecture, left_out=left_out)
    raise CheckpointError(
        no_file(path),
        where=str(path),
        remedy="Write a folder, a .safetensors or .gguf file, hf:owner/name[@revision], synthetic:sd15 or sample:NAME.",
    )


def reopen_checkpoint(origin: Origin, where: str, *, digests: FileDigests) -> Checkpoint:
    """The checkpoint with its exchanged components; those of the hub at the commits that were used.

    where: of the manifest, for messages. Raises UsageError when the manifest does not name it, or when its content is no
    longer what it was; CheckpointError when it cannot be opened.
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
    """Raise UsageError when a checkpoint's content is not what the manifest says that it was."""
    replaced = [name for name, each in origin.components.items() if each is not None]
    if _content(checkpoint.provenance, replaced) != _content(origin.checkpoint or {}, replaced):
        model = origin.pinned_model(where)
        also = {**origin.components, **origin.controlnets}
        others = "".join(f", {name} {reference or 'left out'}" for name, reference in also.items())
        others += "".join(f", the IP-Adapter {each['file']}" for each in origin.ip_adapters)
        raise UsageError(
            f"the checkpoint {model}{others} is not the one that this pipeline was built from",
            where=where,
            remedy="Put back the files that it was built from, or run its workflow again.",
        )


def _content(provenance: Mapping[str, Any], replaced: Collection[str] = ()) -> dict[str, Any]:
    """The provenance without names that may mean something else today: a branch of the hub stands beside its commit; and
    without the files of replaced components, which nothing was built from."""
    kept = {key: value for key, value in provenance.items() if key not in ("revision", *_WITHIN)}
    files = provenance.get("files", {})
    unread = tuple(f"{component}/" for component in replaced)
    return {
        **kept,
        "files": {name: sha for name, sha in files.items() if not name.startswith(unread)},
        **{key: {name: _content(each) for name, each in provenance.get(key, {}).items()} for key in _WITHIN},
    }
