"""Parameters that users set, each declared once: on a dataclass field (`Annotated[int, Parameter(...)]`), or by a
family.

Command options, fields of HTTP requests, keys of workflows and value checks are derived from them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from sdflow.errors import UsageError

Needs = Literal["image", "mask"]


@dataclass(frozen=True)
class Parameter:
    """The documentation of a parameter and its allowed values.

    about: one line. kind: its type, as an annotation: bool, int, float, str, Path, a Literal, `tuple[int, int]`, `list[int]`
    or another that `read` makes; for a dataclass field, the field's type without None. least, most: inclusive limits of
    a number; above: exclusive lower limit. default, otherwise: the default, as a value and in words. options: its
    flags, if not `--NAME`. metavar: of the option's value. read: parses the value from text. call: the keyword of
    `Pipeline.__call__`, if it is not the name. webui: the field of A1111's API, if any. infotext, invokeai: its name in
    PNG text by A1111's webui and by InvokeAI (`sdflow.runtime.files.image_text`). many: whether the option is repeatable and
    the value a sequence.
    needs: the input without which it has no effect. recorded: whether PNG text records it under its name. served:
    whether servers accept it. workflow: whether a workflow's `generate` accepts it.
    """

    about: str
    kind: Any = None
    least: float | None = None
    most: float | None = None
    above: float | None = None
    default: Any = None
    otherwise: str = ""
    options: tuple[str, ...] = ()
    metavar: str | None = None
    read: Callable[[str], Any] | None = None
    call: str = ""
    webui: str = ""
    infotext: str = ""
    invokeai: str = ""
    many: bool = False
    needs: Needs | None = None
    recorded: bool = True
    served: bool = False
    workflow: bool = False

    @property
    def described(self) -> str:
        """The description, with the default in words."""
        return f"{self.about} Default: {self.otherwise}." if self.otherwise else self.about

    def option(self, name: str) -> str:
        """The command-line option for the parameter of this name."""
        return next((each for each in self.options if each.startswith("--")), f"--{name.replace('_', '-')}")

    def require(self, where: str, value: Any) -> None:
        """Raises UsageError for a value out of range. None means unset. where: the user's name for the parameter."""
        if value is not None and not self._allows(value):
            raise UsageError(f"invalid value {value!r:.40}", where=where, remedy=f"Use {self._values()}.")

    def _allows(self, value: Any) -> bool:
        origin = get_origin(self.kind)
        if self.kind in (int, float):
            return self._allows_number(value, self.kind)
        if origin is Literal:
            return value in get_args(self.kind)
        if origin in (tuple, list):
            numbers = value if isinstance(value, tuple | list) else ()
            whole = origin is list or len(numbers) == len(get_args(self.kind))
            return whole and isinstance(value, tuple | list) and all(self._allows_number(each, int) for each in numbers)
        return not isinstance(self.kind, type) or isinstance(value, self.kind)

    def _allows_number(self, value: Any, kind: type) -> bool:
        types = (int,) if kind is int else (int, float)
        if (
            isinstance(value, bool)
            or not isinstance(value, types)
            or (isinstance(value, float) and not math.isfinite(value))
        ):
            return False
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
        )

    def _values(self) -> str:
        """The allowed values, in words."""
        if get_origin(self.kind) is Literal:
            return f"one of {', '.join(map(str, get_args(self.kind)))}"
        limits = {"at least": self.least, "above": self.above, "at most": self.most}
        spelled = " and ".join(f"{words} {limit:g}" for words, limit in limits.items() if limit is not None)
        if get_origin(self.kind) is tuple:
            return f"two whole numbers{f', each {spelled}' if spelled else ''}"
        kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", list: "whole numbers"}
        return f"{kinds.get(get_origin(self.kind) or self.kind, 'another')}{f', {spelled}' if spelled else ''}"


def parameters(cls: type) -> dict[str, Parameter]:
    """The parameters of a dataclass by name, base classes first, each with its field's type and default."""
    hints = get_type_hints(cls, include_extras=True)
    found = {}
    for field in fields(cls):
        for each in getattr(hints[field.name], "__metadata__", ()):
            if isinstance(each, Parameter):
                default = None if field.default is MISSING else field.default
                found[field.name] = replace(each, kind=_without_none(hints[field.name].__origin__), default=default)
    return found


def _without_none(hint: Any) -> Any:
    if get_origin(hint) not in (Union, UnionType):
        return hint
    (kind,) = (each for each in get_args(hint) if each is not NoneType)
    return kind


def require_values(declared: Mapping[str, Parameter], given: Mapping[str, Any]) -> None:
    """Raises UsageError for an invalid value; `where` is the parameter's option."""
    for name, value in given.items():
        declared[name].require(declared[name].option(name), value)


def pair(text: str) -> tuple[int, int]:
    """Parse two whole numbers written as 1024x768. Raises ValueError."""
    found = re.fullmatch(r"(\d{1,6})x(\d{1,6})", text)
    if found is None:
        raise ValueError(f"{text!r} is not of the form 1024x768")
    return int(found[1]), int(found[2])


def numbers(text: str) -> list[int]:
    """Parse whole numbers written as 7,8,9. Raises ValueError."""
    if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", text):
        raise ValueError(f"{text!r} is not of the form 7,8,9")
    return [int(each) for each in text.split(",")]
