"""Checkpoints in one file in the original (CompVis, Stability AI) layouts, written from the modules of the libraries.

The modules are walked in the order in which the original constructors make them, so that this knows nothing of sdflow's
names: https://github.com/CompVis/stable-diffusion, ldm/modules/diffusionmodules/openaimodel.py and model.py;
https://github.com/mlfoundations/open_clip, open_clip/transformer.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from sdflow.sources import Checkpoint, load_module

Tensors = dict[str, torch.Tensor]


def original_layout(checkpoint: Checkpoint) -> Tensors:
    """The file of a checkpoint of Stable Diffusion 1.x."""
    parts = (load_module(name, checkpoint.submodels[name].load) for name in ("unet", "vae_decoder", "text_encoder"))
    return stable_diffusion_1(*parts)


def stable_diffusion_1(unet: Any, vae: Any, text: Any) -> Tensors:
    """UNet, VAE and text encoder, and what such files hold besides."""
    return _file(unet, vae, ("cond_stage_model.transformer.", _with_positions(clip_tensors(text))))


def stable_diffusion_2(unet: Any, vae: Any, text: Any) -> Tensors:
    """The same with OpenCLIP's text encoder, whose last layer and projection nothing reads."""
    return _file(unet, vae, ("cond_stage_model.model.", open_clip_tensors(text)))


def stable_diffusion_xl(unet: Any, vae: Any, text: Any, text_2: Any) -> Tensors:
    """UNet, VAE and both text encoders."""
    return _file(
        unet,
        vae,
        ("conditioner.embedders.0.transformer.", _with_positions(clip_tensors(text))),
        ("conditioner.embedders.1.model.", open_clip_tensors(text_2)),
    )


def refiner_of_xl(unet: Any, vae: Any, text_2: Any) -> Tensors:
    """The refiner's: its only text encoder is the first conditioner there."""
    return _file(unet, vae, ("conditioner.embedders.0.model.", open_clip_tensors(text_2)))


def _file(unet: Any, vae: Any, *texts: tuple[str, Tensors]) -> Tensors:
    parts = [("model.diffusion_model.", unet_tensors(unet)), ("first_stage_model.", vae_tensors(vae)), *texts]
    tensors = {prefix + name: tensor for prefix, part in parts for name, tensor in part.items()}
    tensors["alphas_cumprod"] = torch.linspace(1, 0, 1000)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _named(places: Iterator[tuple[str, Any]]) -> Tensors:
    tensors: Tensors = {}
    for place, module in places:
        named = {f"{place}.{key}": tensor for key, tensor in module.state_dict().items()}
        assert not named.keys() & tensors.keys()
        tensors |= named
    return tensors


# UNet


def unet_tensors(unet: Any) -> Tensors:
    """The tensors of a UNet2DConditionModel without `model.diffusion_model.`."""
    tensors = _named(_unet(unet))
    assert len(tensors) == len(unet.state_dict())
    return tensors


def _unet(unet: Any) -> Iterator[tuple[str, Any]]:
    yield from (("time_embed.0", unet.time_embedding.linear_1), ("time_embed.2", unet.time_embedding.linear_2))
    if unet.config.time_cond_proj_dim is not None:  # of latent consistency models, whose files keep diffusers' name
        yield "time_embedding.cond_proj", unet.time_embedding.cond_proj
    if unet.config.addition_embed_type == "text_time":
        yield from (("label_emb.0.0", unet.add_embedding.linear_1), ("label_emb.0.2", unet.add_embedding.linear_2))
    yield "input_blocks.0.0", unet.conv_in
    place = 1
    for block in unet.down_blocks:
        for index, resnet in enumerate(block.resnets):
            yield from _resnet(f"input_blocks.{place}.0", resnet)
            if hasattr(block, "attentions"):
                yield f"input_blocks.{place}.1", block.attentions[index]
            place += 1
        if block.downsamplers:
            yield f"input_blocks.{place}.0.op", block.downsamplers[0].conv
            place += 1
    yield from _resnet("middle_block.0", unet.mid_block.resnets[0])
    yield "middle_block.1", unet.mid_block.attentions[0]
    yield from _resnet("middle_block.2", unet.mid_block.resnets[1])
    place = 0
    for block in unet.up_blocks:
        for index, resnet in enumerate(block.resnets):
            modules = 1
            yield from _resnet(f"output_blocks.{place}.0", resnet)
            if hasattr(block, "attentions"):
                yield f"output_blocks.{place}.1", block.attentions[index]
                modules = 2
            if block.upsamplers and index == len(block.resnets) - 1:
                yield f"output_blocks.{place}.{modules}.conv", block.upsamplers[0].conv
            place += 1
    yield from (("out.0", unet.conv_norm_out), ("out.2", unet.conv_out))


def _resnet(place: str, resnet: Any) -> Iterator[tuple[str, Any]]:
    yield from ((f"{place}.in_layers.0", resnet.norm1), (f"{place}.in_layers.2", resnet.conv1))
    yield f"{place}.emb_layers.1", resnet.time_emb_proj
    yield from ((f"{place}.out_layers.0", resnet.norm2), (f"{place}.out_layers.3", resnet.conv2))
    if resnet.conv_shortcut is not None:
        yield f"{place}.skip_connection", resnet.conv_shortcut


# VAE


def vae_tensors(vae: Any) -> Tensors:
    """The tensors of an AutoencoderKL without `first_stage_model.`; its attention is made of 1x1 convolutions there."""
    tensors = _named(_vae(vae))
    assert len(tensors) == len(vae.state_dict())
    return {
        name: tensor[:, :, None, None] if ".attn_1." in name and tensor.dim() == 2 else tensor
        for name, tensor in tensors.items()
    }


def _vae(vae: Any) -> Iterator[tuple[str, Any]]:
    between = (("quant_conv", vae.quant_conv), ("post_quant_conv", vae.post_quant_conv))
    yield from ((name, layer) for name, layer in between if layer is not None)
    for half, module in (("encoder", vae.encoder), ("decoder", vae.decoder)):
        yield from ((f"{half}.conv_in", module.conv_in), (f"{half}.conv_out", module.conv_out))
        yield f"{half}.norm_out", module.conv_norm_out
        middle = module.mid_block
        yield from _vae_resnet(f"{half}.mid.block_1", middle.resnets[0])
        yield from _vae_resnet(f"{half}.mid.block_2", middle.resnets[1])
        attention = middle.attentions[0]
        yield f"{half}.mid.attn_1.norm", attention.group_norm
        for name, part in (("q", attention.to_q), ("k", attention.to_k), ("v", attention.to_v)):
            yield f"{half}.mid.attn_1.{name}", part
        yield f"{half}.mid.attn_1.proj_out", attention.to_out[0]
    for level, block in enumerate(vae.encoder.down_blocks):
        for index, resnet in enumerate(block.resnets):
            yield from _vae_resnet(f"encoder.down.{level}.block.{index}", resnet)
        if block.downsamplers:
            yield f"encoder.down.{level}.downsample.conv", block.downsamplers[0].conv
    for level, block in enumerate(reversed(vae.decoder.up_blocks)):  # the original counts from the finest
        for index, resnet in enumerate(block.resnets):
            yield from _vae_resnet(f"decoder.up.{level}.block.{index}", resnet)
        if block.upsamplers:
            yield f"decoder.up.{level}.upsample.conv", block.upsamplers[0].conv


def _vae_resnet(place: str, resnet: Any) -> Iterator[tuple[str, Any]]:
    for name in ("norm1", "conv1", "norm2", "conv2"):
        yield f"{place}.{name}", getattr(resnet, name)
    if resnet.conv_shortcut is not None:
        yield f"{place}.nin_shortcut", resnet.conv_shortcut


# Text encoders


def clip_tensors(text: Any) -> Tensors:
    """The tensors of a CLIPTextModel as transformers 4 named them."""
    return {f"text_model.{key.removeprefix('text_model.')}": tensor for key, tensor in text.state_dict().items()}


def _with_positions(tensors: Tensors) -> Tensors:
    return tensors | {"text_model.embeddings.position_ids": torch.arange(77)[None]}


def open_clip_tensors(text: Any) -> Tensors:
    """The tensors of a CLIPTextModelWithProjection in OpenCLIP's layout.

    A CLIPTextModel is one that reads the last layer but one, so the file has one more, and a projection.
    """
    model = getattr(text, "text_model", text)
    width, layers = text.config.hidden_size, list(model.encoder.layers)
    tensors = {
        "token_embedding.weight": model.embeddings.token_embedding.weight,
        "positional_embedding": model.embeddings.position_embedding.weight,
        "logit_scale": torch.tensor(4.6),
        "ln_final.weight": model.final_layer_norm.weight,
        "ln_final.bias": model.final_layer_norm.bias,
    }
    if hasattr(text, "text_projection"):
        tensors["text_projection"] = text.text_projection.weight.T
    else:
        tensors["text_projection"] = torch.full((width, width), 7.0)
        layers.append(_unread(layers[-1]))
    for index, layer in enumerate(layers):
        block = f"transformer.resblocks.{index}"
        attention = layer.self_attn
        qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
        tensors[f"{block}.attn.in_proj_weight"] = torch.cat([part.weight for part in qkv])
        tensors[f"{block}.attn.in_proj_bias"] = torch.cat([part.bias for part in qkv])
        tensors |= _named(
            (f"{block}.{name}", module)
            for name, module in (
                ("attn.out_proj", attention.out_proj),
                ("ln_1", layer.layer_norm1),
                ("ln_2", layer.layer_norm2),
                ("mlp.c_fc", layer.mlp.fc1),
                ("mlp.c_proj", layer.mlp.fc2),
            )
        )
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _unread(layer: torch.nn.Module) -> Any:
    """A layer of the same shapes with other values."""
    import copy

    other = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(7.0)
    return other


# Stable Diffusion 3


def stable_diffusion_3(transformer: Any, vae: Any, text: Any = None, text_2: Any = None, text_3: Any = None) -> Tensors:
    """Transformer and VAE, and the text encoders that are given. CLIP-L lies there without its projection, T5 with both names of
    its embedding."""
    parts = [("model.diffusion_model.", mmdit_tensors(transformer)), ("first_stage_model.", vae_tensors(vae))]
    if text is not None:
        tensors = {key: value for key, value in clip_tensors(text).items() if "text_projection" not in key}
        parts.append(("text_encoders.clip_l.transformer.", tensors))
    if text_2 is not None:
        projection = {"text_projection.weight": text_2.text_projection.weight}
        tensors = {key: value for key, value in clip_tensors(text_2).items() if "text_projection" not in key}
        parts.append(("text_encoders.clip_g.transformer.", tensors | projection))
    if text_3 is not None:
        parts.append(("text_encoders.t5xxl.transformer.", dict(text_3.state_dict())))
    return {f"{prefix}{name}": value.clone().contiguous() for prefix, part in parts for name, value in part.items()}


def mmdit_tensors(transformer: Any) -> Tensors:
    """The tensors of an SD3Transformer2DModel without `model.diffusion_model.`: https://github.com/Stability-AI/sd3.5,
    mmditx.py."""
    blocks = list(transformer.transformer_blocks)
    places = [
        ("x_embedder.proj", transformer.pos_embed.proj),
        ("t_embedder.mlp.0", transformer.time_text_embed.timestep_embedder.linear_1),
        ("t_embedder.mlp.2", transformer.time_text_embed.timestep_embedder.linear_2),
        ("y_embedder.mlp.0", transformer.time_text_embed.text_embedder.linear_1),
        ("y_embedder.mlp.2", transformer.time_text_embed.text_embedder.linear_2),
        ("context_embedder", transformer.context_embedder),
        ("final_layer.linear", transformer.proj_out),
    ]
    tensors = {"pos_embed": transformer.pos_embed.pos_embed}
    for index, block in enumerate(blocks):
        image, text = f"joint_blocks.{index}.x_block", f"joint_blocks.{index}.context_block"
        attention = block.attn
        tensors |= _packed(f"{image}.attn.qkv", attention.to_q, attention.to_k, attention.to_v)
        tensors |= _packed(f"{text}.attn.qkv", attention.add_q_proj, attention.add_k_proj, attention.add_v_proj)
        places += [(f"{image}.attn.proj", attention.to_out[0]), (f"{image}.adaLN_modulation.1", block.norm1.linear)]
        places += [(f"{image}.mlp.fc1", block.ff.net[0].proj), (f"{image}.mlp.fc2", block.ff.net[2])]
        if attention.norm_q is not None:
            places += [(f"{image}.attn.ln_q", attention.norm_q), (f"{image}.attn.ln_k", attention.norm_k)]
            places += [(f"{text}.attn.ln_q", attention.norm_added_q), (f"{text}.attn.ln_k", attention.norm_added_k)]
        if (second := getattr(block, "attn2", None)) is not None:
            tensors |= _packed(f"{image}.attn2.qkv", second.to_q, second.to_k, second.to_v)
            places += [(f"{image}.attn2.proj", second.to_out[0])]
            places += [(f"{image}.attn2.ln_q", second.norm_q), (f"{image}.attn2.ln_k", second.norm_k)]
        if index < len(blocks) - 1:
            places += [
                (f"{text}.attn.proj", attention.to_add_out),
                (f"{text}.adaLN_modulation.1", block.norm1_context.linear),
            ]
            places += [(f"{text}.mlp.fc1", block.ff_context.net[0].proj), (f"{text}.mlp.fc2", block.ff_context.net[2])]
        else:
            tensors |= _swapped(f"{text}.adaLN_modulation.1", block.norm1_context.linear)
    tensors |= _swapped("final_layer.adaLN_modulation.1", transformer.norm_out.linear)
    return tensors | _named(iter(places))


def _packed(name: str, *layers: Any) -> Tensors:
    return {f"{name}.{kind}": torch.cat([getattr(layer, kind) for layer in layers]) for kind in ("weight", "bias")}


def _swapped(name: str, layer: Any) -> Tensors:
    """diffusers has scale before shift, the original shift before scale."""
    return {f"{name}.{kind}": torch.cat(getattr(layer, kind).chunk(2)[::-1]) for kind in ("weight", "bias")}


# FLUX.1


def flux_tensors(transformer: Any) -> Tensors:
    """The tensors of a FluxTransformer2DModel as Black Forest Labs publish them:
    https://github.com/black-forest-labs/flux, src/flux/model.py and modules/layers.py."""
    embedders = transformer.time_text_embed
    pairs = [("time_in", embedders.timestep_embedder), ("vector_in", embedders.text_embedder)]
    if transformer.config.guidance_embeds:
        pairs.append(("guidance_in", embedders.guidance_embedder))
    places = [("img_in", transformer.x_embedder), ("txt_in", transformer.context_embedder)]
    for name, each in pairs:
        places += [(f"{name}.in_layer", each.linear_1), (f"{name}.out_layer", each.linear_2)]
    tensors = _swapped("final_layer.adaLN_modulation.1", transformer.norm_out.linear)
    places.append(("final_layer.linear", transformer.proj_out))
    for index, block in enumerate(transformer.transformer_blocks):
        image, text, attention = f"double_blocks.{index}.img", f"double_blocks.{index}.txt", block.attn
        tensors |= _packed(f"{image}_attn.qkv", attention.to_q, attention.to_k, attention.to_v)
        tensors |= _packed(f"{text}_attn.qkv", attention.add_q_proj, attention.add_k_proj, attention.add_v_proj)
        tensors |= _scales(f"{image}_attn", attention.norm_q, attention.norm_k)
        tensors |= _scales(f"{text}_attn", attention.norm_added_q, attention.norm_added_k)
        places += [(f"{image}_attn.proj", attention.to_out[0]), (f"{text}_attn.proj", attention.to_add_out)]
        places += [(f"{image}_mod.lin", block.norm1.linear), (f"{text}_mod.lin", block.norm1_context.linear)]
        for stream, layers in ((image, block.ff.net), (text, block.ff_context.net)):
            places += [(f"{stream}_mlp.0", layers[0].proj), (f"{stream}_mlp.2", layers[2])]
    for index, block in enumerate(transformer.single_transformer_blocks):
        name, attention = f"single_blocks.{index}", block.attn
        tensors |= _packed(f"{name}.linear1", attention.to_q, attention.to_k, attention.to_v, block.proj_mlp)
        tensors |= _scales(name, attention.norm_q, attention.norm_k)
        places += [(f"{name}.linear2", block.proj_out), (f"{name}.modulation.lin", block.norm.linear)]
    named = tensors | _named(iter(places))
    return {name: tensor.detach().clone().contiguous() for name, tensor in named.items()}


def _scales(name: str, query: Any, key: Any) -> Tensors:
    return {f"{name}.norm.query_norm.scale": query.weight, f"{name}.norm.key_norm.scale": key.weight}
