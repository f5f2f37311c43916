"""Skip-layer guidance: in some steps, also guide away from the prediction with a few of the denoiser's blocks skipped.

As in diffusers' StableDiffusion3Pipeline (0.42.1): adds scale * (with the prompt - with the prompt and without the
blocks) to the guided output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sdflow.errors import UsageError
from sdflow.parameter import Parameter, numbers

LAYERS = "skip_guidance_layers"
_SCALE, _STOP, _START = "skip_layer_guidance_scale", "skip_layer_guidance_stop", "skip_layer_guidance_start"

ARGUMENTS: Mapping[str, Parameter] = {
    LAYERS: Parameter(
        "Blocks that skip-layer guidance skips, counted from 0; 3.5-medium's model card uses 7,8,9. Text to image only.",
        list[int],
        least=0,
        otherwise="none",
        metavar="7,8,9",
        read=numbers,
    ),
    _SCALE: Parameter("Scale of skip-layer guidance.", float, least=0, most=1000, otherwise="2.8"),
    _STOP: Parameter("Fraction of the steps up to which it applies.", float, least=0, most=1, otherwise="0.2"),
    _START: Parameter("Fraction of the steps after which it applies.", float, least=0, most=1, otherwise="0.01"),
}
"""Arguments of families that support it, with diffusers' names."""


@dataclass(frozen=True)
class SkippedLayers:
    """Settings of skip-layer guidance.

    layers: blocks to skip. start, stop: fractions of the steps; applies strictly between them.
    """

    layers: tuple[int, ...]
    scale: float = 2.8
    stop: float = 0.2
    start: float = 0.01

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> SkippedLayers | None:
        """Create from a call's arguments (None if not given). Returns None if no blocks are skipped.

        Raises UsageError for other settings without blocks.
        """
        said = {name: given[name] for name in (_SCALE, _STOP, _START) if given.get(name) is not None}
        layers = given.get(LAYERS)
        if said and layers is None:
            raise UsageError(
                f"has no effect without {LAYERS}", where=next(iter(said)), remedy="Set the blocks to skip."
            )
        if not layers:
            return None
        short = {_SCALE: "scale", _STOP: "stop", _START: "start"}
        return cls(tuple(sorted(set(layers))), **{short[name]: float(value) for name, value in said.items()})

    def holds(self, index: int, runs: int) -> bool:
        """Whether this denoiser run uses it, counted as in diffusers."""
        return runs * self.start < index < runs * self.stop
