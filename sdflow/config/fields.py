"""The keys of a workflow, with what they mean. Validation, suggestions and the JSON Schema all read them from here."""

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
    "model": "The checkpoint: a diffusers folder, a .safetensors or .gguf file, FILE#ARCHITECTURE for one that does not say "
    "what it is, or contradicts itself (model.safetensors#sdxl-v), hf:owner/name[@revision], hf:owner/name/FILE, "
    "synthetic:sd15[?seed=N], synthetic:sd15-tiny[?seed=N], or sample:shapes. Paths are relative to this file.",
    "components": "Components from elsewhere instead of the model's own. null: its own; for an optional component: none.",
    "controlnets": "ControlNets for the model: a map from a name to each net, written like `model`.",
    "ip_adapters": "IP-Adapters, for image prompts: a list of them. Each reads the image encoder of the first.",
    "refiner": "A model that takes over for the last steps, built into the folder `refiner` of the "
    "pipeline, without the LoRAs. A map of `extends`, its own workflow, and `model`; or written like `model`, which "
    "uses the same chains without the counts of `expect`. null: none.",
    "target": "The target, or a list of targets, to build for.",
    "targets": "Changes for each target, applied when that target is built.",
    "loras": "LoRAs that LoraMerge merges into the submodels that they change. Each must be made for the model's family.",
    "matrix": "Lists of models, LoRAs and targets; every combination is a pipeline of its own.",
    "submodels": "The chain of passes for each submodel. A submodel that is left out, null or false is not built.",
    "evaluate": "What is measured after the build. null: nothing.",
    "generate": "Defaults for generating. They override those of the model and its LoRAs.",
    "verify": "How the artifacts are verified against the PyTorch model before the pipeline is assembled: `quick` (the default), "
    "`full`, a map of options, or false, null or `off`: not at all.",
    "carry_weights": "Run every pass with the weights instead of building the graph without them and filling it in at "
    "the end. Slower; the result is the same, byte for byte.",
    "allow_pickle": "Accept pickled weights (.bin, .ckpt), loaded with weights_only=True.",
    "cache": "A cache that is shared with other machines. null: none. $SDFLOW_REMOTE_CACHE names another.",
}
REFINER: Mapping[str, str] = {
    "extends": "The workflow of the refiner: its chains, with their counts of `expect`, for the same target.",
    "model": "The checkpoint, instead of that workflow's.",
}
NET_NAME = "[a-z0-9][a-z0-9_-]{0,31}"
"""A ControlNet's name, a regular expression: it becomes a part of a folder's name."""
OVERLAY: Mapping[str, str] = {
    "passes": "Changes to the steps of these passes in every submodel that has them. null removes them; insert_before and "
    "insert_after add a step to every chain that has the one they name.",
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
"""That a pipeline may have: each ControlNet and IP-Adapter is in memory beside the denoiser when it draws."""

Steps = Annotated[int, Field(ge=1, le=10_000)]
"""At most: the memory that is free may allow fewer (`sdflow.runtime.denoiser.schedule`)."""
Pixels = Annotated[int, Field(ge=8, le=8192, multiple_of=8)]


class LoraFields(_Fields):
    """A LoRA."""

    file: Annotated[str, Field(min_length=1, description="A .safetensors file, a folder, or hf:owner/name[@revision].")]
    scale: Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False, description="Scale at which it is merged.")] = (
        1.0
    )
    weight_name: Annotated[
        str | None, Field(description="The .safetensors file within a folder or a repository of several.")
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
    encoder: Annotated[str | None, Field(description="An image encoder from elsewhere, written like `model`.")] = None
    encoder_folder: Annotated[
        str | None,
        Field(
            description="The image encoder's folder: next to the file, or, with a slash, in the folder or repository. null: the "
            "one that diffusers looks for, which is called as the submodel is."
        ),
    ] = None


class LatencyFields(_Fields):
    """Timed runs per submodel and for the whole pipeline."""

    warmup: Annotated[int, Field(ge=0, le=1000, description="Runs before the timed ones.")] = LatencySpec.warmup
    runs: Annotated[int, Field(ge=1, le=10_000, description="Timed runs.")] = LatencySpec.runs


class ImageFields(_Fields):
    """The image to draw."""

    prompt: Annotated[str, Field(description="Prompt.")] = ImageSpec.prompt
    negative_prompt: str | None = field_of(COMMON["negative_prompt"], ImageSpec.negative_prompt)
    steps: Annotated[
        Steps | None, Field(description="Denoising steps; null: 20, or the model's where it needs fewer.")
    ] = ImageSpec.steps
    guidance_scale: float | None = field_of(COMMON["guidance_scale"], ImageSpec.guidance_scale)
    seed: int = field_of(COMMON["seed"], ImageSpec.seed)
    height: Annotated[Pixels | None, Field(description="Pixels; null: the model's own size.")] = ImageSpec.height
    width: Annotated[Pixels | None, Field(description="Pixels; null: the model's own size.")] = ImageSpec.width
    prompts: Annotated[
        list[str], Field(max_length=1000, description="Draw a sheet of all of these; the seed counts up from `seed`.")
    ] = list(ImageSpec.prompts)
    references: Annotated[
        int,
        Field(
            ge=0,
            le=MOST_REFERENCES,
            description="Reference images of the image's size (FLUX.2-klein); always the same.",
        ),
    ] = ImageSpec.references


class EvaluateFields(_Fields):
    """What is measured after the build."""

    latency: Annotated[LatencyFields | None, Field(description="Timed runs; null: none.")] = LatencyFields()
    image: Annotated[ImageFields | None, Field(description="The image to generate; null: none.")] = ImageFields()
    allow_fallback: Annotated[
        bool, Field(description="Nodes may run on another execution provider than the target's.")
    ] = EvaluateSpec.allow_fallback


class VerifyFields(_Fields):
    """How the artifacts are verified against the PyTorch model."""

    level: Annotated[
        Literal["quick", "full"],
        Field(description="quick: few steps and shapes; full: more, one at the model's own size."),
    ] = VerifySpec.level
    steps: Annotated[Steps | None, Field(description="Denoising steps; null: 3 for quick, 10 for full.")] = None
    height: Annotated[Pixels | None, Field(description="Of the image denoised, in pixels; null: small.")] = None
    width: Annotated[Pixels | None, Field(description="Of the image denoised, in pixels; null: small.")] = None


class IntervalFields(_Fields):
    """A part of the steps, from 0 to 1."""

    begin: Annotated[float, Field(ge=0, lt=1, alias="from", description="Where it begins.")] = Interval.begin
    end: Annotated[float, Field(gt=0, le=1, alias="to", description="Where it ends.")] = Interval.end

    @model_validator(mode="after")
    def _forward(self) -> Self:
        if self.begin >= self.end:
            raise ValueError("from must be less than to")
        return self


class ReuseFields(IntervalFields):
    """Deep features of the denoiser are kept over some steps."""

    every: Annotated[int, Field(ge=2, le=MOST_EVERY, description="One run in so many is whole.")] = Reuse.every
    layers: Annotated[
        int, Field(ge=1, le=MOST_LAYERS, description="How many of the outermost layers run in every step.")
    ] = Reuse.layers


@with_fields({name: each for name, each in COMMON.items() if each.workflow})
class GenerateFields(_Fields):
    """Defaults of drawing. null, or left out: as the model and its LoRAs say."""

    reuse: Annotated[
        ReuseFields | None,
        Field(description="An approximation: deep features of the denoiser are kept over some steps. null: none are."),
    ] = None
    guidance_interval: Annotated[
        IntervalFields | None,
        Field(description="An approximation: the part of the steps that have guidance. null: all have it."),
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
        Field(description="Seconds without any answer after which it counts as gone for the run; null: 30."),
    ] = None
    trust: Annotated[
        list[Annotated[str, Field(pattern=f"^({SIGNER.pattern})$", max_length=1000)]],
        Field(
            max_length=1000,
            description="Public keys of `sdflow cache key`, PEM files of keys or root certificates, or "
            "`sigstore:IDENTITY ISSUER`: what none of them has signed counts as not there. []: any.",
        ),
    ] = []


class CacheFields(_Fields):
    """A cache that is shared with other machines."""

    remote: Annotated[
        Annotated[str, Field(min_length=1)] | RemoteFields | None,
        Field(
            description="Where finished steps are fetched from: a URL, a folder, or a map with `url`. null: nowhere."
        ),
    ] = None
    push: Annotated[bool, Field(description="Send what is built here there as well.")] = False


def evaluate_spec(fields: EvaluateFields) -> EvaluateSpec:
    """The checked fields as the plain dataclass that the rest of the program uses."""
    return EvaluateSpec(
        latency=LatencySpec(**fields.latency.model_dump()) if fields.latency else None,
        image=ImageSpec(**fields.image.model_dump() | {"prompts": tuple(fields.image.prompts)})
        if fields.image
        else None,
        allow_fallback=fields.allow_fallback,
    )
