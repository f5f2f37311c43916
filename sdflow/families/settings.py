"""Settings of a drawing that are common to all families, declared once.

The options of `sdflow generate` and `query`, the fields of both HTTP APIs, a workflow's `generate`, the arguments of a
pipeline's call and a PNG's text are derived from them. To add one, add a field here, or an entry in a family's
`arguments`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal

from sdflow.families import FAMILIES
from sdflow.families.shared.approximation import parse
from sdflow.families.shared.sampler_names import read_scheduler
from sdflow.families.shared.schedulers import SchedulerName
from sdflow.parameter import Parameter, parameters

MOST_BLUR = 256
"""In pixels."""

MOST_SEED = 2**63 - 1

PromptSyntax = Literal["plain", "a1111"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of an image. None: the model's default. more: the family's own arguments (`Family.arguments`), by
    name."""

    negative_prompt: Annotated[
        str | None, Parameter("Negative prompt.", served=True, webui="negative_prompt", invokeai="negative_prompt")
    ] = None
    prompt_syntax: Annotated[
        PromptSyntax,
        Parameter(
            "Prompt syntax. plain: text only, up to 75 tokens. a1111: (word:1.3), ((word)), [word], BREAK, any length.",
            metavar="plain|a1111",
            served=True,
        ),
    ] = "plain"
    clip_skip: Annotated[
        int | None,
        Parameter(
            "Number of final text encoder layers to skip for the prompt; the negative prompt uses all of them. Counted as in "
            "diffusers: 1 is what other programs call clip skip 2.",
            least=0,
            most=30,
            served=True,
            infotext="Clip skip",
            invokeai="clip_skip",
        ),
    ] = None
    reuse: Annotated[
        Mapping[str, float] | None,
        Parameter(
            "Approximation: compute the deep layers only in every N-th step and reuse them in between. layers=1 sets how "
            "many of the outermost layers run in every step.",
            otherwise="the workflow's, else off",
            metavar="every=2,from=0.1,to=0.9|off",
            read=partial(parse, "--reuse"),
            recorded=False,
        ),
    ] = None
    guidance_interval: Annotated[
        Mapping[str, float] | None,
        Parameter(
            "Approximation: use guidance only in this fraction of the steps.",
            otherwise="the workflow's, else all",
            metavar="from=0.1,to=0.8|off",
            read=partial(parse, "--guidance-interval"),
            recorded=False,
        ),
    ] = None
    steps: Annotated[
        int | None,
        Parameter(
            "Denoising steps.",
            least=1,
            most=10_000,  # free memory may allow fewer (`sdflow.runtime.denoiser.schedule`)
            otherwise="the model's: 50, or 1 to 8 for few-step models",
            call="num_inference_steps",
            webui="steps",
            infotext="Steps",
            invokeai="steps",
            served=True,
            workflow=True,
        ),
    ] = None
    guidance_scale: Annotated[
        float | None,
        Parameter(
            "Guidance scale; 1 or less (Z-Image: 0) turns guidance off.",
            least=0,
            most=1000,
            otherwise="the model's: 7.5, or 5 for SDXL",
            webui="cfg_scale",
            infotext="CFG scale",
            invokeai="cfg_scale",
            served=True,
            workflow=True,
        ),
    ] = None
    strength: Annotated[
        float | None,
        Parameter(
            "Fraction of the steps to run on the image.",
            above=0,
            most=1,
            otherwise="the model's: 0.8, or 0.3 for SDXL; 1 with a mask",
            webui="denoising_strength",
            infotext="Denoising strength",
            invokeai="strength",
            needs="image",
            served=True,
            workflow=True,
        ),
    ] = None
    eta: Annotated[
        float | None,
        Parameter(
            "Amount of noise that DDIM and TCD add in each step.",
            least=0,
            most=1,
            otherwise="the model's",
            webui="eta",
            infotext="Eta",
            served=True,
            workflow=True,
        ),
    ] = None
    scheduler: Annotated[
        SchedulerName | None,
        Parameter(
            "Scheduler, such as euler_a or dpm++_2m_karras; A1111's and ComfyUI's names are understood too.",
            otherwise="the pipeline's",
            metavar="NAME",
            read=read_scheduler,
            call="-",
            recorded=False,
            infotext="Sampler",
            invokeai="scheduler",
            served=True,
            workflow=True,
        ),
    ] = None
    seed: Annotated[
        int | None,
        Parameter(
            "Seed of the first image; later images increment it.",
            least=0,
            most=MOST_SEED,
            otherwise="a random one",
            call="-",
            recorded=False,
            infotext="Seed",
            invokeai="seed",
            served=True,
        ),
    ] = None
    height: Annotated[
        int | None,
        Parameter("Height in pixels.", least=1, otherwise="the model's own", recorded=False, invokeai="height"),
    ] = None
    width: Annotated[
        int | None,
        Parameter("Width in pixels.", least=1, otherwise="the model's own", recorded=False, invokeai="width"),
    ] = None
    mask_blur: Annotated[
        float,
        Parameter(
            "Width of the blend at the edge of the mask.",
            least=0,
            most=MOST_BLUR,
            metavar="PIXELS",
            webui="mask_blur",
            infotext="Mask blur",
            needs="mask",
            served=True,
        ),
    ] = 0.0
    whole: Annotated[
        bool,
        Parameter(
            "Keep the decoded pixels outside the mask, which differ slightly from the image's, as in diffusers.",
            needs="mask",
            served=True,
        ),
    ] = False
    guess_mode: Annotated[bool, Parameter("Let ControlNets guess the content; the prompt may be empty.")] = False
    refiner_start: Annotated[
        float | None,
        Parameter(
            "Fraction of the denoising after which the refiner takes over; 1 turns it off.",
            above=0,
            most=1,
            otherwise="0.8",
            recorded=False,
        ),
    ] = None
    more: Mapping[str, Any] = field(default_factory=dict)

    def given(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults, by name, with the family's own arguments."""
        own = {name: getattr(self, name) for name in COMMON}
        return {name: value for name, value in own.items() if value != COMMON[name].default} | dict(self.more)

    def recorded(self) -> dict[str, Any]:
        """Return the settings that a PNG's text records by their own names."""
        given = {name: value for name, value in self.given().items() if name not in COMMON or COMMON[name].recorded}
        return {"negative_prompt": self.negative_prompt, **given}

    def call_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of a pipeline's call, without defaults."""
        named = ((COMMON[name].call or name if name in COMMON else name, value) for name, value in self.given().items())
        return {name: value for name, value in named if name != "-"}


COMMON = parameters(Settings)
"""Parameters of all families, by name."""


def _family_arguments() -> Iterator[tuple[str, Parameter]]:
    takers: dict[str, dict[str, list[str]]] = {}
    found: dict[str, Parameter] = {}
    for family in FAMILIES.values():
        for name, parameter in family.arguments.items():
            takers.setdefault(name, {}).setdefault(parameter.described, []).append(family.title)
            found[name] = parameter
    for name, parameter in found.items():
        about = " ".join(f"{', '.join(titles)}: {described}" for described, titles in takers[name].items())
        yield name, replace(parameter, about=about, otherwise="", default=None, served=True)


FAMILY_ARGUMENTS: Mapping[str, Parameter] = dict(_family_arguments())
"""Parameters of some families, by name; each description names the families, and has their defaults."""

ALL: Mapping[str, Parameter] = {**COMMON, **FAMILY_ARGUMENTS}
SERVED: Mapping[str, Parameter] = {name: each for name, each in ALL.items() if each.served}
"""Parameters of requests to a server."""


def settings_of(values: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return the arguments of `Settings` for these parameters, with family-specific ones in `more`; None values are
    dropped."""
    given = {name: value for name, value in values if value is not None}
    own = {name: value for name, value in given.items() if name not in FAMILY_ARGUMENTS}
    return own | {"more": {name: value for name, value in given.items() if name in FAMILY_ARGUMENTS}}
