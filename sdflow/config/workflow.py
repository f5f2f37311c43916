"""A checked workflow: plain frozen data, every path resolved, every value with the place it was written at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from sdflow.errors import Problem
from sdflow.families.shared.defaults import Defaults
from sdflow.sources.reference import AdapterReference
from sdflow.store.remote.spec import RemoteSpec


@dataclass(frozen=True, order=True)
class Mark:
    """Where a value was written. Lines and columns count from 1; line 0 means the command line."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file

    def problem(self, message: str, remedy: str | None = None) -> Problem:
        """Something that is wrong there."""
        return Problem(self.file, self.line, self.column, message, remedy)


@dataclass(frozen=True)
class StepSpec:
    """One step of a chain: a pass and its options as written (defaults are filled in when the plan is made).

    expect: operator type -> count that the output must have. Not part of the cache key: it changes nothing.
    folder: where a pass at a path (`user_scripts/foo.py:ClassName`) is looked up from.
    """

    pass_name: str
    options: Mapping[str, Any]
    expect: Mapping[str, int]
    mark: Mark
    folder: Path = Path()


@dataclass(frozen=True)
class LoraSpec:
    """A LoRA as written: a file, a folder or `hf:owner/name[@revision]`, the file's name within, and its scale."""

    reference: str
    scale: float
    weight_name: str | None
    mark: Mark


@dataclass(frozen=True)
class LatencySpec:
    """Timed runs per submodel and for the whole pipeline. Counts of runs."""

    warmup: int = 2
    runs: int = 10


STEPS = 20
"""Of an evaluation's image, where the model needs no fewer."""


@dataclass(frozen=True)
class ImageSpec:
    """The image that an evaluation draws. Height and width in pixels; None: the model's own size. Steps and guidance scale:
    None: the model's, of the steps at most STEPS.

    prompts: when there are any, the image is a sheet of them all, the seed counting up from `seed`; `prompt` is then
        only what is timed.
    references: how many reference images it is drawn with.
    """

    prompt: str = "a photo of an astronaut riding a horse on mars"
    negative_prompt: str | None = None
    steps: int | None = None
    guidance_scale: float | None = None
    seed: int = 0
    height: int | None = None
    width: int | None = None
    prompts: tuple[str, ...] = ()
    references: int = 0

    def settled(self, own: Defaults) -> ImageSpec:
        """With the model's own steps and guidance scale where none are named."""
        steps = min(STEPS, own.steps) if self.steps is None else self.steps
        guidance_scale = own.guidance_scale if self.guidance_scale is None else self.guidance_scale
        return replace(self, steps=steps, guidance_scale=guidance_scale)


@dataclass(frozen=True)
class EvaluateSpec:
    """What happens after assembly. `allow_fallback`: nodes may run on another provider than the target's."""

    latency: LatencySpec | None = field(default_factory=LatencySpec)
    image: ImageSpec | None = field(default_factory=ImageSpec)
    allow_fallback: bool = False


@dataclass(frozen=True)
class VerifySpec:
    """How the artifacts are verified against the PyTorch model after the build. Sizes in pixels; None: as the level has it."""

    level: Literal["quick", "full"] = "quick"
    steps: int | None = None
    height: int | None = None
    width: int | None = None


@dataclass(frozen=True)
class PipelineSpec:
    """One cell of a workflow: one model with its LoRAs for one target. `name` is also its output folder's name.

    components: those that are not the model's own, and the references that they come from. controlnets: name -> reference.
    ip_adapters: in the order of their inputs.
    refiner: what refines its images; it lies in the same folder. verify: None: the artifacts are not verified.
    generate: what is said of how it draws, of `sdflow.manifest.form.Said`.
    """

    name: str
    model: str
    model_mark: Mark
    target: str
    loras: tuple[LoraSpec, ...]
    submodels: Mapping[str, tuple[StepSpec, ...]]
    evaluate: EvaluateSpec
    verify: VerifySpec | None = None
    allow_pickle: bool = False
    carry_weights: bool = False
    components: Mapping[str, str | None] = field(default_factory=dict)
    controlnets: Mapping[str, str] = field(default_factory=dict)
    ip_adapters: tuple[AdapterReference, ...] = ()
    generate: Mapping[str, Any] = field(default_factory=dict)
    refiner: PipelineSpec | None = None

    @property
    def opening(self) -> dict[str, Any]:
        """What `open_checkpoint` takes besides the model."""
        return {
            "allow_pickle": self.allow_pickle,
            "components": self.components,
            "nets": self.controlnets,
            "adapters": self.ip_adapters,
        }


@dataclass(frozen=True)
class Workflow:
    """A workflow file with everything it extends. `files`: every YAML file that was read, in order. remote: the cache that is
    shared with other machines; no part of any key."""

    path: Path
    files: tuple[Path, ...]
    pipelines: tuple[PipelineSpec, ...]
    remote: RemoteSpec | None = None
