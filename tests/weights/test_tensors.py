"""Whatever the file's layout, each tensor is found under the module's key, and read alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from original_layout import original_layout
from safetensors.torch import save_file

from sdflow.errors import CheckpointError
from sdflow.sources import Checkpoint, PlainDigests, load_module, open_checkpoint
from sdflow.sources.load import load_pickle, parameter_shapes
from sdflow.weights.tensors import open_tensors

SUBMODELS = ("unet", "vae_encoder", "text_encoder")


@pytest.fixture(scope="module")
def original(tiny_checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return original_layout(tiny_checkpoint)


def saved(path: Path, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    """One file, opened."""
    save_file(tensors, path) if path.suffix == ".safetensors" else torch.save({"state_dict": tensors}, path)
    return open_checkpoint(str(path), digests=PlainDigests(), download=False, allow_pickle=True)


@pytest.mark.parametrize("name", ["model.safetensors", "model.ckpt"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_file_in_the_original_layout_is_read_tensor_by_tensor(
    name: str, dtype: torch.dtype, original: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    stored = {key: value.to(dtype) if value.is_floating_point() else value for key, value in original.items()}
    checkpoint = saved(tmp_path / name, stored)
    for submodel in SUBMODELS:
        load: Any = checkpoint.submodels[submodel].load
        expected = load_module(submodel, load).state_dict()
        with open_tensors(submodel, load, parameter_shapes(submodel, load)) as found:
            for key, value in expected.items():
                assert np.array_equal(found.read(key).astype(np.float32), value.numpy()), key
                blocks = np.concatenate([block.astype(np.float32) for block in found.blocks(key)])
                assert np.array_equal(blocks, value.numpy().reshape(-1)), key


def test_a_pickle_is_mapped_from_its_file_and_not_read_whole(original: dict[str, torch.Tensor], tmp_path: Path) -> None:
    torch.save(original, tmp_path / "model.ckpt")
    mapped = load_pickle(tmp_path / "model.ckpt", "cpu")
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [entry[0].split("-") for entry in maps if entry[-1] == str(tmp_path / "model.ckpt")]
    assert ranges
    for tensor in mapped.values():
        assert any(int(begin, 16) <= tensor.data_ptr() < int(end, 16) for begin, end in ranges)
    torch.save(original, tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    old = load_pickle(tmp_path / "old.ckpt", "cpu")
    assert old.keys() == mapped.keys()
    assert all(torch.equal(old[key], mapped[key]) for key in old)


def test_a_tensor_that_has_no_place_in_one_file_is_named(original: dict[str, torch.Tensor], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"unexpected: first_stage_model\.more"):
        saved(tmp_path / "a.safetensors", {**original, "first_stage_model.more": torch.zeros(2)})
