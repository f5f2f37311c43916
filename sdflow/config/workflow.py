"""A validated workflow: plain frozen data with resolved paths; every value knows where it was written."""

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
        """A problem at this place."""
        return Problem(self.file, self.line, self.column, message, remedy)


@dataclass(frozen=True)
class StepSpec:
    """One step of a chain: a pass and its options as written (the plan fills in defaults).

    expect: operator type -> count required in the output. Not part of the cache key, since it does not change the
    output.
    folder: base of a pass's path (`user_scripts/foo.py:ClassName`).
    """

    pass_name: str
    options: Mapping[str, Any]
    expect: Mapping[str, int]
    mark: Mark
    folder: Path = Path()


@dataclass(frozen=True)
class LoraSpec:
    """A LoRA as written: a file, a folder or `hf:owner/name[@revision]`, the file's name in it, and its scale."""

    reference: str
    scale: float
    weight_name: str | None
    mark: Mark


@dataclass(frozen=True)
class LatencySpec:
    """Numbers of timed runs, per submodel and for the whole pipeline."""

    warmup: int = 2
    runs: int = 10


STEPS = 20
"""Default for an evaluation's image, unless the model needs fewer."""


@dataclass(frozen=True)
class ImageSpec:
    """The image of an evaluation. height, width: pixels; None is the model's native size. steps, guidance_scale: None
    is the model's own, with at most STEPS steps.

    prompts: if given, the image is a sheet of them all, with seeds counting up from `seed`; `prompt` is then only
    timed.
    references: number of reference images.
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
        """Fill in the model's own steps and guidance scale where none are set."""
        steps = min(STEPS, own.steps) if self.steps is None else self.steps
        guidance_scale = own.guidance_scale if self.guidance_scale is None else self.guidance_scale
        return replace(self, steps=steps, guidance_scale=guidance_scale)


@dataclass(frozen=True)
class EvaluateSpec:
    """Measurements after assembly. `allow_fallback`: nodes may run on providers other than the target's."""

    latency: LatencySpec | None = field(default_factory=LatencySpec)
    image: ImageSpec | None = field(default_factory=ImageSpec)
    allow_fallback: bool = False


@dataclass(frozen=True)
class VerifySpec:
    """Verification against the PyTorch model after the build. Sizes in pixels; None is the level's default."""

    level: Literal["quick", "full"] = "quick"
    steps: int | None = None
    height: int | None = None
    width: int | None = None


@dataclass(frozen=True)
class PipelineSpec:
    """One cell of a workflow: one model with its LoRAs for one target. `name` also names its output folder.

    components: those that replace the model's own -> their references. controlnets: name -> reference.
    ip_adapters: in the order of their inputs.
    refiner: the refiner's pipeline, built into the same folder. verify: None skips verification.
    generate: defaults for generating; see `sdflow.manifest.form.Said`.
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
        """Arguments of `open_checkpoint` other than the model."""
        return {
            "allow_pickle": self.allow_pickle,
            "components": self.components,
            "nets": self.controlnets,
            "adapters": self.ip_adapters,
        }


@dataclass(frozen=True)
class Workflow:
    """A workflow file with all it extends. files: every YAML file that was read, in order. remote: the shared cache,
    which is not part of any key."""

    path: Path
    files: tuple[Path, ...]
    pipelines: tuple[PipelineSpec, ...]
    remote: RemoteSpec | None = None
