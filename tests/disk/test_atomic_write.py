"""A file is whole: the old content or the new."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdflow.disk.atomic_write import replacing, write_whole


@pytest.mark.parametrize("durable", [False, True])
def test_new_content_takes_the_place_of_the_old(durable: bool, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    write_whole(path, b"old", durable=durable)
    write_whole(path, b"new", durable=durable)
    assert path.read_bytes() == b"new"
    assert list(path.parent.iterdir()) == [path]


def test_a_reader_finds_the_old_content_until_the_new_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with replacing(path) as temporary:
        temporary.write_bytes(b"half of the ne")
        assert path.read_bytes() == b"old"
        temporary.write_bytes(b"new")
    assert path.read_bytes() == b"new"


def test_a_failure_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError), replacing(path, durable=True) as temporary:
        temporary.write_bytes(b"half of the ne")
        raise RuntimeError
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_it_is_written_in_the_folder_that_is_named(tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    staging.mkdir()
    with replacing(tmp_path / "out" / "file", staging=staging) as temporary:
        temporary.write_bytes(b"new")
        assert list(staging.iterdir()) == [temporary]
    assert (tmp_path / "out" / "file").read_bytes() == b"new"
    assert not list(staging.iterdir())
