"""Pipelines in a real registry: what comes back is what was pushed, nothing is sent twice, and other clients read it."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sdflow.errors import UsageError, VerificationError
from sdflow.oci import Pulled, Pushed, parse_oci, pull, push
from sdflow.oci.registry import RegistryError
from sdflow.sources import PlainDigests
from tests.oci.docker_registry import DockerRegistry, docker_registry
from tests.oci.pipelines import content_of, make_pipeline

USER = "fox:$2y$05$abcdefghijklmnopqrstuuvcjUqPCVrwycrcN.l52dei8k.vfoITO"
"""Whose password is red."""


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DockerRegistry]:
    with docker_registry(tmp_path_factory.mktemp("registry") / "one") as running:
        yield running


def pushed(reference: str, folder: Path) -> Pushed:
    return push(parse_oci(reference), folder, PlainDigests())


def pulled(reference: str, out: Path) -> Pulled:
    return pull(parse_oci(reference), out, PlainDigests())


def get(host: str, path: str) -> Any:
    asked = urllib.request.Request(
        f"http://{host}/v2/{path}", headers={"Accept": "application/vnd.oci.image.manifest.v1+json"}
    )
    with urllib.request.urlopen(asked) as answer:
        return json.loads(answer.read())


def test_what_is_pulled_is_what_was_pushed(registry: DockerRegistry, tmp_path: Path) -> None:
    folder = make_pipeline(tmp_path)
    done = pushed(f"oci://{registry.host}/round/fox:1", folder)
    back = pulled(f"oci://{registry.host}/round/fox:1", tmp_path / "elsewhere" / "fox")
    assert content_of(back.folder) == content_of(folder)
    assert back.exact == done.exact
    assert not any(path.is_symlink() for path in back.folder.rglob("*"))
    assert [path.name for path in back.folder.parent.iterdir()] == ["fox"], "nothing is left beside it"
    again = pulled(str(done.exact), tmp_path / "by digest")
    assert content_of(again.folder) == content_of(folder)
    once_more = pulled(f"oci://{registry.host}/round/fox:1", back.folder)
    assert once_more.fetched == (), "what is there is not fetched again"


def test_another_lora_of_one_base_sends_what_changed(registry: DockerRegistry, tmp_path: Path) -> None:
    base, ink = make_pipeline(tmp_path), make_pipeline(tmp_path, name="ink", unet=b"ink!")
    registry.uploads()
    first = pushed(f"oci://{registry.host}/loras/fox:base", base)
    assert registry.uploads() == len(first.sent) + 1, "the configuration is a blob too"
    second = pushed(f"oci://{registry.host}/loras/fox:ink", ink)
    assert set(second.sent) == {"unet/model.onnx.data", "sdflow.json", "provenance.json"}
    assert registry.uploads() == 4
    third = pushed(f"oci://{registry.host}/loras/fox:again", ink)
    assert third.sent == () and registry.uploads() == 0
    assert third.exact.digest == second.exact.digest, "equal pipelines have equal manifests"
    pulled(f"oci://{registry.host}/loras/fox:base", tmp_path / "out")
    change = pulled(f"oci://{registry.host}/loras/fox:ink", tmp_path / "out")
    assert set(change.fetched) == {"unet/model.onnx.data", "sdflow.json", "provenance.json"}
    assert content_of(tmp_path / "out") == content_of(ink)


def test_it_is_a_model_of_modelpack(registry: DockerRegistry, tmp_path: Path) -> None:
    """By the words of its specification, docs/spec.md and docs/config.md."""
    pushed(f"oci://{registry.host}/spec/fox:1", make_pipeline(tmp_path))
    manifest = get(registry.host, "spec/fox/manifests/1")
    assert manifest["mediaType"] == "application/vnd.oci.image.manifest.v1+json"
    assert manifest["artifactType"] == "application/vnd.cncf.model.manifest.v1+json"
    assert manifest["config"]["mediaType"] == "application/vnd.cncf.model.config.v1+json"
    types = {each["annotations"]["org.cncf.model.filepath"]: each["mediaType"] for each in manifest["layers"]}
    assert types["unet/model.onnx.data"] == "application/vnd.cncf.model.weight.v1.raw"
    assert types["tokenizer/vocab.json"] == "application/vnd.cncf.model.weight.config.v1.raw"
    assert types["provenance.json"] == "application/vnd.cncf.model.doc.v1.raw"
    config = get(registry.host, f"spec/fox/blobs/{manifest['config']['digest']}")
    assert set(config) == {"descriptor", "config", "modelfs"}
    assert config["modelfs"]["type"] == "layers"
    assert config["modelfs"]["diffIds"] == [each["digest"] for each in manifest["layers"]]
    assert config["config"]["format"] == "onnx"


def test_oras_pulls_it(registry: DockerRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import oras.client

    folder = make_pipeline(tmp_path)
    pushed(f"oci://{registry.host}/oras/fox:1", folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    client = oras.client.OrasClient(insecure=True)
    client.pull(target=f"{registry.host}/oras/fox:1", outdir=str(tmp_path / "theirs"))
    assert content_of(tmp_path / "theirs") == content_of(folder)


def test_credentials_are_dockers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, config = make_pipeline(tmp_path), tmp_path / "docker" / "config.json"
    monkeypatch.setenv("DOCKER_CONFIG", str(config.parent))
    monkeypatch.setenv("HOME", str(tmp_path))
    with docker_registry(tmp_path / "closed", users=USER) as closed:
        with pytest.raises(RegistryError, match=f"access is denied.*\n  Log in: docker login {closed.host}"):
            pushed(f"oci://{closed.host}/fox:1", folder)
        config.parent.mkdir()
        auth = base64.b64encode(b"fox:red").decode()
        config.write_text(json.dumps({"auths": {closed.host: {"auth": auth}}}))
        pushed(f"oci://{closed.host}/fox:1", folder)
        pulled(f"oci://{closed.host}/fox:1", tmp_path / "out")
    assert content_of(tmp_path / "out") == content_of(folder)


def test_what_is_not_what_was_built_is_not_pushed(registry: DockerRegistry, tmp_path: Path) -> None:
    folder = make_pipeline(tmp_path)
    (folder / "sdflow.json").write_text((folder / "sdflow.json").read_text().replace('"cpu"', '"cuda"'))
    with pytest.raises(VerificationError, match=r"sdflow\.json: is not the file that was built"):
        pushed(f"oci://{registry.host}/changed/fox:1", folder)
    (folder / "secret").symlink_to("/etc/hostname")
    other = make_pipeline(tmp_path, name="other")
    (other / "secret").symlink_to("/etc/hostname")
    with pytest.raises(UsageError, match="a link that sdflow did not make"):
        pushed(f"oci://{registry.host}/changed/fox:1", other)


def test_a_file_of_somebody_else_is_not_pushed(registry: DockerRegistry, tmp_path: Path) -> None:
    folder = make_pipeline(tmp_path)
    (folder / "README.md").write_text("mine")
    with pytest.raises(UsageError, match=r"sdflow did not put there: README\.md"):
        pushed(f"oci://{registry.host}/more/fox:1", folder)


def test_what_is_there_and_no_pipeline_is_not_replaced(registry: DockerRegistry, tmp_path: Path) -> None:
    folder = make_pipeline(tmp_path)
    pushed(f"oci://{registry.host}/kept/fox:1", folder)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    with pytest.raises(UsageError, match="not replaced"):
        pulled(f"oci://{registry.host}/kept/fox:1", tmp_path / "mine")
    assert content_of(tmp_path / "mine") == {"thesis.txt": b"years"}
    with pytest.raises(RegistryError, match="is not there .status 404"):
        pulled(f"oci://{registry.host}/kept/fox:2", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_pulled_pipeline_is_replaced_by_a_build(registry: DockerRegistry, tmp_path: Path) -> None:
    """Its submodels are folders where sdflow.json has links."""
    folder = make_pipeline(tmp_path)
    pushed(f"oci://{registry.host}/built/fox:1", folder)
    (tmp_path / "here").mkdir()
    pulled(f"oci://{registry.host}/built/fox:1", tmp_path / "here" / "pipelines" / "fox")
    make_pipeline(tmp_path / "here", unet=b"new!")
    assert (tmp_path / "here" / "pipelines" / "fox" / "unet").is_symlink()


def test_the_commands(registry: DockerRegistry, tmp_path: Path) -> None:
    def sdflow(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "sdflow", *words], cwd=tmp_path, capture_output=True, text=True)

    make_pipeline(tmp_path)
    reference = f"oci://{registry.host}/commands/fox:1"
    sent = sdflow("push", reference, "pipelines/fox", "--json")
    assert sent.returncode == 0, sent.stderr
    told = json.loads(sent.stdout)
    assert (told["format_version"], told["kind"], told["reference"]) == (1, "push", reference)
    came = sdflow("pull", told["exact"], "back")
    assert came.returncode == 0, came.stderr
    assert told["exact"] in came.stdout and "pipeline: " in came.stdout
    assert content_of(tmp_path / "back") == content_of(tmp_path / "pipelines/fox")
    gone = sdflow("pull", f"oci://{registry.host}/commands/hen:1", "--json")
    assert gone.returncode == 2
    assert json.loads(gone.stdout)["kind"] == "error"


@pytest.mark.parametrize(
    "text", ["ghcr.io/me/fox:1", "oci://fox", "oci://h/Fox:1", "oci://h/../x", "oci://h/x:a b", "oci://u:p@h/x", "oci://h/x@sha256:1"]
)  # fmt: skip
def test_what_is_no_reference_is_told(text: str) -> None:
    with pytest.raises(UsageError, match="oci://REGISTRY/NAME:TAG"):
        parse_oci(text)
