"""Pickled weights: refused unless allowed, and then read in a way that runs nothing."""

import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sdflow.errors import CheckpointError
from sdflow.sources import Checkpoint, PlainDigests, find_lora, load_module, open_checkpoint

UNET = "unet/diffusion_pytorch_model"


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A folder whose UNet is pickled."""
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    torch.save(load_file(folder / f"{UNET}.safetensors"), folder / f"{UNET}.bin")
    (folder / f"{UNET}.safetensors").unlink()
    return folder


class Malicious:
    """Writes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.target}",)


def opened(path: Path, allow: bool) -> Checkpoint:
    return open_checkpoint(str(path), digests=PlainDigests(), download=False, allow_pickle=allow)


def test_a_pickle_is_refused_and_the_way_to_convert_it_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"diffusion_pytorch_model\.bin: pickled") as caught:
        opened(folder, allow=False)
    assert "save_file" in str(caught.value) and "allow_pickle" in str(caught.value)
    (tmp_path / "model.ckpt").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="pickled"):
        opened(tmp_path / "model.ckpt", allow=False)


def test_a_pickle_is_loaded_when_it_is_allowed(folder: Path, tiny: Checkpoint) -> None:
    checkpoint = opened(folder, allow=True)
    assert "unet: the weights are pickled" in checkpoint.notes[0]
    ours, theirs = (load_module("unet", each.submodels["unet"].load).state_dict() for each in (checkpoint, tiny))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_safetensors_are_preferred_to_a_pickle(tiny_folder: Path, folder: Path) -> None:
    shutil.copy(tiny_folder / f"{UNET}.safetensors", folder / "unet")
    assert opened(folder, allow=True).notes == opened(folder, allow=False).notes == ()


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_malicious_pickle_does_not_run(wrapped: bool, folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "ran"
    payload: Any = {"state_dict": {"conv_in.bias": Malicious(target)}} if wrapped else Malicious(target)
    # The payload does run when it is loaded carelessly, or the test would show nothing.
    pickle.loads(pickle.dumps(payload))
    assert target.exists()
    target.unlink()
    for write in (lambda file: torch.save(payload, file), lambda file: file.write_bytes(pickle.dumps(payload))):
        write(folder / f"{UNET}.bin")
        with pytest.raises(CheckpointError, match="not a pickle of only weights"):
            load_module("unet", opened(folder, allow=True).submodels["unet"].load)
        write(tmp_path / "model.ckpt")
        with pytest.raises(CheckpointError, match="not a pickle of only weights"):
            opened(tmp_path / "model.ckpt", allow=True)
        assert not target.exists()


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04"])
def test_a_damaged_pickle_is_an_error(content: bytes, folder: Path) -> None:
    (folder / f"{UNET}.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match="not a pickle of only weights"):
        load_module("unet", opened(folder, allow=True).submodels["unet"].load)


def test_a_pickle_of_something_else_is_an_error(folder: Path) -> None:
    torch.save([1, 2], folder / f"{UNET}.bin")
    with pytest.raises(CheckpointError, match="not a pickle of tensors by name"):
        load_module("unet", opened(folder, allow=True).submodels["unet"].load)


def test_an_allowed_ckpt_loads_like_the_safetensors_file(tiny: Checkpoint, tmp_path: Path) -> None:
    from sdflow.models.ldm_names import ldm_unet_names, ldm_vae_names

    unet, vae, text = (
        load_module(name, tiny.submodels[name].load).state_dict() for name in ("unet", "vae_decoder", "text_encoder")
    )
    tensors = {f"model.diffusion_model.{name}": unet[key] for key, name in ldm_unet_names(unet).items()}
    tensors |= {f"first_stage_model.{name}": vae[key] for key, name in ldm_vae_names(vae).items()}
    tensors |= {f"cond_stage_model.transformer.{key}": tensor for key, tensor in text.items()}
    torch.save({"state_dict": tensors, "epoch": 3}, tmp_path / "model.ckpt")
    checkpoint = opened(tmp_path / "model.ckpt", allow=True)
    for name in ("unet", "vae_encoder", "text_encoder"):
        ours, theirs = (load_module(name, each.submodels[name].load).state_dict() for each in (checkpoint, tiny))
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_a_pickled_lora_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lora.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="pickled LoRAs are not supported"):
        find_lora(str(tmp_path / "lora.bin"), download=False)


def test_a_lora_is_found_by_file_and_folder(tmp_path: Path) -> None:
    first = tmp_path / "a.safetensors"
    first.write_bytes(b"")
    assert find_lora(str(first), download=False) == find_lora(str(tmp_path), download=False) == first
    (tmp_path / "b.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"several LoRAs: a\.safetensors, b\.safetensors"):
        find_lora(str(tmp_path), download=False)
    assert find_lora(str(tmp_path), "a.safetensors", download=False) == first
    for reference, name in ((tmp_path, "c.safetensors"), (tmp_path / "none", None)):
        with pytest.raises(CheckpointError):
            find_lora(str(reference), name, download=False)
    with pytest.raises(CheckpointError, match="not a LoRA"):
        find_lora("synthetic:sd15", download=False)


def test_a_pickle_that_unpacks_to_more_than_itself_is_refused_before_it_is(folder: Path) -> None:
    file = folder / f"{UNET}.bin"
    with zipfile.ZipFile(file) as archive:
        parts = {part.filename: archive.read(part) for part in archive.infolist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
        with archive.open("archive/data/zeros", "w") as stream:
            for _ in range(64):
                stream.write(bytes(1 << 20))
    with pytest.raises(CheckpointError, match=r"\.bin: not a pickle of only weights: \d+ bytes that unpack to \d+"):
        load_module("unet", opened(folder, allow=True).submodels["unet"].load)


def test_a_pickle_that_asks_for_all_memory_is_refused(folder: Path) -> None:
    """Which is not had, so that nothing is filled."""

    class Filled:
        def __reduce__(self) -> Any:
            return bytearray, (1 << 60,)

    torch.save({"conv_in.bias": Filled()}, folder / f"{UNET}.bin")
    with pytest.raises(CheckpointError, match=r"\.bin: not a pickle of only weights: "):
        load_module("unet", opened(folder, allow=True).submodels["unet"].load)
