"""Stable Diffusion 2.x and XL as folders and as single files: the same tensors from each, every defect named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from original_layout import stable_diffusion_2, stable_diffusion_xl
from safetensors.torch import save_file

from sdflow.errors import CheckpointError
from sdflow.inspection import inspect
from sdflow.sources import Checkpoint, PlainDigests, load_module, load_pipeline, open_checkpoint
from sdflow.sources.load import parameter_shapes
from sdflow.weights.tensors import open_tensors

Tensors = dict[str, torch.Tensor]


def opened(path: Path | str) -> Checkpoint:
    return open_checkpoint(str(path), digests=PlainDigests(), download=False)


@dataclass
class Written:
    """A tiny checkpoint: as it is made, and in every way in which it may lie on a disk."""

    made: Checkpoint
    folder: Path
    half: Path
    file: Path
    original: Tensors


@pytest.fixture(scope="module", params=["sd21-tiny", "sdxl-tiny"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    root = tmp_path_factory.mktemp(request.param)
    made = opened(f"synthetic:{request.param}?seed=3")
    pipeline = load_pipeline(made)
    parts = [pipeline.unet, pipeline.vae, pipeline.text_encoder]
    if request.param == "sdxl-tiny":
        original = stable_diffusion_xl(*parts, pipeline.text_encoder_2)
    else:
        original = stable_diffusion_2(*parts)
    save_file(original, root / "model.safetensors")
    pipeline.save_pretrained(root / "folder")
    pipeline.to(torch.float16).save_pretrained(root / "half", variant="fp16")
    return Written(made, root / "folder", root / "half", root / "model.safetensors", original)


@pytest.fixture
def xl(tiny_xl_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_xl_folder, tmp_path / "xl"))


@pytest.mark.parametrize("how", ["folder", "half", "file"])
def test_every_tensor_is_the_same_however_it_lies(written: Written, how: str) -> None:
    checkpoint = opened(getattr(written, how))
    assert checkpoint.submodels.keys() == written.made.submodels.keys()
    assert checkpoint.facts == written.made.facts and checkpoint.options == written.made.options
    assert checkpoint.companions.keys() == written.made.companions.keys()
    for name, submodel in checkpoint.submodels.items():
        expected = load_module(name, written.made.submodels[name].load).state_dict()
        if how == "half":
            expected = {key: tensor.half().float() for key, tensor in expected.items()}
        found = load_module(name, submodel.load).state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        with open_tensors(name, submodel.load, parameter_shapes(name, submodel.load)) as stored:
            for key, value in expected.items():
                assert np.array_equal(stored.read(key).astype(np.float32), value.numpy()), key


@pytest.mark.parametrize("how", ["folder", "half", "file"])
def test_the_identity_does_not_depend_on_where_it_lies(written: Written, how: str, tmp_path: Path) -> None:
    path: Path = getattr(written, how)
    before = {name: dict(submodel.identity) for name, submodel in opened(path).submodels.items()}
    copy = (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / f"other{path.suffix}")
    after = {name: dict(submodel.identity) for name, submodel in opened(copy).submodels.items()}
    assert after == before
    assert str(path.parent) not in json.dumps(before)
    contents = {json.dumps(identity, sort_keys=True) for identity in before.values()}
    assert len(contents) == len(before) - 1, "the halves of the VAE alone are one module"


def test_only_the_variant_is_said_where_there_is_no_other(written: Written) -> None:
    notes = " ".join(opened(written.half).notes)
    for component in {written.made.family.part(name).component for name in written.made.submodels}:
        assert f"{component}: only the variant fp16 has weights" in notes
    assert opened(written.folder).notes == ()


@pytest.mark.parametrize("missing", ["text_encoder_2", "tokenizer_2"])
def test_what_a_folder_of_xl_lacks_is_named(missing: str, xl: Path) -> None:
    shutil.rmtree(xl / missing)
    with pytest.raises(CheckpointError, match=rf"{missing}/\w*config\.json: no such file"):
        opened(xl)


def test_a_second_text_encoder_of_another_class_is_named(xl: Path) -> None:
    path = xl / "text_encoder_2/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["CLIPTextModel"]}))
    with pytest.raises(
        CheckpointError, match=r"text_encoder_2/config\.json: .*of CLIPTextModel, not of CLIPTextModelWithProjection"
    ):
        opened(xl)


def test_a_file_that_lacks_a_part_is_refused_and_the_part_named(written: Written, tmp_path: Path) -> None:
    open_clip = next(name for name in written.original if name.endswith("transformer.resblocks.0.ln_1.bias"))
    for prefix in (open_clip.removesuffix("transformer.resblocks.0.ln_1.bias"), "first_stage_model."):
        without = {name: tensor for name, tensor in written.original.items() if not name.startswith(prefix)}
        save_file(without, tmp_path / "pruned.safetensors")
        with pytest.raises(CheckpointError) as caught:
            opened(tmp_path / "pruned.safetensors")
        (named,) = caught.value.what.partition("no tensors under ")[2].partition(";")[0].split(", ")
        # A UNet and a VAE of 2.x this small could be those of 1.x too: either text encoder is what is missing.
        assert named in (prefix, prefix.replace("cond_stage_model.model.", "cond_stage_model.transformer."))
        assert "VAE" in str(caught.value.remedy)


def test_a_file_without_the_first_text_encoder_of_xl_is_not_taken_for_its_refiner(
    written: Written, tmp_path: Path
) -> None:
    prefix = "conditioner.embedders.0.transformer."
    if not any(name.startswith(prefix) for name in written.original):
        pytest.skip("Stable Diffusion 2.x has one text encoder")
    without = {name: tensor for name, tensor in written.original.items() if not name.startswith(prefix)}
    save_file(without, tmp_path / "pruned.safetensors")
    with pytest.raises(CheckpointError, match=r"no tensors under conditioner\.embedders\.0\.transformer\.; .* XL"):
        opened(tmp_path / "pruned.safetensors")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.diffusion_model.input_blocks.0.0.weight": (32, 8, 3, 3)}, "InstructPix2Pix"),
        (
            {"model.diffusion_model.joint_blocks.0.context_block.attn.qkv.weight": (1,)},
            "this is a denoiser of Stable Diffusion 3",
        ),
        ({"model.diffusion_model.double_blocks.0.img_attn.qkv.weight": (1,)}, "this is a denoiser of Flux"),
        ({"double_blocks.0.img_attn.qkv.weight": (1,)}, "this is a denoiser of Flux"),
    ],
)
def test_relatives_are_refused_by_their_names(
    written: Written, changes: Mapping[str, tuple[int, ...]], message: str, tmp_path: Path
) -> None:
    changed = {name: torch.zeros(shape) for name, shape in changes.items()}
    # A file that would be the tiny architecture but for the change.
    changed["model.diffusion_model.out.2.weight"] = torch.zeros(4, 320, 3, 3)
    save_file(written.original | changed, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path / "model.safetensors")


def test_a_file_for_inpainting_is_known_by_the_channels_of_its_unet(written: Written, tmp_path: Path) -> None:
    first = "model.diffusion_model.input_blocks.0.0.weight"
    wide = torch.cat([written.original[first]] * 3, dim=1)[:, :9].contiguous()
    save_file({**written.original, first: wide}, tmp_path / "model.safetensors")
    (said,) = (opened(written.file).provenance["architecture"],)
    checkpoint = opened(tmp_path / "model.safetensors")
    assert checkpoint.provenance["architecture"] == {"sd21-tiny": "sd2-inpainting-tiny"}.get(
        said, "sdxl-inpainting-tiny"
    )
    unet = load_module("unet", checkpoint.submodels["unet"].load).state_dict()
    assert torch.equal(unet["conv_in.weight"], wide)
    before = opened(written.file).submodels
    same = {name for name, each in checkpoint.submodels.items() if each.identity == before[name].identity}
    assert same == checkpoint.submodels.keys() - {"unet"}


def test_a_file_that_predicts_in_a_way_that_nothing_here_does_is_refused_unless_it_is_asked_for(
    written: Written, tmp_path: Path
) -> None:
    path, fitting = tmp_path / "model.safetensors", opened(written.file).provenance["architecture"]
    save_file(written.original | {"edm_mean": torch.zeros(4)}, path)
    with pytest.raises(CheckpointError, match=f"has a tensor edm_mean, but {fitting}") as caught:
        opened(path)
    assert f"model.safetensors#{fitting}" in str(caught.value.remedy)
    asked = opened(f"{path}#{fitting}")
    assert asked.provenance["architecture"] == fitting and "although it has a tensor edm_mean" in asked.notes[-1]


V_PRED, ZERO_SNR = {"v_pred": torch.zeros(1)}, {"ztsnr": torch.zeros(1)}


@pytest.mark.parametrize(
    ("marks", "metadata", "wanted", "zero_snr"),
    [
        (V_PRED, {}, "sdxl-v-tiny", False),
        (V_PRED | ZERO_SNR, {}, "sdxl-v-zsnr-tiny", True),
        (V_PRED | ZERO_SNR, {"modelspec.prediction_type": "v"}, "sdxl-v-zsnr-tiny", True),
        ({}, {"modelspec.prediction_type": "v"}, "sdxl-v-tiny", False),
        ({}, {"modelspec.prediction_type": "epsilon"}, "sdxl-tiny", None),
        (ZERO_SNR, {}, "sdxl-tiny", None),
        ({}, {}, "sdxl-tiny", None),
    ],
)
def test_a_file_of_xl_predicts_what_its_marks_say(
    marks: dict[str, torch.Tensor], metadata: dict[str, str], wanted: str, zero_snr: bool | None, tmp_path: Path
) -> None:
    checkpoint = opened(xl_file(tmp_path, marks, metadata))
    assert checkpoint.provenance["architecture"] == wanted
    config = json.loads((checkpoint.companions["scheduler"] / "scheduler_config.json").read_text())
    predicted = "epsilon" if zero_snr is None else "v_prediction"
    assert (config["prediction_type"], config.get("rescale_betas_zero_snr", False)) == (predicted, bool(zero_snr))
    told = [note for note in checkpoint.notes if "is taken for" in note]
    assert bool(told) == (zero_snr is not None), "only what is not usual is told"


def test_marks_that_contradict_each_other_are_refused_until_the_user_decides(tmp_path: Path) -> None:
    path = xl_file(tmp_path, V_PRED | ZERO_SNR, {"modelspec.prediction_type": "epsilon"})
    with pytest.raises(CheckpointError) as caught:
        opened(path)
    assert caught.value.what == (
        "contradicts itself: its modelspec.prediction_type is epsilon, and it has tensors v_pred and ztsnr"
    )
    for name in ("sdxl-tiny (epsilon)", "sdxl-v-tiny (v_prediction)", "sdxl-v-zsnr-tiny (v_prediction with zero"):
        assert f"model.safetensors#{name}" in str(caught.value.remedy)
    as_it_says, as_it_is = opened(f"{path}#sdxl-tiny"), opened(f"{path}#sdxl-v-zsnr-tiny")
    assert "although it has tensors v_pred and ztsnr" in as_it_says.notes[-1]
    assert "although its modelspec.prediction_type is epsilon" in as_it_is.notes[-1]
    assert as_it_is.provenance["architecture"] == "sdxl-v-zsnr-tiny"
    assert identities(as_it_says) == identities(as_it_is), "the graphs are the same"


def test_a_contradiction_is_told_by_inspect_too(tmp_path: Path) -> None:
    path = xl_file(tmp_path, V_PRED, {"modelspec.prediction_type": "epsilon"})
    (found,) = inspect(path)
    assert "contradicts itself" in found.notes[0] and "sdxl-v-tiny" in found.notes[1]


def xl_file(folder: Path, marks: dict[str, torch.Tensor], metadata: dict[str, str]) -> Path:
    pipeline = load_pipeline(opened("synthetic:sdxl-tiny?seed=3"))
    parts = (pipeline.unet, pipeline.vae, pipeline.text_encoder, pipeline.text_encoder_2)
    save_file(stable_diffusion_xl(*parts) | marks, folder / "model.safetensors", metadata or None)
    return folder / "model.safetensors"


def identities(checkpoint: Checkpoint) -> dict[str, object]:
    return {name: dict(submodel.identity) for name, submodel in checkpoint.submodels.items()}


def test_an_architecture_that_the_file_does_not_have_is_refused(written: Written, tmp_path: Path) -> None:
    architecture = opened(written.file).provenance["architecture"]
    assert opened(f"{written.file}#{architecture}").provenance["architecture"] == architecture
    with pytest.raises(
        CheckpointError, match=rf"has the shapes of {architecture}( and of \S+)?, not of sd21-base"
    ) as caught:
        opened(f"{written.file}#sd21-base")
    assert f"model.safetensors#{architecture}" in str(caught.value.remedy)
    with pytest.raises(CheckpointError, match="unknown architecture 'sd22'"):
        opened(f"{written.file}#sd22")
    with pytest.raises(CheckpointError, match="a vae takes its architecture from the checkpoint"):
        open_checkpoint(
            f"synthetic:{architecture}",
            digests=PlainDigests(),
            download=False,
            components={"vae": f"{written.file}#{architecture}"},
        )
    named = tmp_path / "odd.safetensors"
    named.symlink_to(written.folder)
    with pytest.raises(CheckpointError, match="is a folder, whose config names the architecture"):
        opened(f"{named}#{architecture}")
