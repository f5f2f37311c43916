"""`sdflow init --model hf:...` asks a hub on localhost what a repository is, and fetches none of its weights."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from sdflow.disk.shipped import family_data
from tests.sources.hub_server import Hub, serving

ROOT = Path(__file__).parents[2]
COMMIT = "c" * 40
WEIGHTS = b"these are asked for by nobody"


def configurations(architecture: str) -> dict[str, bytes]:
    """The files of a shipped architecture as a repository has them, beside weights in name only."""
    (folder,) = (place / architecture for place in family_data("architectures") if (place / architecture).is_dir())
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.json")}
    components = [name for name in ("unet", "transformer", "vae", "text_encoder") if f"{name}/config.json" in files]
    return files | {f"{name}/diffusion_pytorch_model.safetensors": WEIGHTS for name in components}


@pytest.fixture
def hub() -> Iterator[Hub]:
    sd15, sdxl = configurations("sd15"), configurations("sdxl")
    unlike = sd15["unet/config.json"].replace(b"[\n    320,", b"[\n    384,")
    assert unlike != sd15["unet/config.json"]
    contents = {
        "civitai/dreamer": sd15,
        "civitai/dreamer-xl": sdxl,
        "civitai/wide": {**sd15, "unet/config.json": unlike},
        "civitai/lora": {"ink.safetensors": WEIGHTS},
        "civitai/audio": {"model_index.json": b'{"_class_name": "AudioLDMPipeline"}'},
    }
    with serving(Hub({name: {COMMIT: files} for name, files in contents.items()}, {"main": COMMIT})) as each:
        yield each


def init(hub: Hub, folder: Path, reference: str, *, offline: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING")) and "proxy" not in k.lower()
    }
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hf"), "PYTHONPATH": str(ROOT)}
    environment |= {"HF_HUB_OFFLINE": "1"} if offline else {}
    command = [sys.executable, "-m", "sdflow", "init", "--model", reference, "--out", "w.yaml"]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    ("repository", "base", "title"),
    [
        ("civitai/dreamer", "base/sd15.yaml", "Stable Diffusion 1"),
        ("civitai/dreamer-xl", "base/sdxl.yaml", "Stable Diffusion XL"),
        ("civitai/wide", "base/stable_diffusion_1.yaml", "Stable Diffusion 1"),
    ],
)
def test_a_repository_is_recognized_by_its_configurations_alone(
    hub: Hub, tmp_path: Path, repository: str, base: str, title: str
) -> None:
    done = init(hub, tmp_path, f"hf:{repository}")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "no bars for some kilobytes"
    text = (tmp_path / "w.yaml").read_text()
    written = yaml.safe_load(text)
    assert (written["extends"], written["model"]) == (base, f"hf:{repository}")
    assert text.startswith(f"# {title}")
    assert any(request.endswith("/unet/config.json") for request in hub.requests)
    assert not any(".safetensors" in request for request in hub.requests)


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        (
            "hf:civitai/lora",
            "no model_index.json, so it is not a pipeline in diffusers' layout; it holds ink.safetensors",
        ),
        ("hf:civitai/audio", "'AudioLDMPipeline' is not known to sdflow"),
        ("hf:civitai/nothing", "no such repository, or it is private"),
        ("civitai/dreamer", "Write --model hf:civitai/dreamer"),
    ],
)
def test_what_is_no_pipeline_is_said_with_what_to_do(hub: Hub, tmp_path: Path, reference: str, says: str) -> None:
    done = init(hub, tmp_path, reference)
    assert done.returncode == 2
    assert says in " ".join(done.stderr.split())
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    assert not (tmp_path / "w.yaml").exists()


def test_without_the_network_the_kind_of_model_is_asked_for(hub: Hub, tmp_path: Path) -> None:
    offline = init(hub, tmp_path, "hf:civitai/dreamer", offline=True)
    assert offline.returncode == 2 and "unknown without downloading it\n  Name the kind of model" in offline.stderr
    assert hub.requests == []
    hub.url = "http://127.0.0.1:9"  # nobody listens there
    unreachable = init(hub, tmp_path, "hf:civitai/dreamer")
    assert unreachable.returncode == 2 and "Name the kind of model, as in --base" in unreachable.stderr
