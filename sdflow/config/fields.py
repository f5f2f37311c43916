"""The keys of a workflow with their descriptions, shared by validation, suggestions and the JSON Schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from sdflow.config.parameter_fields import field_of, with_fields
from sdflow.config.workflow import EvaluateSpec, ImageSpec, LatencySpec, VerifySpec
from sdflow.families.settings import COMMON
from sdflow.families.shared.approximation import MOST_EVERY, MOST_LAYERS, Interval, Reuse
from sdflow.families.shared.references import MOST_REFERENCES
from sdflow.store.signing import SIGNER

WORKFLOW: Mapping[str, str] = {
    "extends": "A workflow file, or a list of them, that this one builds on. Relative to this file; a missing "
    "base/NAME.yaml is the one that ships with sdflow. Maps are merged, lists and values replaced; later files override earlier "
    "ones, and this file overrides all of them, including their `targets`.",
    "name": "The name of the pipeline and its folder. Default: the name of the workflow's file.",
    "model": "The checkpoint: a diffusers folder, a .safetensors or .gguf file, FILE#ARCHITECTURE if the "
    "architecture is missing or contradictory (model.safetensors#sdxl-v), hf:owner/name[@revision], hf:owner/name/FILE, "
    "synthetic:sd15[?seed=N], synthetic:sd15-tiny[?seed=N], or sample:shapes. Paths are relative to this file.",
    "components": "Components that replace the model's own. null: the model's own, or none for an optional component.",
    "controlnets": "ControlNets for the model: a map from a name to each net, written like `model`.",
    "ip_adapters": "A list of IP-Adapters, for image prompts. All use the image encoder of the first.",
    "refiner": "A model that takes over for the last steps, built into the folder `refiner` of the "
    "pipeline, without the LoRAs. A map of `extends`, its own workflow, and `model`; or written like `model`, which "
    "uses the same chains without the counts of `expect`. null: none.",
    "target": "The target, or a list of targets, to build for.",
    "targets": "Changes for each target, applied when that target is built.",
    "loras": "LoRAs that LoraMerge merges into the submodels they change. Each must be for the model's family.",
    "matrix": "Lists of models, LoRAs and targets; every combination is a pipeline of its own.",
    "submodels": "The chain of passes for each submodel. A submodel that is left out, null or false is not built.",
    "evaluate": "Measurements after the build. null: none.",
    "generate": "Defaults for generating. They override those of the model and its LoRAs.",
    "verify": "Verification against the PyTorch model before the pipeline is assembled: `quick` (the default), "
    "`full`, a map of options, or false, null or `off`: not at all.",
    "carry_weights": "Run every pass with the weights instead of building the graph without them and filling it in at "
    "the end. Slower; the result is the same, byte for byte.",
    "allow_pickle": "Accept pickled weights (.bin, .ckpt), loaded with weights_only=True.",
    "cache": "A cache shared with other machines. null: none. $SDFLOW_REMOTE_CACHE names another.",
}
REFINER: Mapping[str, str] = {
    "extends": "The workflow of the refiner: its chains, with their counts of `expect`, for the same target.",
    "model": "The checkpoint, instead of that workflow's.",
}
NET_NAME = "[a-z0-9][a-z0-9_-]{0,31}"
"""Regular expression for a ControlNet's name, which becomes part of a folder name."""
OVERLAY: Mapping[str, str] = {
    "passes": "Changes to steps of these passes in all submodels. null removes them; insert_before and "
    "insert_after add a step to every chain that contains the named one.",
    "submodels": "Changes to single submodels, after those of `passes`.",
    "evaluate": "Changes to `evaluate`.",
    "verify": "Changes to `verify`.",
}
MATRIX: Mapping[str, str] = {
    "model": "Models: a list, or a map from a short name to each.",
    "loras": "Lists of LoRAs: a list of them, or a map from a short name to each. [] is none.",
    "target": "Targets: a list.",
}
SUBMODEL: Mapping[str, str] = {
    "passes": "The chain: a list of steps, or, over a file that has the list, a map from pass name to changed options; null "
    "removes the step, insert_before or insert_after among its options adds one.",
    "precision": "Type of its weights and values: float32 leaves OnnxFloatToFloat16 out of the chain; that pass converts to "
    "float16 or bfloat16. Default: the chain as written.",
}
PRECISIONS = ("float32", "float16", "bfloat16")
STEP: Mapping[str, str] = {
    "pass": "The pass: one of `sdflow passes`, or one of your own as path/to/file.py:ClassName.",
    "insert_before": "In a map over an inherited chain: insert this pass before the step of that name, the first of several.",
    "insert_after": "In a map over an inherited chain: insert this pass after the step of that name, the last of several.",
    "expect": "Operator type to the number of such nodes that the output must have. null drops an expectation.",
}


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


MOST_NETS, MOST_ADAPTERS, MOST_LORAS = 16, 16, 100
"""Limits per pipeline: each ControlNet and IP-Adapter is in memory together with the denoiser."""

Steps = Annotated[int, Field(ge=1, le=10_000)]
"""Upper bound; free memory may allow fewer (`sdflow.runtime.denoiser.schedule`)."""
Pixels = Annotated[int, Field(ge=8, le=8192, multiple_of=8)]


class LoraFields(_Fields):
    """A LoRA."""

    file: Annotated[str, Field(min_length=1, description="A .safetensors file, a folder, or hf:owner/name[@revision].")]
    scale: Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False, description="Scale at which it is merged.")] = (
        1.0
    )
    weight_name: Annotated[
        str | None, Field(description="The .safetensors file, if the folder or repository has several.")
    ] = None


class AdapterFields(_Fields):
    """An IP-Adapter."""

    file: Annotated[
        str,
        Field(
            min_length=1,
            description="A .safetensors file, a folder or hf:owner/name[@revision] that holds it, or synthetic:ip-adapter.",
        ),
    ]
    weight_name: Annotated[
        str | None, Field(description="The file within a folder or a repository: models/ip-adapter_sd15.safetensors.")
    ] = None
    encoder: Annotated[str | None, Field(description="Another image encoder, written like `model`.")] = None
    encoder_folder: Annotated[
        str | None,
        Field(
            description="The image encoder's folder: next to the file, or, with a slash, in the folder or repository. null: the "
            "one that diffusers looks for, named like the submodel."
        ),
    ] = None


class LatencyFields(_Fields):
    """Timed runs per submodel and for the whole pipeline."""

    warmup: Annotated[int, Field(ge=0, le=1000, description="Runs before the timed ones.")] = LatencySpec.warmup
    runs: Annotated[int, Field(ge=1, le=10_000, description="Timed runs.")] = LatencySpec.runs


class ImageFields(_Fields):
    """The image to generate."""

    prompt: Annotated[str, Field(description="Prompt.")] = ImageSpec.prompt
    negative_prompt: str | None = field_of(COMMON["negative_prompt"], ImageSpec.negative_prompt)
    steps: Annotated[Steps | None, Field(description="Denoising steps; null: 20, or the model's own if fewer.")] = (
        ImageSpec.steps
    )
    guidance_scale: float | None = field_of(COMMON["guidance_scale"], ImageSpec.guidance_scale)
    seed: int = field_of(COMMON["seed"], ImageSpec.seed)
    height: Annotated[Pixels | None, Field(description="In pixels; null: the native size.")] = ImageSpec.height
    width: Annotated[Pixels | None, Field(description="In pixels; null: the native size.")] = ImageSpec.width
    prompts: Annotated[
        list[str], Field(max_length=1000, description="Generate a sheet of all of these; seeds count up from `seed`.")
    ] = list(ImageSpec.prompts)
    references: Annotated[
        int,
        Field(
            ge=0,
            le=MOST_REFERENCES,
            description="Number of reference images of the image's size (FLUX.2-klein), with fixed content.",
        ),
    ] = ImageSpec.references


class EvaluateFields(_Fields):
    """Measurements after the build."""

    latency: Annotated[LatencyFields | None, Field(description="Timed runs; null: none.")] = LatencyFields()
    image: Annotated[ImageFields | None, Field(description="The image to generate; null: none.")] = ImageFields()
    allow_fallback: Annotated[
        bool, Field(description="Allow nodes on execution providers other than the target's.")
    ] = EvaluateSpec.allow_fallback


class VerifyFields(_Fields):
    """Verification of the artifacts against the PyTorch model."""

    level: Annotated[
        Literal["quick", "full"],
        Field(description="quick: few steps and shapes; full: more, one at the model's native size."),
    ] = VerifySpec.level
    steps: Annotated[Steps | None, Field(description="Denoising steps; null: 3 for quick, 10 for full.")] = None
    height: Annotated[Pixels | None, Field(description="Height of the test image in pixels; null: small.")] = None
    width: Annotated[Pixels | None, Field(description="Width of the test image in pixels; null: small.")] = None


class IntervalFields(_Fields):
    """A range of the steps, from 0 to 1."""

    begin: Annotated[float, Field(ge=0, lt=1, alias="from", description="Start of the range.")] = Interval.begin
    end: Annotated[float, Field(gt=0, le=1, alias="to", description="End of the range.")] = Interval.end

    @model_validator(mode="after")
    def _forward(self) -> Self:
        if self.begin >= self.end:
            raise ValueError("from must be less than to")
        return self


class ReuseFields(IntervalFields):
    """Reuse of the denoiser's deep features across steps."""

    every: Annotated[int, Field(ge=2, le=MOST_EVERY, description="Run the whole denoiser every N steps.")] = Reuse.every
    layers: Annotated[
        int, Field(ge=1, le=MOST_LAYERS, description="Number of outermost layers that run in every step.")
    ] = Reuse.layers


@with_fields({name: each for name, each in COMMON.items() if each.workflow})
class GenerateFields(_Fields):
    """Defaults for generating. null or missing: those of the model and its LoRAs."""

    reuse: Annotated[
        ReuseFields | None,
        Field(description="An approximation: reuse the denoiser's deep features across steps. null: off."),
    ] = None
    guidance_interval: Annotated[
        IntervalFields | None,
        Field(description="An approximation: the range of steps with guidance. null: all steps."),
    ] = None


class RemoteFields(_Fields):
    """The remote cache."""

    url: Annotated[
        str,
        Field(
            min_length=1,
            description="s3://BUCKET/PREFIX, gs://, az://, https:// (for reading), any URL of fsspec, or a shared folder.",
        ),
    ]
    timeout: Annotated[
        Annotated[float, Field(gt=0, le=3600)] | None,
        Field(description="Seconds without an answer before the remote is disabled for the run; null: 30."),
    ] = None
    trust: Annotated[
        list[Annotated[str, Field(pattern=f"^({SIGNER.pattern})$", max_length=1000)]],
        Field(
            max_length=1000,
            description="Public keys of `sdflow cache key`, PEM files of keys or root certificates, or "
            "`sigstore:IDENTITY ISSUER`: entries without a signature by one of them are ignored. []: accept all.",
        ),
    ] = []


class CacheFields(_Fields):
    """A cache shared with other machines."""

    remote: Annotated[
        Annotated[str, Field(min_length=1)] | RemoteFields | None,
        Field(description="Source of finished steps: a URL, a folder, or a map with `url`. null: none."),
    ] = None
    push: Annotated[bool, Field(description="Also upload steps built here.")] = False


def evaluate_spec(fields: EvaluateFields) -> EvaluateSpec:
    """Convert the validated fields to the dataclass used elsewhere."""
    return EvaluateSpec(
        latency=LatencySpec(**fields.latency.model_dump()) if fields.latency else None,
        image=ImageSpec(**fields.image.model_dump() | {"prompts": tuple(fields.image.prompts)})
        if fields.image
        else None,
        allow_fallback=fields.allow_fallback,
    )
