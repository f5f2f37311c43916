"""Build the requests to the verifying process from a subject."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdflow.config.workflow import VerifySpec
from sdflow.manifest import MANIFEST_FILE, REFINER, Quantization
from sdflow.runtime.files.recorded_tuning import recorded_tuning
from sdflow.targets import TARGETS
from sdflow.verify.artifact.judge_request import JudgeRequest
from sdflow.verify.artifact.recipes import RecipeCheck
from sdflow.verify.artifact.stored import BoundModel
from sdflow.verify.reference.reference_request import ReferenceRequest
from sdflow.verify.reference.selection import Selection
from sdflow.verify.reference.torch_module import LoraMerge, TorchModule
from sdflow.verify.subject import Subject
from sdflow.weights.lora import LoraInput


@dataclass(frozen=True)
class Built:
    """The part of a pipeline folder to verify. digests: submodel -> digest of its actual files. structures: submodel ->
    the structure of its weights, if still cached. unproved: why there is none. quantized: the manifest's entries for
    quantized submodels."""

    submodels: Sequence[str]
    digests: Mapping[str, str]
    structures: Mapping[str, Path]
    unproved: Mapping[str, str]
    quantized: Mapping[str, Quantization] = field(default_factory=dict)


def judge_request(
    subject: Subject, spec: VerifySpec, built: Built, out: Path, threads: int | None, run_on: str | None
) -> JudgeRequest:
    """The request for judging; the reference's folder is not known yet."""
    return JudgeRequest(
        family=subject.checkpoint.family.name,
        folder=subject.folder.absolute(),
        name=subject.name,
        target=subject.target,
        level=spec.level,
        submodels=built.submodels,
        reference=Path(),
        out=out,
        digests=built.digests,
        modules=[torch_module(subject, name) for name in built.submodels],
        recipes=[_recipes(subject, name, path) for name, path in built.structures.items()],
        unproved=built.unproved,
        allow_fallback=subject.allow_fallback,
        threads=threads,
        run_on=run_on,
        tuning={}
        if run_on is None
        else recorded_tuning(_tuned_folder(subject.folder), TARGETS[run_on]).tuning.to_json(),
        quantized={name: {"to": each.to, "limit": each.limit} for name, each in built.quantized.items()},
    )


def _tuned_folder(folder: Path) -> Path:
    """The folder that was tuned: a refiner is tuned with its base, whose folder contains it."""
    return folder.parent if folder.name == REFINER and (folder.parent / MANIFEST_FILE).is_file() else folder


def submodels_of_reference(selection: Selection, subject: Subject) -> list[str]:
    family = subject.checkpoint.family
    drawing = family.drawing_of(subject.checkpoint.submodels)
    return sorted({*selection.submodels, *drawing, *family.optional_parts(subject.checkpoint.submodels)})


def wanted_of(subject: Subject, selection: Selection, out: Path) -> ReferenceRequest:
    """The request for PyTorch's results, into the folder `out`."""
    checkpoint = subject.checkpoint
    return ReferenceRequest(
        family=checkpoint.family.name,
        loads={name: checkpoint.submodels[name].load for name in submodels_of_reference(selection, subject)},
        companions={name: path.absolute() for name, path in checkpoint.companions.items()},
        options=checkpoint.options,
        scheduler=checkpoint.said.get("scheduler"),
        loras=_merges(subject),
        selection=selection,
        out=out.absolute(),
        bfloat16=subject.bfloat16,
    )


def _recipes(subject: Subject, submodel: str, structure: Path) -> RecipeCheck:
    part = subject.checkpoint.submodels[submodel]
    loras = [LoraInput(lora.path.absolute(), lora.scale) for lora in subject.loras]
    bound = BoundModel((subject.folder / submodel).absolute(), part.load, loras, _denoiser(subject))
    return RecipeCheck(submodel, structure.absolute(), bound)


def torch_module(subject: Subject, submodel: str) -> TorchModule:
    """The PyTorch model of a submodel, with its LoRAs."""
    load, half = subject.checkpoint.submodels[submodel].load, "bfloat16" if submodel in subject.bfloat16 else "float16"
    return TorchModule(submodel, load, _merges(subject), _denoiser(subject), half)


def _merges(subject: Subject) -> list[LoraMerge]:
    return [LoraMerge(lora.path.absolute(), lora.scale) for lora in subject.loras]


def _denoiser(subject: Subject) -> Mapping[str, Any]:
    """The denoiser's config."""
    checkpoint = subject.checkpoint
    config: Mapping[str, Any] = checkpoint.submodels[checkpoint.family.denoiser].load["config"]
    return config
