"""Read PEFT's configuration, from a LoRA file's header, where diffusers' save_lora_weights stores it, or from the file
next to it, as PEFT's own save_pretrained writes it.

It holds the alpha of each layer, which the tensors lack, and is interpreted like PEFT and diffusers do. Its module
names are regular expressions, and Python's engine may take forever for a few characters: `(a+)+b`. Only ending the
process stops a search, so patterns other than plain names are first tried in a separate process.
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
"""A plain name, which is matched in a single pass."""

SECONDS = 2
"""Processor time. Matching the 800 modules of Stable Diffusion XL with 800 plain names takes a third of one."""

LONGEST = 60
"""Wall-clock seconds, for a process that gets little processor time."""

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
_DEFAULT = 8  # PEFT's default of r and of lora_alpha
_LARGEST = 1e30  # largest alpha: beyond, float32 overflows
_UNSET: tuple[Any, ...] = (False, [], {}, "")  # PEFT's usual defaults, for unknown fields
_Pattern = tuple[re.Pattern[str], float]


@dataclass(frozen=True)
class PeftConfig:
    """PEFT's configuration for the layers of one submodel. Module names are PEFT's.

    dora: use_dora. kind: the kind's title, if given."""

    rank_default: float
    alpha_default: float
    ranks: tuple[_Pattern, ...]
    alphas: tuple[_Pattern, ...]
    rslora: bool
    dora: bool = False
    kind: str | None = None

    def require_quick(self, modules: Sequence[str], where: str) -> None:
        """Raises CheckpointError if matching the patterns with these modules takes too long."""
        wild = [each for each, _ in (*self.ranks, *self.alphas) if not PLAIN.fullmatch(each.pattern[8:-2])]
        if wild and not end_soon(wild, modules):
            raise CheckpointError(
                f"the patterns of its ranks and alphas take more than {SECONDS} s to match: {wild[0].pattern[8:-2]!r:.100}",
                where=where,
                remedy="Use plain module names there.",
            )

    def rank(self, module: str) -> int:
        """The rank with which PEFT builds this module's layer; PEFT rejects a file with another rank."""
        return int(_first(self.ranks, module, self.rank_default))

    def alpha(self, module: str) -> float:
        """This module's alpha."""
        return _first(self.alphas, module, self.alpha_default)

    def scale(self, module: str, rank: int) -> float:
        """PEFT's factor for up @ down."""
        return self.alpha(module) / (sqrt(rank) if self.rslora else rank)


def read_peft_configs(path: Path, submodels: Sequence[str], own: Collection[str] = ()) -> dict[str, PeftConfig]:
    """The configurations in a file's header, by submodel; empty without PEFT's header.

    own: the submodels of the file's tensors. diffusers' save_lora_adapter, for one model, writes fields without a
        submodel; they belong to the only one.

    Raises CheckpointError for an invalid configuration, and for a kind of adapter that is not merged.
    """
    text = read_metadata(path).get(METADATA_KEY)
    if text is None:
        return {}
    metadata = _parsed(text, METADATA_KEY, str(path))
    if metadata and not any(key.startswith(f"{submodel}.") for key in metadata for submodel in submodels):
        if len(own) != 1 or any("." in key for key in metadata):
            raise CheckpointError(
                f"its {METADATA_KEY} does not name its submodel: {', '.join(sorted(metadata)[:3])}",
                where=str(path),
                remedy=f"Prefix each field with {' or '.join(submodels)}, as in {submodels[0]}.r.",
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
    """The fields of the configuration next to a file; None if there is none. Raises CheckpointError for an invalid
    one."""
    file = path.with_name(ADAPTER_CONFIG)
    try:
        text = read_input(file).decode("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot be read: {error}", where=str(file), remedy="Download it again.") from error
    return _parsed(text, ADAPTER_CONFIG, str(path))


def peft_config_of(path: Path, fields: Mapping[str, Any]) -> PeftConfig:
    """Interpret fields from next to a file. Raises CheckpointError for a kind of adapter that is not merged."""
    return _config(fields, _Where(ADAPTER_CONFIG, "", str(path)))


def model_class(fields: Mapping[str, Any]) -> str | None:
    """The class of the model that PEFT wrapped, if the configuration has it."""
    mapping = fields.get("auto_mapping")
    name = mapping.get("base_model_class") if isinstance(mapping, Mapping) else None
    return name if isinstance(name, str) else None


def _parsed(text: str, name: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
        require_shallow(found)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"its {name} is not JSON", where=where, remedy="Download the LoRA again.") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"its {name} is not a JSON object", where=where, remedy="Download the LoRA again.")
    return found


@dataclass(frozen=True)
class _Where:
    """The location of a configuration: its name, its file, and the prefix of its fields."""

    name: str
    prefix: str
    where: str

    @property
    def merge(self) -> str:
        """Advice for merging such an adapter elsewhere: PEFT reads files that it wrote."""
        return MERGE_WITH_PEFT if self.name == ADAPTER_CONFIG else MERGE_ELSEWHERE

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
    """Raises CheckpointError for another kind of adapter; checked first, since its fields differ."""
    kind = kind_of_config(peft_type)
    if kind is None or kind.read:
        return
    unknown = "" if peft_type in PEFT_TYPES else ", which this version of sdflow does not know,"
    raise CheckpointError(
        f"{kind.title}{unknown} is not supported ({at.prefix}peft_type in its {at.name})",
        where=at.where,
        remedy=at.merge if kind.merges else USE_A_LORA,
    )


def _require_plain(field: str, value: Any, fields: Mapping[str, Field], at: _Where) -> None:
    """Raises CheckpointError for a rejected field, and for an unknown one that is set. fields: of the kind."""
    known = fields.get(field)
    plain = _UNSET if known is None else known.plain
    if value is None or (known is not None and known.decision != "refused"):
        return
    # 0 and 1 are not booleans here, although Python considers them equal.
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
        raise at.bad(f"{field}[{pattern[:100]!r}]", f"not a valid regular expression ({error})") from error


def _first(patterns: tuple[_Pattern, ...], module: str, default: float) -> float:
    """The value of the first matching pattern. diffusers sorts patterns when writing, so the file's order applies."""
    return next((value for pattern, value in patterns if pattern.match(module)), default)


def _rank(value: Any, field: str, at: _Where) -> int:
    if type(value) is not int or not 0 < value < _LARGEST:
        raise at.bad(field, "not a whole number above 0")
    return value


def _alpha(value: Any, field: str, at: _Where) -> float:
    if type(value) not in (int, float) or not -_LARGEST < value < _LARGEST:
        raise at.bad(field, "not a finite number")
    return float(value)


def end_soon(patterns: Iterable[re.Pattern[str]], modules: Iterable[str]) -> bool:
    """Whether matching these patterns with these modules ends within SECONDS of processor time."""
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
