"""A pipe, a socket, a device, a folder or links in a circle in the place of any file of the cache: damage, never a wait."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sdflow.store import Cache

from .builds import make_action, publish

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="has no pipes in folders")
KINDS = ("pipe", "socket", "device", "folder", "circle", "dangling")
ROOT = Path(__file__).parents[2]


def put(kind: str, place: Path) -> None:
    """Something that is no file in the place of a file or a folder."""
    if place.is_dir() and not place.is_symlink():
        for folder, _, _ in os.walk(place):
            Path(folder).chmod(0o755)
        shutil.rmtree(place)
    else:
        if place.parent.is_dir():
            place.parent.chmod(0o755)
        place.unlink(missing_ok=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(place)
        case "socket":
            here = Path.cwd()
            os.chdir(place.parent)  # a socket's path is short
            try:
                with socket.socket(socket.AF_UNIX) as made:
                    made.bind(place.name)
            finally:
                os.chdir(here)
        case "device":
            place.symlink_to("/dev/zero")
        case "folder":
            place.mkdir()
        case "circle":
            place.symlink_to(place.name)
        case "dangling":
            place.symlink_to("nowhere")


def made(folder: Path) -> tuple[Cache, dict[str, Path]]:
    """A cache with everything in it, and the places of its files and folders."""
    cache = Cache(folder / "cache")
    with cache.lease():
        record = publish(cache, make_action())
        cache.notes.remember_step("a/step", make_action())
        pipeline = folder / "pipeline"
        pipeline.mkdir()
        (pipeline / "sdflow.json").write_text("{}")
        cache.note_output_folder(pipeline)
        cache.pin("p", [record.artifact.digest], pipeline)
    cache.stat.close()
    own = folder / "cache/v1"
    entry = record.artifact.path.parent
    return cache, {
        "the tag": folder / "cache/CACHEDIR.TAG",
        "an action": own / f"actions/{make_action().digest[:2]}/{make_action().digest}.json",
        "a folder of actions": own / f"actions/{make_action().digest[:2]}",
        "an object": entry,
        "a manifest": entry / "manifest.json",
        "a file of an object": entry / "files/model.onnx",
        "the files of an object": entry / "files",
        "the files' facts": own / "stat.sqlite",
        "a step": next((own / "steps").glob("*.json")),
        "a pin": next((own / "pins").glob("*.json")),
        "a folder of pipelines": next((own / "outputs").glob("*.json")),
        "a pinned pipeline's sdflow.json": pipeline / "sdflow.json",
        "a lock": own / f"locks/{make_action().digest}.lock",
        "the guard": own / "locks/guard.lock",
        "a lease": own / "leases/1-abc.lock",
        "something in staging": own / "staging/stray",
        "something in the trash": own / "trash/stray",
        "something in quarantine": own / "quarantine/stray",
        "something incoming": own / "incoming/stray",
    }


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_damage_wherever_it_lies(kind: str, memory_path: Path) -> None:
    """Each place in a cache of its own, since one would hide another; all in one process, which would wait for ever at a pipe."""
    folders = {}
    for number, name in enumerate(made(memory_path / "names")[1]):
        folders[name] = memory_path / str(number)
        put(kind, made(folders[name])[1][name])
    done = subprocess.run(
        [sys.executable, "-m", "tests.store.used_cache", *map(str, folders.values())],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )
    outcomes = dict(zip(folders, map(json.loads, done.stdout.splitlines()), strict=False))
    assert done.returncode == 0, f"{kind} for {[*folders][len(outcomes)]}: {done.stderr}"
    for name, said in outcomes.items():
        case = f"{kind} for {name}: {said}"
        if (kind, name) == ("folder", "the tag"):  # what somebody has made there is not ours to remove
            assert str(said["build"]).startswith("CacheError: this folder contains other files (CACHEDIR.TAG)"), case
            continue
        assert said["build"] is said["build again"] is True, case
        assert all(not str(value).startswith(("CacheError", "UsageError")) for value in said.values()), case
        assert said["verify"] == 0, f"what was damaged had been put aside or replaced. {case}"
