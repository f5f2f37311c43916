"""A remote that lies: the build is right, nothing is read without end, and it is given up for the run.

Some lies of each sort, about actions or pieces; `tests/campaigns/test_lying_remotes.py` tries all of them about everything.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sdflow.store.remote import RemoteSpec, reading
from sdflow.store.remote.share import Share, Unusable

from .lies import TIMEOUT, Lies, deceived, lying, require_harmless

pytest.importorskip("aiohttp", reason="pip install -e '.[test]'")
CASES = (
    ("endless", "actions"), ("endless", "pieces"), ("endless_chunks", "objects"), ("gzip_bomb", "actions"),
    ("deflate_bomb", "pieces"), ("transfer_compressed", "actions"), ("drip", "actions"), ("dripping_headers", "pieces"),
    ("endless_headers", "actions"), ("endless_hints", "actions"), ("shorter", "pieces"), ("cut_off", "actions"),
    ("redirected_elsewhere", "actions"), ("redirected_elsewhere", "pieces"), ("redirected_to_a_file", "actions"),
    ("redirected_for_ever", "objects"), ("redirected_here", "pieces"), ("replayed", "actions"), ("replayed", "pieces"),
    ("nested", "actions"), ("wide", "objects"), ("endless_error", "actions"), ("honest", "actions"),
)  # fmt: skip
WORDS = {
    "endless": "it is longer than",
    "gzip_bomb": "it compresses a response that was requested uncompressed",
    "redirected_elsewhere": "it redirects to another server (http://localhost",
    "redirected_to_a_file": "it redirects to another server (file:",
    "drip": "no answer for 2 seconds",
    "replayed": "returned wrong content",
}


@pytest.fixture(scope="module")
def lies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lies]:
    with lying(tmp_path_factory.mktemp("lies")) as found:
        yield found


@pytest.fixture(scope="module")
def outcomes(lies: Lies, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """Of all cases, one behind the other in one process, whose memory is that of the worst."""
    return dict(zip(CASES, deceived(lies, tmp_path_factory.mktemp("deceived"), CASES), strict=True))


@pytest.mark.parametrize(("kind", "of"), CASES)
def test_a_lie_costs_neither_the_build_nor_memory(
    kind: str, of: str, outcomes: dict[tuple[str, str], dict[str, Any]], lies: Lies
) -> None:
    found = outcomes[kind, of]
    require_harmless(kind, of, found)
    assert WORDS.get(kind, "") in " ".join(found["told"])
    assert lies.elsewhere == [], "a host that nobody named was asked"


def test_a_lookup_that_drips_takes_no_longer_than_the_timeout_with_all_its_tries(
    outcomes: dict[tuple[str, str], dict[str, Any]],
) -> None:
    """Three tries took three times as long. What is measured beside it is a build without waiting."""
    waited = outcomes["drip", "actions"]["seconds"] - outcomes["honest", "actions"]["seconds"]
    assert waited < 2 * TIMEOUT


@pytest.mark.parametrize("kind", ["endless", "endless_error"])
def test_an_s3_endpoint_that_lies(kind: str, lies: Lies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs", reason="pip install -e '.[test]'")
    for name, value in {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_ENDPOINT_URL": lies.url,
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    (found,) = deceived(lies, tmp_path, [(kind, "actions")], store="s3:/")
    require_harmless(kind, "actions", found)


@pytest.mark.parametrize(
    ("kind", "told"),
    [("endless", "no answer in time|longer than"), ("endless_pages", "it lists more than 3,000 files")],
)
def test_a_listing_of_s3_that_never_ends_is_left(
    kind: str, told: str, lies: Lies, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("s3fs", reason="pip install -e '.[test]'")
    monkeypatch.setattr(reading, "MOST_LISTED", 3000)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "a")
    monkeypatch.setenv("AWS_ENDPOINT_URL", lies.url)
    seconds = 0.1 if kind == "endless" else 20.0
    with pytest.raises(Unusable, match=told):
        list(Share(RemoteSpec(f"s3://{kind}/actions", timeout=seconds)).list("actions"))


def test_over_http_nothing_is_listed(lies: Lies) -> None:
    with pytest.raises(Unusable, match="HTTP does not support listing"):
        list(Share(RemoteSpec(f"{lies.url}/endless/actions")).list("actions"))


def test_a_layer_over_a_store_which_would_read_it_whole_is_refused(lies: Lies, tmp_path: Path) -> None:
    with pytest.raises(Unusable, match="use the store's own URL"):
        Share(RemoteSpec(f"simplecache::{lies.url}/endless/actions")).read("actions/x", 10)


@pytest.mark.parametrize("place", ["a pipe", "a device", "a loop", "a folder"])
def test_what_is_no_file_in_a_shared_folder_is_not_read(place: str, tmp_path: Path) -> None:
    """A pipe would never end."""
    file = tmp_path / "sdflow-v1/actions/x.json"
    file.parent.mkdir(parents=True)
    match place:
        case "a pipe":
            os.mkfifo(file)
        case "a device":
            file.symlink_to("/dev/zero")
        case "a loop":
            file.symlink_to(file)
        case "a folder":
            file.mkdir()
    share = Share(RemoteSpec(str(tmp_path)))
    with pytest.raises(Unusable):
        share.read("actions/x.json", 10)
    assert list(share.list("actions")) == []


def test_a_folder_of_a_share_that_links_above_itself_is_listed_once(tmp_path: Path) -> None:
    folder = tmp_path / "sdflow-v1/actions"
    folder.mkdir(parents=True)
    (folder / "x.json").write_text("x")
    (folder / "up").symlink_to(tmp_path)
    assert [file.path for file in Share(RemoteSpec(str(tmp_path))).list("actions")] == ["actions/x.json"]


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lies, str]]:
    pytest.importorskip("model_signing", reason="pip install -e '.[test]'")
    from sdflow.store.signing import Signer, make_key

    folder = tmp_path_factory.mktemp("signed")
    key = make_key(folder / "key.pem")
    with lying(folder, Signer(folder / "key.pem")) as found:
        yield found, key


def test_a_lie_about_signatures_is_no_signature(signed: tuple[Lies, str], tmp_path: Path) -> None:
    """Those who trust a key build themselves what it has not signed, whatever the remote has in the place of a signature."""
    lies, key = signed
    cases = [
        (kind, "signatures") for kind in ("honest", "endless", "replayed", "shorter", "empty", "nested", "gzip_bomb")
    ]
    cases += [(kind, "actions") for kind in ("honest", "replayed", "flipped")]
    for (kind, of), found in zip(cases, deceived(lies, tmp_path, cases, trust=[key]), strict=True):
        require_harmless(kind, of, found)
    assert lies.elsewhere == []
