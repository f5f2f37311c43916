"""The folders that objects come into from a remote cache, before they are published."""

from __future__ import annotations

import os
from pathlib import Path

from sdflow.store.layout import Layout, remove_tree
from sdflow.store.records import Stored


def written(folder: Path) -> int:
    """Bytes that the files of a folder take on the disk: those that are still to come are holes."""
    return sum(512 * path.stat().st_blocks for path in folder.rglob("*") if path.is_file()) if os.name != "nt" else 0


def incoming(layout: Layout, entry: Stored) -> Path:
    """The folder that an object comes into. It outlives the process, so that the next goes on from there."""
    folder = layout.incoming / entry.object
    if any(not (path.is_dir() or path.is_file()) or path.is_symlink() for path in (folder, *folder.rglob("*"))):
        remove_tree(folder)  # it is not what `bring` left: a pipe, a link to somewhere else
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)  # `gc` removes what nobody went on with for long
    return folder


def settle(folder: Path, files: Path) -> None:
    """Move what has come in to where it is published from."""
    for path in folder.iterdir():
        path.replace(files / path.name)
    remove_tree(folder)
