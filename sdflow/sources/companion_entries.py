"""What the entries of a tokenizer's, a scheduler's or a feature extractor's config are.

Their libraries take whatever stands there: one fails when it is first used, the other makes a table of a billion steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

MOST_STEPS = 100_000
"""That a scheduler's table has. Models are trained with 1,000."""
MOST_PIXELS = 1 << 13
"""Of a side that a feature extractor makes."""


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _count(value: Any) -> bool:
    return type(value) is int and 0 < value <= MOST_STEPS


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MOST_STEPS and all(map(_number, value))


def _pixels(value: Any) -> bool:
    return type(value) is int and 0 < value <= MOST_PIXELS


def _size(value: Any) -> bool:
    if isinstance(value, dict):
        return all(side is None or _pixels(side) for side in value.values())
    return _pixels(value) or (isinstance(value, list) and len(value) == 2 and all(map(_pixels, value)))


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _map(value: Any) -> bool:
    return isinstance(value, dict)


ENTRIES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("_class_name", "beta_schedule", "prediction_type", "timestep_spacing"), (_text, "text")),
    **dict.fromkeys(("beta_start", "beta_end", "rescale_factor", "model_max_length"), (_number, "a number")),
    **dict.fromkeys(("image_mean", "image_std", "trained_betas"), (_numbers, "a list of numbers")),
    **dict.fromkeys(("size", "crop_size"), (_size, f"a size of up to {MOST_PIXELS:,} pixels a side")),
    "num_train_timesteps": (_count, f"a whole number from 1 to {MOST_STEPS:,}"),
    "added_tokens_decoder": (_map, "a map"),
}
"""Entry -> whether a value is one, and what belongs there. null belongs everywhere: it is the library's own."""


def wrong_entry(config: Mapping[str, Any]) -> str | None:
    """What is wrong with an entry of a config, in words; None where nothing is."""
    for name, (fits, what) in ENTRIES.items():
        value = config.get(name)
        if value is not None and not fits(value):
            return f"its {name} is {value!r:.40}, where {what} belongs"
    return None
