"""Package requirements of commands, checked before anything else. Importing this module imports nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Literal, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def needs(
    *what: Literal["DRAWS", "REFERENCE", "SERVES"], unless: tuple[str, ...] = ()
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a command to raise UsageError unless these packages of `sdflow.machine.packages` are installed.

    unless: parameters that make the command read result files only, without the packages.
    """

    def decorate(command: Callable[P, R]) -> Callable[P, R]:
        @wraps(command)  # typer reads the options from its signature
        def checked(*arguments: P.args, **options: P.kwargs) -> R:
            from sdflow.machine import packages

            if any(options.get(name) for name in unless):
                return command(*arguments, **options)
            wanted = [name for each in what for name in getattr(packages, each)]
            packages.require_packages(f"`sdflow {command.__name__}`", *wanted, "onnxruntime")
            return command(*arguments, **options)

        return checked

    return decorate
