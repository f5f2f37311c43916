"""Who says to have verified what a remote has: written by who did, shown to others, and nothing that a build rests on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sdflow.store import Cache
from sdflow.store.records import BadRecord, dump
from sdflow.store.remote import Claim, RemoteSpec, catalog
from sdflow.store.remote.share import FOLDER
from sdflow.store.remote.trust import claims, read_claim
from sdflow.store.signing import Signer, Untrusted, make_key

from .machines import Machine, make_action

pytest.importorskip("model_signing", reason="pip install -e '.[test]'")

SAID = Claim("full", "cuda", {"onnxruntime": "1.31.1", "torch": "2.13.0"})


def opened(folder: Path, signer: Signer | None = None, trust: tuple[str, ...] = ()) -> Cache:
    cache = Cache(folder / "other", remote=RemoteSpec(str(folder / "shared"), push=True, trust=trust), signer=signer)
    assert cache.remote is not None
    return cache


def files(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "shared" / FOLDER / "verified").rglob("*") if path.is_file())


def test_what_one_verified_another_is_told_with_its_versions_and_key(tmp_path: Path) -> None:
    key = make_key(tmp_path / "key.pem")
    record = Machine(tmp_path / "one", str(tmp_path / "shared")).build(make_action())
    digest = record.artifact.digest
    for signer in (Signer(tmp_path / "key.pem"), None):
        for _ in range(2):
            cache = opened(tmp_path, signer)
            assert cache.remote is not None
            cache.remote.vouch([digest], SAID)
    assert len(files(tmp_path)) == 3, "what is said already is not said again; one is signed"
    for trust in ((), (key,)):
        remote = opened(tmp_path, trust=trust).remote
        assert remote is not None
        told = remote.claims([digest, "0" * 64])
        assert list(told) == [digest]
        signed, unsigned = sorted(told[digest], key=lambda said: said.key is None)
        assert unsigned == SAID
        assert signed == Claim("full", "cuda", SAID.versions, key, bool(trust))
        assert "onnxruntime 1.31.1, torch 2.13.0" in signed.words
        assert ("does not trust" in signed.words) is not bool(trust)


def test_who_does_not_push_says_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "one", str(tmp_path / "shared"), push=False)
    machine.remote.vouch(["0" * 64], SAID)
    assert not (tmp_path / "shared").exists()


def test_a_claim_that_was_altered_or_is_none_is_not_shown(tmp_path: Path) -> None:
    make_key(tmp_path / "key.pem")
    remote = opened(tmp_path, Signer(tmp_path / "key.pem")).remote
    assert remote is not None
    remote.vouch(["0" * 64], SAID)
    path, signature = files(tmp_path)
    data, signed = path.read_bytes(), signature.read_bytes()
    body = {**json.loads(data)["record"], "target": "directml"}
    with pytest.raises(Untrusted):
        read_claim(dump(body), signed, "0" * 64, ())
    with pytest.raises(Untrusted):
        read_claim(data, None, "0" * 64, ())
    with pytest.raises(BadRecord):
        read_claim(data, signed, "1" * 64, ())
    for wrong in ({**body, "level": "\x1b[2J"}, {**body, "versions": [1]}, {**body, "target": None}):
        with pytest.raises(BadRecord):
            read_claim(dump(wrong), None, "0" * 64, ())
    path.write_bytes(data[:-9])
    assert claims(remote.share, (), ["0" * 64]) == {}


def test_gc_removes_claims_of_what_is_gone(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "one", str(tmp_path / "shared"))
    kept = machine.build(make_action()).artifact.digest
    machine.remote.vouch([kept, "0" * 64], SAID)
    catalog.sweep(machine.remote.share, 3600.0)
    assert len(files(tmp_path)) == 2, "an object that belongs to it may be on its way"
    catalog.sweep(machine.remote.share, 30 * 24 * 3600.0)
    assert len(files(tmp_path)) == 2
    import os
    import time

    for path in files(tmp_path):
        os.utime(path, (0, time.time() - 40 * 24 * 3600))
    catalog.sweep(machine.remote.share, 30 * 24 * 3600.0)
    assert [path.name.partition(".")[0] for path in files(tmp_path)] == [kept]


@pytest.mark.parametrize("lacking", [False, True])
def test_a_claim_that_cannot_be_checked_is_left_out(
    tmp_path: Path, lacking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a key that is no point of its curve, or without the packages that check it."""
    make_key(tmp_path / "key.pem")
    signer = Signer(tmp_path / "key.pem")
    for each in (signer, None):
        remote = opened(tmp_path, each).remote
        assert remote is not None
        remote.vouch(["0" * 64], SAID)
    data = dump({"object": "0" * 64, "level": "q", "target": "cpu", "versions": {}, "key": "02" + "ff" * 32})
    path = f"verified/00/{'0' * 64}.{'1' * 16}.json"
    remote.share.write(path, data)
    remote.share.write(f"{path}.sig", signer.signature(data))
    if lacking:
        monkeypatch.setattr("sdflow.store.remote.trust.missing", lambda *names: names)
    (told,) = claims(remote.share, (), ["0" * 64]).values()
    assert {said.key for said in told} == ({None} if lacking else {None, signer.public})
