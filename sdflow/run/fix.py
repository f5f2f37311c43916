"""`sdflow verify --fix`: find the nodes to keep in fp32 so that an overflowing float16 artifact passes, or the layers
not to quantize so that a quantized one meets the workflow's limit.

For float16, suspects are nodes whose values leave its range along the trajectory, and the nodes that read them, since
an unrepresentable value must not be stored in between. For a quantized artifact, suspects are all its quantized layers.
The result is minimal: without any one of its nodes, the artifact fails.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sdflow.build.assemble import assemble
from sdflow.build.execute import Executor
from sdflow.build.listener import Listener
from sdflow.build.pipeline_folder import origin_of
from sdflow.build.plan import make_plan
from sdflow.config.workflow import StepSpec, VerifySpec, Workflow
from sdflow.disk.locked_folder import scratch_folder
from sdflow.errors import VerificationError
from sdflow.manifest import MANIFEST_FILE, REFINER, Origin, read_manifest
from sdflow.run.bake import workflow_of
from sdflow.store import Cache
from sdflow.verify.check import verify_alone
from sdflow.verify.result import Verification
from sdflow.verify.subject import Subject

CONVERSION, BLOCKED = "OnnxFloatToFloat16", "node_block_list"
KEPT = "keep"
"""An option of every quantizing pass."""
ROUNDS = 4
"""How often nodes are added to the suspects that overflow only after others no longer do."""


@dataclass(frozen=True)
class Fix:
    """Nodes of a submodel to leave unconverted, and the number of builds tried to find them. by, option: the pass and
    its option that list them. existing: the option's existing entries."""

    submodel: str
    nodes: tuple[str, ...]
    tried: int
    by: str = CONVERSION
    option: str = BLOCKED
    existing: tuple[str, ...] = ()

    def yaml(self) -> str:
        """The lines to add to the workflow."""
        listed = "".join(
            f"\n          - {json.dumps(name) if '*' in name else name}" for name in (*self.existing, *self.nodes)
        )
        return f"submodels:\n  {self.submodel}:\n    passes:\n      {self.by}:\n        {self.option}:{listed}"


def fix(subject: Subject, spec: VerifySpec, verification: Verification, cache: Cache, listener: Listener) -> list[Fix]:
    """Find a fix for each submodel that overflows or exceeds its limit in `verification`, which belongs to `subject`.

    Builds and verifies the submodel about 2 * k * log2(n) times for n suspects of which k are kept; see `smallest`.
    Raises VerificationError if a submodel fails even with all suspects in fp32, or with any single layer quantized.
    """
    both = [*verification.overflowing, *verification.beyond_stated]
    own = [name for name in both if not name.startswith(f"{REFINER}/")]
    if subject.refiner is not None and len(own) < len(both):
        listener.note(f"{REFINER}: separately, sdflow verify {subject.refiner.folder} --fix")
    origin = read_manifest(subject.folder).origin
    workflow = workflow_of(subject.folder / MANIFEST_FILE, origin, [], subject.name)
    trials = _Trials(subject, spec, origin, workflow, cache, listener)
    found = [_fix(trials, verification, name) for name in own if name in verification.overflowing]
    return found + [_fix_quantized(trials, verification, name) for name in own if name in verification.beyond_stated]


def _fix(trials: _Trials, before: Verification, submodel: str) -> Fix:
    tried, name = {frozenset[str](): before}, trials.subject.name

    def verified(nodes: Sequence[str]) -> Verification:
        if frozenset(nodes) not in tried:
            trials.listener.note(f"{name} {submodel}: {len(nodes)} nodes in fp32")
            tried[frozenset(nodes)] = trials.verified(submodel, nodes, CONVERSION, BLOCKED)
        return tried[frozenset(nodes)]

    found = list(before.overflowing[submodel])
    for _ in range(ROUNDS):
        result = verified(found)
        more = [node for node in result.overflowing.get(submodel, ()) if node not in found]
        if result.passed or not more:
            break
        found += more
    if not verified(found).passed:
        problems = verified(found).failure()
        raise VerificationError(
            f"{submodel} fails even with {len(found)} nodes in fp32: {problems}",
            where=name,
            remedy="Keep the whole submodel in fp32 (remove its OnnxFloatToFloat16), or use weights made for fp16.",
        )
    (pipeline,) = trials.workflow.pipelines
    step = next(each for each in pipeline.submodels[submodel] if each.pass_name == CONVERSION)
    needed = smallest((), found, lambda nodes: verified(nodes).passed)
    return Fix(submodel, tuple(needed), len(tried) - 1, existing=tuple(step.options.get(BLOCKED) or ()))


def _fix_quantized(trials: _Trials, before: Verification, submodel: str) -> Fix:
    chain, name = trials.origin.chains[submodel], trials.subject.name
    quantization = chain.quantized
    assert quantization is not None, "it exceeds a limit in its manifest"
    step = next(each for each in chain.steps if each.name == quantization.by)
    tried = {frozenset[str](): before.submodels[submodel].passed}
    layers = tuple(step.facts["quantized"]["layers"])

    def passes(kept: Sequence[str]) -> bool:
        if len(kept) == len(layers):
            return True  # passes without quantization, by the first part of the proof
        if frozenset(kept) not in tried:
            trials.listener.note(f"{name} {submodel}: {len(kept)} of {len(layers)} layers unquantized")
            tried[frozenset(kept)] = trials.verified(submodel, kept, step.name, KEPT).passed
        return tried[frozenset(kept)]

    found = smallest((), layers, passes)
    if len(found) == len(layers):
        raise VerificationError(
            f"{submodel} exceeds the workflow's limit of {quantization.limit:g} whichever of its layers is in "
            f"{quantization.to}",
            where=name,
            remedy=f"Set a larger limit, or remove {step.name} from its chain.",
        )
    return Fix(submodel, tuple(found), len(tried) - 1, step.name, KEPT, tuple(step.config[KEPT]))


def smallest(needed: Sequence[str], suspects: Sequence[str], passes: Callable[[Sequence[str]], bool]) -> list[str]:
    """A minimal subset of suspects that passes together with `needed`; all suspects together must pass.

    QuickXplain: U. Junker, Preferred explanations and relaxations for over-constrained problems, AAAI 2004.
    """
    if passes(needed):
        return []
    if len(suspects) == 1:
        return list(suspects)
    half = len(suspects) // 2
    first, second = suspects[:half], suspects[half:]
    of_second = smallest([*needed, *first], second, passes)
    return smallest([*needed, *of_second], first, passes) + of_second


@dataclass(frozen=True)
class _Trials:
    """Verified builds of single submodels of a pipeline. workflow: the one in the pipeline's manifest."""

    subject: Subject
    spec: VerifySpec
    origin: Origin
    workflow: Workflow
    cache: Cache
    listener: Listener

    def verified(self, submodel: str, nodes: Sequence[str], by: str, option: str) -> Verification:
        """Verify one submodel, built with these nodes kept in addition to the existing ones. by, option: the pass and
        its option that list them."""
        (pipeline,) = self.workflow.pipelines
        chain = pipeline.submodels[submodel]
        if not any(step.pass_name == by for step in chain):
            raise VerificationError(f"{submodel} is not made by {by}", remedy=f"Only its {option} can be proposed.")
        changed = tuple(_keeping(step, option, nodes) if step.pass_name == by else step for step in chain)
        only = replace(self.workflow, pipelines=(replace(pipeline, submodels={submodel: changed}),))
        (plan,) = make_plan(only, self.cache).pipelines
        name, checkpoint = self.subject.name, self.subject.checkpoint
        with scratch_folder("fix") as scratch, self.cache.lease():
            steps = Executor(self.cache, self.listener).run(plan)
            folder = scratch.resolve() / "trial" / name  # the scratch itself stays locked
            assemble(
                folder,
                options=checkpoint.options,
                changed=checkpoint.changed_companions(),
                parts={submodel: steps[submodel][-1].record.artifact},
                companions=checkpoint.companions,
                origin=origin_of(plan, steps),
            )
            return verify_alone(
                replace(self.subject, folder=folder),
                self.spec,
                self.cache,
                progress=lambda phrase: self.listener.doing(f"{name} verify", phrase),
            ).result


def _keeping(step: StepSpec, option: str, nodes: Sequence[str]) -> StepSpec:
    kept = [*(step.options.get(option) or ()), *nodes]
    return replace(step, options={**step.options, option: list(dict.fromkeys(kept))})
