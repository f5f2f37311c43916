"""`sdflow init`: write a complete, commented workflow for a model, a target and LoRAs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from sdflow.artifact import INDEX_FILE
from sdflow.config import load_workflow
from sdflow.config.files import hub_repository
from sdflow.config.problems import nearest
from sdflow.config.workflow import LoraSpec
from sdflow.disk.atomic_write import write_whole
from sdflow.disk.input_file import is_regular, is_there, read_input
from sdflow.disk.shipped import sample_folder, shipped_workflow, shipped_workflows
from sdflow.errors import UsageError
from sdflow.inspection import Description, inspect
from sdflow.inspection.description import PIPELINE
from sdflow.inspection.folders import inspect_repository
from sdflow.inspection.lines import UNNAMED_MODEL, USUAL, architecture_for, base_of, model_of, title_of
from sdflow.passes.registry import catalog
from sdflow.run.bake import parse_lora
from sdflow.run.init_fits import fit_workflow
from sdflow.run.init_text import InitRequest, Model, path_from, workflow_text
from sdflow.sources.checkpoint import listing
from sdflow.sources.hub import HubUnreachable, describe_repository, hub_weights
from sdflow.sources.recognition import CHECKPOINT, LORA
from sdflow.sources.reference import HubReference, LocalReference, SampleReference, SyntheticReference, parse_reference
from sdflow.sources.synthetic import require_model
from sdflow.targets import find_target

__all__ = ["InitRequest", "write_workflow"]

_KINDS = (CHECKPOINT, PIPELINE)


def write_workflow(request: InitRequest) -> Path:
    """Write the workflow, validate it, and return its path.

    Raises UsageError for inputs that conflict or cannot be identified, CheckpointError for a damaged file.
    """
    find_target(request.target, "--target")
    if request.out.exists() and not request.force:
        raise UsageError(
            "already exists",
            where=str(request.out),
            remedy="Name another file with --out, or overwrite it with --force.",
        )
    if request.out.exists() and not is_regular(request.out):
        raise UsageError(
            "is not a regular file, so it is not overwritten", where=str(request.out), remedy="Name another with --out."
        )
    if not request.out.parent.is_dir():
        raise UsageError("there is no such folder", where=str(request.out.parent), remedy="Name another with --out.")
    loras = [parse_lora(text) for text in request.loras]
    found = [_inspected(lora) for lora in loras]
    model = _model(request, [each for each in found if each is not None])
    for lora in found:
        if lora is not None and lora.of and model.of is not None and model.of not in lora.of:
            raise UsageError(
                f"is a LoRA for {' or '.join(lora.of)}, but the model is {model.of}",
                where=lora.path,
                remedy="Name a matching model with --model.",
            )
    given = list(zip(loras, found, strict=True))
    before = read_input(request.out) if request.out.exists() else None
    write_whole(request.out, workflow_text(request, model, given).encode())
    try:
        workflow = load_workflow(request.out, catalog=catalog())
        if request.fits is not None:
            fitted = fit_workflow(workflow.pipelines[0], request.fits)
            write_whole(request.out, workflow_text(request, model, given, fitted).encode())
            load_workflow(request.out, catalog=catalog())
    except BaseException:  # including an interrupt
        if before is None:
            request.out.unlink()
        else:
            write_whole(request.out, before)
        raise
    return request.out


def _inspected(lora: LoraSpec) -> Description | None:
    """Inspect a LoRA's file; None for one on the hub, and for a folder of several."""
    if lora.reference.startswith("hf:"):
        return None
    path = Path(lora.reference)
    described = inspect(path / lora.weight_name if lora.weight_name else path)
    if len(described) != 1:
        return None
    (found,) = described
    if found.kind != LORA:
        raise UsageError(f"is not a LoRA. It is: {found.kind}", where=found.path, remedy="See `sdflow inspect`.")
    if found.workflow is None:
        raise UsageError(" ".join(found.notes), where=found.path, remedy="See `sdflow inspect`.")
    return found


def _model(request: InitRequest, loras: Sequence[Description]) -> Model:
    if request.model is None:
        architecture = architecture_for(loras[0].of) if loras else USUAL
        if request.base is not None:
            return Model(_known(request.base), None, None, "")
        if architecture is None:
            raise UsageError(
                f"{loras[0].path} does not identify the models it is for",
                where="--lora",
                remedy="Name the model: --model FILE.",
            )
        return Model(base_of(architecture), None, title_of(architecture), "")
    parsed = parse_reference(request.model)
    if isinstance(parsed, SyntheticReference):
        require_model(request.model, parsed.architecture)
        base = _known(request.base) if request.base else base_of(parsed.architecture)
        return Model(base, request.model, title_of(parsed.architecture), "random weights")
    if isinstance(parsed, HubReference) and parsed.file:
        file, _ = hub_weights(parsed, download=False)
        described = inspect(file)
        if parsed.architecture is not None:
            return _as_said(request, parsed.architecture, request.model, described[0].kind)
        return _of_description(request, described[0], request.model)
    if isinstance(parsed, HubReference):
        return _of_the_hub(request, request.model, parsed)
    if isinstance(parsed, SampleReference):
        (found,) = inspect(sample_folder(parsed.name))
        return _of_description(request, found, request.model)
    assert isinstance(parsed, LocalReference)
    repository = hub_repository(request.model)
    if repository is not None and not is_there(parsed.path) and not is_there(parsed.path.parent):
        raise UsageError(
            f"there is no file or folder {request.model!r}",
            where="--model",
            remedy=f"Write --model hf:{repository} for the repository on the hub.",
        )
    described = inspect(parsed.path)
    if len(described) != 1:
        raise UsageError(
            f"holds {len(described)} weight files", where=str(parsed.path), remedy="Name one of them with --model."
        )
    reference = path_from(request.out, parsed.path)
    if parsed.architecture is not None:
        return _as_said(request, parsed.architecture, f"{reference}#{parsed.architecture}", described[0].kind)
    return _of_description(request, described[0], reference)


def _as_said(request: InitRequest, architecture: str, reference: str, comment: str) -> Model:
    """A file whose architecture the user names."""
    base = _known(request.base) if request.base else base_of(architecture)
    return Model(base, reference, title_of(architecture), comment)


def _of_description(request: InitRequest, found: Description, reference: str) -> Model:
    lines = {} if found.workflow is None else yaml.safe_load(found.workflow)
    if not lines or (found.kind not in _KINDS and "components" not in lines):
        lacks = f" that lacks {', '.join(found.missing)}" if found.missing else ""
        option = " Pass a LoRA with --lora." if found.kind == LORA else ""
        raise UsageError(
            f"is not a model to build a pipeline from. It is: {found.kind}{lacks}. {' '.join(found.notes)}".rstrip(),
            where=found.path,
            remedy=f"Name a checkpoint or a folder in diffusers' layout.{option}",
        )
    over = lines["extends"]
    base = _known(request.base) if request.base else over if isinstance(over, str) else f"[{', '.join(over)}]"
    of, pickled = " or ".join(found.of), bool(lines.get("allow_pickle"))
    if components := lines.get("components"):
        model = lines.get("model")
        if model is None and base.startswith("base/") and model_of(base) is None:
            model = UNNAMED_MODEL
        has = f"its {', '.join(found.missing)}" if found.missing else "the rest"
        comment = "" if model is None else f"name a folder or repository that has {has}"
        return Model(base, model, of, comment, pickled, dict.fromkeys(components, reference))
    comment = ", ".join(each for each in (found.kind, found.architecture, found.precision) if each)
    return Model(base, reference, of, comment, pickled)


def _of_the_hub(request: InitRequest, reference: str, parsed: HubReference) -> Model:
    """A repository of a shipped workflow; for others their configurations are fetched, if the hub answers."""
    if request.base is not None:
        return Model(_known(request.base), reference, None, "")
    for name in shipped_workflows():
        if model_of(name) == reference.partition("@")[0]:
            return Model(name, reference, None, "")
    cause, found = "", None
    try:
        found = describe_repository(parsed)
    except HubUnreachable as error:
        cause = f": {error.what}"
    if found is None:
        raise UsageError(
            f"the content of this repository is unknown without downloading it{cause}",
            where=reference,
            remedy="Name the kind of model, as in --base base/sdxl.yaml, or download it and name the folder.",
        )
    if found.configurations is None:
        weights = [name for name in found.files if name.lower().endswith(".safetensors")]
        holds = f"; it holds {listing(weights)}" if weights else ""
        raise UsageError(
            f"the repository has no {INDEX_FILE}, so it is not a pipeline in diffusers' layout{holds}",
            where=reference,
            remedy=f"Download a file, hf download {parsed.repository} FILE, and name it: --model FILE."
            if weights
            else "Name another repository.",
        )
    return _of_description(request, inspect_repository(found.configurations, reference), reference)


def _known(base: str) -> str:
    """The name of a shipped workflow, given as `base/sd15.yaml` or `sd15`."""
    name = base if "/" in base else f"base/{base}"
    name = name if name.endswith(".yaml") else f"{name}.yaml"
    if shipped_workflow(name) is None:
        raise UsageError(
            f"no workflow {name} ships with sdflow", where="--base", remedy=nearest(name, shipped_workflows())
        )
    return name
