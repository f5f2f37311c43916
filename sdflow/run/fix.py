"""`sdflow verify --fix`: the nodes that must stay in fp32 so that a float16 artifact that overflows passes, and the layers that
must stay as they are so that a quantized one keeps to the workflow's limit.

Of float16, suspects are the nodes whose values leave its range along the trajectory, and those that read them: a value that
does not fit must not be stored between the two. Of a quantized artifact, all layers that are. What is kept of them is minimal:
without any one it does not pass.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sdflow.build.assemble import assemble
from sdflow.build.execute import Executor
from sdflow.build.finished_plan import origin_of
from sdflow.build.listener import Listener
from sdflow.build.plan import make_plan
from sdflow.config.workflow import StepSpec, VerifySpec, Workflow
from sdflow.disk.locked_folder import scratch_folder
from sdflow.errors import VerificationError
from sdflow.manifest import MANIFEST_FILE, REFINER, read_manifest
from sdflow.run.bake import workflow_of
from sdflow.store import Cache
from sdflow.verify.check import verify_alone
from sdflow.verify.result import Verification
from sdflow.verify.subject import Subject

CONVERSION, BLOCKED = "OnnxFloatToFloat16", "node_block_list"
KEPT = "keep"
"""The option of every pass that quantizes."""
ROUNDS = 4
"""How often nodes that overflow only once others no longer do become suspects too."""


@dataclass(frozen=True)
class Fix:
    """Nodes of a submodel that stay as they are, and how many builds were tried to find them. by, option: the pass that is told,
    and how. beside: what its option says already."""

    submodel: str
    nodes: tuple[str, ...]
    tried: int
    by: str = CONVERSION
    option: str = BLOCKED
    beside: tuple[str, ...] = ()

    def yaml(self) -> str:
        """The lines for the workflow."""
        listed = "".join(
            f"\n          - {json.dumps(name) if '*' in name else name}" for name in (*self.beside, *self.nodes)
        )
        return f"submodels:\n  {self.submodel}:\n    passes:\n      {self.by}:\n        {self.option}:{listed}"


def fix(subject: Subject, spec: VerifySpec, verification: Verification, cache: Cache, listener: Listener) -> list[Fix]:
    """A fix for each submodel that overflows in `verification`, which is of this subject, or is beyond its limit.

    Builds and verifies that submodel some 2 * k * log2(n) times for n suspects of which k are kept, see `smallest`.
    Raises VerificationError for a submodel that does not pass with all suspects in fp32 either, or with no layer quantized alone.
    """
    both = [*verification.overflowing, *verification.beyond_stated]
    own = [name for name in both if not name.startswith(f"{REFINER}/")]
    if subject.refiner is not None and len(own) < len(both):
        listener.note(f"{REFINER}: by itself, sdflow verify {subject.refiner.folder} --fix")
    found = [
        _fix(subject, spec, verification, name, cache, listener) for name in own if name in verification.overflowing
    ]
    quantized = [name for name in own if name in verification.beyond_stated]
    return found + [_fix_quantized(subject, spec, verification, name, cache, listener) for name in quantized]


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


def _fix_quantized(
    subject: Subject, spec: VerifySpec, before: Verification, submodel: str, cache: Cache, listener: Listener
) -> Fix:
    origin = read_manifest(subject.folder).origin
    workflow = workflow_of(subject.folder / MANIFEST_FILE, origin, [], subject.name)
    quantization = origin.chains[submodel].quantized
    assert quantization is not None, "it is beyond a limit that its manifest states"
    step = next(each for each in origin.chains[submodel].steps if each.name == quantization.by)
    tried = {frozenset[str](): before.submodels[submodel].passed}
    layers = tuple(step.facts["quantized"]["layers"])

    def passes(kept: Sequence[str]) -> bool:
        if len(kept) == len(layers):
            return True  # as it is without quantization, the first part of the proof has shown
        if frozenset(kept) not in tried:
            listener.note(f"{subject.name} {submodel}: {len(kept)} of {len(layers)} layers as they are")
            how = step.name, KEPT
            tried[frozenset(kept)] = _rebuilt(subject, spec, workflow, submodel, kept, cache, listener, how).passed
        return tried[frozenset(kept)]

    found = smallest((), layers, passes)
    if len(found) == len(layers):
        raise VerificationError(
            f"{submodel} is not within the workflow's limit of {quantization.limit:g} with any of its layers in "
            f"{quantization.to}",
            where=subject.name,
            remedy=f"State a larger limit, or take its {step.name} out.",
        )
    return Fix(submodel, tuple(found), len(tried) - 1, step.name, KEPT, tuple(step.config[KEPT]))


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
    how: tuple[str, str] = (CONVERSION, BLOCKED),
) -> Verification:
    """The verification of one submodel, built with these nodes in fp32 besides those that it has there already. how: the pass
    that is told, and its option."""
    (pipeline,) = workflow.pipelines
    chain, (by, option) = pipeline.submodels[submodel], how
    if not any(step.pass_name == by for step in chain):
        raise VerificationError(f"{submodel} is not made by {by}", remedy=f"Only its {option} can be proposed.")
    changed = tuple(_keeping(step, option, nodes) if step.pass_name == by else step for step in chain)
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
            progress=lambda phrase: listener.doing(f"{subject.name} verify", phrase),
        ).result


def _keeping(step: StepSpec, option: str, nodes: Sequence[str]) -> StepSpec:
    kept = [*(step.options.get(option) or ()), *nodes]
    return replace(step, options={**step.options, option: list(dict.fromkeys(kept))})
