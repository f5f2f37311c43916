"""Inputs and outputs of graphs (ports) and the sizes of their axes.

Ports are named as in diffusers' ONNX pipelines and optimum-onnx. Axes that share a name share a size across all submodels
of a pipeline (except `batch`), so `add_free_dimension_override_by_name` can make every shape static.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

GUIDANCE = "timestep_cond"
"""The denoiser input that holds the embedded guidance scale, as diffusers names it."""

EXACT = ("timestep", "time_ids")
"""Exact ports (`Port.exact`) that float16 passes keep in float32 by default. Passes see a graph, not a model, so they
need the names, which are part of cache keys."""


class Role(Enum):
    """The purpose of a port. Callers look ports up by role (`Ports.of`) rather than by name."""

    CONDITION = "condition"
    """An input with no role of its own: prompt embeddings, image embeddings. `Family.condition` supplies it by name."""
    LATENTS = "latents"
    """Latents of a denoiser, a ControlNet, or either half of a VAE."""
    TIMESTEP = "timestep"
    PREDICTION = "prediction"
    """The denoiser's prediction: noise, velocity or image."""
    PIXELS = "pixels"
    """Images: of either half of a VAE, or those that a safety checker receives."""
    HINT = "hint"
    """The control image of a ControlNet."""
    SEEN = "seen"
    """Safety checker: the images as preprocessed for CLIP."""
    CHECKED = "checked"
    """Safety checker: the images, with flagged ones blacked out."""
    FLAGS = "flags"
    """Safety checker: one boolean per image, true if flagged."""


@dataclass(frozen=True)
class Port:
    """An input or output of a graph.

    axes: per axis, a fixed size or the name of a dynamic size. why_exact: why the port must stay float32 in a float16
    graph (fractional timesteps, sizes above 2048 pixels); shown if it does not.
    """

    name: str
    dtype: str
    axes: tuple[int | str, ...]
    role: Role = Role.CONDITION
    why_exact: str = ""

    @property
    def exact(self) -> bool:
        """Whether the port stays float32 in a float16 graph."""
        return bool(self.why_exact)

    @property
    def dynamic_axes(self) -> dict[int, str]:
        """Axis index -> name, for the axes without a fixed size."""
        return {index: axis for index, axis in enumerate(self.axes) if isinstance(axis, str)}

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape for these sizes by axis name. A `divided` axis derives its size from the axis that it
        divides."""
        return tuple(axis if isinstance(axis, int) else _size_of(axis, sizes) for axis in self.axes)


_OVER = "_over_"


def divided(axis: str, by: int) -> str:
    """Return the name of an axis `by` times smaller than `axis`."""
    return axis if by == 1 else f"{axis}{_OVER}{by}"


def _size_of(axis: str, sizes: Mapping[str, int]) -> int:
    whole, over, by = axis.partition(_OVER)
    return sizes[whole] // int(by) if over else sizes[axis]


@dataclass(frozen=True)
class Ports:
    """The inputs and outputs of a graph, in graph order."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    def of(self, role: Role) -> str:
        """Return the name of the port with this role. Raises ValueError unless there is exactly one."""
        (port,) = (port for port in (*self.inputs, *self.outputs) if port.role is role)
        return port.name

    @property
    def dynamic_axes(self) -> dict[str, dict[int, str]]:
        """Port name -> axis index -> axis name, in the form of `torch.onnx.export`."""
        return {port.name: port.dynamic_axes for port in (*self.inputs, *self.outputs) if port.dynamic_axes}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the dynamic axes.

    height, width: of the image, in pixels. vae_scale: image pixels per latent pixel, for models whose config does not include
    it. sequence: tokens per prompt. more: other axes, by name.
    """

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


def timestep_port() -> Port:
    """A denoiser's timestep: float32 of shape (1,), 0 to 1000, shared by the whole batch."""
    why = "integer and half types round the timesteps of Euler and DPM schedulers; see keep_io_types"
    return Port("timestep", "float32", (1,), Role.TIMESTEP, why)
