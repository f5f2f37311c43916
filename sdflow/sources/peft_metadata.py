"""peft's configuration in the header of a LoRA file, where diffusers' save_lora_weights keeps it.

It says what the tensors do not: the alpha of each layer. It is read as peft and diffusers read it back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

from sdflow.errors import CheckpointError
from sdflow.sources.safetensors_file import read_metadata

METADATA_KEY = "lora_adapter_metadata"
_DEFAULT = 8  # of r and of lora_alpha, in peft
_LARGEST = 1e30  # of an alpha: what is larger leaves float32
# Fields that make of the tensors something else than scale * up @ down, by their values that do not.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False,),
    "bias": ("none",),
    "lora_bias": (False,),
    "modules_to_save": ([],),
    "layer_replication": ([],),
    "trainable_token_indices": ([], {}),
    "target_parameters": ([],),
    "alora_invocation_tokens": (),
    "arrow_config": (),
    "kasa_config": (),
    "monteclora_config": (),
    "use_bdlora": (False,),
    "use_qalora": (False,),
    # The others (pissa, olora, corda, loftq, ...) also change the weights that the LoRA is added to.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}

_Pattern = tuple[re.Pattern[str], float]


@dataclass(frozen=True)
class PeftConfig:
    """What peft's configuration of one submodel says of its layers. A module's name is the one that peft saw."""

    rank_default: float
    alpha_default: float
    ranks: tuple[_Pattern, ...]
    alphas: tuple[_Pattern, ...]
    rslora: bool

    def rank(self, module: str) -> int:
        """The rank with which peft builds this module's layer; a file with another rank does not load there."""
        return int(_first(self.ranks, module, self.rank_default))

    def alpha(self, module: str) -> float:
        """This module's alpha."""
        return _first(self.alphas, module, self.alpha_default)

    def scale(self, module: str, rank: int) -> float:
        """By what peft multiplies up @ down."""
        return self.alpha(module) / (sqrt(rank) if self.rslora else rank)


def read_peft_configs(path: Path, submodels: tuple[str, ...]) -> dict[str, PeftConfig]:
    """The configurations in a file's header, for those of the submodels that have one.

    Raises CheckpointError for what is no configuration, and for an adapter that is no plain LoRA.
    """
    text = read_metadata(path).get(METADATA_KEY)
    if text is None:
        return {}
    try:
        metadata = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"its {METADATA_KEY} is not JSON", where=str(path)) from error
    if not isinstance(metadata, dict):
        raise CheckpointError(f"its {METADATA_KEY} is not a JSON object", where=str(path))
    configs = {}
    for submodel in submodels:
        prefix = f"{submodel}."
        fields = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
        if fields:
            configs[submodel] = _config(fields, submodel, str(path))
    return configs


def _config(fields: Mapping[str, Any], submodel: str, where: str) -> PeftConfig:
    for field, plain in _PLAIN.items():
        value = fields.get(field)
        # 0 and 1 are no booleans here, although Python holds them for equal.
        if value is not None and not any(type(value) is type(one) and value == one for one in plain):
            kind = "DoRA" if field == "use_dora" else f"{submodel}.{field} = {json.dumps(value)[:100]}"
            raise CheckpointError(
                f"{kind} is not supported (in its {METADATA_KEY})", where=where, remedy="Use a plain LoRA."
            )
    rslora = fields.get("use_rslora", False)
    if not isinstance(rslora, bool):
        raise _bad(f"{submodel}.use_rslora", "neither true nor false", where)
    return PeftConfig(
        _rank(fields.get("r", _DEFAULT), f"{submodel}.r", where),
        _alpha(fields.get("lora_alpha", _DEFAULT), f"{submodel}.lora_alpha", where),
        _patterns(fields.get("rank_pattern"), f"{submodel}.rank_pattern", _rank, where),
        _patterns(fields.get("alpha_pattern"), f"{submodel}.alpha_pattern", _alpha, where),
        rslora,
    )


def _patterns(value: Any, field: str, number: Callable[[Any, str, str], float], where: str) -> tuple[_Pattern, ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise _bad(field, "not a JSON object", where)
    return tuple((_compiled(key, field, where), number(one, f"{field}[{key!r}]", where)) for key, one in value.items())


def _compiled(pattern: str, field: str, where: str) -> re.Pattern[str]:
    """peft's own expression around a pattern, from peft.utils.other.get_pattern_key.

    Nothing bounds the time of a match: a hostile pattern holds peft up just as long, no bound on its length would
    help, and `re` can be interrupted.
    """
    try:
        return re.compile(rf"(.*\.)?({pattern})$")
    except (re.error, OverflowError, RecursionError) as error:
        raise _bad(f"{field}[{pattern[:100]!r}]", f"no valid regular expression ({error})", where) from error


def _first(patterns: tuple[_Pattern, ...], module: str, default: float) -> float:
    """The value of the first pattern that matches. diffusers sorts them when it writes, so this is the file's order."""
    return next((value for pattern, value in patterns if pattern.match(module)), default)


def _rank(value: Any, field: str, where: str) -> int:
    if type(value) is not int or not 0 < value < _LARGEST:
        raise _bad(field, "no whole number above 0", where)
    return value


def _alpha(value: Any, field: str, where: str) -> float:
    if type(value) not in (int, float) or not -_LARGEST < value < _LARGEST:
        raise _bad(field, "no number that can be an alpha", where)
    return float(value)


def _bad(field: str, what: str, where: str) -> CheckpointError:
    return CheckpointError(
        f"its {METADATA_KEY} has a {field} that is {what}",
        where=where,
        remedy="Correct it there, or write the file again with diffusers.",
    )
