"""Validate entries of a tokenizer's, a scheduler's or a feature extractor's config.

Their libraries accept anything: some values fail at first use, others build a table of a billion steps. Importing this
module imports pydantic, so it is imported where such a config is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MOST_STEPS = 100_000
"""Maximum size of a scheduler's table. Models are trained with 1,000 steps."""
MOST_PIXELS = 1 << 13
"""Maximum side of a feature extractor's output."""

_Numbers = Annotated[list[float], Field(max_length=MOST_STEPS)]
_Pixels = Annotated[int, Field(gt=0, le=MOST_PIXELS)]
_Size = _Pixels | Annotated[list[_Pixels], Field(min_length=2, max_length=2)] | dict[str, _Pixels | None]


class _Entries(BaseModel):
    """null is always allowed and means the library's default. Other entries are left to the library."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    class_name: str | None = Field(None, alias="_class_name")
    beta_schedule: str | None = None
    prediction_type: str | None = None
    timestep_spacing: str | None = None
    beta_start: float | None = None
    beta_end: float | None = None
    rescale_factor: float | None = None
    model_max_length: float | None = None
    image_mean: _Numbers | None = None
    image_std: _Numbers | None = None
    trained_betas: _Numbers | None = None
    size: _Size | None = None
    crop_size: _Size | None = None
    num_train_timesteps: Annotated[int, Field(gt=0, le=MOST_STEPS)] | None = None
    added_tokens_decoder: dict[str, Any] | None = None


def wrong_entry(config: Mapping[str, Any]) -> str | None:
    """The problem of an entry, in words; None if there is none."""
    try:
        _Entries.model_validate(config)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = str(problem["loc"][0])
        return f"its {name} is {config[name]!r:.40}: {problem['msg'].lower()}"
    return None
