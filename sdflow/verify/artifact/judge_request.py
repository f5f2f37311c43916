"""What the process that verifies is to compare with PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdflow.verify.artifact.recipes import RecipeCheck
from sdflow.verify.reference.torch_module import TorchModule


@dataclass(frozen=True)
class JudgeRequest:
    """folder: an assembled pipeline of the family of this name. reference: the folder that the reference was written to. out:
    for PNGs. modules: the PyTorch models, for what is rounded in several ways. recipes: the structures that the weights were
    bound to; unproved: why a submodel has none. allow_fallback: what the target has no kernel for is a warning. quantized: `to`
    and `limit` of each submodel that sdflow.json says is quantized. tuning: what `sdflow tune` chose for run_on. memory: bytes
    that it may take; None: what this machine has. most: submodel -> bytes of its weights in memory at a time, of those that are
    verified block by block.
    """

    family: str
    folder: Path
    name: str
    target: str
    level: str
    submodels: Sequence[str]
    reference: Path
    out: Path
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
