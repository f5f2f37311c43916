"""GGUF files: every value is the one that the `gguf` package gives, whatever the family, the type and the names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGUFWriter
from low_bit_files import (
    PLAIN,
    T,
    by_gguf,
    mixed,
    qwen3_by_llama_cpp,
    t5_by_llama_cpp,
    write_gguf,
)
from original_layout import flux_tensors, original_layout, stable_diffusion_1, unet_tensors
from z_image_layout import z_image_tensors

from sdflow.sources import Checkpoint, PlainDigests, load_module, open_checkpoint
from sdflow.sources.formats import open_weights
from sdflow.sources.formats.ggml_types import TYPES
from sdflow.sources.load import parameter_shapes
from sdflow.sources.loras.layers import LoraLayer
from sdflow.weights.lora import Loras, Merged
from sdflow.weights.tensors import open_tensors

QUANTIZED = [T(number) for number, kind in TYPES.items() if kind.block > 1]
SMALL = (T.Q8_0, T.Q4_0, T.Q5_0, T.Q4_1, T.Q5_1, T.BF16)
"""Types that `gguf` quantizes to."""
K = (T.Q4_K, T.Q5_K, T.Q6_K, T.Q8_0)


def opened(reference: str, **options: Any) -> Checkpoint:
    return open_checkpoint(reference, digests=PlainDigests(), download=False, **options)


def module(checkpoint: Checkpoint, name: str) -> Any:
    return load_module(name, checkpoint.submodels[name].load)


def streamed(checkpoint: Checkpoint, name: str) -> dict[str, np.ndarray]:
    """A submodel's parameters as BindWeights reads them."""
    load = checkpoint.submodels[name].load
    shapes = parameter_shapes(name, load)
    with open_tensors(name, load, shapes) as tensors:
        return {key: tensors.read(key).astype(np.float32) for key in shapes}


def assert_same_bits(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert np.array_equal(np.asarray(found[name]), np.asarray(expected[name])), name


def test_the_types_are_those_of_the_package() -> None:
    for number, kind in TYPES.items():
        assert (kind.name, (kind.block, kind.size)) == (T(number).name, GGML_QUANT_SIZES[T(number)])
    wanted = {T.Q8_0, T.Q6_K, T.Q5_K, T.Q4_K, T.Q4_0, T.Q5_0, T.Q4_1, *PLAIN}
    assert wanted <= {T(number) for number in TYPES}


@pytest.mark.parametrize("kind", [*QUANTIZED, *PLAIN], ids=lambda kind: kind.name)
def test_each_type_has_the_values_of_the_package_whole_and_by_rows(kind: T, tmp_path: Path) -> None:
    values = torch.randn(7, 512, generator=torch.Generator().manual_seed(1)) / 20
    path = write_gguf(
        tmp_path / "x.gguf",
        {"one": torch.zeros(3), "two": values},
        lambda name, _: kind if name == "two" else T.F32,
        "flux",
    )
    expected, tensor = by_gguf(path)["two"], open_weights(path).tensors["two"]
    assert tensor.dtype == kind.name and tensor.low_bits == (kind not in PLAIN) and np.abs(expected).max() > 0.01
    assert np.array_equal(tensor.values(), expected)
    for rows in (slice(2, 5), slice(6, 7), slice(0, 7)):
        assert np.array_equal(tensor.values(rows), expected[rows])


def test_a_large_tensor_is_dequantized_in_steps(tmp_path: Path) -> None:
    values = torch.randn(4200, 1024, generator=torch.Generator().manual_seed(2))
    path = write_gguf(tmp_path / "x.gguf", {"w": values}, lambda *_: T.Q8_0, "flux")
    assert np.array_equal(open_weights(path).tensors["w"].values(), by_gguf(path)["w"])


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_a_transformer_in_its_original_names(tmp_path: Path, prefix: str) -> None:
    """As city96 writes FLUX.1, and as stable-diffusion.cpp does."""
    model = "synthetic:flux1-schnell-tiny"
    named = {f"{prefix}{name}": each for name, each in flux_tensors(module(opened(model), "transformer")).items()}
    path = write_gguf(tmp_path / "flux1-Q4_K_S.gguf", named, mixed(*SMALL, *K), "flux" if not prefix else None)
    found = opened(model, components={"transformer": str(path)})
    expected = {name.removeprefix(prefix): each for name, each in by_gguf(path).items()}
    loaded = module(found, "transformer")
    assert_same_bits(flux_tensors(loaded), expected)
    assert_same_bits(streamed(found, "transformer"), loaded.state_dict())
    origin = found.provenance["components"]["transformer"]
    assert origin["quantized"]["format"] == "gguf" and origin["quantized"]["types"]["Q4_K"] > 1
    assert any("flux1-Q4_K_S.gguf stores its weights in low bits" in note for note in found.notes)


def test_a_lora_is_merged_into_the_dequantized_values(tmp_path: Path) -> None:
    model, key = "synthetic:flux1-schnell-tiny", "transformer_blocks.0.attn.to_k.weight"
    path = write_gguf(tmp_path / "x.gguf", flux_tensors(module(opened(model), "transformer")), mixed(T.Q4_0), "flux")
    load = opened(model, components={"transformer": str(path)}).submodels["transformer"].load
    shapes = parameter_shapes("transformer", load)
    random = np.random.default_rng(0)
    up, down = (random.standard_normal(size).astype(np.float32) for size in ((shapes[key][0], 2), (2, shapes[key][1])))
    with open_tensors("transformer", load, shapes) as tensors:
        merged = Merged(tensors, Loras([({key: LoraLayer(up, down, 0.5)}, 0.8)])).read(key)
    second = by_gguf(path)["double_blocks.0.img_attn.qkv.weight"][shapes[key][0] :][: shapes[key][0]]
    np.testing.assert_allclose(merged, second + 0.4 * up @ down, rtol=1e-5, atol=1e-6)


def test_z_images_transformer_with_pad_tokens_of_one_axis(tmp_path: Path) -> None:
    """llama.cpp's tools drop leading axes of 1."""
    model = "synthetic:z-image-tiny"
    tensors = z_image_tensors(module(opened(model), "transformer"))
    flat = {name: each[0] if name.endswith("pad_token") else each for name, each in tensors.items()}
    assert sum(flat[name].shape != tensors[name].shape for name in flat) == 2
    path = write_gguf(tmp_path / "z.gguf", flat, mixed(*SMALL), "lumina2")
    loaded = module(opened(model, components={"transformer": str(path)}), "transformer")
    expected = {name: each.reshape(tensors[name].shape) for name, each in by_gguf(path).items()}
    assert_same_bits(z_image_tensors(loaded), expected)


@pytest.mark.parametrize("model", ["synthetic:sdxl-tiny", "synthetic:sd15-tiny"])
def test_a_unet_whose_convolutions_were_reshaped(model: str, tmp_path: Path) -> None:
    tensors = unet_tensors(module(opened(model), "unet"))
    path = write_gguf(tmp_path / "unet.gguf", tensors, mixed(*K, T.F16), model.removeprefix("synthetic:"))
    found = opened(model, components={"unet": str(path)})
    loaded = module(found, "unet")
    assert_same_bits(unet_tensors(loaded), by_gguf(path))
    assert_same_bits(streamed(found, "unet"), loaded.state_dict())


def test_a_unet_whose_matrices_are_written_as_convolutions(tmp_path: Path) -> None:
    """As stable-diffusion.cpp writes those around attention in SDXL."""
    tensors = unet_tensors(module(opened("synthetic:sdxl-tiny"), "unet"))
    around = [name for name in tensors if name.endswith((".proj_in.weight", ".proj_out.weight"))]
    assert around and all(tensors[name].dim() == 2 for name in around)
    written = {name: each[:, :, None, None] if name in around else each for name, each in tensors.items()}
    path = write_gguf(tmp_path / "unet.gguf", written, lambda *_: T.F16, None)
    loaded = unet_tensors(module(opened("synthetic:sdxl-tiny", components={"unet": str(path)}), "unet"))
    assert_same_bits(loaded, {name: each.reshape(tensors[name].shape) for name, each in by_gguf(path).items()})


def test_a_whole_checkpoint(tmp_path: Path) -> None:
    """As stable-diffusion.cpp writes Stable Diffusion 1.5."""
    tensors = original_layout(opened("synthetic:sd15-tiny"))
    kinds = mixed(T.Q8_0, T.F16)
    path = write_gguf(
        tmp_path / "sd15.gguf", tensors, lambda name, values: T.I64 if "ids" in name else kinds(name, values), None
    )
    found = opened(str(path))
    assert found.provenance["architecture"] == "sd15-tiny" and found.provenance["quantized"]["types"]["Q8_0"] > 10
    written = stable_diffusion_1(*(module(found, name) for name in ("unet", "vae_decoder", "text_encoder")))
    others = {name for name in written if name.endswith("position_ids") or name == "alphas_cumprod"}
    expected = {name: each for name, each in by_gguf(path).items() if name not in others}
    assert_same_bits({name: each for name, each in written.items() if name not in others}, expected)


def t5_metadata(writer: GGUFWriter) -> None:
    writer.add_name("t5")
    for name, value in {
        "block_count": 2,
        "feed_forward_length": 128,
        "embedding_length": 96,
        "vocab_size": 512,
    }.items():
        writer.add_uint32(f"t5encoder.{name}", value)
    for name, value in {"head_count": 4, "key_length": 16, "relative_buckets_count": 32}.items():
        writer.add_uint32(f"t5encoder.attention.{name}", value)
    writer.add_token_list([f"token {index}" for index in range(512)])
    writer.add_token_scores([0.5] * 512)


def qwen3_metadata(writer: GGUFWriter) -> None:
    writer.add_name("qwen3")
    for name, value in {"block_count": 3, "feed_forward_length": 96, "embedding_length": 40, "vocab_size": 272}.items():
        writer.add_uint32(f"qwen3.{name}", value)
    for name, value in {"head_count": 4, "head_count_kv": 2, "key_length": 16}.items():
        writer.add_uint32(f"qwen3.attention.{name}", value)


@pytest.mark.parametrize(
    ("model", "name", "renamed", "metadata", "architecture"),
    [
        ("synthetic:flux1-schnell-tiny", "text_encoder_2", t5_by_llama_cpp, t5_metadata, "t5encoder"),
        ("synthetic:z-image-tiny", "text_encoder", qwen3_by_llama_cpp, qwen3_metadata, "qwen3"),
    ],
)
def test_a_text_encoder_in_the_names_of_llama_cpp_is_what_transformers_loads(
    model: str, name: str, renamed: Any, metadata: Any, architecture: str, tmp_path: Path
) -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    own = module(opened(model), name)
    path = write_gguf(tmp_path / "text.gguf", renamed(own.state_dict()), mixed(*SMALL), architecture, metadata)
    found = opened(model, components={name: str(path)})
    loaded = module(found, name)
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=own)["tensors"]
    shaped = {key: np.asarray(each).reshape(own.state_dict()[key].shape) for key, each in theirs.items()}
    assert_same_bits({key: loaded.state_dict()[key] for key in shaped}, shaped)
    assert {key for key in loaded.state_dict() if key not in theirs} <= {"encoder.embed_tokens.weight"}
    assert_same_bits(streamed(found, name), loaded.state_dict())
    assert found.companions == opened(model).companions


def test_the_identity_is_that_of_the_content(tmp_path: Path) -> None:
    model = "synthetic:flux1-schnell-tiny"
    tensors = flux_tensors(module(opened(model), "transformer"))

    def identity(path: Path) -> Any:
        return opened(model, components={"transformer": str(path)}).submodels["transformer"].identity

    first = write_gguf(tmp_path / "a.gguf", tensors, mixed(T.Q8_0), "flux")
    again = write_gguf(tmp_path / "b.gguf", tensors, mixed(T.Q8_0), "flux")
    other = write_gguf(tmp_path / "c.gguf", tensors, mixed(T.Q5_0), "flux")
    assert identity(first) == identity(again) != identity(other)
    raw = bytearray(again.read_bytes())
    raw[-40] ^= 1
    again.write_bytes(raw)
    assert identity(first) != identity(again)
