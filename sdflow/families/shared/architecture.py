"""Shipped architectures: configurations to be filled with a single file's or random weights.

Each is a pipeline folder without weights, in its family's `architectures/` or, for a component or an adapter alone, in
this folder's. Its `Architecture` names what it takes from elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Architecture:
    """How a shipped architecture is stored.

    like: the architecture that it equals except for the JSON entries in its own folder; "": it is complete.
    borrowed: companion -> `ARCHITECTURE/FOLDER` that has it. marked: it differs from `like` only in what the denoiser
    predicts or how it is guided, so a file only counts as this one if the file or the user says so.
    """

    like: str = ""
    borrowed: Mapping[str, str] = field(default_factory=dict)
    marked: bool = False


COMPONENTS: Mapping[str, str] = {"taesd": "vae", "taesd-tiny": "vae"}
"""Architectures of a single component, for a workflow's `components` -> the component."""

ADAPTERS: Mapping[str, Architecture] = {
    "ip-adapter": Architecture(),
    "ip-adapter-plus": Architecture(like="ip-adapter"),
    "ip-adapter-sdxl": Architecture(like="ip-adapter"),
    "ip-adapter-plus-sdxl": Architecture(like="ip-adapter-plus"),
    "ip-adapter-tiny": Architecture(like="ip-adapter"),
    "ip-adapter-plus-tiny": Architecture(like="ip-adapter-tiny"),
}
"""Architectures of an IP-Adapter with its image encoder, for a workflow's `ip_adapters`."""
