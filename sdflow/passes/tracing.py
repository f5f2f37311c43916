"""The form in which each submodel is traced, and what the TorchScript exporter must leave alone meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def traced_form(submodel: str, module: Any) -> Any:
    """Change `module` so that its `forward` takes and returns the tensors of `submodel_io`; return it.

    No wrapper: the names of its parameters stay the keys of its state_dict.

    - text_encoder: eager attention under the causal mask of transformers 4.2x, the only one that ORT's fusion knows.
    - unet, vae: diffusers' default attention, scaled_dot_product_attention. For the UNet it is what the
      MultiHeadAttention fusion matches. For the VAE it is what `fusion_attention_vae` of ONNX Runtime 1.31 does *not*
      match: the older form fuses, but that fusion writes zeros in place of the biases of q, k and v.
    - vae_encoder, vae_decoder: the other half's parameters are dropped.
    - safety_checker: the scores of diffusers' `forward_onnx`. Its `images[flagged] = 0` is not exported as it is: that
      becomes a Where whose condition, [batch], is broadcast along the images' last axis.
    """
    _FORMS[submodel](module)
    return module.eval().requires_grad_(False)


def _text_encoder(module: Any) -> None:
    module.set_attn_implementation("eager")
    original = module.forward

    def forward(input_ids: Any) -> tuple[Any, Any]:
        # A mask of four dimensions is used as it is, in place of the one that transformers would make.
        output = original(input_ids=input_ids, attention_mask=_causal_mask(input_ids))
        return output.last_hidden_state, output.pooler_output

    module.forward = forward


def _causal_mask(input_ids: Any) -> Any:
    """0 on and below the diagonal, the least float32 above it, [batch, 1, sequence, sequence].

    The form of transformers 4.2x (`_make_causal_mask`). Traced, it is Where(Less)-Unsqueeze-Unsqueeze-Expand, which
    onnxruntime/transformers/fusion_attention_clip.py looks for.
    """
    import torch

    batch, sequence = input_ids.shape
    mask = torch.full((sequence, sequence), torch.finfo(torch.float32).min)
    positions = torch.arange(sequence)
    mask.masked_fill_(positions < (positions + 1).view(sequence, 1), 0)
    return mask[None, None, :, :].expand(batch, 1, sequence, sequence)


def _unet(module: Any) -> None:
    original = module.forward

    def forward(sample: Any, timestep: Any, encoder_hidden_states: Any) -> Any:
        return original(sample, timestep, encoder_hidden_states, return_dict=False)[0]

    def forward_xl(sample: Any, timestep: Any, encoder_hidden_states: Any, text_embeds: Any, time_ids: Any) -> Any:
        added = {"text_embeds": text_embeds, "time_ids": time_ids}
        return original(sample, timestep, encoder_hidden_states, added_cond_kwargs=added, return_dict=False)[0]

    module.forward = forward if module.config.addition_embed_type is None else forward_xl


def _vae_encoder(module: Any) -> None:
    module.decoder = module.post_quant_conv = None

    def forward(sample: Any) -> Any:
        return module.encode(sample, return_dict=False)[0].mode()

    module.forward = forward


def _vae_decoder(module: Any) -> None:
    module.encoder = module.quant_conv = None

    def forward(latent_sample: Any) -> Any:
        return module.decode(latent_sample, return_dict=False)[0]

    module.forward = forward


def _safety_checker(module: Any) -> None:
    import torch
    from torch.nn.functional import normalize

    def cosines(embeds: Any, concepts: Any) -> Any:
        return normalize(embeds) @ normalize(concepts).t()

    def forward(clip_input: Any, images: Any) -> tuple[Any, Any]:
        embeds = module.visual_projection(module.vision_model(clip_input)[1])
        special = cosines(embeds, module.special_care_embeds) - module.special_care_embeds_weights
        adjustment = torch.any(special > 0, dim=1, keepdim=True) * 0.01
        concepts = cosines(embeds, module.concept_embeds) - module.concept_embeds_weights + adjustment
        flagged = torch.any(concepts > 0, dim=1)
        return torch.where(flagged[:, None, None, None], torch.zeros_like(images), images), flagged

    module.forward = forward


_FORMS = {
    "text_encoder": _text_encoder,
    "unet": _unet,
    "vae_encoder": _vae_encoder,
    "vae_decoder": _vae_decoder,
    "safety_checker": _safety_checker,
}


@contextmanager
def weights_kept_apart() -> Iterator[None]:
    """While this is open, `torch.onnx.export(dynamo=False)` gives every parameter an initializer named by its key.

    Left to itself, the exporter (torch/onnx/_internal/torchscript_exporter/utils.py) folds the transpose before a
    MatMul and the unsqueeze after a GroupNorm into new initializers with made-up names, and merges initializers of
    equal values. Then nobody knows any more which is which, and the graph depends on coincidences among the weights.
    Constants are still folded; `weight_names.fold_weights` folds the weights afterwards and records what it did.
    """
    import torch

    fold = torch._C._jit_pass_onnx_constant_fold
    merge = torch._C._jit_pass_onnx_deduplicate_initializers

    def fold_constants_only(graph: Any, params: dict[str, Any], opset: int) -> dict[str, Any]:
        return {**params, **fold(graph, {}, opset)}

    def merge_nothing(graph: Any, params: dict[str, Any], training: bool) -> dict[str, Any]:
        return params

    torch._C._jit_pass_onnx_constant_fold = fold_constants_only
    torch._C._jit_pass_onnx_deduplicate_initializers = merge_nothing
    try:
        yield
    finally:
        torch._C._jit_pass_onnx_constant_fold = fold
        torch._C._jit_pass_onnx_deduplicate_initializers = merge
