"""`sdflow verify --fix`: the nodes that must stay in fp32 so that a float16 artifact that overflows passes.

Suspects are the nodes whose values leave float16's range along the trajectory, and those that read them: a value that
does not fit must not be stored between the two. What is kept of them is minimal: without any one it does not pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sdflow.assemble import assemble
from sdflow.bake import workflow_of
from sdflow.config.workflow import StepSpec, VerifySpec, Workflow
from sdflow.errors import VerificationError
from sdflow.execute import Executor, Listener
from sdflow.locked_folder import scratch_folder
from sdflow.manifest import MANIFEST_FILE, REFINER, read_manifest
from sdflow.plan import make_plan
from sdflow.run import origin_of
from sdflow.store import Cache
from sdflow.verify.check import verify_alone
from sdflow.verify.result import Verification
from sdflow.verify.subject import Subject

CONVERSION = "OnnxFloatToFloat16"
ROUNDS = 4
"""How often nodes that overflow only once others no longer do become suspects too."""


@dataclass(frozen=True)
class Fix:
    """Nodes of a submodel that stay in fp32, and how many builds were tried to find them."""

    submodel: str
    nodes: tuple[str, ...]
    tried: int

    def yaml(self) -> str:
        """The lines for the workflow."""
        listed = "".join(f"\n          - {name}" for name in self.nodes)
        return f"submodels:\n  {self.submodel}:\n    passes:\n      {CONVERSION}:\n        node_block_list:{listed}"


def fix(subject: Subject, spec: VerifySpec, verification: Verification, cache: Cache, listener: Listener) -> list[Fix]:
    """A fix for each submodel that overflows in `verification`, which is of this subject.

    Builds and verifies that submodel some 2 * k * log2(n) times for n suspects of which k are kept, see `smallest`.
    Raises VerificationError for a submodel that does not pass with all suspects in fp32 either.
    """
    own = [name for name in verification.overflowing if not name.startswith(f"{REFINER}/")]
    if subject.refiner is not None and len(own) < len(verification.overflowing):
        listener.note(f"{REFINER}: by itself, sdflow verify {subject.refiner.folder} --fix")
    return [_fix(subject, spec, verification, name, cache, listener) for name in own]


def _fix(
    subject: Subject, spec: VerifySpec, before: Verification, submodel: str, cache: Cache, listener: Listener
) -> Fix:
    workflow = workflow_of(subject.folder / MANIFEST_FILE, read_manifest(subject.folder).origin, [], subject.name)
    tried = {frozenset[str](): before}

    def verified(nodes: Sequence[str]) -> Verification:
        if frozenset(nodes) not in tried:
            listener.note(f"{subject.name} {submodel}: {len(nodes)} nodes in fp32")
            tried[frozenset(nodes)] = _rebuilt(subject, spec, workflow, submodel, nodes, cache, listener)
        return tried[frozenset(nodes)]

    found = list(before.overflowing[submodel])
    for _ in range(ROUNDS):
        result = verified(found)
        more = [name for name in result.overflowing.get(submodel, ()) if name not in found]
        if result.passed or not more:
            break
        found += more
    if not verified(found).passed:
        problems = verified(found).failure()
        raise VerificationError(
            f"{submodel} does not pass with {len(found)} nodes in fp32 either: {problems}",
            where=subject.name,
            remedy="Keep the whole submodel in fp32 (take its OnnxFloatToFloat16 out), or take weights made for fp16.",
        )
    return Fix(submodel, tuple(smallest((), found, lambda nodes: verified(nodes).passed)), len(tried) - 1)


def smallest(needed: Sequence[str], suspects: Sequence[str], passes: Callable[[Sequence[str]], bool]) -> list[str]:
    """A minimal choice of suspects that passes together with `needed`; all of them together do.

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


def _rebuilt(
    subject: Subject,
    spec: VerifySpec,
    workflow: Workflow,
    submodel: str,
    nodes: Sequence[str],
    cache: Cache,
    listener: Listener,
) -> Verification:
    """The verification of one submodel, built with these nodes in fp32 besides those that it has there already."""
    (pipeline,) = workflow.pipelines
    chain = pipeline.submodels[submodel]
    if not any(step.pass_name == CONVERSION for step in chain):
        raise VerificationError(
            f"{submodel} is not made float16 by {CONVERSION}", remedy="Only its node_block_list can be proposed."
        )
    changed = tuple(_keeping(step, nodes) if step.pass_name == CONVERSION else step for step in chain)
    only = replace(workflow, pipelines=(replace(pipeline, submodels={submodel: changed}),))
    (plan,) = make_plan(only, cache).pipelines
    with scratch_folder("fix") as scratch, cache.lease():
        steps = Executor(cache, listener).run(plan)
        folder = scratch.resolve() / "trial" / subject.name  # the scratch itself stays locked
        assemble(
            folder,
            options=subject.checkpoint.options,
            changed=subject.checkpoint.changed_companions(),
            parts={submodel: steps[submodel][-1].record.artifact},
            companions=subject.checkpoint.companions,
            origin=origin_of(plan, steps),
        )
        return verify_alone(
            replace(subject, folder=folder),
            spec,
            cache,
            progress=lambda phrase: listener.note(f"{subject.name} {phrase}"),
        ).result


def _keeping(step: StepSpec, nodes: Sequence[str]) -> StepSpec:
    kept = [*(step.options.get("node_block_list") or ()), *nodes]
    return replace(step, options={**step.options, "node_block_list": list(dict.fromkeys(kept))})
