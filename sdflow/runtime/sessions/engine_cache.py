"""Storage of what providers compile for a device: TensorRT engines, MIGraphX programs.

    ENGINES/<provider>-<machine>/machine.json            what the machine's key is made of
                                 timing/                 TensorRT's kernel timings, for all models
                                 <model>/                engines of one graph with its weights, for some shapes
                                 <model>/context/        a model that holds them (`sdflow.runtime.sessions.contexts`)

TensorRT's provider names engines by the model's file name and node names (`TRTGenerateId`), not by weights: in a shared
folder, one checkpoint's engine would be used for another checkpoint of the same architecture. It also ignores the
driver and, in the timing cache's name, versions. So all of these are in the key, and no two models share a folder.

Weight-stripped engines do not solve this: they are built for identical weights (`kREFIT_IDENTICAL` in
tensorrt_execution_provider.cc), and written with the weights again.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdflow.digest import digest_json
from sdflow.disk.atomic_write import write_whole
from sdflow.disk.user_folder import user_folder, writing
from sdflow.machine.device import amd_versions, cuda_device, driver_version
from sdflow.machine.packages import installed_versions
from sdflow.machine.plugins import device_facts, display_drivers
from sdflow.targets import CACHE_DIR, ONNXRUNTIME_FLAVOURS, TIMING_DIR, Target

FOLDER_VARIABLE = "SDFLOW_ENGINES"
TENSORRT = "TensorrtExecutionProvider"
MIGRAPHX = "MIGraphXExecutionProvider"
MACHINE_FILE = "machine.json"
MODEL_FILE = "model.json"

Shapes = Mapping[str, Sequence[int]]
"""Input name -> size of each axis."""


@dataclass(frozen=True)
class Profile:
    """Range of shapes of one engine, by input: smallest, the one it is tuned for, largest."""

    smallest: Mapping[str, tuple[int, ...]]
    usual: Mapping[str, tuple[int, ...]]
    largest: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, shapes: Shapes) -> Profile:
        """Return the profile of exactly these shapes."""
        exact = {name: tuple(shape) for name, shape in shapes.items()}
        return cls(exact, exact, exact)

    def with_shapes(self, shapes: Shapes) -> Profile:
        """Return a profile that includes these shapes too; itself if it already does. A widened profile is tuned for
        the largest, so the order of sizes does not matter and equal sets of sizes share an engine."""

        def each(extreme: Any, known: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
            return {name: tuple(map(extreme, known[name], shape)) for name, shape in shapes.items()}

        smallest, largest = each(min, self.smallest), each(max, self.largest)
        return self if (smallest, largest) == (self.smallest, self.largest) else Profile(smallest, largest, largest)

    def only(self, names: Container[str]) -> Profile:
        """Return the profile restricted to these inputs."""
        return Profile(*({key: each[key] for key in each if key in names} for each in vars(self).values()))

    def options(self) -> dict[str, str]:
        """Return options of TensorRT's provider, such as `sample:2x4x64x64,encoder_hidden_states:2x77x768`."""
        named = {"min": self.smallest, "opt": self.usual, "max": self.largest}
        return {
            f"trt_profile_{word}_shapes": ",".join(
                f"{name}:{'x'.join(map(str, sizes))}" for name, sizes in each.items()
            )
            for word, each in named.items()
        }

    def to_json(self) -> dict[str, Any]:
        """Return smallest, usual and largest -> input -> shape, as plain data."""
        return {name: {key: list(sizes) for key, sizes in each.items()} for name, each in vars(self).items()}


@dataclass(frozen=True)
class EngineFolders:
    """The folders for a provider's compiled files.

    engines: of one model. timing: shared by all models on this machine.
    """

    engines: Path
    timing: Path

    def filled(self, options: Mapping[str, str]) -> dict[str, str]:
        """Return a provider's options with placeholders replaced by these folders."""
        places = {CACHE_DIR: str(self.engines), TIMING_DIR: str(self.timing)}
        return {name: _replaced(value, places) for name, value in options.items()}


def keeps_engines(target: Target) -> bool:
    """Whether a provider of the target stores what it compiles."""
    return any(CACHE_DIR in value for options in target.session.options.values() for value in options.values())


def engine_folders(
    root: Path | None,
    target: Target,
    provider: str,
    model: str,
    profile: Profile | None = None,
    device: Any = None,
) -> EngineFolders:
    """Return the folders, created if needed. root: default: the user's. model: digest of a graph with its weights.
    device: of a plugin.

    A folder whose key file names another machine or model was copied or modified by hand, and is removed.
    Raises UsageError if a folder is not writable.
    """
    machine = machine_key(provider, device)
    root = engine_root() if root is None else root
    here = machine_folder(root, machine)
    what = {
        "model": model,
        "options": {name: dict(each) for name, each in target.session.options.items()},
        "profile": None if profile is None else profile.to_json(),
    }
    found = EngineFolders(here / model_name(what), here / "timing")
    with writing("engines", here, FOLDER_VARIABLE):
        for folder, name, content in ((here, MACHINE_FILE, machine), (found.engines, MODEL_FILE, what)):
            if (folder / name).exists() and read_key(folder / name) != content:
                shutil.rmtree(folder)
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / name).exists():
                write_whole(folder / name, key_file(content))
        found.timing.mkdir(parents=True, exist_ok=True)
    return found


def machine_folder(root: Path, machine: Mapping[str, Any]) -> Path:
    """Return the engine folder of a machine, by its key."""
    short = str(machine["provider"]).removesuffix("ExecutionProvider").lower()
    return root.absolute() / f"{short}-{digest_json(machine)[:16]}"


def model_name(what: Mapping[str, Any]) -> str:
    """Return the name of a model's folder, by its key."""
    return digest_json(what)[:32]


def key_file(key: Mapping[str, Any]) -> bytes:
    """Return the content of a folder's key file."""
    return (json.dumps(key, indent=1, sort_keys=True) + "\n").encode()


def read_key(path: Path) -> Any:
    """Return the key in a folder's key file, or None if it cannot be read."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def engine_root() -> Path:
    """Return the user's engine folder, which may not exist yet. Raises UsageError if there is no such place."""
    return user_folder("engines", FOLDER_VARIABLE)


def machine_key(provider: str, device: Any = None) -> dict[str, Any]:
    """Return what an engine depends on besides its model: device, driver, versions. device: of a plugin."""
    if device is not None:
        packages = installed_versions(*ONNXRUNTIME_FLAVOURS)
        drivers = [driver for driver in (driver_version(), *display_drivers()) if driver is not None]
        return {"provider": provider, **device_facts(device), "drivers": drivers, "packages": packages}
    more = {"amd": amd_versions()} if provider == MIGRAPHX else {}
    return {
        "provider": provider,
        **more,
        "device": cuda_device().get("accelerator"),
        "compute_capability": _compute_capability(),
        "driver": driver_version(),
        "cuda": cuda_device().get("cuda"),
        "tensorrt": tensorrt_version() if provider == TENSORRT else None,
        "packages": installed_versions(*ONNXRUNTIME_FLAVOURS),
    }


def tensorrt_version() -> int | None:
    """Return the version of the library that the provider loads, such as 101500 for 10.15.0; None if not found."""
    name = "nvinfer_10.dll" if sys.platform == "win32" else "libnvinfer.so.10"
    try:
        return int(ctypes.CDLL(name).getInferLibVersion())
    except (OSError, AttributeError):
        return None


def _compute_capability() -> str | None:
    if not cuda_device():
        return None
    import torch

    return ".".join(map(str, torch.cuda.get_device_capability(0)))


def _replaced(value: str, places: Mapping[str, str]) -> str:
    for mark, place in places.items():
        value = value.replace(mark, place)
    return value
