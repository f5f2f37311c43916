"""OpenSSF Model Signing: its own command checks what sdflow signed, and the other way round; nothing is sent anywhere."""

from __future__ import annotations

import datetime
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("model_signing", reason="pip install -e '.[test]'")

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from typer.testing import CliRunner

from sdflow.cli.app import app
from sdflow.config import load_workflow
from sdflow.errors import UsageError, VerificationError, WorkflowError
from sdflow.passes.registry import catalog
from sdflow.run.sign import check_signature, sign_pipeline, signature_of
from sdflow.store import Cache
from sdflow.store.remote import RemoteSpec
from sdflow.store.remote.share import FOLDER
from sdflow.store.remote.trust import signature_path
from sdflow.store.signing import Signer, make_key

from .builds import make_action
from .remote.machines import BUILT


def command(*words: object) -> subprocess.CompletedProcess[str]:
    """`model_signing` itself, as a process."""
    return subprocess.run([sys.executable, "-m", "model_signing", *map(str, words)], capture_output=True, text=True)


@pytest.fixture
def key(tmp_path: Path) -> str:
    return make_key(tmp_path / "key.pem")


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """A pipeline's folder, as a build makes it: a submodel's is a link into the cache."""
    artifact = tmp_path / "cache/objects/files"
    artifact.mkdir(parents=True)
    (artifact / "model.onnx").write_bytes(b"graph")
    (artifact / "model.onnx.data").write_bytes(b"weights")
    folder = tmp_path / "pipelines/fox"
    folder.mkdir(parents=True)
    (folder / "sdflow.json").write_text("{}")
    (folder / "unet").symlink_to(artifact)
    return folder


def copied(pipeline: Path) -> Path:
    """As `--copy` makes it, or `cp -rL`."""
    place = pipeline.parent / "copies" / pipeline.name
    shutil.copytree(pipeline, place, symlinks=False)
    return place


def authority(folder: Path) -> tuple[str, str, str]:
    """Writes root.pem, and leaf.pem with the key leaf.key that it is for."""
    name, until = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")]), datetime.timedelta(days=1)
    now = datetime.datetime.now(datetime.UTC)
    root = ec.generate_private_key(ec.SECP384R1())

    def certificate(of: ec.EllipticCurvePublicKey, subject: x509.Name, *, ca: bool) -> bytes:
        builder = (
            x509.CertificateBuilder(name, subject, of, x509.random_serial_number(), now - until, now + until)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.KeyUsage(not ca, False, False, False, False, ca, ca, False, False), critical=True)
        )
        if not ca:
            builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False)
        return builder.sign(root, hashes.SHA256()).public_bytes(Encoding.PEM)

    leaf = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "signer")])
    (folder / "root.pem").write_bytes(certificate(root.public_key(), name, ca=True))
    (folder / "leaf.pem").write_bytes(certificate(leaf.public_key(), subject, ca=False))
    (folder / "leaf.key").write_bytes(leaf.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return "root.pem", "leaf.pem", "leaf.key"


def test_the_command_verifies_a_pipeline_that_a_key_signed(pipeline: Path, key: str, tmp_path: Path) -> None:
    signature = signature_of(pipeline)
    sign_pipeline(pipeline, signature, Signer(tmp_path / "key.pem"))
    assert check_signature(pipeline, signature, [key]) == key
    copy, public = copied(pipeline), tmp_path / "key.pem.pub"
    done = command("verify", "key", copy, "--signature", signature, "--public_key", public)
    assert done.returncode == 0, done.stdout + done.stderr
    assert check_signature(copy, signature, [str(public)]) == str(public)
    (copy / "unet/model.onnx.data").write_bytes(b"weighty")
    done = command("verify", "key", copy, "--signature", signature, "--public_key", public)
    assert done.returncode != 0
    with pytest.raises(VerificationError, match=r"Hash mismatch for 'unet/model.onnx.data'"):
        check_signature(copy, signature, [key])


def test_what_the_command_signed_is_verified(pipeline: Path, key: str, tmp_path: Path) -> None:
    copy, other = copied(pipeline), make_key(tmp_path / "another.pem")
    for place in (tmp_path / "model.sig", copy / "model.sig"):
        done = command("sign", "key", copy, "--signature", place, "--private_key", tmp_path / "key.pem")
        assert done.returncode == 0, done.stdout + done.stderr
        assert check_signature(copy, place, [other, key]) == key
    assert check_signature(pipeline, tmp_path / "model.sig", [key]) == key, "what it links to is the same"
    with pytest.raises(VerificationError, match="not signed with a trusted key"):
        check_signature(copy, copy / "model.sig", [other])


@pytest.mark.parametrize("change", ["more", "less", "renamed", "linked elsewhere", "a circle"])
def test_a_folder_that_was_changed_is_not_what_was_signed(
    change: str, pipeline: Path, key: str, tmp_path: Path
) -> None:
    sign_pipeline(pipeline, signature_of(pipeline), Signer(tmp_path / "key.pem"))
    match change:
        case "more":
            (pipeline / "unet/more.py").write_text("")
        case "less":
            (pipeline / "sdflow.json").unlink()
        case "renamed":
            (pipeline / "unet").rename(pipeline / "vae")
        case "a circle":
            for name in ("a", "b", "c"):
                (pipeline / name).symlink_to(pipeline)
        case _:
            (pipeline / "unet").unlink()
            (pipeline / "unet").symlink_to(tmp_path)
    with pytest.raises(VerificationError, match="is not valid"):
        check_signature(pipeline, signature_of(pipeline), [key])


def test_a_certificate_signs_and_its_root_is_trusted(pipeline: Path, tmp_path: Path) -> None:
    root, leaf, private = (tmp_path / name for name in authority(tmp_path))
    signature = signature_of(pipeline)
    sign_pipeline(pipeline, signature, Signer(private, leaf))
    copy = copied(pipeline)
    done = command("verify", "certificate", copy, "--signature", signature, "--certificate_chain", root)
    assert done.returncode == 0, done.stdout + done.stderr
    assert check_signature(pipeline, signature, [str(root)]) == str(root)
    (tmp_path / "other").mkdir()
    stranger, *_ = authority(tmp_path / "other")
    with pytest.raises(VerificationError):
        check_signature(pipeline, signature, [str(tmp_path / "other" / stranger)])
    own = tmp_path / "own.sig"
    done = command(
        "sign", "certificate", copy, "--signature", own, "--private_key", private,
        "--signing_certificate", leaf, "--certificate_chain", leaf,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert check_signature(pipeline, own, [str(root)]) == str(root)


def test_an_entry_of_a_remote_is_signed_so_that_the_command_verifies_it(key: str, tmp_path: Path) -> None:
    """And one that nobody signed, the command can sign for those who trust its key."""
    shared = tmp_path / "shared"
    for name, signer in (("signed", Signer(tmp_path / "key.pem")), ("unsigned", None)):
        cache = Cache(tmp_path / "one", remote=RemoteSpec(str(shared), push=True), signer=signer)
        with cache.lease(), cache.staging(make_action(name)) as staging:
            (staging.files / "model.onnx").write_bytes(b"graph")
            cache.offer(staging.publish({}, BUILT))

    def places(name: str) -> tuple[Path, Path]:
        digest = make_action(name).digest
        entry = shared / FOLDER / f"actions/{digest[:2]}/{digest}.json"
        return entry, shared / FOLDER / signature_path(entry.read_bytes())

    entry, signature = places("signed")
    done = command("verify", "key", entry, "--signature", signature, "--public_key", tmp_path / "key.pem.pub")
    assert done.returncode == 0, done.stdout + done.stderr
    reader = Cache(tmp_path / "two", remote=RemoteSpec(str(shared), trust=(key,)))
    assert reader.fetch(make_action("signed")) is not None
    assert reader.fetch(make_action("unsigned")) is None
    entry, signature = places("unsigned")
    assert not signature.exists()
    signature.parent.mkdir(exist_ok=True)
    done = command("sign", "key", entry, "--signature", signature, "--private_key", tmp_path / "key.pem")
    assert done.returncode == 0, done.stdout + done.stderr
    reader = Cache(tmp_path / "two", remote=RemoteSpec(str(shared), trust=(key,)))
    assert reader.fetch(make_action("unsigned")) is not None


OFFLINE = """
import sys
def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        raise RuntimeError(f"the network is used: {event} {arguments}")
sys.addaudithook(refuse)
from pathlib import Path
from sdflow.run.sign import check_signature, sign_pipeline
from sdflow.store.signing import Signer, make_key
folder, key = Path(sys.argv[1]), Path(sys.argv[2])
imported = "model_signing" in sys.modules or "sigstore" in sys.modules
sign_pipeline(folder, key.with_name("x.sig"), Signer(key))
print(imported, "sigstore" in sys.modules, check_signature(folder, key.with_name("x.sig"), [str(key) + ".pub"]))
"""


def test_with_a_key_nothing_uses_the_network(pipeline: Path, key: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, str(pipeline), str(tmp_path / "key.pem")], capture_output=True, text=True
    )
    assert done.stdout.split() == ["False", "True", str(tmp_path / "key.pem.pub")], done.stderr


def test_sigstore_without_a_network_is_an_error_that_says_so(
    pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UsageError, match="cannot be signed: "):
        sign_pipeline(pipeline, tmp_path / "x.sig", Signer(None, identity_token="x"))
    assert not (tmp_path / "x.sig").exists()


@pytest.mark.parametrize("trusted", ["03" + "f" * 64, "nothing.pem", "text.pem", "bad.pem"])
def test_who_is_trusted_by_no_key_is_an_error(trusted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.pem").write_text("no key")
    Path("bad.pem").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    with pytest.raises(UsageError):
        Cache(tmp_path / "c", remote=RemoteSpec("/x", trust=(trusted,)))


def test_a_workflow_names_who_is_trusted(key: str, tmp_path: Path) -> None:
    """Files lie beside the workflow; what is no key is told with its line."""
    path = tmp_path / "workflow.yaml"
    trust = [key, "key.pem.pub", "sigstore:me@example.com https://accounts.example.com"]
    text = "extends: base/tiny.yaml\nmodel: synthetic:sd15-tiny\ntarget: cpu\ncache: {remote: {url: shared.zip, trust: %s}}\n"
    path.write_text(text % trust)
    remote = load_workflow(path, catalog=catalog()).remote
    assert remote is not None
    assert remote.archive == tmp_path / "shared.zip"
    assert remote.trust == (key, str(tmp_path / "key.pem.pub"), *trust[2:])
    for other in ("04" + "0" * 64, "0" * 64):
        path.write_text(text % [other])
        with pytest.raises(WorkflowError, match=r"workflow.yaml:4"):
            load_workflow(path, catalog=catalog())


def test_who_did_not_sign_is_not_asked(
    pipeline: Path, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sigstore takes the network; a bundle with a key cannot be its."""
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("HOME", str(tmp_path))
    sigstore = "sigstore:me@example.com https://accounts.example.com"
    sign_pipeline(pipeline, signature_of(pipeline), Signer(tmp_path / "key.pem"))
    assert check_signature(pipeline, signature_of(pipeline), [sigstore, key]) == key
    root, leaf, private = (tmp_path / name for name in authority(tmp_path))
    sign_pipeline(pipeline, signature_of(pipeline), Signer(private, leaf))
    assert check_signature(pipeline, signature_of(pipeline), [key, sigstore, str(root)]) == str(root)


def test_a_bundle_that_does_not_say_its_key_is_checked_with_each(
    pipeline: Path, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sign_pipeline(pipeline, signature_of(pipeline), Signer(tmp_path / "key.pem"))
    bundle = json.loads(signature_of(pipeline).read_text())
    del bundle["verificationMaterial"]["publicKey"]["hint"]
    signature_of(pipeline).write_text(json.dumps(bundle))
    other = make_key(tmp_path / "another.pem")
    assert check_signature(pipeline, signature_of(pipeline), [other, key]) == key
    with pytest.raises(VerificationError):
        check_signature(pipeline, signature_of(pipeline), [other])
    assert capsys.readouterr().out == "", "output in JSON stays so"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--trust", "key.pem.pub"], "--trust: requires --check"),
        (["--key", "key.pem", "--identity-token", "x"], "--identity-token: requires --sigstore"),
        (["--key", "key.pem", "--trust-config", "x"], "--trust-config: requires --sigstore"),
        (["--certificate", "leaf.pem"], "--certificate: requires --key"),
        (["--check", "--key", "key.pem", "--trust", "key.pem.pub"], "--key: cannot be combined with --check"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(
    words: list[str], says: str, pipeline: Path, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["sign", str(pipeline), *words])
    assert says in str(result.exception)
    assert not signature_of(pipeline).exists()


def test_the_certificate_of_the_environment_goes_with_a_key(
    pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, leaf, private = (tmp_path / name for name in authority(tmp_path))
    monkeypatch.setenv("SDFLOW_SIGNING_CERTIFICATE", str(leaf))
    assert CliRunner().invoke(app, ["sign", str(pipeline), "--key", str(private)]).exit_code == 0
    assert check_signature(pipeline, signature_of(pipeline), [str(root)]) == str(root)
