"""Base classes of VAE halves: encoder (pixels to latents) and decoder (latents to pixels), each a separate graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from sdflow.models.base import Config, Model, Shapes, halved
from sdflow.models.ports import Port, Ports, Role, Sizes

if TYPE_CHECKING:
    import torch


class VaeHalf(Model):
    """Half of a VAE. unread: parts of the module that this half's graph does not use."""

    weights_stem: ClassVar[str] = "diffusion_pytorch_model"
    unread: ClassVar[tuple[str, ...]]
    device_factor: ClassVar[float] = 0.53

    def graph_parameters(self, config: Config) -> Shapes | None:
        found = self.parameters(config)
        return None if found is None else {
            name: shape for name, shape in found.items() if not name.startswith(self.unread)
        }  # fmt: skip

    def scale(self, config: Config) -> int:
        return halved(config)

    def smallest(self, config: Config) -> Sizes:
        deepest = 2 * halved(config)
        return Sizes(batch=2, height=deepest, width=deepest)

    def traced(self, module: Any) -> None:
        for part in self.unread:
            setattr(module, part, None)


class EncoderHalf(VaeHalf):
    """Maps pixels in [-1, 1] to unscaled latents."""

    def ports(self, config: Config) -> Ports:
        return Ports(inputs=(_pixels(config["in_channels"]),), outputs=(_latents(config),))

    def encode(self, module: Any, sample: Any) -> Any:
        """Return the module's latents for these pixels, in the form that is traced."""
        raise NotImplementedError

    def traced(self, module: Any) -> None:
        super().traced(module)

        def forward(sample: Any) -> Any:
            return self.encode(module, sample)

        module.forward = forward

    def recorded_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return {"sample": args[0]}


class DecoderHalf(VaeHalf):
    """Maps unscaled latents to pixels in about [-1, 1]."""

    def ports(self, config: Config) -> Ports:
        return Ports(inputs=(_latents(config),), outputs=(_pixels(config["out_channels"]),))

    def traced(self, module: Any) -> None:
        super().traced(module)

        def forward(latent_sample: Any) -> Any:
            return module.decode(latent_sample, return_dict=False)[0]

        module.forward = forward

    def reference(self, module: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"sample": module.decode(inputs["latent_sample"]).sample}

    def recorded_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return {"latent_sample": args[0]}


def _pixels(channels: int) -> Port:
    return Port("sample", "float32", ("batch", channels, "height", "width"), Role.PIXELS)


def _latents(config: Config) -> Port:
    axes = ("batch", config["latent_channels"], "latent_height", "latent_width")
    return Port("latent_sample", "float32", axes, Role.LATENTS)
