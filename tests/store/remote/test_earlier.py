"""What earlier releases wrote still reads: a cache, a remote with its signatures and claims, and an archive.

`tests/data/earlier_entries.zip` was written by sdflow before entries were signed by OpenSSF Model Signing: two actions (`signed`,
`unsigned`) in a remote, the first also in a cache, two structures in an archive, and the Ed25519 key that signed.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from sdflow.errors import UsageError
from sdflow.run.structures import import_structures
from sdflow.store import Cache
from sdflow.store.remote import Claim, RemoteSpec

from ..builds import contents, make_action
from .machines import files_of

DATA = Path(__file__).parents[2] / "data/earlier_entries.zip"
SIGNED, UNSIGNED = make_action("signed"), make_action("unsigned")


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    with zipfile.ZipFile(DATA) as archive:
        archive.extractall(tmp_path)
    return tmp_path


def opened(earlier: Path, *trust: str, name: str = "mine") -> tuple[Cache, list[str]]:
    told: list[str] = []
    cache = Cache(earlier / name, remote=RemoteSpec(str(earlier / "remote"), trust=trust))
    assert cache.remote is not None
    cache.remote.tell = told.append
    return cache, told


def test_an_earlier_cache_has_its_hits(earlier: Path) -> None:
    cache = Cache(earlier / "cache")
    record = cache.lookup(SIGNED)
    assert record is not None
    assert files_of(record) == contents(SIGNED, 2000)
    assert cache.verify().damaged == ()


def test_an_earlier_remote_is_fetched_from(earlier: Path) -> None:
    cache, told = opened(earlier)
    for action in (SIGNED, UNSIGNED):
        record = cache.fetch(action)
        assert record is not None
        assert files_of(record) == contents(action, 2000)
    assert told == []


def test_an_earlier_signature_and_claim_are_believed(earlier: Path) -> None:
    key = (earlier / "public_key").read_text()
    pytest.importorskip("cryptography", reason="pip install -e '.[test]'")
    cache, _ = opened(earlier, key)
    record = cache.fetch(SIGNED)
    assert record is not None
    assert cache.fetch(UNSIGNED) is None
    assert cache.remote is not None
    (said,) = cache.remote.claims([record.artifact.digest])[record.artifact.digest]
    assert said == Claim("full", "cuda", {"torch": "2.13.0"}, key, True)
    theirs, _ = opened(earlier, "0" * 64, name="theirs")
    assert theirs.fetch(SIGNED) is None


def test_an_earlier_archive_is_imported(earlier: Path) -> None:
    cache = Cache(earlier / "imported")
    found = import_structures(earlier / "structures.sdflow", cache)
    assert len(found.new) == 2
    assert [files_of(record)["model.onnx"] for record in found.new] == [b"graph" * 40] * 2
    assert cache.notes.imported_architectures() == [{"config": {"_class_name": "UNet"}, "defaults": {}}]
    assert not import_structures(earlier / "structures.sdflow", cache).new


@pytest.mark.parametrize("cut", [100, 1000])
def test_an_earlier_archive_that_is_cut_short_is_rejected(earlier: Path, cut: int) -> None:
    path = earlier / "structures.sdflow"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(UsageError, match="damaged"):
        import_structures(path, Cache(earlier / "imported"))
    assert Cache(earlier / "imported").entries() == []
