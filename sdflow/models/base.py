"""What a model is: one network class, and so one graph.

A model knows its config.json and its state_dict, and nothing of the pipeline around it. Names of ports are those that
diffusers' ONNX pipelines and optimum-onnx feed and read. Two axes with one name have one size, across all submodels of
a pipeline but for `batch`, so that `add_free_dimension_override_by_name` can make every shape static.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import numpy as np
    import torch

Config = Mapping[str, Any]
"""config.json of the submodel; of the whole VAE for its halves."""

Shapes = Mapping[str, tuple[int, ...]]
"""state_dict key -> shape."""


GUIDANCE = "timestep_cond"
"""The input in which a denoiser takes the guidance scale, embedded: diffusers' name for it."""

EXACT = ("timestep", "time_ids")
"""The names of exact ports (`Port.exact`) that the passes to float16 leave float32 where a workflow does not name others: they
know a graph, and no model. They are part of cache keys."""


class Role(Enum):
    """What a port is for, whatever it is called: by this, whoever feeds and reads a graph finds it (`Ports.of`)."""

    CONDITION = "condition"
    """What a denoiser takes of prompts and images, and anything else that is not below: by name, from `Family.condition`."""
    LATENTS = "latents"
    """Of a denoiser, of its ControlNets and of both halves of a VAE."""
    TIMESTEP = "timestep"
    PREDICTION = "prediction"
    """What a denoiser makes of the latents."""
    PIXELS = "pixels"
    """Of both halves of a VAE; of a checker the images as they are drawn."""
    HINT = "hint"
    """The image that a ControlNet is given."""
    SEEN = "seen"
    """Of a checker: the images as its processor makes them."""
    CHECKED = "checked"
    """Of a checker: the images with those blackened that it flags."""
    FLAGS = "flags"
    """Of a checker: which it flags."""


@dataclass(frozen=True)
class Port:
    """One input or output: its name, numpy type, and for each axis its fixed size or the name of its dynamic size; its role.

    exact: float16 would round its values away, as timesteps between whole numbers and sizes above 2048 pixels: it stays float32
    where a graph is converted. why_exact: in words, for who finds it otherwise.
    """

    name: str
    dtype: str
    axes: tuple[int | str, ...]
    role: Role = Role.CONDITION
    why_exact: str = ""

    @property
    def exact(self) -> bool:
        return bool(self.why_exact)

    @property
    def dynamic_axes(self) -> dict[int, str]:
        return {index: axis for index, axis in enumerate(self.axes) if isinstance(axis, str)}

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Its shape where the axes have these sizes, by name; one that is a part of another (`divided`) follows from it."""
        return tuple(axis if isinstance(axis, int) else _size_of(axis, sizes) for axis in self.axes)


_OVER = "_over_"


def divided(axis: str, by: int) -> str:
    """The name of the axis that is so many times smaller than this one."""
    return axis if by == 1 else f"{axis}{_OVER}{by}"


def _size_of(axis: str, sizes: Mapping[str, int]) -> int:
    whole, over, by = axis.partition(_OVER)
    return sizes[whole] // int(by) if over else sizes[axis]


@dataclass(frozen=True)
class Ports:
    """The inputs and outputs of a graph, in its order."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    def of(self, role: Role) -> str:
        """The name of the only port with this role. Raises ValueError where there are several or none."""
        (port,) = (port for port in (*self.inputs, *self.outputs) if port.role is role)
        return port.name

    @property
    def dynamic_axes(self) -> dict[str, dict[int, str]]:
        """Port name -> axis index -> axis name, as `torch.onnx.export` wants them."""
        return {port.name: port.dynamic_axes for port in (*self.inputs, *self.outputs) if port.dynamic_axes}


@dataclass(frozen=True)
class Sizes:
    """What the dynamic axes are. height, width: of the image in pixels; vae_scale: image pixels per latent pixel, for
    models whose config does not say it; sequence: tokens per prompt; more: of further axes, by name."""

    batch: int = 1
    height: int = 512
    width: int = 512
    vae_scale: int = 8
    sequence: int = 77
    more: Mapping[str, int] = field(default_factory=dict)

    def axes(self) -> dict[str, int]:
        """Axis name -> size."""
        return {
            **self.more,
            "batch": self.batch,
            "sequence": self.more.get("sequence", self.sequence),
            "height": self.height,
            "width": self.width,
            "latent_height": self.height // self.vae_scale,
            "latent_width": self.width // self.vae_scale,
        }


@dataclass(frozen=True)
class Original:
    """Where a parameter lies in a file in the original layout: the tensor `name`; of its rows the part of this index out
    of so many equal parts (q, k and v in one matrix); transposed; with the halves of its rows swapped. identity: it lies nowhere,
    and is the identity matrix."""

    name: str
    part: int = 0
    parts: int = 1
    transposed: bool = False
    swapped: bool = False
    identity: bool = False


def timestep_port() -> Port:
    """The timestep of a denoiser: one for the whole batch."""
    why = "an integer or half type cuts off the timesteps of Euler's and DPM's schedulers; keep_io_types"
    return Port("timestep", "float32", (1,), Role.TIMESTEP, why)


def halved(config: Config) -> int:
    """How many times smaller the deepest level of a UNet or VAE is than what goes in, along each axis.

    Raises what looking up an entry that the config lacks raises.
    """
    channels = config.get("block_out_channels") or config.get("decoder_block_out_channels")
    if channels is None:
        channels = config["block_out_channels"]
    return int(2 ** (len(channels) - 1))


def class_names(config: Config) -> list[str]:
    """The class that a config.json is of, as diffusers or transformers write it; none where it names none."""
    named = [config["_class_name"]] if "_class_name" in config else config.get("architectures")
    return [str(name) for name in named] if isinstance(named, list) else []


class Model:
    """One network class. Subclasses set the class variables and the methods that raise here.

    class_name: as in config.json and in cache keys.
    weights_stem: of the file that diffusers or transformers keep its weights in, without the suffix.
    library_module: of its library, that holds the class and imports slowly; a process that will make many imports it once.
    quick: a VAE that decodes in a small part of a step's time.
    """

    class_name: ClassVar[str]
    weights_stem: ClassVar[str]
    quick: ClassVar[bool] = False
    library_module: ClassVar[str | None] = None

    @property
    def of_transformers(self) -> bool:
        """Whether transformers' rules say where its weights lie; else diffusers' do."""
        return self.weights_stem == "model"

    def library_class(self) -> Any:
        """Its class in diffusers or transformers."""
        assert self.library_module is not None
        return getattr(import_module(self.library_module), self.class_name)

    def empty(self, config: Config) -> torch.nn.Module:
        """The module as its library makes it from the config. The caller puts its parameters on the meta device."""
        raise NotImplementedError

    def parameters(self, config: Config) -> Shapes | None:
        """The parameters of the module that `empty` makes, told without it; None where that takes the class itself. What
        adapters add is not among them. Raises KeyError or TypeError for a config that lacks something."""
        return None

    def ports(self, config: Config) -> Ports:
        """The inputs and outputs of its graph. Raises PassError for a config with other inputs."""
        raise NotImplementedError

    def smallest(self, config: Config) -> Sizes:
        """The smallest sizes from which a trace generalizes: no axis is 1, and no two are equal by accident."""
        raise NotImplementedError

    def traced(self, module: Any) -> None:
        """Change the module so that its `forward` takes and returns the tensors of `ports`, in the form that the fusions
        match. No wrapper: the names of its parameters stay the keys of its state_dict."""
        raise NotImplementedError

    def reference(self, module: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Outputs by name from inputs by name, by the library's own forward. It never calls `traced`: it is what the
        traced graph is held to."""
        raise NotImplementedError

    def recorded_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The arguments of a call that diffusers' pipeline made of the module, under the names of the inputs."""
        raise NotImplementedError

    def recorded_state(self, module: Any) -> dict[str, torch.Tensor]:
        """What diffusers sets in the module before it calls it, under the names of the inputs."""
        return {}

    def config_for(self, denoiser: Config) -> Config:
        """The config of such a model for a denoiser with this config, where a file has none. For ControlNets."""
        raise NotImplementedError

    def distinguishing_shapes(self, config: Config) -> Shapes:
        """Tensors by which a file is known to hold such a model alone, of this config, by the names that `current_name`
        gives; none where nothing tells. Raises KeyError for a config that lacks something."""
        return {}

    def config_from_shapes(self, config: Config, shapes: Shapes) -> Config:
        """The config with what the tensors of a file, without a prefix, tell of such a model: a file has no config."""
        return config

    def halves(self, config: Config) -> Mapping[str, Shapes]:
        """Of a model that is also published as a file for each half, in the original names: half -> the tensors by which its
        file is known. In `original_names` the halves' names begin with the half and a dot, which the files leave out."""
        return {}

    def to_float16(self, module: Any) -> None:
        """Make the module plain float16 PyTorch, for `reference`: what a float16 graph is measured by."""
        module.half()

    def scale(self, config: Config) -> int | None:
        """Image pixels per latent pixel, along each axis; None where the config does not say it."""
        return None

    def width(self, config: Config) -> int:
        """Channels of its widest layer, of a denoiser."""
        return int(max(config["block_out_channels"]))

    def working_values(self, config: Config, rows: int, columns: int, *, scores: bool) -> int:
        """An estimate of how many values are in memory at once, at most, while the graph computes one image of a batch.

        rows, columns: of the latents. scores: whether attention keeps its matrix of scores (tokens x tokens of each head), as
        ONNX Runtime's kernels for the CPU do; those for CUDA do not. 0 for models whose memory does not grow with the image.
        Raises KeyError or TypeError for a config that lacks something.
        """
        return 0

    def more_axes(self, config: Config) -> Mapping[str, int]:
        """The sizes of axes that no other model has, at the smallest."""
        return {}

    def token_sizes(self, config: Config, inputs: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """The sizes of the axes of tokens, by name, when inputs have these shapes. inputs: shapes by port, of any of them."""
        return {
            axis: int(size)
            for port in self.ports(config).inputs
            if port.name in inputs
            for axis, size in zip(port.axes, inputs[port.name], strict=True)
            if isinstance(axis, str) and axis not in ("batch", "latent_height", "latent_width")
        }

    def dummy(self, config: Config, sizes: Sizes = Sizes(), seed: int = 0) -> dict[str, np.ndarray]:
        """Random inputs of the right names, types and shapes. The same seed gives the same values."""
        import numpy as np

        axes = {**self.more_axes(config), **sizes.axes()}
        if scale := self.scale(config):
            axes |= {"latent_height": sizes.height // scale, "latent_width": sizes.width // scale}
        random = np.random.default_rng(seed)
        ports = self.ports(config).inputs
        return {port.name: self.values(port, list(port.shape(axes)), config, random) for port in ports}

    def values(self, port: Port, shape: list[int], config: Config, random: np.random.Generator) -> np.ndarray:
        """Made-up values of one input: standard normal, unless a subclass knows better."""
        import numpy as np

        return random.standard_normal(shape, np.float32)

    def current_name(self, name: str) -> str:
        """A tensor's name in a checkpoint as the class has it today: older releases called some otherwise."""
        return name

    def original_names(self, keys: Iterable[str]) -> dict[str, Original]:
        """state_dict key -> where it lies in a file in the original layout, without the prefix."""
        return {key: Original(self.current_name(key)) for key in keys}

    def unused(self, name: str, keys: Iterable[str]) -> bool:
        """Whether a tensor of a checkpoint that has no place among the module's keys is there by custom, and not read."""
        return False

    def fits(self, stored: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        """Whether a tensor stored in this shape holds the values of a parameter of that shape, in its order."""
        return stored == shape

    def lora_spellings(self, modules: Iterable[str]) -> Mapping[str, tuple[str | Original, ...]]:
        """module -> its names in LoRA files, with dots, or where it lies in a module of such a file; empty where LoRAs do not
        change this model."""
        return {}

    def has_lora_module(self, module: str) -> bool:
        """Whether modules of such a name, with underscores in place of dots, are this model's and no other denoiser's: kohya's
        and PEFT's names begin alike for all of them."""
        return False

    def lora_misfit(self, config: Config, module: str, width: int) -> str | None:
        """Why a LoRA's part for a module was made for another architecture than this config's; None where nothing says so.

        module: as LoRA files name it, with underscores in place of dots. width: of its input.
        """
        return None
