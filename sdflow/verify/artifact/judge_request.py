"""The request to the process that compares artifacts with PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdflow.verify.artifact.recipes import RecipeCheck
from sdflow.verify.reference.torch_module import TorchModule


@dataclass(frozen=True)
class JudgeRequest:
    """What to compare, and how.

    folder: an assembled pipeline of the named family. reference: folder of the reference's results. out: for PNGs.
    digests: submodel -> digest of its actual files. modules: the PyTorch models, for roundings in several ways. recipes:
    the structures that the weights were bound to; unproved: why a submodel has none. allow_fallback: missing kernels are
    only warnings. quantized: `to` and `limit` of each submodel that sdflow.json lists as quantized. tuning: the choice of
    `sdflow tune` for run_on. memory: limit in bytes; None: this machine's. most: submodel -> limit in bytes for its
    weights in memory, if verified block by block.
    """

    family: str
    folder: Path
    name: str
    target: str
    level: str
    submodels: Sequence[str]
    reference: Path
    out: Path
    digests: Mapping[str, str] = field(default_factory=dict)
    modules: Sequence[TorchModule] = ()
    recipes: Sequence[RecipeCheck] = ()
    unproved: Mapping[str, str] = field(default_factory=dict)
    allow_fallback: bool = False
    threads: int | None = None
    run_on: str | None = None
    tuning: Mapping[str, Any] = field(default_factory=dict)
    quantized: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    memory: int | None = None
    most: Mapping[str, int] = field(default_factory=dict)
