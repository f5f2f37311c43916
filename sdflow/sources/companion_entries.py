"""What the entries of a tokenizer's, a scheduler's or a feature extractor's config may be.

Their libraries take whatever stands there: one fails when it is first used, the other makes a table of a billion steps.
pydantic is imported with this module, which is imported where such a config is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MOST_STEPS = 100_000
"""That a scheduler's table has. Models are trained with 1,000."""
MOST_PIXELS = 1 << 13
"""Of a side that a feature extractor makes."""

_Numbers = Annotated[list[float], Field(max_length=MOST_STEPS)]
_Pixels = Annotated[int, Field(gt=0, le=MOST_PIXELS)]
_Size = _Pixels | Annotated[list[_Pixels], Field(min_length=2, max_length=2)] | dict[str, _Pixels | None]


class _Entries(BaseModel):
    """null belongs everywhere: it is the library's own. Others are theirs to check."""

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
    """What is wrong with an entry of a config, in words; None where nothing is."""
    try:
        _Entries.model_validate(config)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = str(problem["loc"][0])
        return f"its {name} is {config[name]!r:.40}: {problem['msg'].lower()}"
    return None
