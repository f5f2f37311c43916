"""Files in low bits, written by `gguf` and `safetensors` themselves, and what their libraries make of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize
from gguf.quants import quantize
from safetensors.torch import save_file

T = GGMLQuantizationType
Arrays = dict[str, np.ndarray]
PLAIN = (T.F32, T.F16, T.BF16)
_SCALES = {
    T.Q2_K: (80, 82), T.Q3_K: (108,), T.Q4_K: (0, 2), T.Q5_K: (0, 2), T.Q6_K: (208,), T.IQ1_S: (0,), T.IQ2_XXS: (0,),
    T.IQ2_XS: (0,), T.IQ2_S: (0,), T.IQ3_XXS: (0,), T.IQ3_S: (0,), T.IQ4_XS: (0,), T.IQ4_NL: (0,), T.TQ1_0: (52,),
    T.TQ2_0: (64,),
}  # fmt: skip
"""Where the float16 scales of a block lie, of types that `gguf` only dequantizes."""


def blocks(kind: GGMLQuantizationType, values: np.ndarray, seed: int = 0) -> np.ndarray:
    """Values in the bytes of a type; of one that `gguf` cannot make, random blocks of small values."""
    try:
        return np.asarray(quantize(values.astype(np.float32), kind))
    except NotImplementedError:
        block, size = GGML_QUANT_SIZES[kind]
        shape = (*values.shape[:-1], values.shape[-1] // block, size)
        random = np.random.default_rng(seed)
        found = random.integers(0, 256, shape, np.uint8)
        for place in _SCALES.get(kind, ()):
            scales = random.uniform(0.0002, 0.001, shape[:-1]).astype(np.float16)
            found[..., place : place + 2] = scales[..., None].view(np.uint8)
        if kind is T.IQ1_M:  # its scale is made of the upper halves of four bytes; this is the exponent
            found[..., 55] = 0x10 | (found[..., 55] & 0x0F)
        return found.reshape(*values.shape[:-1], -1)


class _Nameless(GGUFWriter):
    def add_architecture(self) -> None:
        pass


def write_gguf(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    kind_of: Callable[[str, np.ndarray], GGMLQuantizationType],
    architecture: str | None,
    more: Callable[[GGUFWriter], None] = lambda writer: None,
) -> Path:
    """As city96's ComfyUI-GGUF writes one: a tensor whose rows are no whole blocks lies in rows of 256 values, and its shape is
    in the metadata. architecture: None: it says none, as stable-diffusion.cpp."""
    writer = _Nameless(path, "") if architecture is None else GGUFWriter(path, architecture)
    more(writer)
    for index, (name, tensor) in enumerate(tensors.items()):
        values = np.ascontiguousarray(tensor.detach().float().numpy())
        kind = kind_of(name, values)
        if values.ndim and values.shape[-1] % GGML_QUANT_SIZES[kind][0]:
            writer.add_array(f"comfy.gguf.orig_shape.{name}", [int(size) for size in values.shape])
            values = values.reshape(-1, 256)
        writer.add_tensor(name, blocks(kind, values, index), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def mixed(*kinds: GGMLQuantizationType) -> Callable[[str, np.ndarray], GGMLQuantizationType]:
    """Matrices get these types in turn, where they can be cut into blocks; the rest is F32."""
    place = iter(range(10**6))

    def kind_of(name: str, values: np.ndarray) -> GGMLQuantizationType:
        if values.ndim < 2:
            return T.F32
        kind = kinds[next(place) % len(kinds)]
        block = GGML_QUANT_SIZES[kind][0]
        return kind if values.shape[-1] % block == 0 or values.size % 256 == 0 else T.F16

    return kind_of


def by_gguf(path: Path) -> Arrays:
    """The tensors of a file as `gguf` reads and dequantizes them, in float32."""
    reader = GGUFReader(path)
    found = {}
    for tensor in reader.tensors:
        if tensor.tensor_type in (T.I8, T.I16, T.I32, T.I64):
            continue
        original = reader.get_field(f"comfy.gguf.orig_shape.{tensor.name}")
        shape = tensor.shape[::-1].tolist() if original is None else original.contents()
        found[tensor.name] = np.array(dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(shape)
    return found


T5_LAYERS = {
    "layer.0.SelfAttention.relative_attention_bias": "attn_rel_b", "layer.0.SelfAttention.q": "attn_q",
    "layer.0.SelfAttention.k": "attn_k", "layer.0.SelfAttention.v": "attn_v", "layer.0.SelfAttention.o": "attn_o",
    "layer.0.layer_norm": "attn_norm", "layer.1.DenseReluDense.wi_0": "ffn_gate", "layer.1.DenseReluDense.wi_1": "ffn_up",
    "layer.1.DenseReluDense.wo": "ffn_down", "layer.1.layer_norm": "ffn_norm",
}  # fmt: skip
QWEN3_LAYERS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def t5_by_llama_cpp(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As convert_hf_to_gguf.py names the tensors of an encoder."""
    found = {"token_embd.weight": state["shared.weight"]}
    found["enc.output_norm.weight"] = state["encoder.final_layer_norm.weight"]
    for name, tensor in state.items():
        if name.startswith("encoder.block."):
            block, _, layer = name.removeprefix("encoder.block.").removesuffix(".weight").partition(".")
            found[f"enc.blk.{block}.{T5_LAYERS[layer]}.weight"] = tensor
    return found


def qwen3_by_llama_cpp(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same of a decoder without a head."""
    found = {"token_embd.weight": state["embed_tokens.weight"], "output_norm.weight": state["norm.weight"]}
    for name, tensor in state.items():
        if name.startswith("layers."):
            block, _, layer = name.removeprefix("layers.").removesuffix(".weight").partition(".")
            found[f"blk.{block}.{QWEN3_LAYERS[layer]}.weight"] = tensor
    return found


def described(**values: Any) -> torch.Tensor:
    """A `comfy_quant` tensor."""
    return torch.tensor(list(json.dumps(values).encode()), dtype=torch.uint8)


def to_float8(weight: torch.Tensor, kind: torch.dtype = torch.float8_e4m3fn) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and its scale, as ComfyUI makes them."""
    scale = weight.abs().max().float() / torch.finfo(kind).max
    return (weight / scale).to(kind), scale


def write_fp8_scaled(path: Path, tensors: Mapping[str, torch.Tensor], prefix: str = "") -> dict[str, torch.Tensor]:
    """An fp8_scaled file, and what its values are."""
    written: dict[str, torch.Tensor] = {f"{prefix}scaled_fp8": torch.empty(0, dtype=torch.float8_e4m3fn)}
    exact = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and name.endswith(".weight"):
            values, scale = to_float8(tensor)
            layer = f"{prefix}{name.removesuffix('.weight')}"
            written |= {f"{layer}.weight": values, f"{layer}.scale_weight": scale}
            written[f"{layer}.scale_input"] = torch.tensor(1.5)
            exact[name] = values.to(torch.float32) * scale
        else:
            written[f"{prefix}{name}"] = tensor.to(torch.bfloat16).contiguous()
            exact[name] = written[f"{prefix}{name}"].to(torch.float32)
    save_file(written, path)
    return exact
