"""Nothing of what a registry sends is taken on trust: what is wrong never lands, and every pull ends, in words, soon, and with
little in memory."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sdflow.errors import SdflowError
from sdflow.oci import parse_oci, pull
from sdflow.oci.session import Limits
from sdflow.sources import PlainDigests
from tests.oci.lying_registry import Handler, LyingRegistry, serving
from tests.oci.pipelines import content_of, make_pipeline

LIMITS = Limits(seconds=0.5, answer=1, manifest=100_000, other=10_000, rate=1000, window=0.5)
LONGEST = 10
"""Seconds."""
MOST = 64 << 20
"""Bytes that a registry may get rid of before it is given up."""
WEIGHTS = 20_000


@pytest.fixture(scope="module")
def fox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pipeline(tmp_path_factory.mktemp("pushed"))


@pytest.fixture
def registry(fox: Path) -> Iterator[LyingRegistry]:
    with serving(LyingRegistry.of(fox)) as running:
        yield running


@pytest.fixture(params=["nothing there", "another pipeline there"])
def out(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Where it is pulled to."""
    if request.param == "nothing there":
        return tmp_path / "pipelines" / "fox"
    return make_pipeline(tmp_path, unet=b"mine")


def tried(registry: LyingRegistry, out: Path, reference: str = ":1") -> str:
    """What a pull says that does not succeed. Nothing has changed, and nothing is left."""
    before = content_of(out) if out.exists() else None
    begun = time.monotonic()
    with pytest.raises(SdflowError) as raised:
        pull(parse_oci(f"oci://{registry.host}/fox{reference}"), out, PlainDigests(), limits=LIMITS)
    assert time.monotonic() - begun < LONGEST
    assert registry.sent < MOST
    assert (content_of(out) if out.exists() else None) == before
    assert {path.name for path in out.parent.iterdir()} <= {out.name} if out.parent.exists() else True
    assert any(each in str(raised.value) for each in (registry.host, "are free"))
    assert len(str(raised.value)) < 1500
    return str(raised.value)


def test_an_honest_one_is_pulled_from(registry: LyingRegistry, fox: Path, out: Path) -> None:
    pull(parse_oci(f"oci://{registry.host}/fox:1"), out, PlainDigests(), limits=LIMITS)
    assert content_of(out) == content_of(fox)


# Bodies


def weights_of(registry: LyingRegistry) -> str:
    """The digest of the UNet's weights."""
    return next(digest for digest, content in registry.blobs.items() if content.startswith(b"basebase"))


def endless(handler: Handler) -> None:
    handler.begin({"Transfer-Encoding": "chunked"})
    block = b"x" * 65536
    while True:
        handler.put(b"10000\r\n" + block + b"\r\n")


def drip(handler: Handler) -> None:
    handler.begin({"Content-Length": str(WEIGHTS)})
    for _ in range(WEIGHTS):
        handler.put(b"x")
        time.sleep(0.05)


def dripping_headers(handler: Handler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        handler.wfile.write(b"X-More: yes\r\n")
        time.sleep(0.1)


def endless_header(handler: Handler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-More: ")
    while True:
        handler.put(b"x" * 65536)


def bomb(handler: Handler) -> None:
    handler.send(gzip.compress(bytes(WEIGHTS)), {"Content-Encoding": "gzip"})


def redirect(where: str) -> Callable[[Handler], None]:
    def send(handler: Handler) -> None:
        handler.send(b"", {"Location": where.format(path=handler.path)}, status=307)

    return send


def endless_redirect(handler: Handler) -> None:
    handler.begin({"Location": handler.path, "Transfer-Encoding": "chunked"}, status=302)
    while True:
        handler.put(b"10000\r\n" + b"x" * 65536 + b"\r\n")


BODIES: dict[str, tuple[Callable[[Handler], None], str]] = {
    "wrong bytes": (lambda handler: handler.send(b"y" * WEIGHTS), "has the digest"),
    "one wrong byte": (lambda handler: handler.send(b"base" * 4999 + b"bask"), "has the digest"),
    "too short": (lambda handler: handler.send(b"base" * 4999), "ends after 19,996 of its 20,000 bytes"),
    "empty": (lambda handler: handler.send(b""), "ends after 0 of its"),
    "too long": (lambda handler: handler.send(b"base" * 5001), "longer than its 20,000 bytes"),
    "endless": (endless, "longer than its 20,000 bytes"),
    "drips": (drip, "too slow|was not received"),
    "dripping headers": (dripping_headers, "no answer within 1 seconds"),
    "an endless header": (endless_header, "line|no answer"),
    "compressed": (bomb, "compresses a response that was requested uncompressed"),
    "redirected in a circle": (redirect("{path}"), "redirects more than 5 times"),
    "redirected to a file": (redirect("file:///etc/passwd"), "was not received|cannot be reached"),
    "redirected to nowhere": (redirect("http://127.0.0.1:1/x"), "was not received|cannot be reached"),
    "redirected without end": (endless_redirect, "redirects more than 5 times"),
    "a login page": (lambda handler: handler.send(b"<html>log in</html>", {"Content-Type": "text/html"}), "ends after"),
    "an error without end": (
        lambda handler: (handler.begin({"Connection": "close"}, 500), [handler.put(b"x" * 65536) for _ in range(10**6)])[0],
        "longer than 10,000 bytes",
    ),
    "gone": (lambda handler: handler.send(b"", status=404), "is not there .status 404"),
    "no HTTP": (lambda handler: (handler.wfile.write(b"SSH-2.0-OpenSSH\r\n"), handler.cut())[1], "was not received|reached"),
    "silence": (lambda handler: time.sleep(2), "was not received|cannot be reached"),
}  # fmt: skip


@pytest.mark.parametrize("lie", BODIES)
def test_a_blob_that_is_not_what_it_should_be(registry: LyingRegistry, tmp_path: Path, lie: str) -> None:
    send, says = BODIES[lie]
    weights = weights_of(registry)

    def answer(handler: Handler) -> bool:
        if not handler.path.endswith(weights):
            return False
        send(handler)
        return True

    registry.answer = answer
    message = tried(registry, tmp_path / "pipelines" / "fox")
    assert any(each in message for each in says.split("|")) or "status 404" in message, message


@pytest.mark.parametrize("lie", ["wrong bytes", "endless", "dripping headers", "compressed"])
def test_a_lie_leaves_another_pipeline_as_it_was(registry: LyingRegistry, tmp_path: Path, lie: str) -> None:
    there = make_pipeline(tmp_path, unet=b"mine")
    registry.answer = lambda handler: handler.path.endswith(weights_of(registry)) and (BODIES[lie][0](handler), True)[1]
    tried(registry, there)


@pytest.mark.parametrize("times", [1, 2, 9])
def test_a_transfer_that_breaks_off_is_gone_on_with(registry: LyingRegistry, tmp_path: Path, times: int) -> None:
    weights, left, ranges = weights_of(registry), [times], []

    def answer(handler: Handler) -> bool:
        if not handler.path.endswith(weights):
            return False
        content = registry.blobs[weights]
        ranges.append(begins := int((handler.headers.get("Range") or "bytes=0-")[6:-1]))
        handler.begin({"Content-Length": str(len(content) - begins)}, 206 if begins else 200)
        if left[0] == 0:
            handler.put(content[begins:])
            return True
        left[0] -= 1
        handler.put(content[begins : begins + 5000])
        handler.cut()
        return True

    registry.answer = answer
    if times > 2:
        assert "was not received" in tried(registry, tmp_path / "fox")
        assert ranges == [0, 5000, 10000]
    else:
        pull(parse_oci(f"oci://{registry.host}/fox:1"), tmp_path / "fox", PlainDigests(), limits=LIMITS)
        assert ranges == [0, 5000, 10000][: times + 1]


# Manifests


def changed(registry: LyingRegistry, change: Callable[[dict[str, Any]], Any]) -> None:
    manifest = json.loads(registry.manifest)
    changed = change(manifest)
    registry.manifest = json.dumps(manifest if changed is None else changed).encode()


def layer(manifest: dict[str, Any], name: str = "unet/config.json") -> dict[str, Any]:
    return next(each for each in manifest["layers"] if each["annotations"]["org.cncf.model.filepath"] == name)


def named(name: str) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        layer(manifest)["annotations"]["org.cncf.model.filepath"] = name

    return change


def with_layer(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: layer(manifest).update(fields)


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    **{
        f"a file {name[:20]!r}": (named(name), "not a file of a pipeline")
        for name in (
            "../evil", "/etc/evil", "unet/../../evil", "..", ".", "", "unet//x", "unet/./x", "C:\\evil", "C:evil", "a\\..\\b",
            "unet/\0", "x" * 300, "y/" * 600 + "y", "//host/share/x", "unet/",
        )
    },
    "no name": (with_layer(annotations={}), "not a file of a pipeline"),
    "two of a name": (named("unet/model.onnx"), "two layers are for"),
    "two but for case": (named("unet/MODEL.onnx"), "two layers are for"),
    "a file for a folder": (named("unet"), "two layers are for"),
    "a file in a file": (named("sdflow.json/x"), "two layers are for"),
    "an archive": (with_layer(mediaType="application/vnd.cncf.model.weight.v1.tar"), "which sdflow does not read"),
    "a negative size": (with_layer(size=-1), "layers"),
    "a size in words": (with_layer(size="17"), "layers"),
    "a size that is true": (with_layer(size=True), "layers"),
    "a size in parts": (with_layer(size=1.5), "layers"),
    "more than fits": (with_layer(size=1 << 43), "are free"),
    "more than anything": (with_layer(size=1 << 70), "layers|not a JSON number"),
    "another algorithm": (with_layer(digest="md5:d41d8cd98f00b204e9800998ecf8427e"), "digest"),
    "a digest with a path": (with_layer(digest="sha256:../../../etc"), "digest"),
    "upper case": (with_layer(digest="sha256:" + "A" * 64), "digest"),
    "annotations of numbers": (with_layer(annotations={"org.cncf.model.filepath": 1}), "annotations"),
    "no layers": (lambda m: m.update(layers=[]), "no sdflow.json"),
    "layers that are none": (lambda m: m.update(layers={"a": 1}), "layers"),
    "no sdflow.json": (lambda m: m["layers"].remove(layer(m, "sdflow.json")), "no sdflow.json"),
    "no weights": (lambda m: m["layers"].remove(layer(m, "unet/model.onnx.data")), "it lacks unet/model.onnx.data"),
    "weights of another submodel": (
        lambda m: layer(m, "unet/model.onnx.data").update(digest=layer(m, "vae_decoder/model.onnx.data")["digest"], size=15000),
        "it has another unet/model.onnx.data",
    ),
    "another file": (
        lambda m: m["layers"].append(
            layer(m) | {"annotations": {"org.cncf.model.filepath": "README.md"}}
        ),
        "it has README.md, which its sdflow.json does not name",
    ),
    "no tokenizer": (lambda m: m["layers"].remove(layer(m, "tokenizer/vocab.json")), "it lacks tokenizer/vocab.json"),
    "a container image": (lambda m: m.update(artifactType="application/vnd.oci.image.config.v1+json"), "not a ModelPack model"),
    "an index": (lambda m: {"schemaVersion": 2, "manifests": []}, "not a model manifest"),
    "the first version": (lambda m: m.update(schemaVersion=1), "schemaVersion"),
    "a list": (lambda m: [m], "not a model manifest"),
    "thousands of layers": (lambda m: m.update(layers=[{}] * 11_000), "layers"),
}  # fmt: skip


@pytest.mark.parametrize("lie", MANIFESTS)
def test_a_manifest_that_lies(registry: LyingRegistry, tmp_path: Path, lie: str) -> None:
    change, says = MANIFESTS[lie]
    changed(registry, change)
    message = tried(registry, tmp_path / "pipelines" / "fox")
    assert any(each in message for each in says.split("|")), message
    assert not (tmp_path / "evil").exists() and not (tmp_path / "pipelines" / "evil").exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not a manifest"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 50_000, "nested too deeply"),
        (b'{"a": NaN}', "not a JSON number"),
        (b"<html>", "not a manifest"),
        (b" " * 200_000, "longer than 100,000 bytes"),
    ],
    ids=lambda value: repr(value[:8]),
)
def test_what_is_no_manifest(registry: LyingRegistry, tmp_path: Path, content: bytes, says: str) -> None:
    registry.manifest = content
    assert says in tried(registry, tmp_path / "fox")


def test_a_manifest_without_end(registry: LyingRegistry, tmp_path: Path) -> None:
    registry.answer = lambda handler: (endless(handler), True)[1]
    assert "longer than 100,000 bytes" in tried(registry, tmp_path / "fox")


def test_a_tag_that_was_rolled_back_is_found_by_the_digest(registry: LyingRegistry, tmp_path: Path, fox: Path) -> None:
    wanted = registry.digest
    older = LyingRegistry.of(make_pipeline(tmp_path / "old", unet=b"aged"))
    registry.manifest, registry.blobs = older.manifest, {**older.blobs}
    message = tried(registry, tmp_path / "out" / "fox", f"@{wanted}")
    assert "sent another manifest" in message and wanted in message
    assert "sent another manifest" in tried(registry, tmp_path / "out" / "fox", f":1@{wanted}")


def test_a_manifest_that_is_not_what_its_header_says(registry: LyingRegistry, tmp_path: Path) -> None:
    named = {"Docker-Content-Digest": "sha256:" + "0" * 64}
    registry.answer = lambda handler: (
        "/manifests/" in handler.path and (handler.send(registry.manifest, named), True)[1]
    )
    assert "sent another manifest" in tried(registry, tmp_path / "fox")


# Credentials


@pytest.mark.parametrize(
    "challenge",
    [
        "", "Bearer", "Basic", 'Bearer realm="x"', 'Bearer realm="http://127.0.0.1:1/token",service="s"', "Negotiate",
        'Bearer realm="{here}/list"', 'Bearer realm="{here}/endless"', 'Bearer realm="file:///etc/passwd"', "x" * 60_000,
    ],
    ids=lambda value: value[:30],
)  # fmt: skip
def test_credentials_that_cannot_be_given(registry: LyingRegistry, tmp_path: Path, challenge: str) -> None:
    here = f"http://{registry.host}"

    def answer(handler: Handler) -> bool:
        if handler.path.startswith("/list"):
            handler.send(b"[1]")
        elif handler.path.startswith("/endless"):
            endless(handler)
        else:
            handler.send(b"", {"Www-Authenticate": challenge.format(here=here)}, 401)
        return True

    registry.answer = answer
    tried(registry, tmp_path / "fox")


def test_a_redirect_to_another_host_takes_no_credentials_along(
    registry: LyingRegistry, fox: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docker").mkdir()
    config = {"auths": {registry.host: {"auth": "Zm94OnJlZA=="}}}
    (tmp_path / "docker" / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    with serving(LyingRegistry.of(fox)) as other:

        def answer(handler: Handler) -> bool:
            if handler.headers.get("Authorization") is None:
                handler.send(b"", {"Www-Authenticate": 'Basic realm="r"'}, 401)
            elif "/blobs/" in handler.path:
                handler.send(b"", {"Location": f"http://{other.host}{handler.path}"}, 307)
            else:
                return False
            return True

        registry.answer = answer
        pull(parse_oci(f"oci://{registry.host}/fox:1"), tmp_path / "fox", PlainDigests(), limits=LIMITS)
        assert "Basic Zm94OnJlZA==" in registry.authorizations
        assert other.authorizations and set(other.authorizations) == {None}
    assert content_of(tmp_path / "fox") == content_of(fox)


@pytest.mark.parametrize("kind", ["Basic", "Bearer"])
def test_another_host_that_asks_for_credentials_gets_none(
    registry: LyingRegistry, fox: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    (tmp_path / "docker").mkdir()
    config = {"auths": {registry.host: {"auth": "Zm94OnJlZA=="}}}
    (tmp_path / "docker" / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    with serving(LyingRegistry.of(fox)) as other:
        asked = {"Www-Authenticate": f'{kind} realm="http://{other.host}/token",service="s",scope="p"'}
        other.answer = lambda handler: (
            handler.send(b'{"token": "t"}') if "/token" in handler.path else handler.send(b"", asked, 401),
            True,
        )[1]

        def answer(handler: Handler) -> bool:
            if "/blobs/" in handler.path:
                handler.send(b"", {"Location": f"http://{other.host}{handler.path}"}, 307)
                return True
            return False

        registry.answer = answer
        assert f"redirects to {other.host}, which asks for credentials" in tried(registry, tmp_path / "pipelines/fox")
        assert other.authorizations and set(other.authorizations) == {None}
