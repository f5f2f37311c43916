"""Check the chains of passes of a workflow, and the changes that targets make to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from sdflow.config.catalog import PassCatalog, PassInfo, PassNotFound
from sdflow.config.fields import OVERLAY, PRECISIONS, SUBMODEL, EvaluateFields, VerifyFields
from sdflow.config.files import Files
from sdflow.config.options import check
from sdflow.config.patch import INSERTING, check_change, pass_name, without_places
from sdflow.config.problems import Problems, nearest
from sdflow.config.tree import Node, YamlList, YamlMap, YamlScalar, as_map, expect_kind, is_null, text_of, to_data
from sdflow.config.workflow import Mark, StepSpec
from sdflow.families import any_family
from sdflow.targets import TARGETS

Chain = tuple[tuple[StepSpec, PassInfo], ...]


class Chains:
    """Turns the YAML of chains into steps. One per workflow, so that each pass is looked up once."""

    def __init__(self, catalog: PassCatalog, files: Files, problems: Problems) -> None:
        self.catalog = catalog
        self.files = files
        self.problems = problems
        self._passes: dict[tuple[str, str], PassInfo | PassNotFound] = {}

    def submodels(self, node: Node, target: str) -> dict[str, Chain]:
        """The chain of every submodel that is not switched off, in the families' order. target: "" for none."""
        submodels = self._submodels(node)
        return {
            name: self._in_precision(name, submodels[name], self._chain(name, submodels[name]), target)
            for name in any_family.submodels()
            if name in submodels and not is_off(submodels[name])
        }

    def _submodels(self, node: Node) -> Mapping[str, Node]:
        written = as_map(node, "a map from submodel to its passes", "`submodels`", self.problems)
        if written is None:
            return {}
        unknown_keys(written, any_family.submodels(), "submodel", self.problems)
        return written.entries

    def overlays(self, node: Node) -> None:
        """Check every target's changes as far as possible without the chains that they change."""
        targets = as_map(node, "a map from target to its changes", "`targets`", self.problems)
        if targets is None:
            return
        unknown_keys(targets, TARGETS, "target", self.problems)
        for each in targets.entries.values():
            overlay = as_map(each, f"a map of {', '.join(OVERLAY)}", "a target's changes", self.problems)
            if overlay is None:
                continue
            unknown_keys(overlay, OVERLAY, "key", self.problems)
            if "passes" in overlay.entries:
                self._patch(overlay.entries["passes"])
            if "submodels" in overlay.entries:
                self._overlay_submodels(overlay.entries["submodels"])
            for key, fields in (("evaluate", EvaluateFields), ("verify", VerifyFields)):
                if isinstance(written := overlay.entries.get(key), YamlMap):
                    check(fields, written, key, self.problems, partial=True)

    def _overlay_submodels(self, node: Node) -> None:
        for name, submodel in self._submodels(node).items():
            passes = submodel.entries.get("passes") if isinstance(submodel, YamlMap) else None
            if isinstance(passes, YamlList):
                self._chain(name, submodel)
            elif isinstance(submodel, YamlMap):
                unknown_keys(submodel, SUBMODEL, "key", self.problems)
                self._precision(submodel.entries.get("precision"))
                if passes is not None:
                    self._patch(passes)
            elif not is_off(submodel):
                expect_kind(submodel, "a map with `passes`, or null", f"submodel {name!r}", self.problems)

    def _patch(self, node: Node) -> None:
        passes = as_map(node, "a map from pass name to changed options", "`passes`", self.problems)
        if passes is None:
            return
        for name, options in passes.entries.items():
            info = self._find(name, passes.keys[name])
            check_change(name, options, self.problems)
            if isinstance(options, YamlMap) and info is not None:
                self._step(info, without_places(options), options.mark, partial=True)

    def _in_precision(self, submodel: str, node: Node, chain: Chain, target: str) -> Chain:
        """Apply the submodel's `precision` to its chain; unchanged if there is none.

        A pass with an option of that name does the conversion.
        """
        written = node.entries.get("precision") if isinstance(node, YamlMap) else None
        precision = self._precision(written)
        converts = [info for _, info in chain if "precision" in info.options.model_fields]
        if precision == "float32":
            return tuple((spec, info) for spec, info in chain if info not in converts)
        if precision and written is not None and not converts:
            text = f"no step of {submodel} converts its weights to {precision}"
            self.problems.add(written.mark, text, "add {pass: OnnxFloatToFloat16} to its passes")
        found = []
        for spec, info in chain:
            if info in converts:
                spec = replace(spec, options={**spec.options, "precision": precision}) if precision else spec
                wanted = spec.options.get("precision")
                if wanted == "bfloat16" and target in TARGETS and not TARGETS[target].bfloat16:
                    takes = " and ".join(each.name for each in TARGETS.values() if each.bfloat16)
                    text = f"{submodel}: {target} has no kernels for bfloat16, {takes} has"
                    self.problems.add(written.mark if written else spec.mark, text, "precision: float16, or float32")
            found.append((spec, info))
        return tuple(found)

    def _precision(self, node: Node | None) -> str | None:
        """The submodel's `precision`; None if missing, or unknown, which is reported."""
        if node is None or is_null(node):
            return None
        if (value := text_of(node)) in PRECISIONS:
            return value
        expect_kind(node, " or ".join(PRECISIONS), "`precision`", self.problems)
        return None

    def _chain(self, submodel: str, node: Node) -> Chain:
        written = as_map(node, "a map with `passes`, or null", f"submodel {submodel!r}", self.problems)
        if written is None:
            return ()
        unknown_keys(written, SUBMODEL, "key", self.problems)
        passes = written.entries.get("passes")
        if isinstance(passes, YamlMap):
            mark = next(iter(passes.keys.values()), passes.mark)
            self.problems.add(
                mark,
                f"no file has a list of passes for {submodel} that these changes could apply to",
                "write the chain as a list of steps, or extend a file that has it",
            )
            return ()
        if not isinstance(passes, YamlList):
            if passes is None:
                self.problems.add(node.mark, f"submodel {submodel!r} has no `passes`")
            else:
                expect_kind(passes, "a list of steps", f"the passes of {submodel}", self.problems)
            return ()
        if not passes.items:
            self.problems.add(passes.mark, f"the chain of {submodel} is empty", "write null to leave the submodel out")
        chain = []
        for index, item in enumerate(passes.items):
            step = self._read(item)
            if step is not None:
                chain.append(step)
                self._check_place(submodel, index, step, chain[:-1])
        return tuple(chain)

    def _read(self, node: Node) -> tuple[StepSpec, PassInfo] | None:
        step = as_map(node, "a map like {pass: OnnxConversion}", "a step", self.problems)
        if step is None:
            return None
        named, name = step.entries.get("pass"), pass_name(step)
        if named is None:
            self.problems.add(step.mark, "the step names no pass", "pass: one of `sdflow passes`")
            return None
        if not name:
            expect_kind(named, "the name of a pass", "`pass`", self.problems)
            return None
        info = self._find(name, named.mark)
        if info is None:
            self._expect(step)
            return None
        return self._step(info, step, step.mark, partial=False), info

    def _step(self, info: PassInfo, node: YamlMap, mark: Mark, *, partial: bool) -> StepSpec:
        named = node.entries.get("pass")
        for key in INSERTING:
            if key in node.entries:
                text = f"`{key}` is for a map over an inherited chain; steps of a list run in the order written"
                self.problems.add(node.keys[key], text, "leave it out")
        options = {key: value for key, value in node.entries.items() if key not in ("pass", "expect", *INSERTING)}
        tree = YamlMap(options, node.keys, mark)
        known = ("expect", *INSERTING) if partial else ("expect",)
        check(info.options, tree, info.name, self.problems, known=known, partial=partial)
        folder = self._folder_of(info.name, named.mark if named else mark)
        return StepSpec(info.name, to_data(tree), self._expect(node), mark, folder)

    def _expect(self, node: YamlMap) -> dict[str, int]:
        expect = node.entries.get("expect")
        if expect is None or is_null(expect):
            return {}
        counts = {}
        written = as_map(expect, "a map from operator type to a count", "`expect`", self.problems)
        for operator, count in written.entries.items() if written else ():
            value = count.value if isinstance(count, YamlScalar) else ""
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                counts[operator] = value
            elif value is not None:
                expect_kind(count, "a count", f"expect: {operator!r}", self.problems)
        return counts

    def _check_place(
        self, submodel: str, index: int, step: tuple[StepSpec, PassInfo], before: Sequence[tuple[StepSpec, PassInfo]]
    ) -> None:
        spec, info = step
        if index == 0 and info.accepts != "checkpoint":
            self.problems.add(
                spec.mark,
                f"{info.name} needs an ONNX model, and a chain starts from a checkpoint",
                "begin with a pass that exports, such as OnnxConversion",
            )
        elif index > 0 and info.accepts != "onnx":
            self.problems.add(spec.mark, f"{info.name} needs a checkpoint, and can only begin a chain")
        if not info.takes_loras:
            return
        earlier = [other for other, other_info in before if other_info.takes_loras]
        if earlier:
            self.problems.add(
                spec.mark, f"{info.name} would merge the LoRAs a second time", f"first at {earlier[0].mark}"
            )
        changed = any_family.submodels_with_loras()
        if submodel not in changed:
            self.problems.add(spec.mark, f"{info.name} has nothing to merge: LoRAs change {' and '.join(changed)} only")

    def _find(self, name: str, mark: Mark) -> PassInfo | None:
        folder = self._folder_of(name, mark)
        key = (name, str(folder))
        if key not in self._passes:
            try:
                self._passes[key] = self.catalog.find(name, folder)
            except PassNotFound as unknown:
                self._passes[key] = unknown
        found = self._passes[key]
        if isinstance(found, PassInfo):
            return found
        reason = str(found)
        self.problems.add(mark, reason, None if "did you mean" in reason else nearest(name, self.catalog.names()))
        return None

    def _folder_of(self, name: str, mark: Mark) -> Path:
        """The folder to look a pass up from. For a pass at a path, the nearest one that contains the file: the folder
        of the YAML file that names it, one above it, or the current folder. So a path written in `workflows/` can begin
        with `user_scripts/`.
        """
        folder = self.files.folder(mark)
        script, separator, _ = name.rpartition(":")
        if not separator or "\0" in script:
            return folder
        try:
            return next(above for above in (folder, *folder.parents, Path.cwd()) if (above / script).is_file())
        except (OSError, StopIteration):  # the name is too long; no such file
            return folder


def is_off(node: Node) -> bool:
    """Whether a submodel is switched off."""
    return isinstance(node, YamlScalar) and (node.value is None or node.value is False)


def unknown_keys(node: YamlMap, known: Mapping[str, object], what: str, problems: Problems) -> None:
    """Report unknown keys of the map."""
    for key in node.entries:
        if key not in known:
            problems.add(node.keys[key], f"unknown {what} {key!r}", nearest(key, known))
