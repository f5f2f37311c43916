"""Load a workflow file into a validated Workflow.

Every target has its own tree: the files with their changes for it (`sdflow.config.files`), then `--set`. The submodels,
`evaluate` and `verify` come from it; everything else is common to all targets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

from sdflow.config.catalog import PassCatalog
from sdflow.config.chain import Chain, Chains, unknown_keys
from sdflow.config.fields import REFINER, WORKFLOW
from sdflow.config.files import Files, workflow_file
from sdflow.config.matrix import Cell, cells
from sdflow.config.named import Named, evaluate_of, verify_of
from sdflow.config.override import Override, apply, parse_overrides
from sdflow.config.problems import Problems
from sdflow.config.reference import model_reference
from sdflow.config.tree import YamlMap, expect_kind, is_null, text_of
from sdflow.config.workflow import EvaluateSpec, PipelineSpec, VerifySpec, Workflow
from sdflow.families import any_family


def load_workflow(
    path: str | PathLike[str], *, catalog: PassCatalog, overrides: Sequence[str] = (), targets: Sequence[str] = ()
) -> Workflow:
    """Read, merge and validate a workflow.

    path: a file, or the name of a shipped workflow such as sd15. overrides: `key=value`, as for `--set`.
    targets: replace the workflow's own.
    Raises WorkflowError with all problems.
    """
    problems = Problems()
    files = Files(problems)
    path = workflow_file(Path(path))
    document = files.load(path)
    changes = parse_overrides(overrides, problems)
    document = apply(document, [change for change in changes if not change.after_overlay], problems)
    late = [change for change in changes if change.after_overlay]

    loader = _Loader(document, files, Chains(catalog, files, problems), late, problems)
    loader.check_document()
    combinations = cells(document, path.stem, targets, problems)
    if not combinations and "matrix" not in document.entries:
        # Without a target there is no pipeline; this one only serves to find other problems.
        combinations = [Cell("", document.entries.get("model"), document.entries.get("loras"), "")]
    pipelines = [each for cell in combinations if (each := loader.pipeline(cell)) is not None]
    remote = loader.named.remote()
    problems.check()
    return Workflow(path.absolute(), tuple(files.read), tuple(pipelines), remote)


def _with_types(name: str, chains: Mapping[str, Chain]) -> str:
    """Append the types that passes quantize weights to, unless the name has them: the folder should not look like one
    of float16 or float32."""
    found = (info.quantizes(spec.options) for chain in chains.values() for spec, info in chain)
    types = dict.fromkeys(each for each in found if each is not None)
    return "_".join([name, *(each for each in types if each.partition("_")[0] not in name)])


@dataclass(frozen=True)
class _ForTarget:
    """The parts that all pipelines for one target share."""

    chains: dict[str, Chain]
    evaluate: EvaluateSpec
    verify: VerifySpec | None


class _Loader:
    def __init__(
        self, document: YamlMap, files: Files, chains: Chains, overrides: Sequence[Override], problems: Problems
    ) -> None:
        self.document = document
        self.files = files
        self.chains = chains
        self.overrides = overrides
        self.problems = problems
        self.named = Named(document, files, problems)
        self._targets: dict[str, _ForTarget] = {}

    def check_document(self) -> None:
        """Check the parts that do not depend on the target."""
        unknown_keys(self.document, WORKFLOW, "key", self.problems)
        if "targets" in self.document.entries:
            self.chains.overlays(self.document.entries["targets"])
            self.problems.extend(self.files.check_targets(), elsewhere=True)

    def pipeline(self, cell: Cell) -> PipelineSpec | None:
        common = self._for_target(cell.target)
        loras = self.named.loras(cell.loras)
        changed = any_family.submodels_with_loras()
        if loras and not any(info.takes_loras for name in changed for _, info in common.chains.get(name, ())):
            for lora in loras:
                self.problems.add(
                    lora.mark,
                    "no step merges this LoRA",
                    f"add {{pass: LoraMerge}} to the passes of {' or '.join(changed)}",
                )
        if cell.model is None:
            self.problems.add(self.document.mark, "no `model`", f"model: {WORKFLOW['model']}")
            return None
        model = self.named.model(cell.model)
        if model is None:
            return None
        nets = self.named.nets(model)
        pipeline = PipelineSpec(
            name=_with_types(cell.name, common.chains),
            model=model,
            model_mark=cell.model.mark,
            target=cell.target,
            loras=loras,
            # Without LoRAs there is nothing to merge.
            submodels={
                name: tuple(spec for spec, info in chain if loras or not info.takes_loras)
                for name, chain in self._with_nets(self._with_prompter(common.chains), nets).items()
            },
            evaluate=common.evaluate,
            verify=common.verify,
            allow_pickle=self.named.allow_pickle,
            carry_weights=self.named.carry_weights,
            components=self.named.components,
            controlnets=nets,
            ip_adapters=self.named.ip_adapters,
            generate=self.named.generate,
        )
        return replace(pipeline, refiner=self._refiner(pipeline))

    def _refiner(self, pipeline: PipelineSpec) -> PipelineSpec | None:
        """The pipeline of the workflow's refiner, if any: the same chains, for the same target.

        `expect` is dropped, since its counts describe the model's own graphs.
        """
        node = self.document.entries.get("refiner")
        if node is None or is_null(node):
            return None
        if isinstance(node, YamlMap):
            return self._refiner_of_workflow(node, pipeline)
        model = model_reference(node, self.files.folder(node.mark), self.named.allow_pickle, self.problems, "`refiner`")
        if model is None:
            return None
        chains = self._for_target(pipeline.target).chains
        return replace(
            pipeline,
            name=f"{pipeline.name}_refiner",
            model=model,
            model_mark=node.mark,
            loras=(),
            submodels={
                name: tuple(replace(spec, expect={}) for spec, info in chain if not info.takes_loras)
                for name, chain in chains.items()
                if name not in any_family.net_chains() | any_family.prompter_chains()
            },
            controlnets={},
            ip_adapters=(),
        )

    def _refiner_of_workflow(self, node: YamlMap, pipeline: PipelineSpec) -> PipelineSpec | None:
        """A refiner with its own workflow: that workflow's chains with their `expect`, for the pipeline's target."""
        unknown_keys(node, REFINER, "key of `refiner`", self.problems)
        written = node.entries.get("extends")
        reference = text_of(written)
        if written is None or reference is None:
            expect_kind(written or node, "a workflow file", "`refiner.extends`", self.problems)
            return None
        files = Files(self.problems, shared=self.files)
        document = files.load(self.files.found(reference, written.mark), written.mark)
        self.files.read.extend(files.read)
        for key in ("matrix", "refiner", "loras"):
            if key in document.entries:
                self.problems.add(document.keys[key], f"the workflow of a refiner has no `{key}`", "leave it out")
        own = _Loader(document, files, Chains(self.chains.catalog, files, self.problems), (), self.problems)
        own.check_document()
        model = node.entries.get("model")
        if model is not None:
            own.files.folders.setdefault(model.mark.file, self.files.folder(model.mark))
        name = f"{pipeline.name}_refiner"
        found = own.pipeline(Cell(name, model or document.entries.get("model"), None, pipeline.target))
        denoisers = any_family.denoiser_components()
        of_both = {name: each for name, each in pipeline.components.items() if name not in denoisers}
        return None if found is None else replace(
            found,
            evaluate=pipeline.evaluate,
            verify=pipeline.verify,
            components={**of_both, **found.components},
            allow_pickle=pipeline.allow_pickle,
            carry_weights=pipeline.carry_weights,
        )  # fmt: skip

    def _with_prompter(self, chains: Mapping[str, Chain]) -> Mapping[str, Chain]:
        """Drop the chains of the image prompt encoder unless there are IP-Adapters."""
        prompters = any_family.prompter_chains()
        if not self.named.ip_adapters:
            return {name: chain for name, chain in chains.items() if name not in prompters}
        if not prompters & chains.keys():
            text = f"no chain for image prompts: `submodels` has no {' or '.join(sorted(prompters))}"
            self.problems.add(self.document.mark, text, "extend a workflow that has it, such as base/sd15.yaml")
        return chains

    def _with_nets(self, chains: Mapping[str, Chain], nets: Mapping[str, str]) -> dict[str, Chain]:
        """Repeat the chains of ControlNets for each of them."""
        kinds = any_family.net_chains()
        others = {name: chain for name, chain in chains.items() if name not in kinds}
        if nets and not kinds & chains.keys():
            text = f"no chain for the ControlNets: `submodels` has no {' or '.join(sorted(kinds))}"
            self.problems.add(self.document.mark, text, "extend a workflow that has it, such as base/sd15.yaml")
            return others
        of_nets = {kind: chain for kind, chain in chains.items() if kind in kinds}
        return others | {f"{kind}_{name}": chain for kind, chain in of_nets.items() for name in sorted(nets)}

    def _for_target(self, target: str) -> _ForTarget:
        if target not in self._targets:
            document = apply(self.files.for_target(target), self.overrides, self.problems)
            submodels = document.entries.get("submodels")
            if submodels is None:
                self.problems.add(
                    document.mark,
                    "no `submodels`",
                    "extend a workflow that has them, such as `extends: base/sd15.yaml`",
                )
            chains = self.chains.submodels(submodels, target) if submodels is not None else {}
            evaluate = evaluate_of(document.entries.get("evaluate"), self.problems)
            verify = verify_of(document.entries.get("verify"), self.problems)
            self._targets[target] = _ForTarget(chains, evaluate, verify)
        return self._targets[target]
