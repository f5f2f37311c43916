"""Builds of shipped workflows, each made once for a whole run of the tests: many files only want what they leave."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock, Timeout
from started_python import ROOT, Command

import sdflow as package
from sdflow.digest import digest_file, digest_json


@dataclass(frozen=True)
class KeptBuilds:
    """Copies into a folder, as `cache`, the cache that a run of a shipped workflow leaves. Kept in pytest's cache for as long as
    the package is the same.

    root: of this package's. locks: a folder.
    """

    root: Path
    locks: Path
    sdflow: Command

    def __call__(self, workflow: str, out: Path) -> None:
        with self._lock(workflow):  # the other worker of pytest-xdist waits
            if not (self.root / workflow).exists():
                building = self._new(workflow)
                building.mkdir(parents=True)
                file = str(ROOT / f"workflows/{workflow}.yaml")
                done = self.sdflow("run", file, "--no-evaluate", "--no-verify", folder=building)
                assert done.returncode == 0, done.stderr
                self._keep(workflow, building)
        shutil.copytree(self.root / workflow / "cache", out / "cache", symlinks=True, dirs_exist_ok=True)

    def offer(self, workflow: str, folder: Path) -> None:
        """For others, the `cache` of a folder in which a test has just built the workflow, whatever that was for."""
        try:
            with self._lock(workflow).acquire(timeout=0):
                if not (self.root / workflow).exists():
                    building = self._new(workflow)
                    shutil.copytree(folder / "cache", building / "cache", symlinks=True)
                    self._keep(workflow, building)
        except Timeout:  # the other worker builds it
            return

    def _lock(self, workflow: str) -> FileLock:
        return FileLock(self.locks / f"builds-{workflow}")

    def _new(self, workflow: str) -> Path:
        """Where it is to be built. What an earlier package built goes."""
        building = self.root.with_suffix(f".{workflow}")
        for old in self.root.parent.iterdir():
            if old != self.root and old.suffix in ("", building.suffix):
                remove(old)
        return building

    def _keep(self, workflow: str, building: Path) -> None:
        self.root.mkdir(exist_ok=True)
        building.rename(self.root / workflow)


@pytest.fixture(scope="session")
def cache_of(request: pytest.FixtureRequest, sdflow: Command) -> KeptBuilds:
    folder = Path(package.__file__).parent
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    digest = digest_json([digest_file(path) for path in sorted((*files, *ROOT.glob("workflows/*.yaml")))])
    root = request.config.cache.mkdir("builds") / digest
    return KeptBuilds(root, request.config.cache.mkdir("locks"), sdflow)


def remove(folder: Path) -> None:
    """A folder, with the folders in it that may not be written to."""
    for path in (folder, *folder.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)
    shutil.rmtree(folder)


__all__ = ["KeptBuilds", "cache_of"]
