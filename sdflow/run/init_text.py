"""The text of the workflow that `sdflow init` writes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from sdflow.config import load_workflow
from sdflow.config.matrix import slug
from sdflow.config.workflow import LoraSpec
from sdflow.disk.shipped import shipped_workflow
from sdflow.families import FAMILIES, any_family
from sdflow.inspection import Description
from sdflow.inspection.description import DRAWS_WITH
from sdflow.inspection.lines import USUAL, quoted
from sdflow.passes.registry import catalog
from sdflow.run.init_fits import NOT_FITTED, Fitted
from sdflow.targets import TARGETS


@dataclass(frozen=True)
class InitRequest:
    """The inputs of the workflow.

    model: as in a workflow; None: the base's. loras: FILE or FILE:SCALE. target: None: cpu. base: the workflow to
    extend; None: detected from the model or the first LoRA. fits: bytes of device memory to fit into; for the CPU, of
    its memory.
    """

    out: Path
    model: str | None = None
    target: str = "cpu"
    loras: Sequence[str] = ()
    base: str | None = None
    force: bool = False
    fits: int | None = None


@dataclass(frozen=True)
class Model:
    """The model's line; None for the base's own. of: its kind in words; None if unknown. components: replaced ones ->
    their sources."""

    base: str
    reference: str | None
    of: str | None
    comment: str
    pickled: bool = False
    components: Mapping[str, str] = field(default_factory=dict)


def path_from(out: Path, path: Path) -> str:
    """A path as the workflow spells it: relative if it is below the workflow's folder, otherwise absolute."""
    folder = out.absolute().parent
    path = path.absolute()
    if not path.is_relative_to(folder):
        return str(path)
    below = path.relative_to(folder).as_posix()
    return f"./{below}" if ":" in below else below  # otherwise it would look like a scheme


def workflow_text(
    request: InitRequest,
    model: Model,
    loras: Sequence[tuple[LoraSpec, Description | None]],
    fitted: Fitted = NOT_FITTED,
) -> str:
    of = model.of or "the model"
    file, name = shlex.quote(request.out.name), slug(request.out.stem) or "pipeline"
    others = ", ".join(name for name in TARGETS if name != request.target)
    lines = [
        f"# {of[0].upper()}{of[1:]} for {request.target}, written by `sdflow init`.",
        f"#   sdflow validate {file}    check this file",
        f"#   sdflow plan {file}        show what would be built",
        f"#   sdflow run {file}         build, verify, measure; then",
        f'#   sdflow generate pipelines/{name} --prompt "a horse on the moon"{fitted.options}',
        *fitted.comments,
        "",
        f"extends: {model.base}    # the chain of passes of each submodel; it ships with sdflow",
    ]
    if model.reference is None:
        lines += ["# model: models/my_model.safetensors    # instead of the base's own", ""]
    else:
        lines += [
            f"model: {quoted(model.reference)}" + (f"    # {_one_line(model.comment)}" if model.comment else ""),
            "",
        ]
    if model.pickled:
        lines += ["allow_pickle: true    # read with weights_only=True: no code in it runs", ""]
    lines += [f"target: {request.target}    # or a list; the others are {others}", ""]
    if loras:
        lines += ["loras:    # merged into the weights, in this order, at this scale"]
        lines += [_lora(request, lora, found) for lora, found in loras]
    else:
        lines += ["# loras:    # merged into the weights", "#   - {file: loras/my_lora.safetensors, scale: 1.0}"]
    given = [f"  {component}: {quoted(file)}" for component, file in model.components.items()]
    lines += ["", f"{'' if given else '# '}components:    # replace the model's own", *given]
    components = _components(model.base) - model.components.keys()
    exchangeable, omittable = any_family.exchangeable_components(), any_family.omittable_components()
    lines += [f"#   {component}: my_{component}.safetensors" for component in exchangeable if component in components]
    lines += [f"#   {component}: null    # left out" for component in omittable if component in components]
    lines += fitted.submodels
    lines += ["", "verify: quick    # verify each part against PyTorch; full: more thoroughly, false: not at all", ""]
    triggers = [found.details["trigger words"] for _, found in loras if found and "trigger words" in found.details]
    if triggers:
        lines += ["evaluate:    # measurements after the build; null: none"]
        lines += [f"  image: {{prompt: {quoted(', '.join(['a photo', *triggers]))}}}    # with the trigger words"]
    else:
        lines += ["# evaluate:    # measurements after the build; null: none"]
        lines += ["#   image: {prompt: a horse on the moon, seed: 0}"]
    return "\n".join(lines) + "\n"


def _components(base: str) -> set[str]:
    """The components with chains in a shipped workflow, or in the first of a list."""
    over = yaml.safe_load(base)
    path = shipped_workflow(over if isinstance(over, str) else over[0])
    assert path is not None
    (pipeline, *_) = load_workflow(
        path, catalog=catalog(), overrides=[f"model=synthetic:{USUAL}"], targets=[next(iter(TARGETS))]
    ).pipelines
    parts = [part for family in FAMILIES.values() for part in family.parts]
    return {part.component for part in parts if part.name in pipeline.submodels}


def _lora(request: InitRequest, lora: LoraSpec, found: Description | None) -> str:
    hub = lora.reference.startswith("hf:")
    file = lora.reference if hub else path_from(request.out, Path(lora.reference))
    name = f", weight_name: {quoted(lora.weight_name)}" if lora.weight_name else ""
    details = {} if found is None else found.details
    noted = [f"{what}: {details[what]}" for what in ("rank", DRAWS_WITH, "trigger words") if what in details]
    comment = f"    # {_one_line('; '.join(noted))}" if noted else ""
    return f"  - {{file: {quoted(file)}{name}, scale: {lora.scale!r}}}{comment}"


def _one_line(text: str) -> str:
    """Make text safe for a comment."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
