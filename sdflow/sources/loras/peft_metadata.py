"""peft's configuration in the header of a LoRA file, where diffusers' save_lora_weights keeps it, or beside the file, where
peft's own save_pretrained does.

It says what the tensors do not: the alpha of each layer. It is read as peft and diffusers read it back. Its names of modules
are regular expressions, and Python's engine may search for ever in one of a few characters: `(a+)+b`. Nothing ends a search but
the end of its process, so those that are more than names are tried in a process of their own before they are used.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

from sdflow.disk.input_file import read_input, require_shallow
from sdflow.errors import CheckpointError
from sdflow.sources.loras.adapter_kinds import (
    CONFIGS,
    MERGE_ELSEWHERE,
    MERGE_WITH_PEFT,
    PEFT_TYPES,
    USE_A_LORA,
    Field,
    kind_of_config,
    title_of,
)
from sdflow.sources.safetensors_file import read_metadata
from sdflow.sources.weight_files import ADAPTER_CONFIG

PLAIN = re.compile(r"\^?(?:[\w-]|\\?\.)*")
"""A name: each character is looked at once."""

SECONDS = 2
"""Of the processor. The 800 modules of Stable Diffusion XL by 800 plain names take a third of one."""

LONGEST = 60
"""Seconds by the clock, of a process that hardly gets a processor."""

TRIAL = f"""
import json, re, sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS}, {SECONDS}))
except ImportError:
    pass
patterns, modules = json.load(sys.stdin)
for pattern in patterns:
    found = re.compile(pattern)
    for module in modules:
        found.match(module)
"""

METADATA_KEY = "lora_adapter_metadata"
BESIDE = ADAPTER_CONFIG
_DEFAULT = 8  # of r and of lora_alpha, in peft
_LARGEST = 1e30  # of an alpha: what is larger leaves float32
_UNSET: tuple[Any, ...] = (False, [], {}, "")  # of a field that is not known: PEFT's defaults of most
_Pattern = tuple[re.Pattern[str], float]


@dataclass(frozen=True)
class PeftConfig:
    """What peft's configuration of one submodel says of its layers. A module's name is the one that peft saw.

    dora: use_dora. kind: the title of the kind, if it is said."""

    rank_default: float
    alpha_default: float
    ranks: tuple[_Pattern, ...]
    alphas: tuple[_Pattern, ...]
    rslora: bool
    dora: bool = False
    kind: str | None = None

    def require_quick(self, modules: Sequence[str], where: str) -> None:
        """Raises CheckpointError where it would take too long to find the patterns of these modules."""
        wild = [each for each, _ in (*self.ranks, *self.alphas) if not PLAIN.fullmatch(each.pattern[8:-2])]
        if wild and not end_soon(wild, modules):
            raise CheckpointError(
                f"the patterns of its ranks and alphas take more than {SECONDS} s to match: {wild[0].pattern[8:-2]!r:.100}",
                where=where,
                remedy="Write the names of the modules there as they are.",
            )

    def rank(self, module: str) -> int:
        """The rank with which peft builds this module's layer; a file with another rank does not load there."""
        return int(_first(self.ranks, module, self.rank_default))

    def alpha(self, module: str) -> float:
        """This module's alpha."""
        return _first(self.alphas, module, self.alpha_default)

    def scale(self, module: str, rank: int) -> float:
        """By what peft multiplies up @ down."""
        return self.alpha(module) / (sqrt(rank) if self.rslora else rank)


def read_peft_configs(path: Path, submodels: Sequence[str], own: Collection[str] = ()) -> dict[str, PeftConfig]:
    """The configurations in a file's header, for those of the submodels that have one; none where it has no header of PEFT's.

    own: the submodels that the file's tensors are for. diffusers' save_lora_adapter, of one model, writes no submodel in front
        of the fields: they are then those of the only one.
    Raises CheckpointError for what is no configuration, and for a kind of adapter that is not merged.
    """
    text = read_metadata(path).get(METADATA_KEY)
    if text is None:
        return {}
    metadata = _parsed(text, METADATA_KEY, str(path))
    if metadata and not any(key.startswith(f"{submodel}.") for key in metadata for submodel in submodels):
        if len(own) != 1 or any("." in key for key in metadata):
            raise CheckpointError(
                f"its {METADATA_KEY} does not say which submodel it is for: {', '.join(sorted(metadata)[:3])}",
                where=str(path),
                remedy=f"Write {' or '.join(submodels)} in front of each field, as in {submodels[0]}.r.",
            )
        return {next(iter(own)): _config(metadata, _Where(METADATA_KEY, "", str(path)))}
    configs = {}
    for submodel in submodels:
        prefix = f"{submodel}."
        fields = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
        if fields:
            configs[submodel] = _config(fields, _Where(METADATA_KEY, prefix, str(path)))
    return configs


def peft_fields_of(path: Path) -> dict[str, Any] | None:
    """The fields of the configuration beside a file; None where there is none. Raises CheckpointError for what is none."""
    file = path.with_name(BESIDE)
    try:
        text = read_input(file).decode("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot be read: {error}", where=str(file)) from error
    return _parsed(text, BESIDE, str(path))


def peft_config_of(path: Path, fields: Mapping[str, Any]) -> PeftConfig:
    """What these fields, from beside a file, say. Raises CheckpointError for a kind of adapter that is not merged."""
    return _config(fields, _Where(BESIDE, "", str(path)))


def model_class(fields: Mapping[str, Any]) -> str | None:
    """The class of the model that PEFT wrapped, if its configuration says it."""
    mapping = fields.get("auto_mapping")
    name = mapping.get("base_model_class") if isinstance(mapping, Mapping) else None
    return name if isinstance(name, str) else None


def _parsed(text: str, name: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
        require_shallow(found)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"its {name} is not JSON", where=where) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"its {name} is not a JSON object", where=where)
    return found


@dataclass(frozen=True)
class _Where:
    """Where a configuration stands: under which name in which file, and how its fields begin there."""

    name: str
    prefix: str
    where: str

    @property
    def merge(self) -> str:
        """How else to have such an adapter merged: PEFT reads what it wrote itself."""
        return MERGE_WITH_PEFT if self.name == BESIDE else MERGE_ELSEWHERE

    def bad(self, field: str, what: str) -> CheckpointError:
        return CheckpointError(
            f"its {self.name} has a {self.prefix}{field} that is {what}",
            where=self.where,
            remedy="Correct it there, or write the file again with diffusers.",
        )


def _config(fields: Mapping[str, Any], at: _Where) -> PeftConfig:
    peft_type = fields.get("peft_type")
    _require_lora(peft_type, at)
    known = CONFIGS[peft_type or "LORA"]
    for field, value in fields.items():
        _require_plain(field, value, known, at)
    alpha = "lora_alpha" if "lora_alpha" in known else "alpha"
    return PeftConfig(
        _rank(fields.get("r", _DEFAULT), "r", at),
        _alpha(fields.get(alpha, _DEFAULT), alpha, at),
        _patterns(fields.get("rank_pattern"), "rank_pattern", _rank, at),
        _patterns(fields.get("alpha_pattern"), "alpha_pattern", _alpha, at),
        _flag("use_rslora", fields, known, at),
        _flag("use_dora", fields, known, at),
        None if peft_type is None else title_of(peft_type),
    )


def _flag(field: str, fields: Mapping[str, Any], known: Mapping[str, Field], at: _Where) -> bool:
    value = fields.get(field) if field in known else None
    if value is not None and not isinstance(value, bool):
        raise at.bad(field, "neither true nor false")
    return bool(value)


def _require_lora(peft_type: Any, at: _Where) -> None:
    """Raises CheckpointError for another kind of adapter: first of all, as its fields are others."""
    kind = kind_of_config(peft_type)
    if kind is None or kind.read:
        return
    unknown = "" if peft_type in PEFT_TYPES else ", a kind that this version of sdflow does not know,"
    raise CheckpointError(
        f"{kind.title}{unknown} is not supported ({at.prefix}peft_type in its {at.name})",
        where=at.where,
        remedy=at.merge if kind.merges else USE_A_LORA,
    )


def _require_plain(field: str, value: Any, fields: Mapping[str, Field], at: _Where) -> None:
    """Raises CheckpointError for a field that is refused, and for one that this version does not know and that is set. fields: of
    the kind."""
    known = fields.get(field)
    plain = _UNSET if known is None else known.plain
    if value is None or (known is not None and known.decision != "refused"):
        return
    # 0 and 1 are no booleans here, although Python holds them for equal.
    if not any(type(value) is type(one) and value == one for one in plain):
        kind = f"{at.prefix}{field} = {json.dumps(value)[:100]}"
        why = "a field that this version of sdflow does not know" if known is None else known.why
        raise CheckpointError(
            f"{kind} is not supported (in its {at.name}): {why}",
            where=at.where,
            remedy=at.merge if known is None or known.merges else USE_A_LORA,
        )


def _patterns(value: Any, field: str, number: Callable[[Any, str, _Where], float], at: _Where) -> tuple[_Pattern, ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise at.bad(field, "not a JSON object")
    return tuple((_compiled(key, field, at), number(one, f"{field}[{key!r}]", at)) for key, one in value.items())


def _compiled(pattern: str, field: str, at: _Where) -> re.Pattern[str]:
    """peft's own expression around a pattern, from peft.utils.other.get_pattern_key."""
    try:
        return re.compile(rf"(.*\.)?({pattern})$")
    except (re.error, OverflowError, RecursionError) as error:
        raise at.bad(f"{field}[{pattern[:100]!r}]", f"no valid regular expression ({error})") from error


def _first(patterns: tuple[_Pattern, ...], module: str, default: float) -> float:
    """The value of the first pattern that matches. diffusers sorts them when it writes, so this is the file's order."""
    return next((value for pattern, value in patterns if pattern.match(module)), default)


def _rank(value: Any, field: str, at: _Where) -> int:
    if type(value) is not int or not 0 < value < _LARGEST:
        raise at.bad(field, "no whole number above 0")
    return value


def _alpha(value: Any, field: str, at: _Where) -> float:
    if type(value) not in (int, float) or not -_LARGEST < value < _LARGEST:
        raise at.bad(field, "no number that can be an alpha")
    return float(value)


def end_soon(patterns: Iterable[re.Pattern[str]], modules: Iterable[str]) -> bool:
    """Whether it is known within SECONDS of the processor which of these patterns match which modules."""
    given = json.dumps([[each.pattern for each in patterns], [*modules]])
    limit = LONGEST if sys.platform != "win32" else SECONDS
    try:
        tried = subprocess.run(
            [sys.executable, "-I", "-S", "-c", TRIAL],
            input=given,
            text=True,
            encoding="utf-8",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return tried.returncode == 0
