"""Create random weights of a `synthetic:` checkpoint in several processes, because numpy's generator holds the GIL."""

from __future__ import annotations

import mmap
import multiprocessing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any
from unittest import mock

import numpy as np


@contextmanager
def made_by(processes: int) -> Iterator[None]:
    """Meanwhile the tensors of synthetic modules are made by so many processes. Enter it before the device is first used: they
    are forked."""
    from sdflow.sources import load

    make = load.tensors_for

    def tensors_for(model: Any, shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Any]:
        arrays = {name: shared(shape) for name, shape in shapes.items()}

        def fill(names: list[str]) -> None:
            for name in names:
                arrays[name][...] = make(model, {name: shapes[name]}, seed)[name]

        context = multiprocessing.get_context("fork")
        started = [context.Process(target=fill, args=(names,)) for names in shares(shapes, processes) if names]
        for each in started:
            each.start()
        for each in started:
            each.join()
        if failed := [each.exitcode for each in started if each.exitcode]:
            raise RuntimeError(f"{len(failed)} of {len(started)} processes failed: {failed}")
        return arrays

    with mock.patch.object(load, "tensors_for", tensors_for):
        yield


def shared(shape: tuple[int, ...]) -> Any:
    """A float32 array in memory that forked processes write to."""
    count = prod(shape)
    return np.frombuffer(mmap.mmap(-1, max(1, 4 * count)), np.float32, count).reshape(shape)


def shares(shapes: Mapping[str, tuple[int, ...]], processes: int) -> list[list[str]]:
    """The names, in lists of about as many values: the largest first, each to the list that has fewest."""
    lists: list[list[str]] = [[] for _ in range(processes)]
    counts = [0] * processes
    for name in sorted(shapes, key=lambda name: -prod(shapes[name])):
        least = counts.index(min(counts))
        lists[least].append(name)
        counts[least] += prod(shapes[name])
    return lists
