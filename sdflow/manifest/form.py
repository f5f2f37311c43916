"""Validate `sdflow.json` of this version and earlier ones. Entries of later versions are ignored.

Importing this module imports pydantic, which only readers of manifests need.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from sdflow.digest import FileEntry, inside
from sdflow.errors import UsageError, first_problem
from sdflow.families import DEFAULT, FAMILIES
from sdflow.families.shared.approximation import Approximation
from sdflow.families.shared.schedulers import SCHEDULERS
from sdflow.manifest.content import (
    NOT_SAID,
    REFINER,
    Chain,
    FinishedPass,
    Manifest,
    MergedLora,
    Origin,
    Part,
    Quantization,
    WrittenPass,
)
from sdflow.printable import printable

_OF_ANYBODY = ("config", "facts", "options", "uses")
"""Keys with arbitrary text from passes, which is never printed."""


def _require_shown(value: Any) -> None:
    """Raises ValueError for text, including keys, with terminal control characters."""
    if isinstance(value, str) and printable(value) != value:
        raise ValueError(f"{value!r:.60} holds characters that a terminal takes for commands")
    for each in value if isinstance(value, list | dict) else ():
        _require_shown(each)
        if isinstance(value, dict) and each not in _OF_ANYBODY:
            _require_shown(value[each])


def _that(accepts: Callable[[str], bool], otherwise: str) -> AfterValidator:
    def check(text: str) -> str:
        if not accepts(text):
            raise ValueError(otherwise)
        return text

    return AfterValidator(check)


File = Annotated[str, _that(inside, "it is not a file in its folder")]
Folder = Annotated[str, _that(lambda name: inside(name) and "/" not in name, "it is not a folder name")]
FamilyName = Annotated[str, _that(FAMILIES.__contains__, f"known are {', '.join(FAMILIES)}")]
Scheduler = Annotated[str, _that(SCHEDULERS.__contains__, f"known are {', '.join(SCHEDULERS)}")]
Refiner = Annotated[str, _that(REFINER.__eq__, f"a refiner is always in the folder {REFINER}")]
Count = Annotated[float, Field(ge=0, lt=math.inf)]
Json = dict[str, Any]


class _Form(BaseModel):
    model_config = ConfigDict(strict=True)


class _File(_Form):
    path: File
    size: int = Field(alias="bytes")
    sha256: str


class _Written(_Form):
    name: str = Field(alias="pass")
    options: Json


class _Finished(_Form):
    name: str = Field(alias="pass")
    action: str
    config: Json = {}
    uses: Json = {}
    facts: Json = {}


class _Submodel(_Form):
    artifact: str
    files: list[_File]
    steps: list[_Finished] | None = None
    quantized: Quantization | None = None
    passes: list[_Written] | None = None

    def chain(self) -> Chain | None:
        if self.steps is None:
            return None
        if self.quantized is not None and self.quantized.limit is not None and not 0 < self.quantized.limit < math.inf:
            raise ValueError(f"quantized.limit: {self.quantized.limit} is not a valid limit")
        written = None if self.passes is None else tuple(WrittenPass(**dict(each)) for each in self.passes)
        return Chain(written, tuple(FinishedPass(**dict(each)) for each in self.steps), self.quantized)

    def part(self) -> Part:
        return Part(self.artifact, tuple(FileEntry(each.path, each.size, each.sha256) for each in self.files))


class _Lora(_Form):
    reference: str
    weight_name: str | None = None
    sha256: str
    scale: float
    commit: str | None = None


class _Adapter(_Form):
    file: str
    weight_name: str | None = None
    encoder: str | None = None
    encoder_folder: str | None = None


class _Checkpoint(_Form):
    """A checkpoint; further keys depend on its kind."""

    model_config = ConfigDict(extra="allow")

    components: dict[str, Json] = {}


class Said(_Form):
    """Settings for generating from a workflow, or implied by names of the model and its LoRAs, with the reason."""

    steps: Annotated[int, Field(ge=1)] | None = None
    guidance_scale: Count | None = None
    strength: Count | None = None
    eta: Count | None = None
    scheduler: Scheduler | None = None
    reuse: Json | None = None
    guidance_interval: Json | None = None
    because: str | None = None

    @model_validator(mode="after")
    def _known(self) -> Self:
        try:
            Approximation.of(self.reuse, self.guidance_interval)
        except UsageError as error:
            raise ValueError(str(error)) from error
        return self


class _Manifest(_Form):
    sdflow_version: str = ""
    copied: bool = False
    name: str
    target: str
    model: str | None = None
    checkpoint: _Checkpoint | None = None
    allow_pickle: bool = False
    carry_weights: bool = False
    loras: list[_Lora]
    submodels: dict[Folder, _Submodel]
    files: tuple[File, ...]
    verified: str | None = NOT_SAID
    family: FamilyName = DEFAULT
    components: dict[str, str | None] = {}
    controlnets: dict[str, str] = {}
    ip_adapters: list[_Adapter] = []
    generate: Said = Said()
    few_steps: Said = Said()
    refiner: Refiner | None = None
    left_out: tuple[str, ...] | None = None


def manifest_of(value: Mapping[str, Any]) -> Manifest:
    """The manifest of a file's JSON. Raises ValueError naming a missing or invalid key."""
    _require_shown(value)
    try:
        # In strict mode, only JSON may give lists for tuples, and maps for dataclasses.
        form = _Manifest.model_validate_json(json.dumps(value))
    except ValidationError as error:
        raise ValueError(first_problem(error)) from error
    others = ("checkpoint", "loras", "chains", "ip_adapters", "generate", "few_steps")
    origin = Origin(
        **{each.name: getattr(form, each.name) for each in fields(Origin) if each.name not in others},
        checkpoint=None if form.checkpoint is None else form.checkpoint.model_dump(exclude_unset=True),
        loras=tuple(MergedLora(**dict(each)) for each in form.loras),
        chains={name: chain for name, each in form.submodels.items() if (chain := each.chain()) is not None},
        ip_adapters=tuple(each.model_dump(exclude_none=True) for each in form.ip_adapters),
        generate=form.generate.model_dump(exclude_none=True),
        few_steps=form.few_steps.model_dump(exclude_none=True),
    )
    parts = {name: each.part() for name, each in form.submodels.items()}
    return Manifest(origin, parts, form.files, form.copied, form.sdflow_version)
