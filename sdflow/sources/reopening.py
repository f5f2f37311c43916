"""The checkpoint that a pipeline was built from, opened again by what its manifest says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sdflow.errors import UsageError
from sdflow.manifest import Origin
from sdflow.sources.checkpoint import Checkpoint, FileDigests
from sdflow.sources.opening import open_checkpoint
from sdflow.sources.reference import AdapterReference

_WITHIN = ("components", "controlnets", "ip_adapters")
"""Entries of a provenance that hold provenances by name."""


def reopen_checkpoint(origin: Origin, where: str, *, digests: FileDigests, download: bool = False) -> Checkpoint:
    """The checkpoint with its exchanged components; those of the hub at the commits that were used.

    where: of the manifest, for messages. Raises UsageError when the manifest does not name it, or when its content is no
    longer what it was; CheckpointError when it cannot be opened.
    """
    model = origin.pinned_model(where)
    checkpoint = open_checkpoint(
        model,
        digests=digests,
        download=download,
        allow_pickle=origin.allow_pickle,
        components=origin.pinned_components(),
        nets=origin.pinned_nets(),
        adapters=[AdapterReference(**each) for each in origin.pinned_adapters()],
    )
    require_same_checkpoint(checkpoint, origin, where)
    return replace(checkpoint, said=origin.said)


def require_same_checkpoint(checkpoint: Checkpoint, origin: Origin, where: str) -> None:
    """Raise UsageError when a checkpoint's content is not what the manifest says that it was."""
    if _content(checkpoint.provenance) != _content(origin.checkpoint or {}):
        model = origin.pinned_model(where)
        also = {**origin.components, **origin.controlnets}
        others = "".join(f", {name} {reference or 'left out'}" for name, reference in also.items())
        others += "".join(f", the IP-Adapter {each['file']}" for each in origin.ip_adapters)
        raise UsageError(
            f"the checkpoint {model}{others} is not the one that this pipeline was built from",
            where=where,
            remedy="Put back the files that it was built from, or run its workflow again.",
        )


def _content(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The provenance without names that may mean something else today: a branch of the hub stands beside its commit."""
    kept = {key: value for key, value in provenance.items() if key not in ("revision", *_WITHIN)}
    return {
        **kept,
        **{key: {name: _content(each) for name, each in provenance.get(key, {}).items()} for key in _WITHIN},
    }
