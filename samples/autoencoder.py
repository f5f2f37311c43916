"""How the autoencoders of both samples are trained: to give images back, with latents near a normal distribution."""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from diffusers import AutoencoderKL, AutoencoderKLFlux2
from optimize import Ema, Log, mixed_precision, optimizer_steps
from torch import Tensor, nn
from torch.nn import functional
from training_images import as_input

Vae = TypeVar("Vae", AutoencoderKL, AutoencoderKLFlux2)


class Autoencode(nn.Module):
    """Encoder, one sample, decoder, as one module to compile."""

    def __init__(self, vae: AutoencoderKL | AutoencoderKLFlux2) -> None:
        super().__init__()
        self.vae = vae

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Images [n, 3, h, w] to their reconstruction and the latents' mean and log variance."""
        mean, log_variance = self.vae.quant_conv(self.vae.encoder(images)).chunk(2, dim=1)
        latents = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance.clamp(-30, 20))
        return self.vae.decoder(self.vae.post_quant_conv(latents)), mean, log_variance


def trained(
    vae: Vae, chosen: dict[str, Any], compiled: Callable[[nn.Module], nn.Module], batch: Callable[[], Tensor], log: Log
) -> Vae:
    """The moving average of a VAE, trained by a stage's settings on batches of uint8 images."""
    ema, autoencode = Ema([vae], chosen["ema_decay"]), compiled(Autoencode(vae))

    def losses() -> Iterator[Tensor]:
        while True:
            images = as_input(batch()).contiguous(memory_format=torch.channels_last)
            with mixed_precision(images.device):
                again, mean, log_variance = autoencode(images)
            mean, log_variance = mean.float(), log_variance.float().clamp(-30, 20)
            kl = 0.5 * (mean.square() + log_variance.exp() - 1.0 - log_variance).mean()
            yield functional.l1_loss(again.float(), images) + chosen["kl_weight"] * kl

    def stepped() -> Iterator[Tensor]:
        parameters = [each for each in vae.parameters() if each.requires_grad]
        for loss in optimizer_steps(parameters, chosen["steps"], chosen["learning_rate"], losses()):
            ema.update()
            yield loss

    log.stage("vae", stepped())
    average = ema.modules[0]
    assert isinstance(average, type(vae))
    return average
