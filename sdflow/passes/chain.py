"""Which chains of passes can be built as a structure plus weights (`sdflow.weights.structure`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sdflow.passes.base import Pass


@dataclass(frozen=True)
class ChainStep:
    """A pass of a chain and its options, as validated by the pass's Config."""

    implementation: type[Pass[Any]]
    config: Mapping[str, Any]


def why_weights_are_carried(chain: Sequence[ChainStep]) -> str | None:
    """Return None if the chain can be built as structure and weights, otherwise the reason.

    LoRAs must be merged into the exported parameters before any other pass: only there can BindWeights merge them
    instead.
    """
    if not chain or chain[0].implementation.accepts != "checkpoint":
        return "the chain does not begin with a pass that exports"
    first = chain[0].implementation.name
    for index, step in enumerate(chain):
        name = step.implementation.name
        if not vars(step.implementation).get("moves_weights", False):
            return f"{name} may look at the weights"
        if step.implementation.takes_loras and index != 1:
            return f"{name} is not right after {first}"
        for option, effect in step.implementation.weights_read_by.items():
            if step.config.get(option):
                return f"{name} with {option} {step.config[option]} {effect}"
    return None
