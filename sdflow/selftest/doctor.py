"""Check this machine for known problems, and suggest remedies.

The table of versions is data: what breaks, the consequence, and the remedy.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from packaging.specifiers import SpecifierSet

from sdflow.errors import SdflowError
from sdflow.fits.device import device_for, usual_fits
from sdflow.machine.packages import (
    EXTRAS,
    distribution_version,
    found_version,
    how_to_install,
    installed_version,
    missing,
    onnxruntime_packages,
)
from sdflow.machine.webgpu import missing_library
from sdflow.store import Cache
from sdflow.store.layout import free_bytes
from sdflow.targets import TARGETS, WEBGPU_PROVIDER

Level = Literal["ok", "warning", "error"]

GIB = 2**30
BUILD_MEMORY = 18 * GIB  # fusing a full SD1.5 UNet while carrying its fp32 weights, measured
BUILD_DISK = 20 * GIB  # one SD1.5 target with its conversions

# (distribution, versions, level, what happens, what to do)
KNOWN_BREAKS: tuple[tuple[str, str, Level, str, str], ...] = (
    ("numpy", ">=2.4", "error", "attention fusions of onnxruntime raise TypeError", "pip install 'numpy<2.4'"),
    ("numpy", "<2", "error", "olive-ai and onnx need numpy 2", "pip install 'numpy>=2,<2.4'"),
    ("pydantic", ">=2.14", "error", "olive-ai's data configs raise AttributeError", "pip install 'pydantic<2.14'"),
    ("olive-ai", ">=0.14", "warning", "the passes' options are those of 0.13", "pip install 'olive-ai<0.14'"),
    ("transformers", "<5", "warning", "the text encoder's export needs 5", "pip install 'transformers>=5'"),
)  # fmt: skip
CORE = ("torch", "diffusers", "transformers", "peft", "onnx", "onnx-ir", "onnxscript", "olive-ai", "numpy", "pydantic")


@dataclass(frozen=True)
class Diagnosis:
    """The result of one check."""

    level: Level
    subject: str
    what: str
    remedy: str | None = None


def diagnose(cache: Cache) -> tuple[Diagnosis, ...]:
    """Run all checks, in order: Python, packages, ONNX Runtime, its plugins, memory, device memory, disk, cache."""
    found = (*_packages(), *_onnxruntime(), *_plugins(), _memory(), _device_memory())
    return (*found, _disk(cache.root), _cache(cache))


def _packages() -> list[Diagnosis]:
    diagnoses = [Diagnosis("ok", "python", sys.version.split()[0])]
    absent = missing(*EXTRAS["build"])
    if absent and found_version("torch") is None:
        what = f"not installed: {', '.join(absent)}: imported structures can be bound, but none built"
        diagnoses.append(Diagnosis("warning", "build", what, how_to_install(*absent)))
    else:
        absent = ()
    for name in CORE:
        if name in absent:
            continue
        try:
            version = distribution_version(name)
        except SdflowError as error:
            diagnoses.append(Diagnosis("error", name, error.what, error.remedy))
            continue
        broken = [row for row in KNOWN_BREAKS if row[0] == name and version in SpecifierSet(row[1], prereleases=True)]
        diagnoses += [Diagnosis(level, name, f"{version}: {what}", remedy) for _, _, level, what, remedy in broken]
        if not broken:
            diagnoses.append(Diagnosis("ok", name, version))
    return diagnoses


def _onnxruntime() -> list[Diagnosis]:
    installed = onnxruntime_packages()
    found = ", ".join(f"{name} {version}" for name, version in installed.items())
    if not installed:
        return [
            Diagnosis("error", "onnxruntime", "not installed", "pip install 'sdflow[cpu]', or [cuda], [directml], …")
        ]
    if len(installed) > 1:
        return [
            Diagnosis(
                "error",
                "onnxruntime",
                f"{found} are installed together: they overwrite each other's files",
                f"pip uninstall {' '.join(installed)}, then install the one for your target",
            )
        ]
    return [Diagnosis("ok", "onnxruntime", found)]


def _plugins() -> list[Diagnosis]:
    """The installed plugins of ONNX Runtime, and whether the system has their libraries."""
    found = []
    for target in TARGETS.values():
        if not target.plugins or (version := installed_version(target.package)) is None:
            continue
        name = target.package
        if WEBGPU_PROVIDER in target.plugins and (lacking := missing_library()):
            remedy = f"The target {target.name} needs {target.requires}."
            found.append(Diagnosis("warning", name, f"{version}: {lacking}", remedy))
        else:
            found.append(Diagnosis("ok", name, f"{version}, for the target {target.name}; `sdflow targets` tries it"))
    return found


def _memory() -> Diagnosis:
    total = psutil.virtual_memory().total
    what = f"{total / GIB:.0f} GiB"
    if total < BUILD_MEMORY:
        return Diagnosis(
            "warning",
            "memory",
            f"{what}: fusing a full SD1.5 UNet takes up to {BUILD_MEMORY / GIB:.0f} GiB",
            "build on a larger machine and copy the pipeline folder (--copy), or build smaller architectures",
        )
    return Diagnosis("ok", "memory", what)


_WAYS = {
    "resident": "fit",
    "turns": "fit with --keep fit",
    "streamed": "fit with --keep fit, which streams weights",
    None: "do not fit",
}


def _device_memory() -> Diagnosis:
    """The card's memory, and the models that fit into it."""
    device = device_for(None)
    if device.card is None:
        return Diagnosis("ok", "device memory", "unknown: neither NVIDIA's driver nor PyTorch shows a card")
    ways: dict[str, list[str]] = {}
    for name, fit in usual_fits(device):
        ways.setdefault(_WAYS[fit.way], []).append(name)
    found = "; ".join(f"{', '.join(names)} {how}" for how, names in ways.items())
    return Diagnosis("ok", "device memory", f"{device.words_for('cuda')}: {found} (sdflow init --fits)")


def _disk(root: Path) -> Diagnosis:
    free = free_bytes(root.absolute())
    what = f"{free / GIB:.0f} GiB free for {root}"
    if free < BUILD_DISK:
        return Diagnosis(
            "warning", "disk", f"{what}: one SD1.5 target takes about {BUILD_DISK / GIB:.0f} GiB",
            "sdflow cache gc --max-size 10GB, or --cache on another disk",
        )  # fmt: skip
    return Diagnosis("ok", "disk", what)


def _cache(cache: Cache) -> Diagnosis:
    try:
        entries = list(cache.entries())
    except SdflowError as error:
        return Diagnosis("error", "cache", str(error), error.remedy)
    return Diagnosis("ok", "cache", f"{len(entries)} entries in {cache.root}; `sdflow cache verify` reads them all")
