"""An environment as `pip install 'sdflow[bind]'`, or with other extras, makes it: `bind` brings neither torch nor olive-ai,
diffusers or transformers.

It is a virtual environment whose packages are links to those of the tests' own: just those that pyproject.toml's dependencies
and the extras name, and what these need in turn. So it also holds the list in pyproject.toml to be enough.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
FORKED = Path(__file__).with_name("forked_commands.py")
HEAVY = ("torch", "diffusers", "transformers", "olive", "peft", "accelerate", "onnxscript", "huggingface_hub", "PIL")
_KEPT = ("PATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "TMPDIR")


@dataclass(frozen=True)
class LightInstall:
    """python: the interpreter of the environment. folder: where commands run."""

    python: Path
    folder: Path

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`sdflow` with these arguments."""
        return self.start("-P", "-m", "sdflow", *arguments)

    def run_all(self, commands: Sequence[Sequence[str]]) -> list[subprocess.CompletedProcess[str]]:
        """`sdflow` with each of these arguments, one after another, forked from one process that has imported it."""
        done = self.start("-P", str(FORKED), said=json.dumps(commands))
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        return [subprocess.CompletedProcess(command, *each) for command, each in zip(commands, found, strict=True)]

    def start(self, *arguments: str, said: str | None = None) -> subprocess.CompletedProcess[str]:
        """Python with these arguments. said: to its standard input."""
        kept = {name: value for name, value in os.environ.items() if name in _KEPT}
        environment = {**kept, "HOME": str(self.folder), "PYTHONPATH": str(ROOT), "ORT_DISABLE_TELEMETRY": "1"}
        environment["SDFLOW_CACHE"] = "cache"
        return subprocess.run(
            [self.python, *arguments],
            cwd=self.folder,
            env=environment,
            input=said,
            capture_output=True,
            text=True,
            check=False,
        )


def light_install(folder: Path, *extras: str) -> LightInstall:
    """Make it with these extras, and a folder for commands in it."""
    place = folder / "environment"
    venv.create(place, symlinks=True, with_pip=False)
    (packages,) = place.glob("lib/python*/site-packages")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(each for extra in extras for each in project["optional-dependencies"][extra])]
    listed = [Requirement(each) for each in wanted]
    for distribution in _closure([each for each in listed if each.marker is None or each.marker.evaluate()]):
        for name in {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}:
            link = packages / name
            if not link.is_symlink():
                link.symlink_to(Path(str(distribution.locate_file(name))).resolve())
    work = folder / "work"
    work.mkdir()
    return LightInstall(place / "bin" / "python", work)


def _closure(wanted: list[Requirement]) -> Iterator[metadata.Distribution]:
    seen: set[str] = set()
    while wanted:
        requirement = wanted.pop()
        key = requirement.name.lower().replace("_", "-")
        if key in seen:
            continue
        seen.add(key)
        found = _distribution(requirement.name)
        yield found
        extras: list[str] = ["", *requirement.extras]
        for text in found.requires or ():
            more = Requirement(text)
            if more.marker is None or any(more.marker.evaluate({"extra": extra}) for extra in extras):
                wanted.append(more)


def _distribution(name: str) -> Any:
    flavours = ("onnxruntime-gpu", "onnxruntime-directml") if name == "onnxruntime" else ()
    for each in (name, *flavours):
        try:
            return metadata.distribution(each)
        except metadata.PackageNotFoundError:
            continue
    raise AssertionError(f"{name} is not installed in {sys.prefix}")
