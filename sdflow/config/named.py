"""What a workflow names beside its chains: the same for every target.

Models, LoRAs, components from elsewhere, ControlNets, IP-Adapters, what `generate` takes, the cache of others. What is wrong is
told to `Problems`, and left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdflow.config.chain import is_null, unknown_keys
from sdflow.config.fields import MOST_ADAPTERS, MOST_LORAS, MOST_NETS, NET_NAME, GenerateFields
from sdflow.config.files import Files
from sdflow.config.merge import expect_kind
from sdflow.config.nodes import Node, YamlList, YamlMap, YamlScalar
from sdflow.config.options import check
from sdflow.config.problems import Problems
from sdflow.config.reference import adapter_reference, lora_spec, model_reference
from sdflow.config.remote import remote_spec
from sdflow.config.workflow import LoraSpec, Mark
from sdflow.families import any_family
from sdflow.sources.components.nets_in_folder import nets_in_folder
from sdflow.sources.reference import AdapterReference
from sdflow.store.remote.spec import RemoteSpec


class Named:
    """What a document names. Attributes: the keys of the same names, checked."""

    def __init__(self, document: YamlMap, files: Files, problems: Problems) -> None:
        self._entries = document.entries
        self._files = files
        self._problems = problems
        self._models: dict[int, str | None] = {}
        self._loras: dict[int, tuple[LoraSpec, ...]] = {}
        self.allow_pickle = self._flag("allow_pickle")
        self.carry_weights = self._flag("carry_weights")
        self.components = self._components(document.entries.get("components"))
        self.controlnets = self._controlnets(document.entries.get("controlnets"))
        self.ip_adapters = self._ip_adapters(document.entries.get("ip_adapters"))
        self.generate = self._generate(document.entries.get("generate"))

    def nets(self, model: str) -> dict[str, str]:
        """The ControlNets that the workflow names, and those in the model's folder that it says nothing of."""
        node = self._entries.get("controlnets")
        said = node.entries if isinstance(node, YamlMap) else {}
        own = {name: reference for name, reference in nets_in_folder(model).items() if name not in said}
        return {**own, **self.controlnets}

    def model(self, node: Node) -> str | None:
        """The reference of a model; None where it is none, which is then said."""
        if id(node) not in self._models:
            self._models[id(node)] = model_reference(
                node, self._files.folder(node.mark), self.allow_pickle, self._problems
            )
        return self._models[id(node)]

    def loras(self, node: Node | None) -> tuple[LoraSpec, ...]:
        """A list of LoRAs, but for those that are none, which are then said."""
        if node is None or is_null(node):
            return ()
        if not isinstance(node, YamlList):
            expect_kind(node, "a list of LoRAs like {file: …, scale: 1.0}", "`loras`", self._problems)
            return ()
        if id(node) not in self._loras:
            within = self._within("LoRAs", [item.mark for item in node.items], MOST_LORAS)
            items = node.items if within else []
            specs = [lora_spec(item, self._lora_folder(item), self._problems) for item in items]
            self._loras[id(node)] = tuple(spec for spec in specs if spec is not None)
        return self._loras[id(node)]

    def remote(self) -> RemoteSpec | None:
        """The cache of others that it takes artifacts from, if it names one."""
        node = self._entries.get("cache")
        if node is None or is_null(node):
            return None
        if not isinstance(node, YamlMap):
            expect_kind(node, "a map like {remote: s3://bucket/prefix}, or null", "`cache`", self._problems)
            return None
        where = node.entries.get("remote", node)
        if isinstance(where, YamlMap):
            where = where.entries.get("url", where)
        return remote_spec(node, self._files.folder(where.mark), self._problems)

    def _flag(self, key: str) -> bool:
        node = self._entries.get(key)
        if node is None:
            return False
        if isinstance(node, YamlScalar) and isinstance(node.value, bool):
            return node.value
        expect_kind(node, "true or false", f"`{key}`", self._problems)
        return False

    def _components(self, node: Node | None) -> dict[str, str | None]:
        """Component -> where it comes from; None: it is left out. Of one that no model can lack, null says nothing."""
        if node is None or is_null(node):
            return {}
        exchangeable, omittable = any_family.exchangeable_components(), any_family.omittable_components()
        if not isinstance(node, YamlMap):
            example = f"a map like {{{next(iter(exchangeable))}: hf:owner/name}}, or null"
            expect_kind(node, example, "`components`", self._problems)
            return {}
        unknown_keys(node, {**exchangeable, **omittable}, "component", self._problems)
        found: dict[str, str | None] = {}
        for name, each in node.entries.items():
            if name in omittable:
                if is_null(each):
                    found[name] = None
                else:
                    expect_kind(
                        each,
                        "null, which leaves it out: it comes with the model",
                        f"`components.{name}`",
                        self._problems,
                    )
            elif name in exchangeable and not is_null(each):
                reference = model_reference(
                    each, self._files.folder(each.mark), self.allow_pickle, self._problems, f"`components.{name}`"
                )
                found |= {} if reference is None else {name: reference}
        return found

    def _controlnets(self, node: Node | None) -> dict[str, str]:
        if node is None or is_null(node):
            return {}
        if not isinstance(node, YamlMap):
            expect_kind(node, "a map like {canny: hf:owner/name}, or null", "`controlnets`", self._problems)
            return {}
        if not self._within("ControlNets", list(node.keys.values()), MOST_NETS):
            return {}
        found = {}
        for name, each in node.entries.items():
            if not re.fullmatch(NET_NAME, name):
                kind = "up to 32 of a-z, 0-9, _ and -, of which the first is a letter or a digit"
                self._problems.add(node.keys[name], f"{name!r} is not a valid name for a ControlNet", kind)
            elif not is_null(each):
                found[name] = model_reference(
                    each, self._files.folder(each.mark), self.allow_pickle, self._problems, f"`controlnets.{name}`"
                )
        return {name: reference for name, reference in found.items() if reference is not None}

    def _ip_adapters(self, node: Node | None) -> tuple[AdapterReference, ...]:
        if node is None or is_null(node):
            return ()
        if not isinstance(node, YamlList):
            expect_kind(node, "a list of IP-Adapters like {file: …}, or null", "`ip_adapters`", self._problems)
            return ()
        if not self._within("IP-Adapters", [item.mark for item in node.items], MOST_ADAPTERS):
            return ()
        found = [adapter_reference(item, self._files.folder, self.allow_pickle, self._problems) for item in node.items]
        return tuple(each for each in found if each is not None)

    def _within(self, what: str, marks: Sequence[Mark], most: int) -> bool:
        """Whether there are at most so many; more are said at the first that is too many."""
        if len(marks) > most:
            self._problems.add(marks[most], f"{len(marks):,} {what}", f"at most {most} go into a pipeline")
        return len(marks) <= most

    def _generate(self, node: Node | None) -> dict[str, Any]:
        if node is None or is_null(node):
            return {}
        if not isinstance(node, YamlMap):
            expect_kind(node, "a map of steps, guidance_scale and scheduler, or null", "`generate`", self._problems)
            return {}
        fields = check(GenerateFields, node, "generate", self._problems)
        return fields.model_dump(exclude_none=True, by_alias=True) if fields else {}

    def _lora_folder(self, item: Node) -> Path:
        written = item.entries.get("file", item) if isinstance(item, YamlMap) else item
        return self._files.folder(written.mark)
