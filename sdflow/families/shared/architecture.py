"""The architectures that sdflow ships: configurations that a single file or random weights are filled into.

Each is a folder in the `architectures/` of its family, or beside this file where it is a component's or an adapter's alone:
a pipeline folder without weights, and without what its `Architecture` says lies elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Architecture:
    """like: the architecture that it equals but for the entries of the JSON files in its own folder; "": it is complete.
    borrowed: companion -> `ARCHITECTURE/FOLDER` where it lies. marked: it differs from `like` only in what the denoiser
    predicts or how it is guided, so a file is taken for it only where the file or its user says so.
    """

    like: str = ""
    borrowed: Mapping[str, str] = field(default_factory=dict)
    marked: bool = False


COMPONENTS: Mapping[str, str] = {"taesd": "vae", "taesd-tiny": "vae"}
"""Architectures of a component alone, for `components` of a workflow -> the component."""

ADAPTERS: Mapping[str, Architecture] = {
    "ip-adapter": Architecture(),
    "ip-adapter-plus": Architecture(like="ip-adapter"),
    "ip-adapter-sdxl": Architecture(like="ip-adapter"),
    "ip-adapter-plus-sdxl": Architecture(like="ip-adapter-plus"),
    "ip-adapter-tiny": Architecture(like="ip-adapter"),
    "ip-adapter-plus-tiny": Architecture(like="ip-adapter-tiny"),
}
"""Architectures of an IP-Adapter with its image encoder, for `ip_adapters` of a workflow."""
