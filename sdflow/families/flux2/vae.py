"""diffusers' AutoencoderKLFlux2 as two graphs, whose latents are in the denoiser's form.

Between VAE and denoiser, diffusers' pipelines fold 2 x 2 latent pixels into channels and normalize each channel by
statistics from the checkpoint, like a batch norm's. Both graphs include this, so the statistics are ordinary weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from sdflow.models.base import Config, Original, Shapes, halved
from sdflow.models.ports import Port, Ports, Role, Sizes
from sdflow.models.vae import VaeDecoder, VaeEncoder

if TYPE_CHECKING:
    import torch

_MEAN, _VARIANCE, _COUNT = "bn.running_mean", "bn.running_var", "bn.num_batches_tracked"


def folded_channels(config: Config) -> int:
    """Return the channels of the denoiser's latents."""
    return int(config["latent_channels"]) * prod(_patch(config))


def folded_scale(config: Config) -> int:
    """Return the image pixels per denoiser latent pixel, along each axis."""
    return halved(config) * _patch(config)[0]


def _patch(config: Config) -> tuple[int, int]:
    rows, columns = config.get("patch_size", (2, 2))
    if rows != columns:
        raise TypeError(f"patch_size is {rows} x {columns}, but only squares are supported")
    return int(rows), int(columns)


class _Folded:
    """Common code of both halves; combined with a half of AutoencoderKL, which has the same networks."""

    class_name: ClassVar[str] = "AutoencoderKLFlux2"
    library_module: ClassVar[str | None] = "diffusers.models.autoencoders.autoencoder_kl_flux2"

    def library_class(self) -> Any:
        """Return the class with its statistics as two plain tensors: a batch norm would also have a batch counter."""
        return _class_with_statistics()

    def empty(self, config: Config) -> torch.nn.Module:
        module: torch.nn.Module = _class_with_statistics().from_config(dict(config))
        return module

    def parameters(self, config: Config) -> Shapes | None:
        found = super().parameters(config)  # type: ignore[misc]
        statistics = dict.fromkeys((_MEAN, _VARIANCE), (folded_channels(config),))
        return None if found is None else {**found, **statistics}

    def ports(self, config: Config) -> Ports:
        plain: Ports = super().ports(config)  # type: ignore[misc]
        return Ports(*(tuple(_folded_port(port, config) for port in ports) for ports in (plain.inputs, plain.outputs)))

    def scale(self, config: Config) -> int:
        return folded_scale(config)

    def smallest(self, config: Config) -> Sizes:
        side = 2 * folded_scale(config)
        return Sizes(batch=2, height=side, width=side)

    def distinguishing_shapes(self, config: Config) -> Shapes:
        return {**super().distinguishing_shapes(config), _MEAN: (folded_channels(config),)}  # type: ignore[misc]

    def working_values(self, config: Config, rows: int, columns: int, *, scores: bool) -> int:
        down, across = _patch(config)
        found: int = super().working_values(config, down * rows, across * columns, scores=scores)  # type: ignore[misc]
        return found

    def original_names(self, keys: Iterable[str]) -> dict[str, Original]:
        keys = list(keys)
        statistics = {key: Original(key) for key in keys if key in (_MEAN, _VARIANCE)}
        return {**super().original_names(key for key in keys if key not in statistics), **statistics}  # type: ignore[misc]

    def unused(self, name: str, keys: Iterable[str]) -> bool:
        return name == _COUNT or bool(super().unused(name, keys))  # type: ignore[misc]


class Flux2VaeEncoder(_Folded, VaeEncoder):
    """Maps pixels in [-1, 1] to the mean of the latent distribution, folded and normalized."""

    def encode(self, module: Any, sample: Any) -> Any:
        mean, deviation = _statistics(module)
        return (_fold(super().encode(module, sample), _patch(module.config)) - mean) / deviation

    def reference(self, module: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Fold (batch, 3, height, width) to latents as diffusers' pipeline itself does."""
        from diffusers import Flux2KleinPipeline

        encode: Any = Flux2KleinPipeline._encode_vae_image
        return {"latent_sample": encode(_Holder(module), inputs["sample"], None)}


class Flux2VaeDecoder(_Folded, VaeDecoder):
    """Maps folded and normalized latents to pixels in about [-1, 1]."""

    def traced(self, module: Any) -> None:
        super().traced(module)
        decode = module.forward

        def forward(latent_sample: Any) -> Any:
            mean, deviation = _statistics(module)
            return decode(_unfold(latent_sample * deviation + mean, _patch(module.config)))

        module.forward = forward

    def reference(self, module: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Decode to (batch, 3, height, width) like the end of diffusers' Flux2KleinPipeline, which has no separate function
        for it."""
        import torch
        from diffusers import Flux2KleinPipeline

        latents = inputs["latent_sample"]
        mean = module.bn.running_mean.view(1, -1, 1, 1).to(latents)
        deviation = torch.sqrt(module.bn.running_var.view(1, -1, 1, 1) + module.config.batch_norm_eps).to(latents)
        unfolded = Flux2KleinPipeline._unpatchify_latents(latents * deviation + mean)
        return {"sample": module.decode(unfolded).sample}


class _Holder:
    """Stands in for the pipeline in diffusers' function."""

    def __init__(self, vae: Any) -> None:
        from diffusers import Flux2KleinPipeline

        self.vae = vae
        self._patchify_latents = Flux2KleinPipeline._patchify_latents


def _folded_port(port: Port, config: Config) -> Port:
    if port.role is not Role.LATENTS:
        return port
    batch, _, *size = port.axes
    return Port(port.name, port.dtype, (batch, folded_channels(config), *size), port.role)


def _statistics(module: Any) -> tuple[Any, Any]:
    """Return mean and deviation of every channel, as the pipeline computes them.

    abs() does not change a variance, but ONNX Runtime's symbolic shape inference does not evaluate it, so it does not
    fold the sum of weights into the graph.
    """
    mean, variance = (each.view(1, -1, 1, 1) for each in (module.bn.running_mean, module.bn.running_var))
    return mean, (variance.abs() + module.config.batch_norm_eps).sqrt()


def _fold(latents: Any, patch: tuple[int, int]) -> Any:
    batch, channels, rows, columns = latents.shape
    down, across = patch
    parts = latents.reshape(batch, channels, rows // down, down, columns // across, across).permute(0, 1, 3, 5, 2, 4)
    return parts.reshape(batch, channels * down * across, rows // down, columns // across)


def _unfold(latents: Any, patch: tuple[int, int]) -> Any:
    batch, channels, rows, columns = latents.shape
    down, across = patch
    whole = channels // (down * across)
    parts = latents.reshape(batch, whole, down, across, rows, columns).permute(0, 1, 4, 2, 5, 3)
    return parts.reshape(batch, whole, rows * down, columns * across)


@cache
def _class_with_statistics() -> Any:
    import torch
    from diffusers import AutoencoderKLFlux2

    def changed(module: Any) -> Any:
        statistics = torch.nn.Module()
        statistics.register_buffer("running_mean", module.bn.running_mean)
        statistics.register_buffer("running_var", module.bn.running_var)
        module.bn = statistics
        return module

    class WithStatistics(AutoencoderKLFlux2):  # type: ignore[misc]
        @classmethod
        def from_config(cls, *args: Any, **options: Any) -> Any:
            return changed(super().from_config(*args, **options))

        @classmethod
        def from_pretrained(cls, *args: Any, **options: Any) -> Any:
            found = super().from_pretrained(*args, **options)
            changed(found[0] if isinstance(found, tuple) else found)
            return found

    for name in ("__name__", "__qualname__", "__module__"):  # diffusers writes these when it saves a module
        setattr(WithStatistics, name, getattr(AutoencoderKLFlux2, name))
    return WithStatistics
