"""Calculate the bytes of 20 LoRAs of one Stable Diffusion 1.5 in a remote cache, at full size from its tensors.

    python benchmarks/cache/remote_pieces.py

A changed tensor counts with every piece that it touches. Nothing is built or sent; only float16 shapes are used.
"""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from sdflow.store.remote.entry import sizes
from sdflow.units import spell_bytes

LORAS = 20
KINDS = {
    "attention of the UNet": (r"attn[12]\.to_(q|k|v|out)", None),
    "attention and feed-forward of the UNet": (r"attn[12]\.to_|ff\.net|proj_(in|out)", None),
    "the same, and the text encoder": (r"attn[12]\.to_|ff\.net|proj_(in|out)", r"self_attn|mlp"),
}


def shapes() -> dict[str, dict[str, int]]:
    """Submodel -> tensor -> bytes in float16, in the order of the state dict."""
    import torch
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    with torch.device("meta"):
        text = CLIPTextConfig(
            hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, projection_dim=768
        )
        modules = {
            "unet": UNet2DConditionModel(cross_attention_dim=768, attention_head_dim=8),
            "text_encoder": CLIPTextModel(text),
            "vae": AutoencoderKL(
                block_out_channels=(128, 256, 512, 512),
                down_block_types=("DownEncoderBlock2D",) * 4,
                up_block_types=("UpDecoderBlock2D",) * 4,
                layers_per_block=2,
                latent_channels=4,
            ),
        }
    return {
        name: {key: 2 * math.prod(tensor.shape) for key, tensor in module.state_dict().items()}
        for name, module in modules.items()
    }


def changed(tensors: dict[str, int], pattern: str | None) -> tuple[int, int, int]:
    """Bytes of the pieces that change, bytes of the tensors that do, and the number of all pieces."""
    offsets, end = {}, 0
    for key, size in tensors.items():
        offsets[key] = end
        end += size
    touched = [
        (offsets[key], offsets[key] + size)
        for key, size in tensors.items()
        if pattern and key.endswith("weight") and re.search(pattern, key)
    ]
    begin = pieces = sent = 0
    for size in sizes(end, list(offsets.values())):
        if any(low < begin + size and high > begin for low, high in touched):
            sent += size
        begin += size
        pieces += 1
    return sent, sum(high - low for low, high in touched), pieces


def main() -> None:
    models = shapes()
    base = sum(sum(tensors.values()) for tensors in models.values())
    count = sum(changed(tensors, None)[2] for tensors in models.values())
    print(f"base: {spell_bytes(base)} in {count} pieces")
    for kind, (unet, text) in KINDS.items():
        parts = [changed(models["unet"], unet), changed(models["text_encoder"], text)]
        sent, exact = (sum(part[index] for part in parts) for index in (0, 1))
        print(
            f"{kind}: {spell_bytes(sent)} for each LoRA ({spell_bytes(exact)} of tensors); "
            f"{LORAS} of them and the base: {(base + LORAS * sent) / base:.2f}x the base"
        )


if __name__ == "__main__":
    main()
