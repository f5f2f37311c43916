"""Signatures: of what is pushed, and who is believed."""

from __future__ import annotations

import base64
import json
import stat
from pathlib import Path

import pytest

from sdflow.errors import UsageError
from sdflow.store import Cache
from sdflow.store.records import dump, load
from sdflow.store.remote import RemoteSpec
from sdflow.store.remote.share import FOLDER

from .machines import BUILT, files_of, make_action

pytest.importorskip("model_signing", reason="pip install -e '.[test]'")

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from sdflow.store.remote.trust import signature_path
from sdflow.store.signing import Signer, make_key, signer_from_environment

ACTION = make_action("signed")


@pytest.fixture
def folder(memory_path: Path) -> Path:
    return memory_path


@pytest.fixture
def key(folder: Path) -> str:
    return make_key(folder / "key.pem")


def opened(
    folder: Path, name: str, signer: Signer | None = None, trust: tuple[str, ...] = ()
) -> tuple[Cache, list[str]]:
    told: list[str] = []
    cache = Cache(folder / name, remote=RemoteSpec(str(folder / "shared"), push=True, trust=trust), signer=signer)
    assert cache.remote is not None
    cache.remote.tell = told.append
    return cache, told


def build(cache: Cache, content: bytes = b"content") -> None:
    with cache.lease(), cache.staging(ACTION) as staging:
        (staging.files / "model.onnx").write_bytes(content)
        cache.offer(staging.publish({}, BUILT))


def signature(folder: Path) -> Path:
    """Of the entry."""
    return folder / "shared" / FOLDER / signature_path(entry(folder).read_bytes())


def entry(folder: Path) -> Path:
    (path,) = (folder / "shared" / FOLDER / "actions").rglob("*.json")
    return path


def test_what_a_trusted_key_signed_is_fetched(folder: Path, key: str) -> None:
    build(opened(folder, "one", Signer(folder / "key.pem"))[0])
    other, told = opened(folder, "other", trust=(make_key(folder / "second.pem"), key))
    record = other.fetch(ACTION)
    assert record is not None
    assert files_of(record) == {"model.onnx": b"content"}
    assert told == []


def test_without_trust_a_signature_changes_nothing(folder: Path, key: str) -> None:
    build(opened(folder, "one", Signer(folder / "key.pem"))[0])
    assert opened(folder, "other")[0].fetch(ACTION) is not None


def test_what_nobody_signed_or_somebody_else_is_a_miss_said_once(folder: Path, key: str) -> None:
    make_key(folder / "stranger.pem")
    for signer in (None, Signer(folder / "stranger.pem")):
        build(opened(folder, f"one {signer is None}", signer)[0])
        other, told = opened(folder, f"other {signer is None}", trust=(key,))
        assert other.fetch(ACTION) is None
        assert other.fetch(ACTION) is None
        assert len(told) == 1
        assert "without a trusted signature; they are treated as missing" in told[0]
        entry(folder).unlink()


@pytest.mark.parametrize(
    "what", ["object", "facts", "published", "payload", "hint", "none", "shape", "of another", "no bundle"]
)
def test_a_signature_holds_for_every_field(folder: Path, key: str, what: str) -> None:
    build(opened(folder, "one", Signer(folder / "key.pem"))[0])
    path, signed = entry(folder), signature(folder).read_bytes()
    body, bundle = load(path.read_bytes()), json.loads(signed)
    changes = {"object": "0" * 64, "facts": {"nodes": 1}, "published": 0}
    if what in changes:
        path.write_bytes(dump({**body, what: changes[what]}))
    match what:
        case "payload":
            statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
            statement["predicate"]["resources"][0]["digest"] = "0" * 64
            bundle["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()
        case "hint":
            bundle["verificationMaterial"]["publicKey"]["hint"] = "0" * 64
        case "shape":
            bundle["dsseEnvelope"]["signatures"] = []
        case "of another":
            bundle = json.loads(Signer(folder / "key.pem").signature(b"other"))
        case "no bundle":
            bundle = {"verificationMaterial": [1]}
    signature(folder).parent.mkdir(exist_ok=True)
    signature(folder).write_text(json.dumps(bundle))
    if what == "none":
        signature(folder).unlink()
    other, told = opened(folder, "other", trust=(key,))
    assert other.fetch(ACTION) is None
    assert "without a trusted signature; they are treated as missing" in told[0]


def test_what_is_built_in_its_place_is_signed_and_trusted(folder: Path, key: str) -> None:
    build(opened(folder, "stranger")[0], b"of a stranger")
    mine, _ = opened(folder, "mine", Signer(folder / "key.pem"), (key,))
    assert mine.fetch(ACTION) is None
    build(mine, b"mine")
    record = opened(folder, "third", trust=(key,))[0].fetch(ACTION)
    assert record is not None
    assert files_of(record) == {"model.onnx": b"mine"}


@pytest.mark.parametrize(("trusted", "lost"), [(True, True), (False, True), (False, False)])
def test_what_is_signed_gives_way_to_nothing_unsigned(folder: Path, key: str, trusted: bool, lost: bool) -> None:
    """trusted: here too. lost: its pieces, so that it is built here."""
    build(opened(folder, "one", Signer(folder / "key.pem"))[0])
    signed = entry(folder).read_bytes()
    mine, _ = opened(folder, "mine", trust=(key if trusted else make_key(folder / "another.pem"),))
    for piece in (folder / "shared" / FOLDER / "pieces").rglob("*"):
        if lost and piece.is_file():
            piece.unlink()
    assert mine.fetch(ACTION) is None
    build(mine)
    assert entry(folder).read_bytes() == signed
    record = opened(folder, "third", trust=(key,))[0].fetch(ACTION)
    assert record is not None, "what it lacked was sent"
    assert files_of(record) == {"model.onnx": b"content"}


def test_what_a_trusted_key_signed_gives_way_to_no_other_key(folder: Path, key: str) -> None:
    build(opened(folder, "one", Signer(folder / "key.pem"))[0])
    signed = entry(folder).read_bytes()
    for piece in (folder / "shared" / FOLDER / "pieces").rglob("*"):
        if piece.is_file():
            piece.unlink()
    make_key(folder / "own.pem")
    mine, _ = opened(folder, "mine", Signer(folder / "own.pem"), (key,))
    assert mine.fetch(ACTION) is None
    build(mine)
    assert entry(folder).read_bytes() == signed


def test_what_came_from_elsewhere_is_not_signed_here(folder: Path, key: str) -> None:
    build(opened(folder, "stranger")[0], b"of a stranger")
    mine, _ = opened(folder, "mine", Signer(folder / "key.pem"))
    record = mine.fetch(ACTION)
    assert record is not None
    entry(folder).unlink()
    with mine.lease():
        mine.offer(record)
    assert not signature(folder).exists()
    assert opened(folder, "third", trust=(key,))[0].fetch(ACTION) is None


def test_a_key_is_its_owners_and_overwrites_nothing(folder: Path, key: str) -> None:
    path = folder / "key.pem"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = path.read_bytes()
    with pytest.raises(UsageError, match="cannot be written"):
        make_key(path)
    assert path.read_bytes() == before
    assert Signer(path).public == key


def test_a_key_that_is_none_is_told(folder: Path) -> None:
    (folder / "text").write_text("no key")
    (folder / "ed25519").write_bytes(
        Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    for name, said in (
        ("text", "no unencrypted private key"),
        ("missing", "cannot be read"),
        ("ed25519", "key of another type"),
    ):
        with pytest.raises(UsageError, match=said):
            signer_from_environment({"SDFLOW_SIGNING_KEY": str(folder / name)})
    assert signer_from_environment({}) is None


def test_the_key_stays_here(folder: Path, key: str) -> None:
    build(opened(folder, "one", Signer(folder / "key.pem"))[0])
    secret = "".join((folder / "key.pem").read_text().splitlines()[1:-1])
    for path in folder.rglob("*"):
        if path.is_file() and path.name != "key.pem":
            assert secret.encode() not in path.read_bytes()


def test_without_the_package_trust_is_an_error_and_no_trust_is_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sdflow.machine.packages.missing", lambda *names: names)
    Cache(folder / "c", remote=RemoteSpec("/x"))
    with pytest.raises(UsageError) as told:
        Cache(folder / "c", remote=RemoteSpec("/x", trust=("02" + "0" * 64,)))
    assert told.value.remedy == "pip install 'sdflow[sign]'"
    assert told.value.what.endswith("needs model-signing, pyopenssl, which are not installed")


def test_what_is_there_unsigned_is_signed_by_who_pushes_it_with_a_key(folder: Path, key: str) -> None:
    build(opened(folder, "one")[0])
    assert opened(folder, "two", trust=(key,))[0].fetch(ACTION) is None
    mine, _ = opened(folder, "one", Signer(folder / "key.pem"))
    record = mine.lookup(ACTION)
    assert record is not None and mine.remote is not None
    for results in (1, 0):
        sent = mine.remote.push(record)
        assert sent is not None and (sent.results, sent.bytes) == (results, 0)
    assert opened(folder, "two", trust=(key,))[0].fetch(ACTION) is not None
