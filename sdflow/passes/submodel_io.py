"""What goes into and comes out of each submodel: names, types, axes; and inputs made up for tracing and timing.

The names are those that diffusers' OnnxStableDiffusionPipeline and optimum-onnx feed and read. Two axes with one name
have one size, across all submodels of a pipeline but for `batch` (twice as large in the UNet with guidance on), so that
`add_free_dimension_override_by_name` can make every shape static.

- text_encoder takes int32 ids: that is what diffusers feeds.
- unet's `timestep` is float32 of shape [1]: diffusers feeds `np.array([t])` in the type that the session declares, and
  optimum-onnx adds an axis when the input has one. An integer type would cut off the fractions of Euler's and DPM's
  timesteps. Its axis is fixed: one timestep for the whole batch.
- the UNet of Stable Diffusion XL also takes `text_embeds`, the pooled embedding of the prompt, and `time_ids`: height and
  width of the original image, top and left of the crop, height and width of the target, in pixels.
- vae_encoder gives the mean of the latent distribution. Sampling in the graph could be neither seeded nor verified;
  diffusers and optimum-onnx both take `latent_sample` as it comes.
- safety_checker takes images in NHWC, values in [0, 1], and blackens those that it flags.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sdflow import picture_sizes
from sdflow.errors import PassError

if TYPE_CHECKING:
    import numpy as np

TIME_IDS = 6
"""Numbers of pixels in `time_ids`."""

Config = Mapping[str, Any]
"""config.json of the submodel; of the whole VAE for vae_encoder and vae_decoder."""


@dataclass(frozen=True)
class Port:
    """One input or output: its name, numpy type, and for each axis its fixed size or the name of its dynamic size."""

    name: str
    dtype: str
    axes: tuple[int | str, ...]

    @property
    def dynamic_axes(self) -> dict[int, str]:
        return {index: axis for index, axis in enumerate(self.axes) if isinstance(axis, str)}


@dataclass(frozen=True)
class SubmodelIO:
    """The inputs and outputs of a submodel, in the order of its graph."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    @property
    def dynamic_axes(self) -> dict[str, dict[int, str]]:
        """Port name -> axis index -> axis name, as `torch.onnx.export` wants them."""
        return {port.name: port.dynamic_axes for port in (*self.inputs, *self.outputs) if port.dynamic_axes}


def submodel_io(submodel: str, config: Config) -> SubmodelIO:
    """The inputs and outputs of `submodel` with this config. Raises PassError for an architecture with other inputs."""
    return _IO[submodel](config)


def dummy_inputs(
    submodel: str,
    config: Config,
    *,
    batch: int = 1,
    height: int = 512,
    width: int = 512,
    vae_scale: int = 8,
    sequence: int = 77,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Random inputs of the right names, types and shapes.

    height, width: of the image in pixels. vae_scale: image pixels per latent pixel, for the UNet, whose config does not
    say; the VAE's is its own. sequence: tokens per prompt. The same seed gives the same values.
    """
    import numpy as np

    scale = picture_sizes.vae_scale(config) if submodel.startswith("vae") else vae_scale
    sizes = {
        "batch": batch,
        "sequence": sequence,
        "height": height,
        "width": width,
        "latent_height": height // scale,
        "latent_width": width // scale,
    }
    random = np.random.default_rng(seed)
    return {
        port.name: _values(port, [sizes[axis] if isinstance(axis, str) else axis for axis in port.axes], config, random)
        for port in submodel_io(submodel, config).inputs
    }


def tracing_inputs(submodel: str, config: Config) -> dict[str, np.ndarray]:
    """The smallest inputs that a trace generalizes from: batch 2, two pixels at the deepest level."""
    if submodel == "text_encoder":
        return dummy_inputs(submodel, config, batch=2, sequence=config["max_position_embeddings"])
    if submodel == "safety_checker":
        return dummy_inputs(submodel, config, batch=2, height=8, width=8)
    deepest = 2 * picture_sizes.halved(config)
    return dummy_inputs(submodel, config, batch=2, height=deepest, width=deepest, vae_scale=1)


def _values(port: Port, shape: list[int], config: Config, random: np.random.Generator) -> np.ndarray:
    import numpy as np

    if port.name == "input_ids":
        ids = random.integers(0, config["vocab_size"], shape, dtype=port.dtype)
        ids[:, -1] = min(config["eos_token_id"], config["vocab_size"] - 1)
        return ids
    if port.name == "timestep":
        return random.uniform(0, 1000, shape).astype(port.dtype)
    if port.name == "time_ids":
        return random.integers(0, 1025, shape).astype(port.dtype)
    if port.name == "images":
        return random.random(shape, np.float32)
    return random.standard_normal(shape, np.float32)


def _text_encoder(config: Config) -> SubmodelIO:
    hidden = config["hidden_size"]
    return SubmodelIO(
        inputs=(Port("input_ids", "int32", ("batch", "sequence")),),
        outputs=(
            Port("last_hidden_state", "float32", ("batch", "sequence", hidden)),
            Port("pooler_output", "float32", ("batch", hidden)),
        ),
    )


def _unet(config: Config) -> SubmodelIO:
    for option in ("class_embed_type", "addition_embed_type", "time_cond_proj_dim", "num_class_embeds"):
        if config.get(option) is not None and (option, config[option]) != ("addition_embed_type", "text_time"):
            raise PassError(
                f"{option}={config[option]!r}: this UNet has inputs beside sample, timestep and encoder_hidden_states",
                where="unet",
                remedy="Only the architectures of Stable Diffusion 1.x, 2.x and XL are supported.",
            )
    return SubmodelIO(
        inputs=(
            Port("sample", "float32", ("batch", config["in_channels"], "latent_height", "latent_width")),
            Port("timestep", "float32", (1,)),
            Port("encoder_hidden_states", "float32", ("batch", "sequence", config["cross_attention_dim"])),
            *_added_conditions(config),
        ),
        outputs=(Port("out_sample", "float32", ("batch", config["out_channels"], "latent_height", "latent_width")),),
    )


def _added_conditions(config: Config) -> tuple[Port, ...]:
    """What the UNet of Stable Diffusion XL takes besides."""
    if config.get("addition_embed_type") is None:
        return ()
    sizes = ("addition_time_embed_dim", "projection_class_embeddings_input_dim")
    if missing := [name for name in sizes if config.get(name) is None]:
        raise PassError(
            f"config.json has addition_embed_type={config['addition_embed_type']!r} but no {missing[0]}", where="unet"
        )
    width, joined = (config[name] for name in sizes)
    if joined - 5 * width == config["cross_attention_dim"]:
        raise PassError("this is the refiner of Stable Diffusion XL, which takes other time_ids", where="unet")
    return (
        Port("text_embeds", "float32", ("batch", joined - TIME_IDS * width)),
        Port("time_ids", "float32", ("batch", TIME_IDS)),
    )


def _vae_encoder(config: Config) -> SubmodelIO:
    return SubmodelIO(
        inputs=(Port("sample", "float32", ("batch", config["in_channels"], "height", "width")),),
        outputs=(
            Port("latent_sample", "float32", ("batch", config["latent_channels"], "latent_height", "latent_width")),
        ),
    )


def _vae_decoder(config: Config) -> SubmodelIO:
    return SubmodelIO(
        inputs=(
            Port("latent_sample", "float32", ("batch", config["latent_channels"], "latent_height", "latent_width")),
        ),
        outputs=(Port("sample", "float32", ("batch", config["out_channels"], "height", "width")),),
    )


def _safety_checker(config: Config) -> SubmodelIO:
    size = config["vision_config"]["image_size"]
    images = ("batch", "height", "width", 3)
    return SubmodelIO(
        inputs=(Port("clip_input", "float32", ("batch", 3, size, size)), Port("images", "float32", images)),
        outputs=(Port("out_images", "float32", images), Port("has_nsfw_concepts", "bool", ("batch",))),
    )


_IO = {
    "text_encoder": _text_encoder,
    "unet": _unet,
    "vae_encoder": _vae_encoder,
    "vae_decoder": _vae_decoder,
    "safety_checker": _safety_checker,
}
