"""Who may read what sdflow leaves behind is up to the umask, and to nothing else."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from store.builds import make_action

from sdflow.bench.evaluate import append_result
from sdflow.build.assemble import assemble
from sdflow.disk.atomic_write import replacing_all
from sdflow.manifest import Origin
from sdflow.store import Cache

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a umask is POSIX's")

NOBODY = 65534
"""A user, and a group, that is not that of the tests."""

READ_ALL = textwrap.dedent(
    """
    import os, sys
    os.setgroups([])
    os.setgid(int(sys.argv[1]))
    os.setuid(int(sys.argv[2]))
    count = 0
    def refused(error):
        raise error
    for folder, _, files in os.walk(sys.argv[3], followlinks=True, onerror=refused):
        for name in files:
            count += len(open(os.path.join(folder, name), "rb").read())
    print(count)
    """
)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can enter: pytest's own are private."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    for directory, _, _ in os.walk(folder):
        Path(directory).chmod(0o700)
    shutil.rmtree(folder)


def built(folder: Path, umask: int, *, copy: bool) -> Path:
    """A pipeline whose artifacts a cache has, made under a umask. Its pass writes one file as `tempfile` makes them."""
    before = os.umask(umask)
    try:
        cache = Cache(folder / "cache")
        parts = {}
        for submodel in ("text_encoder", "unet", "vae_decoder"):
            action = make_action(submodel)
            with cache.staging(action) as staging:
                for name in ("model.onnx", "config.json"):
                    (staging.files / name).write_bytes(submodel.encode())
                descriptor, private = tempfile.mkstemp(dir=staging.files)
                os.close(descriptor)
                Path(private).write_bytes(b"weights")
                Path(private).rename(staging.files / "model.onnx.data")
                (staging.files / "more").mkdir(mode=0o700)
                (staging.files / "more" / "notes").write_text("more")
                parts[submodel] = staging.publish({}, {}).artifact
        tokenizer = folder / "checkpoint" / "tokenizer"
        tokenizer.mkdir(parents=True)
        (tokenizer / "vocab.json").write_text("{}")
        (tokenizer / "vocab.json").chmod(0o600)  # that the checkpoint is private makes no copy of it so
        out = folder / "pipelines" / "one"
        made = assemble(
            out,
            parts=parts,
            companions={"tokenizer": tokenizer},
            origin=Origin("one", "cpu"),
            copy=copy,
            keeper=cache,
        )
    finally:
        os.umask(before)
    assert made.changed
    return out


def reached(folder: Path) -> Iterator[Path]:
    """The folder and all below it, through links, and every folder on the way."""
    for directory, _, files in os.walk(folder, followlinks=True):
        place = Path(directory).resolve()
        yield from (place, *place.parents[: len(place.parents) - len(Path(tempfile.gettempdir()).parts)])
        yield from (place / name for name in files)


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077, 0o002])
def test_a_pipeline_is_readable_as_the_umask_says(open_folder: Path, umask: int, copy: bool) -> None:
    out = built(open_folder, umask, copy=copy)
    for path in {*reached(out)} - {open_folder}:
        mode = stat.S_IMODE(path.stat().st_mode)
        wanted = 0o555 if path.is_dir() else 0o444
        assert mode & 0o555 == wanted & ~umask, f"{path} is {mode:o}"
        assert mode & umask == 0, f"{path} is {mode:o}"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize(
    ("umask", "group", "may"),
    [(0o022, NOBODY, True), (0o027, 0, True), (0o027, NOBODY, False), (0o077, 0, False)],
)
def test_another_user_reads_a_pipeline_where_the_umask_lets_them(
    open_folder: Path, umask: int, group: int, may: bool, copy: bool
) -> None:
    out = built(open_folder, umask, copy=copy)
    command = [sys.executable, "-c", READ_ALL, str(group), str(NOBODY), str(out)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if may:
        assert found.returncode == 0, found.stderr
        assert int(found.stdout) > 100
    else:
        assert "PermissionError" in found.stderr


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o077])
def test_results_and_exports_are_readable_as_the_umask_says(tmp_path: Path, umask: int) -> None:
    class Result:
        def to_json(self) -> dict[str, int]:
            return {"steps": 1}

    before = os.umask(umask)
    try:
        append_result(tmp_path / "results" / "one.jsonl", Result())  # type: ignore[arg-type]
        exported = tmp_path / "exports" / "one.onnx"
        with replacing_all([exported]) as written:
            written[exported].write_bytes(b"graph")
    finally:
        os.umask(before)
    for path in (tmp_path / "results" / "one.jsonl", exported):
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o777 & ~umask


def test_what_is_only_scratch_stays_private(tmp_path: Path) -> None:
    from sdflow.disk.locked_folder import scratch_folder

    with scratch_folder("test", tmp_path) as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
