"""A workflow file to a checked Workflow.

Every target has a tree of its own: the files with their changes for it (`sdflow.config.files`), then `--set`. From it
come the submodels and `evaluate`; everything else is the same for all targets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from sdflow.config.catalog import PassCatalog, PassInfo
from sdflow.config.chain import Chains, is_null, unknown_keys
from sdflow.config.fields import (
    NET_NAME,
    REFINER,
    WORKFLOW,
    EvaluateFields,
    GenerateFields,
    VerifyFields,
    evaluate_spec,
    verify_spec,
)
from sdflow.config.files import Files
from sdflow.config.matrix import Cell, cells
from sdflow.config.merge import expect_kind
from sdflow.config.nodes import Node, YamlList, YamlMap, YamlScalar
from sdflow.config.options import check
from sdflow.config.override import Override, apply, parse_overrides
from sdflow.config.problems import Problems
from sdflow.config.reference import adapter_reference, lora_spec, model_reference
from sdflow.config.remote import remote_spec
from sdflow.config.workflow import EvaluateSpec, LoraSpec, PipelineSpec, StepSpec, VerifySpec, Workflow
from sdflow.families import DENOISERS, DRAWING, EXCHANGEABLE, NET, PROMPTER, WITH_LORAS
from sdflow.sources.nets_in_folder import nets_in_folder
from sdflow.sources.reference import AdapterReference
from sdflow.store.remote.spec import RemoteSpec


def load_workflow(
    path: str | PathLike[str], *, catalog: PassCatalog, overrides: Sequence[str] = (), targets: Sequence[str] = ()
) -> Workflow:
    """Read, merge and check a workflow.

    overrides: `key=value`, as given to `--set`. targets: what to build for, in place of what the workflow says.
    Raises WorkflowError with every problem that was found.
    """
    problems = Problems()
    files = Files(problems)
    path = Path(path)
    document = files.load(path)
    changes = parse_overrides(overrides, problems)
    document = apply(document, [change for change in changes if not change.after_overlay], problems)
    late = [change for change in changes if change.after_overlay]

    loader = _Loader(document, files, Chains(catalog, files, problems), late, problems)
    loader.check_document()
    combinations = cells(document, path.stem, targets, problems)
    if not combinations and "matrix" not in document.entries:
        # Without a target there is no pipeline; this one is only there to find what else is wrong.
        combinations = [Cell("", document.entries.get("model"), document.entries.get("loras"), "")]
    pipelines = [each for cell in combinations if (each := loader.pipeline(cell)) is not None]
    remote = loader.remote(document.entries.get("cache"))
    problems.check()
    return Workflow(path.absolute(), tuple(files.read), tuple(pipelines), remote)


_Chain = tuple[tuple[StepSpec, PassInfo], ...]


@dataclass(frozen=True)
class _ForTarget:
    """What all pipelines for one target have in common."""

    chains: dict[str, _Chain]
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
        self.allow_pickle = self._flag("allow_pickle")
        self.carry_weights = self._flag("carry_weights")
        self.components = self._components(document.entries.get("components"))
        self.controlnets = self._controlnets(document.entries.get("controlnets"))
        self.ip_adapters = self._ip_adapters(document.entries.get("ip_adapters"))
        self.generate = self._generate(document.entries.get("generate"))
        self._targets: dict[str, _ForTarget] = {}
        self._models: dict[int, str | None] = {}
        self._loras: dict[int, tuple[LoraSpec, ...]] = {}

    def check_document(self) -> None:
        """What does not depend on the target."""
        unknown_keys(self.document, WORKFLOW, "key", self.problems)
        if "targets" in self.document.entries:
            self.chains.overlays(self.document.entries["targets"])

    def pipeline(self, cell: Cell) -> PipelineSpec | None:
        common = self._for_target(cell.target)
        loras = self._lora_specs(cell.loras)
        if loras and not any(
            info.takes_loras for submodel in WITH_LORAS for _, info in common.chains.get(submodel, ())
        ):
            for lora in loras:
                self.problems.add(
                    lora.mark,
                    "no step merges this LoRA",
                    f"add {{pass: LoraMerge}} to the passes of {' or '.join(WITH_LORAS)}",
                )
        if cell.model is None:
            self.problems.add(self.document.mark, "no `model`", f"model: {WORKFLOW['model']}")
            return None
        model = self._model(cell.model)
        if model is None:
            return None
        nets = self._nets(model)
        pipeline = PipelineSpec(
            name=cell.name,
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
            allow_pickle=self.allow_pickle,
            carry_weights=self.carry_weights,
            components=self.components,
            controlnets=nets,
            ip_adapters=self.ip_adapters,
            generate=self.generate,
        )
        return replace(pipeline, refiner=self._refiner(pipeline))

    def _refiner(self, pipeline: PipelineSpec) -> PipelineSpec | None:
        """The refiner of a pipeline, where the workflow names one: by the same chains, for the same target.

        The counts of `expect` are those of the model's own graphs. Where the refiner's are equal, they are the same steps.
        """
        node = self.document.entries.get("refiner")
        if node is None or is_null(node):
            return None
        if isinstance(node, YamlMap):
            return self._refiner_of_workflow(node, pipeline)
        model = model_reference(node, self.files.folder(node.mark), self.allow_pickle, self.problems, "`refiner`")
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
                if name not in (NET, PROMPTER)
            },
            controlnets={},
            ip_adapters=(),
        )

    def _refiner_of_workflow(self, node: YamlMap, pipeline: PipelineSpec) -> PipelineSpec | None:
        """A refiner with a workflow of its own: its chains, with what they promise, for the target of the pipeline."""
        unknown_keys(node, REFINER, "key of `refiner`", self.problems)
        written = node.entries.get("extends")
        if not isinstance(written, YamlScalar) or not isinstance(written.value, str) or not written.value:
            expect_kind(written or node, "a workflow file", "`refiner.extends`", self.problems)
            return None
        files = Files(self.problems, beside=self.files)
        document = files.load(self.files.found(written.value, written.mark))
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
        of_both = {name: each for name, each in pipeline.components.items() if name not in DENOISERS}
        return None if found is None else replace(
            found,
            evaluate=pipeline.evaluate,
            verify=pipeline.verify,
            components={**of_both, **found.components},
            allow_pickle=pipeline.allow_pickle,
            carry_weights=pipeline.carry_weights,
        )  # fmt: skip

    def _flag(self, key: str) -> bool:
        node = self.document.entries.get(key, YamlScalar(False, self.document.mark))
        if isinstance(node, YamlScalar) and isinstance(node.value, bool):
            return node.value
        expect_kind(node, "true or false", f"`{key}`", self.problems)
        return False

    def _components(self, node: Node | None) -> dict[str, str]:
        if node is None or is_null(node):
            return {}
        if not isinstance(node, YamlMap):
            example = f"a map like {{{next(iter(EXCHANGEABLE))}: hf:owner/name}}, or null"
            expect_kind(node, example, "`components`", self.problems)
            return {}
        unknown_keys(node, EXCHANGEABLE, "component", self.problems)
        found = {
            name: model_reference(
                each, self.files.folder(each.mark), self.allow_pickle, self.problems, f"`components.{name}`"
            )
            for name, each in node.entries.items()
            if name in EXCHANGEABLE and not is_null(each)
        }
        return {name: reference for name, reference in found.items() if reference is not None}

    def _controlnets(self, node: Node | None) -> dict[str, str]:
        if node is None or is_null(node):
            return {}
        if not isinstance(node, YamlMap):
            expect_kind(node, "a map like {canny: hf:owner/name}, or null", "`controlnets`", self.problems)
            return {}
        found = {}
        for name, each in node.entries.items():
            if not re.fullmatch(NET_NAME, name):
                kind = "up to 32 of a-z, 0-9, _ and -, of which the first is a letter or a digit"
                self.problems.add(node.keys[name], f"{name!r} is no name for a ControlNet", kind)
            elif not is_null(each):
                found[name] = model_reference(
                    each, self.files.folder(each.mark), self.allow_pickle, self.problems, f"`controlnets.{name}`"
                )
        return {name: reference for name, reference in found.items() if reference is not None}

    def _ip_adapters(self, node: Node | None) -> tuple[AdapterReference, ...]:
        if node is None or is_null(node):
            return ()
        if not isinstance(node, YamlList):
            expect_kind(node, "a list of IP-Adapters like {file: …}, or null", "`ip_adapters`", self.problems)
            return ()
        found = [adapter_reference(item, self.files.folder, self.allow_pickle, self.problems) for item in node.items]
        return tuple(each for each in found if each is not None)

    def _with_prompter(self, chains: Mapping[str, _Chain]) -> Mapping[str, _Chain]:
        """The chains with that of what reads image prompts only where there are IP-Adapters."""
        if not self.ip_adapters:
            return {name: chain for name, chain in chains.items() if name != PROMPTER}
        if PROMPTER not in chains:
            text = f"no chain for what reads image prompts: `submodels` has no {PROMPTER}"
            self.problems.add(self.document.mark, text, "extend a file that has it")
        return chains

    def _nets(self, model: str) -> dict[str, str]:
        """Those that the workflow names, and those in the model's folder that it says nothing of."""
        node = self.document.entries.get("controlnets")
        said = node.entries if isinstance(node, YamlMap) else {}
        own = {name: reference for name, reference in nets_in_folder(model).items() if name not in said}
        return {**own, **self.controlnets}

    def _with_nets(self, chains: Mapping[str, _Chain], nets: Mapping[str, str]) -> dict[str, _Chain]:
        """The chains with that of the ControlNets once for each of them."""
        others = {name: chain for name, chain in chains.items() if name != NET}
        if nets and NET not in chains:
            text = f"no chain for the ControlNets: `submodels` has no {NET}"
            self.problems.add(self.document.mark, text, "extend a file that has it")
            return others
        return {**others, **{f"{NET}_{name}": chains[NET] for name in sorted(nets)}}

    def _generate(self, node: Node | None) -> dict[str, Any]:
        if node is None or is_null(node):
            return {}
        if not isinstance(node, YamlMap):
            expect_kind(node, "a map of steps, guidance_scale and scheduler, or null", "`generate`", self.problems)
            return {}
        fields = check(GenerateFields, node, "generate", self.problems)
        return fields.model_dump(exclude_none=True) if fields else {}

    def remote(self, node: Node | None) -> RemoteSpec | None:
        if node is None or is_null(node):
            return None
        if not isinstance(node, YamlMap):
            expect_kind(node, "a map like {remote: s3://bucket/prefix}, or null", "`cache`", self.problems)
            return None
        where = node.entries.get("remote", node)
        if isinstance(where, YamlMap):
            where = where.entries.get("url", where)
        return remote_spec(node, self.files.folder(where.mark), self.problems)

    def _for_target(self, target: str) -> _ForTarget:
        if target not in self._targets:
            document = apply(self.files.for_target(target), self.overrides, self.problems)
            submodels = document.entries.get("submodels")
            if submodels is None:
                self.problems.add(document.mark, "no `submodels`", "extend a file that has them")
            chains = self.chains.submodels(submodels) if submodels is not None else {}
            evaluate = self._evaluate(document.entries.get("evaluate"))
            missing = [name for name in DRAWING if name not in chains]
            if isinstance(submodels, YamlMap) and evaluate.image and missing:
                self.problems.add(
                    submodels.mark,
                    f"no image can be drawn without {' and '.join(missing)}",
                    "add the submodel, or write `evaluate: {image: null}`",
                )
            verify = self._verify(document.entries.get("verify"))
            self._targets[target] = _ForTarget(chains, evaluate, verify)
        return self._targets[target]

    def _evaluate(self, node: Node | None) -> EvaluateSpec:
        if node is None:
            return EvaluateSpec()
        if is_null(node):
            return EvaluateSpec(latency=None, image=None)
        if not isinstance(node, YamlMap):
            expect_kind(node, "a map of latency, image and allow_fallback, or null", "`evaluate`", self.problems)
            return EvaluateSpec()
        fields = check(EvaluateFields, node, "evaluate", self.problems)
        return evaluate_spec(fields) if fields else EvaluateSpec()

    def _verify(self, node: Node | None) -> VerifySpec | None:
        if node is None:
            return VerifySpec()
        if isinstance(node, YamlScalar):
            if node.value in (None, False, "off"):
                return None
            if node.value in (True, "quick", "full"):
                return VerifySpec(level="full" if node.value == "full" else "quick")
        if not isinstance(node, YamlMap):
            expect_kind(
                node, "quick, full, false, or a map of level, steps, height and width", "`verify`", self.problems
            )
            return None
        fields = check(VerifyFields, node, "verify", self.problems)
        return verify_spec(fields) if fields else None

    def _model(self, node: Node) -> str | None:
        if id(node) not in self._models:
            self._models[id(node)] = model_reference(
                node, self.files.folder(node.mark), self.allow_pickle, self.problems
            )
        return self._models[id(node)]

    def _lora_specs(self, node: Node | None) -> tuple[LoraSpec, ...]:
        if node is None or is_null(node):
            return ()
        if not isinstance(node, YamlList):
            expect_kind(node, "a list of LoRAs like {file: …, scale: 1.0}", "`loras`", self.problems)
            return ()
        if id(node) not in self._loras:
            specs = [lora_spec(item, self._lora_folder(item), self.problems) for item in node.items]
            self._loras[id(node)] = tuple(spec for spec in specs if spec is not None)
        return self._loras[id(node)]

    def _lora_folder(self, item: Node) -> Path:
        written = item.entries.get("file", item) if isinstance(item, YamlMap) else item
        return self.files.folder(written.mark)
