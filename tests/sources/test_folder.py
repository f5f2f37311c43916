"""Diffusers folders: loaded exactly, identified by content alone, every defect named."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sdflow.errors import CheckpointError
from sdflow.sources import Checkpoint, PlainDigests, load_module, load_pipeline, open_checkpoint
from sdflow.verify.reference.torch_module import TorchModule

UNET = "unet/diffusion_pytorch_model.safetensors"
VAE = "vae/diffusion_pytorch_model.safetensors"
TEXT = "text_encoder/model.safetensors"


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def opened(folder: Path, **options: Any) -> Checkpoint:
    return open_checkpoint(str(folder), digests=PlainDigests(), download=False, **options)


def identities(checkpoint: Checkpoint) -> dict[str, Any]:
    return {name: dict(submodel.identity) for name, submodel in checkpoint.submodels.items()}


def assert_same_modules(one: Checkpoint, other: Checkpoint, tolerance: float = 0.0) -> None:
    assert one.submodels.keys() == other.submodels.keys()
    for name in one.submodels:
        first, second = (load_module(name, each.submodels[name].load).state_dict() for each in (one, other))
        assert first.keys() == second.keys()
        for key in first:
            assert (first[key] - second[key]).abs().max() <= tolerance, key


def rewrite(file: Path, change: Any) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_folder_written_by_diffusers_loads_exactly(tiny: Checkpoint, tiny_folder: Path) -> None:
    checkpoint = opened(tiny_folder)
    assert_same_modules(tiny, checkpoint)
    assert checkpoint.facts == tiny.facts and checkpoint.notes == ()
    assert checkpoint.companions["tokenizer"] == tiny_folder / "tokenizer"
    assert UNET in checkpoint.provenance["files"]
    json.dumps([dict(checkpoint.provenance), [dict(s.load) for s in checkpoint.submodels.values()]])


def test_diffusers_loads_the_same_pipeline(tiny_folder: Path) -> None:
    from diffusers import StableDiffusionPipeline

    theirs = StableDiffusionPipeline.from_pretrained(tiny_folder)
    ours = load_pipeline(opened(tiny_folder))
    for pipeline in (ours, theirs):
        pipeline.set_progress_bar_config(disable=True)
    images = [
        pipeline("a red square", num_inference_steps=2, generator=torch.Generator().manual_seed(1), output_type="np")
        for pipeline in (ours, theirs)
    ]
    assert (images[0].images == images[1].images).all()


def test_moving_renaming_and_touching_change_nothing(folder: Path, tmp_path: Path) -> None:
    before = identities(opened(folder))
    moved = folder.rename(tmp_path / "elsewhere")
    for path in moved.rglob("*"):
        os.utime(path, (1, 1))
    assert identities(opened(moved)) == before
    edit(moved / "unet/config.json", _diffusers_version="0.1", _name_or_path="/somewhere")
    assert identities(opened(moved)) == before
    assert str(tmp_path) not in json.dumps(before)


@pytest.mark.parametrize(
    ("file", "submodels"),
    [
        (TEXT, {"text_encoder"}),
        (UNET, {"unet"}),
        (VAE, {"vae_encoder", "vae_decoder"}),
        ("safety_checker/model.safetensors", {"safety_checker"}),
        ("tokenizer/tokenizer.json", set()),
    ],
)
def test_a_change_concerns_its_own_submodel_only(file: str, submodels: set[str], folder: Path) -> None:
    before = identities(opened(folder))
    content = bytearray((folder / file).read_bytes())
    content[-2] ^= 1
    (folder / file).write_bytes(content)
    after = identities(opened(folder))
    assert {name for name in before if before[name] != after[name]} == submodels


def test_a_changed_configuration_changes_the_identity(folder: Path) -> None:
    before = identities(opened(folder))
    edit(folder / "unet/config.json", norm_eps=1e-6)
    after = identities(opened(folder))
    assert {name for name in before if before[name] != after[name]} == {"unet"}


def test_shards_load_like_one_file(tiny: Checkpoint, folder: Path) -> None:
    (folder / UNET).unlink()
    load_pipeline(tiny).unet.save_pretrained(folder / "unet", max_shard_size="5MB")
    assert (folder / f"{UNET}.index.json").is_file()
    checkpoint = opened(folder)
    assert len(checkpoint.submodels["unet"].identity["weights"]) > 1
    assert_same_modules(tiny, checkpoint)
    next((folder / "unet").glob("*-00002-of-*")).unlink()
    with pytest.raises(CheckpointError, match=r"the shard .*-00002-of-.* is missing"):
        opened(folder)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_variant_is_used_only_without_plain_weights_and_said(sharded: bool, tiny: Checkpoint, folder: Path) -> None:
    unet = load_pipeline(tiny).unet.half()
    unet.save_pretrained(folder / "unet", variant="fp16", max_shard_size="2MB" if sharded else "1GB")
    assert opened(folder).notes == ()
    (folder / UNET).unlink()
    checkpoint = opened(folder)
    (note,) = checkpoint.notes
    assert note.startswith("unet: ")
    assert "variant fp16" in note
    assert_same_modules(tiny, checkpoint, tolerance=2e-3)


def test_old_names_of_the_vae_attention_and_prefixes_of_clip_load(tiny: Checkpoint, folder: Path) -> None:
    def old_vae(tensors: dict[str, torch.Tensor]) -> None:
        for new, old in (("to_q", "query"), ("to_k", "key"), ("to_v", "value"), ("to_out.0", "proj_attn")):
            for name in [name for name in tensors if f"attentions.0.{new}." in name]:
                tensors[name.replace(new, old)] = tensors.pop(name)

    def old_text(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[f"text_model.{name.removeprefix('text_model.')}"] = tensors.pop(name)
        tensors["text_model.embeddings.position_ids"] = torch.arange(77)[None]

    def old_safety(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("vision_model.")]:
            bare = name.replace("vision_model.vision_model.", "vision_model.")
            tensors[f"vision_model.{bare}"] = tensors.pop(name)

    rewrite(folder / VAE, old_vae)
    rewrite(folder / TEXT, old_text)
    rewrite(folder / "safety_checker/model.safetensors", old_safety)
    assert any("proj_attn" in name for name in load_file(folder / VAE))
    assert_same_modules(tiny, opened(folder))
    for name, submodel in opened(folder).submodels.items():
        proved, made = TorchModule(name, submodel.load).network().module, load_module(name, tiny.submodels[name].load)
        theirs = proved.state_dict()
        assert all(torch.equal(theirs[key], value) for key, value in made.state_dict().items()), name


def test_a_checkpoint_without_a_safety_checker(folder: Path) -> None:
    shutil.rmtree(folder / "safety_checker")
    edit(folder / "model_index.json", safety_checker=[None, None], feature_extractor=[None, None])
    checkpoint = opened(folder)
    assert "safety_checker" not in checkpoint.submodels and "feature_extractor" not in checkpoint.companions
    assert load_pipeline(checkpoint).safety_checker is None


def remove(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove("conv_in.bias"), r"missing: conv_in\.bias"),
        (lambda tensors: tensors.update(stray=torch.zeros(1)), "unexpected: stray"),
        (
            lambda tensors: tensors.update({"conv_in.bias": torch.zeros(3)}),
            r"conv_in\.bias is \[3\], expected \[32\]",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(change: Any, message: str, folder: Path) -> None:
    rewrite(folder / UNET, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_module("unet", opened(folder).submodels["unet"].load)
    assert str(folder / UNET) in str(caught.value)


def test_a_file_that_changed_after_planning_is_refused(folder: Path) -> None:
    load = opened(folder).submodels["unet"].load
    rewrite(folder / UNET, lambda tensors: tensors["conv_in.bias"].add_(1))
    with pytest.raises(CheckpointError, match="has changed since the build was planned"):
        load_module("unet", load)
    (folder / UNET).unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_module("unet", load)


HEADER = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'


def safetensors(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        b"\xff" * 100,
        safetensors(HEADER, b"\0" * 7),
        safetensors(HEADER, b"\0" * 9),
        safetensors(HEADER, b"")[:20],
        safetensors(b"not json", b""),
        safetensors(b"[]", b""),
        safetensors(b"[" * 100_000, b""),
        safetensors(HEADER.replace(b"[2]", b"[3]"), b"\0" * 8),
        safetensors(HEADER.replace(b"[2]", b"[-2]"), b"\0" * 8),
        safetensors(HEADER.replace(b"[2]", b'"x"'), b"\0" * 8),
        safetensors(HEADER.replace(b"F32", b"Q17"), b"\0" * 8),
        safetensors(HEADER.replace(b"[0,8]", b"[4,12]"), b"\0" * 12),
        safetensors(HEADER.replace(b"[0,8]", b"[0]"), b"\0" * 8),
    ],
)
def test_garbage_and_lying_headers_are_errors(content: bytes, folder: Path) -> None:
    (folder / UNET).write_bytes(content)
    with pytest.raises(CheckpointError, match="not a valid safetensors file") as caught:
        opened(folder)
    assert str(folder / UNET) in str(caught.value) and caught.value.remedy


def test_a_truncated_file_is_an_error(folder: Path) -> None:
    content = (folder / UNET).read_bytes()
    (folder / UNET).write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="its tensors end at byte"):
        opened(folder)


@pytest.mark.parametrize("file", ["model_index.json", "unet/config.json", "tokenizer/tokenizer_config.json", UNET])
def test_a_missing_file_is_named(file: str, folder: Path) -> None:
    (folder / file).unlink()
    with pytest.raises(CheckpointError) as caught:
        opened(folder)
    assert Path(file).name in str(caught.value) and caught.value.remedy


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("model_index.json", {"_class_name": "StableCascadeDecoderPipeline"}, "StableDiffusionXLPipeline"),
        ("unet/config.json", {"_class_name": "UNet3DConditionModel"}, "of UNet3DConditionModel, not of UNet2D"),
        ("text_encoder/config.json", {"architectures": ["T5EncoderModel"]}, "of T5EncoderModel, not of CLIPTextModel"),
        ("vae/config.json", {"_class_name": "AsymmetricAutoencoderKL"}, "of AsymmetricAutoencoderKL"),
        ("unet/config.json", {"sample_size": None}, "its sample_size is None"),
        ("vae/config.json", {"block_out_channels": None}, "are incomplete"),
    ],
)
def test_another_class_or_an_unusable_configuration_is_an_error(
    file: str, changes: dict[str, Any], message: str, folder: Path
) -> None:
    edit(folder / file, **changes)
    with pytest.raises(CheckpointError, match=message):
        opened(folder)


@pytest.mark.parametrize(
    ("file", "submodel", "changes"),
    [
        ("unet/config.json", "unet", {"down_block_types": ["NoSuchBlock"] * 4}),
        ("unet/config.json", "unet", {"norm_num_groups": 7}),
        ("text_encoder/config.json", "text_encoder", {"hidden_size": 33}),
        ("text_encoder/config.json", "text_encoder", {"num_attention_heads": 0}),
        ("text_encoder/config.json", "text_encoder", {"hidden_act": "no such"}),
    ],
)
def test_a_configuration_that_makes_no_module_is_an_error(
    file: str, submodel: str, changes: dict[str, Any], folder: Path
) -> None:
    edit(folder / file, **changes)
    with pytest.raises(CheckpointError):
        load_module(submodel, opened(folder).submodels[submodel].load)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\0"])
def test_a_damaged_configuration_is_an_error(text: str, folder: Path) -> None:
    (folder / "vae/config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"vae/config\.json: not"):
        opened(folder)


@pytest.mark.parametrize(
    "reference", ["", "/no/such/folder", "https://example.com/x", "hf:onlyname", "hf:a/b@", "sample:no such"]
)
def test_a_reference_to_nothing_is_an_error(reference: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(reference, digests=PlainDigests(), download=False)
    assert caught.value.remedy


def test_an_unknown_sample_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(CheckpointError, match="there is no sample") as caught:
        open_checkpoint("sample:nothing", digests=PlainDigests(), download=False)
    assert caught.value.remedy == "known: shapes, shapes-klein"


def test_a_sample_opens(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sdflow

    (tmp_path / "samples").mkdir()
    shutil.copytree(tiny_folder, tmp_path / "samples/shapes")
    monkeypatch.setattr(sdflow, "__file__", str(tmp_path / "sdflow/__init__.py"))
    checkpoint = open_checkpoint("sample:shapes", digests=PlainDigests(), download=False)
    assert checkpoint.provenance["kind"] == "sample"
    assert identities(checkpoint) == identities(opened(tiny_folder))


def test_a_config_without_a_class_is_of_the_class_that_the_index_declares(tiny: Checkpoint, folder: Path) -> None:
    """As diffusers loads it: `from_pretrained` goes by model_index.json."""
    from transformers import CLIPTextModel

    edit(folder / "text_encoder/config.json", architectures=None)
    loaded = CLIPTextModel.from_pretrained(folder / "text_encoder").state_dict()
    checkpoint = opened(folder)
    found = load_module("text_encoder", checkpoint.submodels["text_encoder"].load).state_dict()
    assert found.keys() == loaded.keys() and all(torch.equal(found[name], loaded[name]) for name in found)
    edit(folder / "model_index.json", text_encoder=["transformers", "T5EncoderModel"])
    with pytest.raises(CheckpointError, match="T5EncoderModel"):
        opened(folder)
