"""What a UNet and a text encoder learn: the noise of latents with captions."""

from collections.abc import Iterator
from typing import Any

import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline
from optimize import mixed_precision
from torch import Tensor, nn
from training_images import as_input


@torch.no_grad()
def encode(vae: AutoencoderKL, images: Tensor, scale: float) -> Tensor:
    """Latents [n, 4, 16, 16] of uint8 images: the posterior's mean times `scale`."""
    parts = []
    for part in images.split(512):
        with mixed_precision(part.device):
            parts.append(vae.encode(as_input(part)).latent_dist.mean.float() * scale)
    return torch.cat(parts)


class Denoising:
    """Batches of noised latents with captions, and the loss of predicting their noise."""

    def __init__(
        self, pipeline: StableDiffusionPipeline, unet: nn.Module, text_encoder: nn.Module, settings: dict[str, Any]
    ) -> None:
        self.unet, self.text_encoder, self.settings = unet, text_encoder, settings
        self.tokenizer = pipeline.tokenizer
        self.device = pipeline.unet.device
        self.alphas = pipeline.scheduler.alphas_cumprod.to(self.device)
        self.empty = self.tokens([""])[0]

    def tokens(self, texts: list[str]) -> Tensor:
        """Token ids [n, 77]."""
        ids = self.tokenizer(texts, padding="max_length", max_length=77, truncation=True, return_tensors="pt").input_ids
        return ids.to(self.device)

    def losses(self, latents: Tensor, captions: Tensor) -> Iterator[Tensor]:
        """Mean squared error of the predicted noise, a batch at a time, for ever.

        Some captions are dropped, and some are those of another image, as on the web: without guidance the model then
        follows its prompt only that often, and guidance has something to do.
        """
        batch = self.settings["batch"]
        while True:
            chosen = torch.randint(len(latents), (batch,), device=self.device)
            clean, ids = latents[chosen], captions[chosen]
            fate = torch.rand(batch, device=self.device)
            dropped = fate < self.settings["caption_dropped"]
            other = fate > 1.0 - self.settings["caption_of_another"]
            ids = torch.where(other[:, None], ids.roll(1, 0), ids)
            ids = torch.where(dropped[:, None], self.empty, ids)
            noise = torch.randn_like(clean)
            times = torch.randint(1000, (batch,), device=self.device)
            alpha = self.alphas[times][:, None, None, None]
            noised = (alpha.sqrt() * clean + (1.0 - alpha).sqrt() * noise).contiguous(memory_format=torch.channels_last)
            with mixed_precision(self.device):
                states = self.text_encoder(ids)[0]
                predicted = self.unet(noised, times, states, return_dict=False)[0]
            # 1 / alpha makes the error that of v-prediction (Salimans and Ho, arXiv 2202.00512), which the noisiest
            # steps share in full; a limit of 1 leaves the plain error of the noise.
            weight = (1.0 / alpha).clamp(max=self.settings["largest_weight"])
            yield (weight * (predicted.float() - noise).square()).mean()
