"""`open_checkpoint`: from a reference to an identified checkpoint, without torch, diffusers or transformers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from sdflow.disk.input_file import is_regular, is_there, no_file
from sdflow.errors import CheckpointError
from sdflow.sources.checkpoint import Access, Checkpoint, FileDigests
from sdflow.sources.components.adapters import with_adapters
from sdflow.sources.components.component import require_omittable, with_component
from sdflow.sources.components.nets import has_nets, with_nets
from sdflow.sources.folder import open_folder
from sdflow.sources.headers import require_loadable
from sdflow.sources.hub import open_hub
from sdflow.sources.reference import (
    AdapterReference,
    HubReference,
    SampleReference,
    SyntheticReference,
    parse_reference,
)
from sdflow.sources.sample import sample_folder
from sdflow.sources.single_file import open_single_file
from sdflow.sources.synthetic import open_synthetic


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
    checkpoint = _open(reference, access, left_out)
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


def _open(reference: str, access: Access, left_out: Collection[str]) -> Checkpoint:
    parsed = parse_reference(reference)
    if isinstance(parsed, SyntheticReference):
        return open_synthetic(reference, parsed.architecture, parsed.seed, left_out=left_out)
    if isinstance(parsed, SampleReference):
        origin, safe = {"kind": "sample", "name": parsed.name}, replace(access, allow_pickle=False)
        return open_folder(sample_folder(parsed.name), reference, safe, origin=origin, left_out=left_out)
    if isinstance(parsed, HubReference):
        return open_hub(parsed, reference, access, left_out)
    path = parsed.path
    if is_there(path) and path.is_dir():
        if parsed.architecture is not None:
            raise CheckpointError(
                "is a folder, which says itself what it is",
                where=str(path),
                remedy=f"Leave out #{parsed.architecture}.",
            )
        return open_folder(path, reference, access, left_out=left_out)
    if is_regular(path):
        return open_single_file(path, reference, access, architecture=parsed.architecture, left_out=left_out)
    raise CheckpointError(
        no_file(path),
        where=str(path),
        remedy="Write a folder, a .safetensors file, hf:owner/name[@revision], synthetic:sd15 or sample:NAME.",
    )
