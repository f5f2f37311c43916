"""A file of a hub's repository, and models whose replaced components have no weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from low_bit_files import T, mixed, write_gguf
from original_layout import flux_tensors, original_layout

from sdflow.errors import CheckpointError
from sdflow.manifest import Origin
from sdflow.sources import CheckpointNotLocal, PlainDigests, load_pipeline, reopen_checkpoint
from sdflow.sources.hub import needed_files
from sdflow.sources.reference import HubReference, parse_reference
from tests.sources.formats.test_gguf import module, opened
from tests.sources.hub_cache import COMMIT, cached_repository

FLUX = "synthetic:flux1-schnell-tiny"


@pytest.mark.parametrize(
    ("text", "expected"),
    {
        "hf:city96/FLUX.1-dev-gguf/flux1-dev-Q4_K_S.gguf": ("city96/FLUX.1-dev-gguf", "main", "flux1-dev-Q4_K_S.gguf"),
        "hf:a/b/split_files/c_fp8 (1).safetensors@v2": ("a/b", "v2", "split_files/c_fp8 (1).safetensors"),
        "hf:a/b@refs/pr/1": ("a/b", "refs/pr/1", ""),
        "hf:a/b.gguf": ("a/b.gguf", "main", ""),
    }.items(),
)
def test_a_file_of_a_repository_is_named_behind_it(text: str, expected: tuple[str, str, str]) -> None:
    assert parse_reference(text) == HubReference(*expected)


@pytest.mark.parametrize("text", ["hf:a/b/c", "hf:a/b/../c.gguf", "hf:a/b//c.gguf", "hf:a/b/c.bin", "hf:a/b/.c/d.gguf"])
def test_nothing_else_is_taken_for_a_file(text: str) -> None:
    with pytest.raises(CheckpointError, match="not of the form"):
        parse_reference(text)


def test_a_component_is_a_file_of_a_repository_at_the_commit_that_was_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    reference = "hf:city96/FLUX.1-schnell-gguf/flux1-schnell-Q8_0.gguf"
    with pytest.raises(CheckpointNotLocal):
        opened(FLUX, components={"transformer": reference})
    repository = cached_repository(tmp_path, "city96/FLUX.1-schnell-gguf")
    file = repository / "snapshots" / COMMIT / "flux1-schnell-Q8_0.gguf"
    file.parent.mkdir(parents=True)
    write_gguf(file, flux_tensors(module(opened(FLUX), "transformer")), mixed(T.Q8_0), "flux")
    found = opened(FLUX, components={"transformer": reference})
    said = found.provenance["components"]["transformer"]
    assert (said["kind"], said["commit"], said["file"]) == ("hub", COMMIT, file.name)
    assert said["quantized"]["format"] == "gguf" and "path" not in said
    assert (
        found.submodels["transformer"] == opened(FLUX, components={"transformer": str(file)}).submodels["transformer"]
    )
    (repository / "refs/main").write_text("b" * 40)
    origin = Origin("x", "cpu", FLUX, found.provenance, components={"transformer": reference}, family="flux")
    assert reopen_checkpoint(origin, "x", digests=PlainDigests()).submodels == found.submodels


def test_a_model_is_a_file_of_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    file = cached_repository(tmp_path, "a/sd") / "snapshots" / COMMIT / "gguf" / "sd15.gguf"
    file.parent.mkdir(parents=True)
    kinds = mixed(T.Q8_0)
    tensors = original_layout(opened("synthetic:sd15-tiny"))
    write_gguf(file, tensors, lambda name, each: T.I64 if "ids" in name else kinds(name, each), None)
    found = opened("hf:a/sd/gguf/sd15.gguf")
    assert found.provenance["commit"] == COMMIT and found.submodels == opened(str(file)).submodels


def test_a_replaced_component_needs_no_weights(tmp_path: Path) -> None:
    model = opened("synthetic:sd15-tiny")
    load_pipeline(model).save_pretrained(tmp_path / "model")
    whole = opened(str(tmp_path / "model"), components={"unet": "synthetic:sd15-tiny?seed=2"})
    shutil.rmtree(tmp_path / "rest", ignore_errors=True)
    shutil.copytree(tmp_path / "model", tmp_path / "rest")
    (tmp_path / "rest/unet/diffusion_pytorch_model.safetensors").unlink()
    rest = opened(str(tmp_path / "rest"), components={"unet": "synthetic:sd15-tiny?seed=2"})
    assert {name: each.identity for name, each in rest.submodels.items()} == {
        name: each.identity for name, each in whole.submodels.items()
    }
    with pytest.raises(CheckpointError, match=r"no weights: diffusion_pytorch_model\.safetensors is missing"):
        opened(str(tmp_path / "rest"))


def test_of_a_replaced_component_only_the_configuration_is_fetched() -> None:
    names = ["model_index.json", "transformer/config.json", "transformer/diffusion_pytorch_model.safetensors", "vae/config.json",
             "vae/diffusion_pytorch_model.safetensors"]  # fmt: skip
    assert needed_files(names, replaced={"transformer"}) == sorted(set(names) - {names[2]})
