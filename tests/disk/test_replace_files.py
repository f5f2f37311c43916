"""Files that belong together are all new, or all as they were."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from sdflow.disk.atomic_write import replacing_all

NAMES = ("graph", "weights", "told")


def write(folder: Path, text: str, names: tuple[str, ...] = NAMES) -> None:
    with replacing_all([folder / name for name in names]) as written:
        for path in written.values():
            path.write_text(text)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_they_take_the_places_of_the_old_ones(tmp_path: Path) -> None:
    write(tmp_path / "deep/er", "old", NAMES[:2])
    write(tmp_path / "deep/er", "new")
    assert contents(tmp_path / "deep/er") == dict.fromkeys(NAMES, "new")


def test_a_failure_before_the_end_leaves_the_old_ones(tmp_path: Path) -> None:
    write(tmp_path, "old", NAMES[:2])
    with pytest.raises(RuntimeError), replacing_all([tmp_path / name for name in NAMES]) as written:
        written[tmp_path / "graph"].write_text("new")
        raise RuntimeError
    assert contents(tmp_path) == dict.fromkeys(NAMES[:2], "old")


def test_a_failure_leaves_no_folder_that_was_made(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), replacing_all([tmp_path / "deep/er" / name for name in NAMES]):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failing", range(2 * len(NAMES)))
def test_a_failure_while_they_are_exchanged_leaves_the_old_ones(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows refuses to move a file that another program has open. The second one was not there before."""
    write(tmp_path, "old", ("graph", "told"))
    rename, count = Path.rename, 0

    def refused(self: Path, target: Path) -> Path:
        nonlocal count
        count += 1
        if count == failing:
            raise PermissionError(13, "it is open", str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refused)
    if failing == 0:
        write(tmp_path, "new")
        assert contents(tmp_path) == dict.fromkeys(NAMES, "new")
        return
    with pytest.raises(PermissionError):
        write(tmp_path, "new")
    assert contents(tmp_path) == dict.fromkeys(("graph", "told"), "old")


def test_without_the_one_that_names_them_nobody_finds_a_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every moment of the exchange: a process that is killed then leaves what is there."""
    write(tmp_path, "old")
    rename = Path.rename
    seen: list[set[str]] = []

    def looked_at(self: Path, target: Path) -> Path:
        found = rename(self, target)
        seen.append({path.read_text() for path in map(tmp_path.joinpath, NAMES) if path.exists()})
        assert len(seen[-1]) == 1 or not (tmp_path / "graph").exists()
        return found

    monkeypatch.setattr(Path, "rename", looked_at)
    write(tmp_path, "new")
    assert len(seen) == 2 * len(NAMES)
    assert seen[-1] == {"new"}


def test_what_is_a_folder_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    with pytest.raises(IsADirectoryError) as found:
        write(tmp_path, "new")
    assert found.value.filename == str(tmp_path / "weights")
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]


def test_of_many_at_once_one_ones_files_stay(tmp_path: Path) -> None:
    threads = [threading.Thread(target=write, args=(tmp_path, str(number))) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = contents(tmp_path)
    assert sorted(found) == sorted(NAMES)
    assert len(set(found.values())) == 1
