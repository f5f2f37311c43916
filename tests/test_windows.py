"""What differs on Windows, as far as this machine shows it: no links, no folder locks, no exchange (docs/windows.md)."""

from __future__ import annotations

import errno
import io
import os
import stat
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from store.builds import make_action, publish

from sdflow.artifact import Artifact
from sdflow.disk.file_stamp import changed_ns, identity
from sdflow.disk.locked_folder import alone_in, locked_folder, remove_if_abandoned, try_lock
from sdflow.errors import CacheError, UsageError
from sdflow.export.schedule import Coefficients
from sdflow.store import Cache
from tests.build.test_assemble import SUBMODELS, artifacts, build, companions, make_artifacts  # noqa: F401

ROOT = Path(__file__).parents[1]
COMPILED = (".so", ".pyd", ".dll", ".dylib", ".exe", ".o")


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A platform of that name, and a file system that has no symbolic links."""

    def refuse(*names: object, **options: object) -> None:
        raise OSError(1314, "A required privilege is not held by the client")

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(os, "symlink", refuse)
    monkeypatch.setattr(Path, "symlink_to", refuse)


@pytest.fixture
def strict(windows: None, monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """What Windows refuses besides, whoever asks: to remove, replace or write a read-only file; to remove, replace or rename what
    a program has open. Given back is the set of paths that are open; an open file holds the folders above it."""
    held: set[Path] = set()
    plain = {name: getattr(os, name) for name in ("unlink", "remove", "rename", "replace")}
    plain_open = io.open

    def refuse(path: object, why: int = 5) -> NoReturn:
        error = OSError(errno.EACCES, "Access is denied" if why == 5 else "used by another process", str(path))
        raise PermissionError(*error.args)

    def is_read_only(path: object, folder: int | None = None) -> bool:
        try:
            found = os.stat(path, dir_fd=folder, follow_symlinks=False)  # type: ignore[arg-type]
        except OSError:
            return False
        return stat.S_ISREG(found.st_mode) and not found.st_mode & stat.S_IWUSR

    def is_held(path: Any) -> bool:
        place = Path(path).absolute()
        return any(place == each or place in each.parents for each in held)

    def unlink(path: Any, *, dir_fd: int | None = None) -> None:
        if is_read_only(path, dir_fd) or (dir_fd is None and is_held(path)):
            refuse(path)
        plain["unlink"](path, dir_fd=dir_fd)

    def moving(name: str) -> Callable[..., None]:
        def move(source: Any, target: Any, **options: Any) -> None:
            if is_held(source) or is_held(target):
                refuse(source, 32)
            if is_read_only(target):
                refuse(target)
            plain[name](source, target, **options)

        return move

    def opening(file: Any, mode: str = "r", *more: Any, **options: Any) -> Any:
        if set(mode) & set("wa+") and not isinstance(file, int) and is_read_only(file):
            refuse(file)
        return plain_open(file, mode, *more, **options)

    for name, instead in (
        ("unlink", unlink),
        ("remove", unlink),
        ("rename", moving("rename")),
        ("replace", moving("replace")),
    ):
        monkeypatch.setattr(os, name, instead)
    monkeypatch.setattr(io, "open", opening)
    monkeypatch.setattr("builtins.open", opening)
    return held


def test_sealed_files_are_written_read_and_removed(strict: set[Path], tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    record = publish(cache, make_action("a"))
    model = record.artifact.path / "model.onnx"
    assert not model.stat().st_mode & stat.S_IWUSR, "it is read-only"
    with pytest.raises(PermissionError):
        model.unlink()
    publish(cache, make_action("b"))
    assert publish(cache, make_action("a")).artifact.digest == record.artifact.digest
    assert cache.verify().objects == 2
    cache.gc(0)
    assert not model.exists()
    assert [path for path in (tmp_path / "cache/v1/trash").rglob("*") if path.is_file()] == []
    publish(cache, make_action("c"))
    cache.clean()
    assert not list((tmp_path / "cache").rglob("model.onnx"))


def test_paths_of_a_cache_are_short_and_do_not_differ_in_case_alone(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    for name in ("a", "A"):
        publish(cache, make_action(name))
    found = [path.relative_to(tmp_path / "cache").as_posix() for path in (tmp_path / "cache").rglob("*")]
    assert len(found) == len({each.casefold() for each in found})
    assert max(map(len, found)) < 130, "with the path of a project, Windows has 260 characters"
    assert not any(set(each) & set('<>:"|?*\\') for each in found)


def test_a_pipeline_that_a_program_has_open_stays_whole_and_that_is_told(
    strict: set[Path],
    tmp_path: Path,
    artifacts: dict[str, Artifact],  # noqa: F811
    companions: dict[str, Path],  # noqa: F811
) -> None:
    out = tmp_path / "pipelines" / "one"
    assert build(out, artifacts, companions)
    strict.add(out / "unet/model.onnx.data")
    with pytest.raises(CacheError, match="the pipeline cannot be written") as told:
        build(out, make_artifacts(tmp_path / "other", b"b"), companions)
    assert "What was there before is unchanged" in str(told.value)
    assert (out / "unet/model.onnx.data").read_bytes()[:1] == b"a"
    assert [path.name for path in out.parent.iterdir()] == ["one"]
    strict.clear()
    assert build(out, make_artifacts(tmp_path / "another", b"b"), companions)


def test_a_file_that_a_program_has_open_keeps_its_content_and_that_is_told(strict: set[Path], tmp_path: Path) -> None:
    table = Coefficients("DDIMScheduler", 1, 0.0, 0, np.zeros(1, np.float32), np.zeros((2, 2), np.float32))
    table.write(tmp_path / "ddim.json")
    before = (tmp_path / "ddim.json").read_bytes()
    strict.add(tmp_path / "ddim.json")
    with pytest.raises(UsageError, match="cannot be written"):
        replace(table, steps=2).write(tmp_path / "ddim.json")
    assert (tmp_path / "ddim.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["ddim.json"], "nothing unfinished is left"


@pytest.mark.usefixtures("windows")
def test_a_file_is_known_by_its_size_and_the_time_of_its_content(tmp_path: Path) -> None:
    """What Linux calls ctime is the time of creation there: it says nothing of a change."""
    (tmp_path / "file").write_bytes(b"1234")
    before = (tmp_path / "file").stat()
    (tmp_path / "file").chmod(0o600)
    (tmp_path / "other").write_bytes(b"12345")
    assert identity((tmp_path / "file").stat()) == identity(before)
    assert identity((tmp_path / "other").stat()) != identity(before)
    assert changed_ns(before) == before.st_mtime_ns


@pytest.mark.usefixtures("windows")
def test_a_pipeline_folder_is_made_of_copies_and_replaced_without_links_locks_or_an_exchange(
    tmp_path: Path,
    artifacts: dict[str, Artifact],  # noqa: F811
    companions: dict[str, Path],  # noqa: F811
) -> None:
    out = tmp_path / "pipelines" / "one"
    assert build(out, artifacts, companions)
    assert not any(path.is_symlink() for path in out.rglob("*"))
    assert {(out / name / "model.onnx").read_bytes()[:1] for name in SUBMODELS} == {b"a"}
    assert not build(out, artifacts, companions), "the same again changes nothing"
    assert build(out, make_artifacts(tmp_path / "other", b"b"), companions)
    assert {(out / name / "model.onnx").read_bytes()[:1] for name in SUBMODELS} == {b"b"}
    assert [path.name for path in out.parent.iterdir()] == ["one"], "nothing is left beside it"


@pytest.mark.usefixtures("windows")
def test_without_locks_nobody_waits_and_nothing_of_anybody_is_taken_for_abandoned(tmp_path: Path) -> None:
    with alone_in(tmp_path), alone_in(tmp_path):
        assert try_lock(tmp_path) is None
    with locked_folder(tmp_path / "mine") as folder:
        assert not remove_if_abandoned(folder)
        assert folder.is_dir()


def require_shipped_workflows(wheel: Path, place: Path) -> None:
    """From the wheel alone, in any folder, a shipped workflow is given by its name."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    command = [sys.executable, "-P", "-m", "sdflow", "validate", "sd15", "--target", "directml"]
    environment = {**os.environ, "PYTHONPATH": str(place)}
    done = subprocess.run(command, cwd=wheel.parent, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "sd15: valid (sd15-directml)\n"), done.stderr


def test_the_wheel_is_pure_python_and_for_every_system(tmp_path: Path) -> None:
    """Built by the backend that pip would call, without the network."""
    build_it = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build_it, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    name = done.stdout.split()[-1]
    require_shipped_workflows(tmp_path / name, tmp_path / "installed")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert name == f"sdflow-{version}-py3-none-any.whl"
    with zipfile.ZipFile(tmp_path / name) as wheel:
        inside = wheel.namelist()
        about = wheel.read(next(each for each in inside if each.endswith(".dist-info/WHEEL"))).decode()
    assert "Root-Is-Purelib: true" in about
    assert about.split("Tag: ")[1].split() == ["py3-none-any"]
    assert not [each for each in inside if each.endswith(COMPILED)]
    folded = [each.casefold() for each in inside]
    assert len(folded) == len(set(folded)), "two names differ in case alone"
    reserved = {"con", "prn", "aux", "nul", *(f"{port}{digit}" for port in ("com", "lpt") for digit in range(1, 10))}
    for each in inside:
        parts = each.split("/")
        assert not {part.casefold().split(".")[0] for part in parts} & reserved, each
        assert not any(part.endswith((".", " ")) or set(part) & set('<>:"|?*\\') for part in parts), each
        assert len(each) < 150, "with the path of an environment, Windows has 260 characters"
