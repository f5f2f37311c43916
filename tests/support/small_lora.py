"""LoRAs with random weights for the small Stable Diffusion, in kohya's key style."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from sdflow.sources.architectures import architecture_config
from sdflow.sources.load import parameter_shapes

PREFIX = {"unet": "lora_unet", "text_encoder": "lora_te"}
LAYERS = {"unet": ("attn2.to_q", "attn2.to_v"), "text_encoder": ("self_attn.q_proj", "mlp.fc1")}


def write_lora(path: Path, submodels: Sequence[str] = ("unet", "text_encoder"), seed: int = 0) -> Path:
    """A LoRA of rank 2 that touches some layers of these submodels."""
    random = np.random.default_rng(seed)
    tensors = {}
    for submodel in submodels:
        for key, shape in parameter_shapes(submodel, {"config": architecture_config("sd15-tiny", submodel)}).items():
            layer = key.removesuffix(".weight")
            if layer == key or not layer.endswith(LAYERS[submodel]):
                continue
            full = layer if submodel == "unet" or layer.startswith("text_model.") else f"text_model.{layer}"
            name = f"{PREFIX[submodel]}_{full.replace('.', '_')}"
            tensors[f"{name}.lora_up.weight"] = random.standard_normal((shape[0], 2)).astype(np.float32)
            tensors[f"{name}.lora_down.weight"] = random.standard_normal((2, shape[1])).astype(np.float32)
            tensors[f"{name}.alpha"] = np.array(2.0, np.float32)
    save_file(tensors, path)
    return path
