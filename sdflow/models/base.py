"""`Model`: one network class, exported as one graph.

A model knows its config.json and its state_dict, but not the pipeline around it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from sdflow.models.ports import Port, Ports, Sizes

if TYPE_CHECKING:
    import numpy as np
    import torch

Config = Mapping[str, Any]
"""The submodel's config.json. Both halves of a VAE share the VAE's."""

Shapes = Mapping[str, tuple[int, ...]]
"""state_dict key -> shape."""


@dataclass(frozen=True)
class Original:
    """Location of a parameter in a checkpoint file of the original layout.

    name: tensor name. part, parts: the parameter is slice `part` of `parts` equal slices of the tensor's rows (such as
    q, k and v in one matrix). taken: number of slices it spans, from `part` on. transposed: stored transposed. swapped:
    stored with the two halves of its rows exchanged. identity: not stored; the parameter is the identity matrix.
    """

    name: str
    part: int = 0
    parts: int = 1
    taken: int = 1
    transposed: bool = False
    swapped: bool = False
    identity: bool = False


def halved(config: Config) -> int:
    """Return the downsampling factor of a UNet or VAE per axis, from input to deepest level.

    Raises KeyError if the config has no channels, TypeError if they are not a list.
    """
    channels = config.get("block_out_channels") or config.get("decoder_block_out_channels")
    if channels is None:
        channels = config["block_out_channels"]
    return int(2 ** (len(channels) - 1))


def class_names(config: Config) -> list[str]:
    """Return the class names in a config.json of diffusers or transformers; empty if there are none."""
    named = [config["_class_name"]] if "_class_name" in config else config.get("architectures")
    return [str(name) for name in named] if isinstance(named, list) else []


class Model:
    """A network class. Subclasses set the class variables and implement the methods that raise NotImplementedError.

    class_name: as in config.json and in cache keys.
    weights_stem: name of the weights file in diffusers or transformers folders, without suffix.
    library_module: the module that defines the class; slow to import, so long-lived processes preload it.
    blocks: the module list of a transformer's blocks, any of which can be skipped
        (`sdflow.runtime.denoiser.skipped_blocks`).
    quick: decodes in a fraction of the time of a denoising step (a tiny VAE).
    random_version: version of `random_gain`, part of the identity of `synthetic:` weights.
    traced_as: in cache keys, what distinguishes its trace from that of another model with its `class_name` and config.
    device_factor: measured peak memory of a run on CUDA, relative to `working_values` in the graph's own type
        (tests/fits/test_measured_peaks.py).
    """

    class_name: ClassVar[str]
    weights_stem: ClassVar[str]
    quick: ClassVar[bool] = False
    library_module: ClassVar[str | None] = None
    blocks: ClassVar[str | None] = None
    random_version: ClassVar[int] = 1
    traced_as: ClassVar[str | None] = None
    device_factor: ClassVar[float] = 2.7

    @property
    def of_transformers(self) -> bool:
        """Whether weights are stored by transformers' conventions rather than diffusers'."""
        return self.weights_stem == "model"

    def library_class(self) -> Any:
        """Return the class from diffusers or transformers."""
        assert self.library_module is not None
        return getattr(import_module(self.library_module), self.class_name)

    def empty(self, config: Config) -> torch.nn.Module:
        """Build the module from the config. Callers wrap this in a meta-device context."""
        raise NotImplementedError

    def parameters(self, config: Config) -> Shapes | None:
        """Return name -> shape of the parameters of `empty`'s module without importing its library; None if that needs
        the class. Excludes parameters of adapters. Raises KeyError or TypeError for an incomplete config."""
        return None

    def graph_parameters(self, config: Config) -> Shapes | None:
        """Return name -> shape of the parameters in the graph, to estimate its size: `parameters` without those that
        the graph does not read. Classes without `parameters` may omit norms and embeddings. None and errors as in
        `parameters`."""
        return self.parameters(config)

    def ports(self, config: Config) -> Ports:
        """Return the inputs and outputs of the graph. Raises PassError if the config implies unsupported inputs."""
        raise NotImplementedError

    def smallest(self, config: Config) -> Sizes:
        """Return the smallest sizes for which a trace generalizes: no axis is 1, and no two axes coincide in size."""
        raise NotImplementedError

    def traced(self, module: Any) -> None:
        """Modify the module in place for export: `forward` takes and returns the tensors of `ports`, in the form that
        the fusions match. There is no wrapper module, so parameter names remain the state_dict's keys."""
        raise NotImplementedError

    def reference(self, module: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Compute outputs by name from inputs by name, in the shapes of `ports`, with the library's own forward. Independent
        of `traced`, because the traced graph is verified against it."""
        raise NotImplementedError

    def recorded_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Convert the arguments of diffusers' call of the module to graph inputs by name, in the shapes of `ports`."""
        raise NotImplementedError

    def recorded_outputs(
        self, ports: Ports, kwargs: Mapping[str, Any], outputs: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the output tensors of such a call by output name; empty if the numbers do not match."""
        names = [port.name for port in ports.outputs]
        return dict(zip(names, outputs, strict=True)) if len(outputs) == len(names) else {}

    def recorded_state(self, module: Any) -> dict[str, torch.Tensor]:
        """Return graph inputs by name that diffusers sets as module attributes before calling it."""
        return {}

    def config_for(self, denoiser: Config) -> Config:
        """Return the config for use with this denoiser, for files without a config (ControlNets)."""
        raise NotImplementedError

    def distinguishing_shapes(self, config: Config) -> Shapes:
        """Return name (after `current_name`) -> shape of tensors that identify a file of only this model with this
        config; empty if none do. Raises KeyError for an incomplete config."""
        return {}

    def config_from_shapes(self, config: Config, shapes: Shapes) -> Config:
        """Complete the config from the tensor shapes of a file (names without prefix), since files have no config."""
        return config

    def halves(self, config: Config) -> Mapping[str, Shapes]:
        """For models also published as one file per half: half -> the tensors (original names) that identify its file.
        In `original_names`, such names have the half and a dot as prefix; the files omit it."""
        return {}

    def to_half(self, module: Any, dtype: torch.dtype) -> None:
        """Convert the module to float16 or bfloat16 in place. Its error is the reference for graphs of that type."""
        module.to(dtype)

    def scale(self, config: Config) -> int | None:
        """Return the image pixels per latent pixel along each axis; None if the config does not determine it."""
        return None

    def width(self, config: Config) -> int:
        """Return the number of channels of a denoiser's widest layer."""
        return int(max(config["block_out_channels"]))

    def working_values(self, config: Config, rows: int, columns: int, *, scores: bool) -> int:
        """Estimate the peak number of activation values (not bytes) per image of a batch; 0 if it is independent of
        image size.

        rows, columns: size of the latents. scores: whether attention materializes its scores (heads x tokens x tokens),
        as ONNX Runtime's CPU kernels do and its CUDA kernels do not. Raises KeyError or TypeError for an incomplete
        config.
        """
        return 0

    def more_axes(self, config: Config) -> Mapping[str, int]:
        """Return the smallest sizes of axes specific to this model, by name."""
        return {}

    def token_sizes(self, config: Config, inputs: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """Return the sizes of the token axes implied by input shapes. inputs: shape by port; may be partial."""
        return {
            axis: int(size)
            for port in self.ports(config).inputs
            if port.name in inputs
            for axis, size in zip(port.axes, inputs[port.name], strict=True)
            if isinstance(axis, str) and axis not in ("batch", "latent_height", "latent_width")
        }

    def dummy(self, config: Config, sizes: Sizes = Sizes(), seed: int = 0) -> dict[str, np.ndarray]:
        """Return random inputs by name, with the types and shapes of `ports` at these sizes; deterministic in the
        seed."""
        import numpy as np

        axes = {**self.more_axes(config), **sizes.axes()}
        if scale := self.scale(config):
            axes |= {"latent_height": sizes.height // scale, "latent_width": sizes.width // scale}
        random = np.random.default_rng(seed)
        ports = self.ports(config).inputs
        return {port.name: self.values(port, list(port.shape(axes)), config, random) for port in ports}

    def values(self, port: Port, shape: list[int], config: Config, random: np.random.Generator) -> np.ndarray:
        """Return random values of this shape for one input: standard normal unless overridden."""
        import numpy as np

        return random.standard_normal(shape, np.float32)

    def random_gain(self, name: str) -> float:
        """Return the deviation of a matrix of `synthetic:` weights, relative to the one that preserves the variance of
        its input. name: after `current_name`."""
        return 1.0

    def current_name(self, name: str) -> str:
        """Return the class's current name for a checkpoint tensor: older library releases used other names."""
        return name

    def original_names(self, keys: Iterable[str]) -> dict[str, Original]:
        """Return state_dict key -> location in a file of the original layout, without the prefix."""
        return {key: Original(self.current_name(key)) for key in keys}

    def unused(self, name: str, keys: Iterable[str]) -> bool:
        """Whether a checkpoint tensor without a matching key is a known leftover that can be ignored."""
        return False

    def fits(self, stored: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        """Whether a tensor stored in shape `stored` can be reshaped to parameter shape `shape`. GGUF files from
        llama.cpp's tools omit leading axes of 1."""
        while stored != shape and shape[:1] == (1,):
            shape = shape[1:]
        return stored == shape

    def lora_spellings(self, modules: Iterable[str]) -> Mapping[str, tuple[str | Original, ...]]:
        """Return module -> its (dotted) names in LoRA files, or its location in a fused module; empty if LoRAs do not
        apply."""
        return {}

    def has_lora_module(self, module: str) -> bool:
        """Whether a module name (underscores for dots) exists only in this model: kohya and PEFT prefixes are the same
        for all denoisers."""
        return False

    def lora_misfit(self, config: Config, module: str, width: int) -> str | None:
        """Return why LoRA weights for a module do not fit this config, or None if they appear to.

        module: name in LoRA files, with underscores for dots. width: input features.
        """
        return None
