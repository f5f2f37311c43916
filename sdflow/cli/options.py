"""Command options from declared parameters (`sdflow.parameter`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from sdflow.parameter import Parameter

Command = Callable[..., Any]


def takes(declared: Mapping[str, Parameter]) -> Callable[[Command], Command]:
    """Decorate a command: add these parameters as options in place of its last argument, `**given`."""
    return _with([_option(name, each) for name, each in declared.items()])


def with_options_of(command: Command, **others: inspect.Parameter) -> Callable[[Command], Command]:
    """Decorate a command: add another command's options in place of its last argument, with those in `others`
    replaced."""
    taken = inspect.signature(command, eval_str=True).parameters.values()
    return _with([others.get(each.name, each) for each in taken])


def _with(options: Sequence[inspect.Parameter]) -> Callable[[Command], Command]:
    def taking(function: Command) -> Command:
        own = list(inspect.signature(function, eval_str=True).parameters.values())[:-1]
        ordered = sorted([*own[:2], *options, *own[2:]], key=lambda each: each.default is not each.empty)
        function.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]  # read by typer
        return function

    return taking


def _option(name: str, parameter: Parameter) -> inspect.Parameter:
    kind = parameter.kind if parameter.kind in _TYPED and parameter.read is None else str
    many = parameter.many
    annotation = list[kind] if many else kind  # type: ignore[valid-type]
    default = None if many else parameter.default
    flags = (parameter.option(name),) if kind is bool and default is False else ()
    info = typer.Option(
        *(parameter.options or flags),
        min=parameter.least if kind in (int, float) else None,
        max=parameter.most if kind in (int, float) else None,
        help=parameter.described,
        metavar=parameter.metavar,
    )
    hint = Annotated[annotation if default is not None else annotation | None, info]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=hint)


_TYPED = (bool, int, float, str, Path)


def read_options(declared: Mapping[str, Parameter], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return option values by parameter, parsed from text where needed. Raises UsageError for values that cannot be
    parsed or are not allowed."""
    from sdflow.errors import UsageError

    found = {}
    for name, value in given.items():
        parameter = declared[name]
        where = parameter.option(name)
        if parameter.read is not None and value is not None:
            try:
                value = tuple(map(parameter.read, value)) if parameter.many else parameter.read(value)
            except ValueError as error:
                raise UsageError(str(error), where=where, remedy=parameter.described) from error
        elif parameter.many:
            value = tuple(value or ())
        found[name] = value
    return found


@contextmanager
def errors_name_options(declared: Mapping[str, Parameter]) -> Iterator[None]:
    """Rewrite errors that name a Python argument to name the option that the user typed."""
    import re

    from sdflow.errors import UsageError

    options = {call: each.option(name) for name, each in declared.items() for call in (name, each.call) if call}
    try:
        yield
    except UsageError as error:
        if error.where not in options:
            raise
        what, remedy = (
            re.sub(r"\w+", lambda word: options.get(word[0], word[0]) if "_" in word[0] else word[0], text)
            for text in (error.what, error.remedy or "")
        )
        raise UsageError(what, where=options[error.where], remedy=remedy or None) from error
