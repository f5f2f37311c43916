"""What commands need to be installed: told before they do anything else. Importing this imports nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Literal, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def needs(
    *what: Literal["DRAWS", "REFERENCE", "SERVES"], unless: tuple[str, ...] = ()
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Of a command that needs these of `sdflow.machine.packages`: it raises UsageError where one is not installed.

    unless: parameters with which it only reads files of results.
    """

    def decorate(command: Callable[P, R]) -> Callable[P, R]:
        @wraps(command)  # typer reads the options off its signature
        def checked(*arguments: P.args, **options: P.kwargs) -> R:
            from sdflow.machine import packages

            if any(options.get(name) for name in unless):
                return command(*arguments, **options)
            wanted = [name for each in what for name in getattr(packages, each)]
            packages.require_packages(f"`sdflow {command.__name__}`", *wanted, "onnxruntime")
            return command(*arguments, **options)

        return checked

    return decorate
