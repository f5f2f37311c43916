"""Builds of shipped workflows, each made once for a whole run of the tests: many files only want what they leave."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock
from started_python import ROOT, Command

import sdflow as package
from sdflow.digest import digest_file, digest_json

WorkflowCache = Callable[[str, Path], None]


@pytest.fixture(scope="session")
def cache_of(request: pytest.FixtureRequest, sdflow: Command) -> WorkflowCache:
    """Copies into a folder, as `cache`, the cache that a run of a shipped workflow leaves, without its verification. Kept in
    pytest's cache for as long as the package is the same."""
    folder = Path(package.__file__).parent
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    root = request.config.cache.mkdir("builds") / digest_json(
        [digest_file(path) for path in sorted((*files, *ROOT.glob("workflows/*.yaml")))]
    )

    def copy(workflow: str, out: Path) -> None:
        made = root / workflow
        with FileLock(
            request.config.cache.mkdir("locks") / f"builds-{workflow}"
        ):  # the other worker of pytest-xdist waits
            if not made.exists():
                building = root.with_suffix(f".{workflow}")
                for old in root.parent.iterdir():
                    if old != root and (old.suffix in ("", building.suffix)):
                        remove(old)
                building.mkdir(parents=True)
                done = sdflow(
                    "run", str(ROOT / f"workflows/{workflow}.yaml"), "--no-evaluate", "--no-verify", folder=building
                )
                assert done.returncode == 0, done.stderr
                root.mkdir(exist_ok=True)
                building.rename(made)
        shutil.copytree(made / "cache", out / "cache", symlinks=True, dirs_exist_ok=True)

    return copy


def remove(folder: Path) -> None:
    """A folder, with the folders in it that may not be written to."""
    for path in (folder, *folder.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)
    shutil.rmtree(folder)


__all__ = ["WorkflowCache", "cache_of"]
