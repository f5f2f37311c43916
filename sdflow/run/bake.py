"""`sdflow bake`: rebuild an existing pipeline with LoRAs, without a workflow.

Checkpoint, target, passes and options are taken from the pipeline's sdflow.json.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sdflow.build.listener import Listener
from sdflow.build.plan import Plan
from sdflow.config.catalog import PassNotFound
from sdflow.config.workflow import EvaluateSpec, LoraSpec, Mark, PipelineSpec, StepSpec, VerifySpec, Workflow
from sdflow.disk.input_file import is_there
from sdflow.errors import UsageError
from sdflow.families import FAMILIES, any_family
from sdflow.machine.packages import REFERENCE, require_packages
from sdflow.manifest import MANIFEST_FILE, Origin, read_manifest
from sdflow.passes import registry
from sdflow.run.options import RunOptions
from sdflow.run.run import PipelineResult, run_workflow
from sdflow.runtime.files.folder import refiner_of
from sdflow.sources import require_same_checkpoint
from sdflow.sources.reference import AdapterReference
from sdflow.store import Cache
from sdflow.targets import find_target

_HUB = re.compile(r"hf:[^:]*")
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")


def bake(
    base: Path,
    loras: Sequence[str],
    out: Path,
    cache: Cache,
    listener: Listener,
    *,
    copy: bool = False,
    jobs: int | None = None,
    verify: bool = False,
    results: Path = Path("results"),
) -> PipelineResult:
    """Rebuild the pipeline in the folder `base` with these LoRAs in addition to its own, as `out`. See `parse_lora`.

    verify: verify it against the PyTorch model with the LoRAs merged, at the quick level; the report goes to `results`.
    Raises UsageError for a folder that is not an sdflow pipeline and for a missing LoRA; otherwise like a run.
    """
    if verify:
        require_packages("`sdflow bake --verify`", *REFERENCE)
    out = out.absolute()
    if out.resolve() == base.resolve():
        raise UsageError("is the base itself", where=str(out), remedy="Name another folder with --out.")
    origin = read_manifest(base).origin
    workflow = workflow_of(base / MANIFEST_FILE, origin, [parse_lora(text) for text in loras], out.name)
    refined = refiner_of(base)
    if refined is not None:  # rebuilt unchanged, without the LoRAs
        of_refiner = workflow_of(refined / MANIFEST_FILE, read_manifest(refined).origin, (), f"{out.name}_refiner")
        (pipeline,), (refiner,) = workflow.pipelines, of_refiner.pipelines
        workflow = replace(workflow, pipelines=(replace(pipeline, refiner=refiner),))
    if verify:
        (pipeline,) = workflow.pipelines
        workflow = replace(workflow, pipelines=(replace(pipeline, verify=VerifySpec()),))
    options = RunOptions(
        out=out.parent, results=results if verify else out.parent, copy=copy, evaluate=False, jobs=jobs
    )

    def of_the_base(plan: Plan) -> None:
        for planned, folder in zip(plan.every, (base, refined), strict=False):
            assert planned.checkpoint is not None and folder is not None, "planned with download=True"
            made_of = read_manifest(folder).origin
            require_same_checkpoint(planned.checkpoint, made_of, str(folder / MANIFEST_FILE))
            for lora, merged in zip(planned.loras, made_of.loras, strict=False):  # its own LoRAs; added ones follow
                if lora.sha256 != merged.sha256:
                    raise UsageError(
                        f"the LoRA {lora.path} differs from the one it was built with",
                        where=str(folder / MANIFEST_FILE),
                        remedy="Restore the original file, or run its workflow again.",
                    )

    (result,) = run_workflow(workflow, cache, options, listener, planned=of_the_base).pipelines
    return result


def parse_lora(text: str) -> LoraSpec:
    """Parse REFERENCE or REFERENCE#NAME, optionally with :SCALE.

    REFERENCE: a file, a folder, or hf:owner/name[@revision]; NAME: a file in the folder or repository. The scale
    follows the last colon, if it is a number: C:\\ink.safetensors has none. An existing path that contains such signs
    takes precedence. Raises UsageError if there is no such file or folder, or something other than a number follows it.
    """
    mark = Mark(f"--lora {text}", 0, 0)
    reference, colon, number = text.rpartition(":")
    if not colon or _HUB.fullmatch(text) or is_there(Path(text).expanduser()):
        reference, scale = text, 1.0
    elif _NUMBER.fullmatch(number):
        scale = float(number)
    elif _is_there(reference):
        raise UsageError(
            f"the scale {number!r} is not a number", where=str(mark), remedy=f"Write {reference}:0.8, or leave it out."
        )
    else:
        reference, scale = text, 1.0
    if not math.isfinite(scale):
        raise UsageError(f"the scale {number} is too large", where=str(mark), remedy="Scales are around 1.")
    if not _is_there(reference):
        raise UsageError(
            f"there is no file or folder {reference!r}",
            where=str(mark),
            remedy="Write FILE:SCALE. FILE is a .safetensors file, a folder with one, or hf:owner/name; if there are several, "
            "write FILE#NAME.",
        )
    whole = _HUB.fullmatch(reference) is None and is_there(Path(reference).expanduser())
    reference, _, weight_name = (reference, "", "") if whole else reference.partition("#")
    if not _HUB.fullmatch(reference):
        reference = str(Path(reference).expanduser().absolute())
    return LoraSpec(reference, scale, weight_name or None, mark)


def _is_there(reference: str) -> bool:
    """Whether it is spelled as a hub repository, or names a local file or folder."""
    if not reference:
        return False
    outer = reference.partition("#")[0]
    return bool(_HUB.fullmatch(outer)) or any(is_there(Path(each).expanduser()) for each in (reference, outer) if each)


def workflow_of(path: Path, origin: Origin, loras: Sequence[LoraSpec], name: str) -> Workflow:
    """The workflow equivalent to a pipeline's origin with further LoRAs. path: of the manifest, for messages.

    Raises UsageError if the manifest does not describe how the pipeline was built.
    """
    mark = Mark(str(path), 0, 0)
    own = [LoraSpec(lora.pinned, lora.scale, lora.weight_name, mark) for lora in origin.loras]
    submodels = {}
    for submodel in FAMILIES[origin.family].ordered(origin.chains):
        chain = origin.chains[submodel]
        if chain.written is None:
            raise UsageError(
                f"does not list the passes of {submodel}",
                where=str(path),
                remedy="An earlier sdflow wrote it: run the pipeline's workflow again.",
            )
        steps = (StepSpec(each.name, each.options, {}, mark, path.parent.absolute()) for each in chain.written)
        written = tuple(steps)
        _require_passes(submodel, written)
        submodels[submodel] = _with_merge(submodel, written) if own or loras else written
    pipeline = PipelineSpec(
        name=name,
        model=origin.pinned_model(str(path)),
        model_mark=mark,
        components=origin.pinned_components(),
        controlnets=origin.pinned_nets(),
        ip_adapters=tuple(AdapterReference(**each) for each in origin.pinned_adapters()),
        generate=origin.generate,
        target=find_target(origin.target, str(path)).name,
        loras=(*own, *loras),
        submodels=submodels,
        evaluate=EvaluateSpec(latency=None, image=None),
        allow_pickle=origin.allow_pickle,
        carry_weights=origin.carry_weights,
    )
    return Workflow(path, (), (pipeline,))


def _require_passes(submodel: str, chain: tuple[StepSpec, ...]) -> None:
    """Raises UsageError for a chain without passes, or with an unavailable one: a manifest may contain anything."""
    if not chain:
        raise UsageError(f"does not list the passes of {submodel}", remedy="Run the pipeline's workflow again.")
    for step in chain:
        try:
            registry.tried_pass(step.pass_name, step.folder)
        except PassNotFound as cause:
            raise UsageError(f"in the chain of {submodel}: {str(cause)[:500]}", where=str(step.mark)) from cause


def _with_merge(submodel: str, chain: tuple[StepSpec, ...]) -> tuple[StepSpec, ...]:
    """The chain with LoraMerge at its usual place, which chains of pipelines without LoRAs lack."""
    if submodel not in any_family.submodels_with_loras():
        return chain
    if any(registry.tried_pass(step.pass_name, step.folder).takes_loras for step in chain):
        return chain
    first = chain[0]
    if first.pass_name != "OnnxConversion":
        raise UsageError(
            f"the chain of {submodel} begins with {first.pass_name}, so LoraMerge cannot be inserted",
            where=str(first.mark),
            remedy="Add a pass that merges LoRAs to the chain in the pipeline's workflow, and run that.",
        )
    return (first, StepSpec("LoraMerge", {}, {}, first.mark, first.folder), *chain[1:])
