"""The hub through the real huggingface_hub client, in processes of their own, against a server on localhost."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sdflow.sources.hub import needed_files
from tests.sources.hub_server import LARGE, Hub, serving

FIRST, SECOND = "a" * 40, "b" * 40
UNET = "unet/diffusion_pytorch_model.safetensors"

OPEN = """
import json, sys, sdflow.sources as s
from sdflow.errors import CheckpointError
request = json.loads(sys.argv[1])
try:
    if "lora" in request:
        found = s.find_lora(request["lora"], request.get("name"), download=request["download"])
        print(json.dumps({"path": str(found)}))
    else:
        c = s.open_checkpoint(
            request["model"],
            digests=s.PlainDigests(),
            download=request["download"],
            components=request.get("components"),
        )
        print(json.dumps({
            "provenance": dict(c.provenance),
            "identities": {k: dict(v.identity) for k, v in c.submodels.items()},
            "loads": {k: dict(v.load) for k, v in c.submodels.items()},
            "torch": "torch" in sys.modules,
        }))
except CheckpointError as error:
    print(json.dumps({"error": type(error).__name__, "message": str(error)}))
"""


@dataclass
class Client:
    """Opens references in a fresh process with a hub cache of its own."""

    hub: Hub
    home: Path

    def __call__(self, reference: str, *, download: bool = True, **more: Any) -> dict[str, Any]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING")) and "proxy" not in k}
        environment |= {"HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.home), "HF_HUB_DISABLE_TELEMETRY": "1"}
        environment |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", **more.pop("environment", {})}
        request = {more.pop("kind", "model"): reference, "download": download, **more}
        command = [sys.executable, "-c", OPEN, json.dumps(request)]
        self.hub.requests.clear()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout)
        return result


@pytest.fixture
def client(tiny_folder: Path, tmp_path: Path) -> Iterator[Client]:
    files = {path.relative_to(tiny_folder).as_posix(): path.read_bytes() for path in tiny_folder.rglob("*.*")}
    extra = {
        "README.md": b"hello",
        "unet/diffusion_pytorch_model.bin": b"pickle",
        "unet/diffusion_pytorch_model.fp16.safetensors": b"half",
        "v1-5-pruned.ckpt": b"pickle",
    }
    changed = dict(files) | {"unet/config.json": files["unet/config.json"].replace(b"1e-05", b"1e-06")}
    assert changed != files and len(files[UNET]) > LARGE
    hub = Hub({"owner/tiny": {FIRST: files | extra, SECOND: changed}}, {"main": FIRST, "v2": SECOND})
    with serving(hub):
        yield Client(hub, tmp_path / "hf")


def test_a_checkpoint_is_downloaded_and_pinned_to_its_commit(client: Client, tiny_folder: Path) -> None:
    found = client("hf:owner/tiny")
    assert found["provenance"]["commit"] == FIRST and found["provenance"]["repository"] == "owner/tiny"
    assert {identity["commit"] for identity in found["identities"].values()} == {FIRST}
    assert not found["torch"]
    [file] = found["loads"]["unet"]["files"]
    assert Path(file["path"]).read_bytes() == (tiny_folder / UNET).read_bytes()
    assert client("hf:owner/tiny@v2")["provenance"]["commit"] == SECOND


def test_only_the_needed_files_are_downloaded(client: Client) -> None:
    client("hf:owner/tiny")
    names = {path.name for path in client.home.glob("hub/models--owner--tiny/snapshots/*/**/*")}
    assert "diffusion_pytorch_model.safetensors" in names
    assert not {"v1-5-pruned.ckpt", "diffusion_pytorch_model.bin"} & names
    assert "diffusion_pytorch_model.fp16.safetensors" not in names
    assert not any(".ckpt" in request or ".bin" in request for request in client.hub.requests)


def test_a_repository_of_xl_comes_with_its_second_text_encoder_and_no_second_copy(
    client: Client, tiny_xl_folder: Path
) -> None:
    files = {path.relative_to(tiny_xl_folder).as_posix(): path.read_bytes() for path in tiny_xl_folder.rglob("*.*")}
    beside = [
        "sd_xl_base_1.0.safetensors",
        "sd_xl_base_1.0_0.9vae.safetensors",
        "text_encoder/model.onnx",
        "text_encoder_2/model.fp16.safetensors",
        "text_encoder_2/model.onnx_data",
        "text_encoder_2/flax_model.msgpack",
        "unet/diffusion_pytorch_model.fp16.safetensors",
        "unet/model.onnx",
        "vae_1_0/diffusion_pytorch_model.safetensors",
        "vae_decoder/model.onnx",
    ]
    client.hub.repositories["owner/xl"] = {FIRST: files | dict.fromkeys(beside, b"other")}
    found = client("hf:owner/xl")
    assert set(found["identities"]) == {"text_encoder", "text_encoder_2", "unet", "vae_encoder", "vae_decoder"}
    fetched = {
        path.relative_to(snapshot).as_posix()
        for snapshot in client.home.glob("hub/models--owner--xl/snapshots/*")
        for path in snapshot.rglob("*.*")
    }
    assert fetched == set(files)
    assert {"tokenizer_2/vocab.json", "tokenizer_2/tokenizer.json"} & fetched
    assert client("hf:owner/xl", download=False) == found and client.hub.requests == []
    (client.home / f"hub/models--owner--xl/snapshots/{FIRST}/text_encoder_2/model.safetensors").unlink()
    assert client("hf:owner/xl", download=False)["error"] == "CheckpointNotLocal"


def test_without_download_nothing_is_asked(client: Client) -> None:
    missing = client("hf:owner/tiny", download=False)
    assert missing["error"] == "CheckpointNotLocal" and client.hub.requests == []
    online = client("hf:owner/tiny")
    assert client.hub.requests
    assert client("hf:owner/tiny", download=False) == online and client.hub.requests == []
    assert client("hf:owner/tiny@v2", download=False)["error"] == "CheckpointNotLocal"
    # HF_HUB_OFFLINE is the user's word against the network: the same as download=False.
    assert client("hf:owner/tiny", environment={"HF_HUB_OFFLINE": "1"}) == online and client.hub.requests == []


def test_a_local_full_commit_needs_no_request(client: Client) -> None:
    first = client(f"hf:owner/tiny@{FIRST}")
    assert client.hub.requests
    assert client(f"hf:owner/tiny@{FIRST}") == first and client.hub.requests == []


def test_a_branch_that_moved_gives_the_new_commit(client: Client) -> None:
    before = client("hf:owner/tiny")
    client.hub.refs["main"] = SECOND
    after = client("hf:owner/tiny")
    assert (before["provenance"]["commit"], after["provenance"]["commit"]) == (FIRST, SECOND)
    assert client("hf:owner/tiny", download=False)["provenance"]["commit"] == SECOND
    assert client(f"hf:owner/tiny@{FIRST}", download=False)["provenance"]["commit"] == FIRST


def test_an_incomplete_snapshot_is_not_local_and_is_completed(client: Client) -> None:
    client(f"hf:owner/tiny@{FIRST}")
    snapshot = client.home / f"hub/models--owner--tiny/snapshots/{FIRST}"
    (snapshot / UNET).unlink()
    assert client(f"hf:owner/tiny@{FIRST}", download=False)["error"] == "CheckpointNotLocal"
    assert "error" not in client(f"hf:owner/tiny@{FIRST}")
    # A second choice that another program fetched does not stand in for the weights that are missing.
    (snapshot / UNET).rename(snapshot / UNET.replace(".safetensors", ".fp16.safetensors"))
    found = client(f"hf:owner/tiny@{FIRST}")
    assert found["loads"]["unet"]["files"][0]["path"].endswith(UNET)


def test_a_cut_download_is_tried_again(client: Client, tiny_folder: Path) -> None:
    client.hub.cut_after = 150_000
    found = client("hf:owner/tiny")
    assert client.hub.cut_after is None
    large = [request for request in client.hub.requests if request.startswith("GET /cdn/")]
    assert len(large) == len(set(large)) + 1
    for load in found["loads"].values():
        for stamp in load["files"]:
            path = Path(stamp["path"])
            assert path.read_bytes() == (tiny_folder / path.parent.name / path.name).read_bytes()


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("hf:owner/none", "no such repository, or it is private"),
        ("hf:owner/tiny@nope", "no revision nope"),
        (f"hf:owner/tiny@{'c' * 40}", "no revision c"),
    ],
)
def test_what_is_not_on_the_hub_is_an_error(reference: str, message: str, client: Client) -> None:
    found = client(reference)
    assert found["error"] == "CheckpointError" and message in found["message"] and reference in found["message"] + "@"


def test_a_gated_repository_says_how_to_get_in(client: Client) -> None:
    client.hub.gated.add("owner/tiny")
    found = client("hf:owner/tiny")
    assert found["error"] == "CheckpointError" and "gated" in found["message"] and "HF_TOKEN" in found["message"]
    assert "error" not in client("hf:owner/tiny", environment={"HF_TOKEN": "secret"})


def test_a_hub_that_cannot_be_reached_is_an_error_even_with_a_local_copy(client: Client) -> None:
    client("hf:owner/tiny")
    unreachable = client("hf:owner/tiny", environment={"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert unreachable["error"] == "HubUnreachable" and "HF_HUB_OFFLINE=1" in unreachable["message"]


def test_a_repository_without_a_pipeline_is_an_error(client: Client) -> None:
    client.hub.repositories["owner/other"] = {FIRST: {"README.md": b"x", "config.json": b"{}"}}
    found = client("hf:owner/other")
    assert "model_index.json: no such file" in found["message"]


def test_a_vae_is_fetched_from_a_repository_that_is_one_and_from_one_that_has_one(
    client: Client, tiny_folder: Path
) -> None:
    name = "diffusion_pytorch_model.safetensors"
    weights = (tiny_folder / "vae" / name).read_bytes()
    config = (tiny_folder / "vae/config.json").read_bytes()
    alone = {"config.json": config, name: weights, "sdxl_vae.safetensors": b"x", "diffusion_pytorch_model.bin": b"y"}
    client.hub.repositories["owner/vae"] = {FIRST: alone}
    client.hub.repositories["owner/file"] = {FIRST: {"sdxl_vae.safetensors": b"x"}}

    def opened(vae: str, **options: Any) -> dict[str, Any]:
        return client("synthetic:sd15-tiny", components={"vae": vae}, **options)

    for vae, place in (("hf:owner/vae", name), ("hf:owner/tiny@main", f"vae/{name}")):
        assert opened(vae, download=False)["error"] == "CheckpointNotLocal" and client.hub.requests == []
        found = opened(vae)
        assert found["provenance"]["components"]["vae"]["commit"] == FIRST
        assert list(found["provenance"]["components"]["vae"]["files"]) == [place]
        assert not found["torch"]
        assert opened(vae, download=False) == found and client.hub.requests == []
        repository = client.home / f"hub/models--{vae[3:].partition('@')[0].replace('/', '--')}/snapshots/{FIRST}"
        fetched = {path.relative_to(repository).as_posix() for path in repository.rglob("*.*") if path.is_file()}
        assert fetched == {place, place.replace(name, "config.json")}
        assert (repository / place).read_bytes() == weights
    # a pipeline of which only the VAE is there is not there as a checkpoint, and is completed
    assert client("hf:owner/tiny", download=False)["error"] == "CheckpointNotLocal"
    assert "error" not in client("hf:owner/tiny")
    refused = opened("hf:owner/file")
    assert "hf:owner/file@main: holds neither vae/config.json nor config.json" in refused["message"]
    assert "For a single file of a repository: hf:owner/file/FILE." in refused["message"]


def test_a_lora_is_fetched_from_the_hub(client: Client) -> None:
    client.hub.repositories["owner/lora"] = {FIRST: {"style.safetensors": b"one", "README.md": b"x"}}
    client.hub.repositories["owner/loras"] = {FIRST: {"a.safetensors": b"one", "b.safetensors": b"two", "c.bin": b""}}
    assert client("hf:owner/lora", kind="lora", download=False)["error"] == "CheckpointNotLocal"
    assert client.hub.requests == []
    found = client("hf:owner/lora", kind="lora")
    assert Path(found["path"]).read_bytes() == b"one" and FIRST in found["path"]
    assert client("hf:owner/lora", kind="lora", download=False) == found and client.hub.requests == []
    assert "several LoRAs: a.safetensors, b.safetensors" in client("hf:owner/loras", kind="lora")["message"]
    named = client("hf:owner/loras", kind="lora", name="b.safetensors")
    assert Path(named["path"]).read_bytes() == b"two"
    assert "holds no file d.safetensors" in client("hf:owner/loras", kind="lora", name="d.safetensors")["message"]
    assert "pickled" in client("hf:owner/loras", kind="lora", name="c.bin")["message"]


def test_needed_files_take_the_shards_of_the_chosen_weights_only() -> None:
    names = [
        "model_index.json",
        "unet/config.json",
        "unet/diffusion_pytorch_model.safetensors.index.json",
        "unet/diffusion_pytorch_model-00001-of-00002.safetensors",
        "unet/diffusion_pytorch_model-00002-of-00002.safetensors",
        "unet/diffusion_pytorch_model.safetensors.index.fp16.json",
        "unet/diffusion_pytorch_model.fp16-00001-of-00001.safetensors",
        "unet/diffusion_pytorch_model.bin",
        "text_encoder/pytorch_model.bin",
        "tokenizer/merges.txt",
        "tokenizer_9/merges.txt",
    ]
    assert needed_files(names) == sorted([*names[:5], "text_encoder/pytorch_model.bin", "tokenizer/merges.txt"])
    pickled = [name for name in names if "index.json" not in name]
    assert "unet/diffusion_pytorch_model.bin" in needed_files(pickled), "diffusers reads it before any variant"
    without = [name for name in pickled if not name.startswith("unet/") or not name.endswith(".bin")]
    assert "unet/diffusion_pytorch_model.fp16-00001-of-00001.safetensors" in needed_files(without)
    assert "unet/diffusion_pytorch_model-00001-of-00002.safetensors" not in needed_files(without)
