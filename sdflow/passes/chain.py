"""Chains of passes that can be built as a structure and weights (`sdflow.weights.structure`), and why others cannot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sdflow.passes.base import Pass


@dataclass(frozen=True)
class ChainStep:
    """A pass of a chain and its options, as the pass's Config has them."""

    implementation: type[Pass[Any]]
    config: Mapping[str, Any]


def why_weights_are_carried(chain: Sequence[ChainStep]) -> str | None:
    """None for a chain that can be built as structure and weights; otherwise the reason, in words.

    LoRAs are merged into parameters, before anything else happens to them: only there does a merge change places with
    what follows.
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
