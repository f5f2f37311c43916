"""The parts of a workflow other than its chains, all but `evaluate` and `verify` common to every target.

Models, LoRAs, replaced components, ControlNets, IP-Adapters, `generate`, and the shared cache. Invalid values are
reported to `Problems` and skipped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from sdflow.config.chain import unknown_keys
from sdflow.config.fields import (
    MOST_ADAPTERS,
    MOST_LORAS,
    MOST_NETS,
    NET_NAME,
    CacheFields,
    EvaluateFields,
    GenerateFields,
    RemoteFields,
    VerifyFields,
    evaluate_spec,
)
from sdflow.config.files import Files
from sdflow.config.options import check
from sdflow.config.problems import Problems
from sdflow.config.reference import adapter_reference, lora_spec, model_reference
from sdflow.config.tree import Node, YamlList, YamlMap, YamlScalar, as_map, expect_kind, is_null
from sdflow.config.workflow import EvaluateSpec, LoraSpec, Mark, VerifySpec
from sdflow.families import any_family
from sdflow.sources.components.nets import nets_in_folder
from sdflow.sources.reference import AdapterReference
from sdflow.store.remote.spec import TIMEOUT, RemoteSpec, at, is_url, unknown_scheme, without_secrets
from sdflow.store.signing import is_file

Kind = TypeVar("Kind", YamlMap, YamlList)


class Named:
    """The validated parts of a document. Attributes are named like the keys."""

    def __init__(self, document: YamlMap, files: Files, problems: Problems) -> None:
        self._entries = document.entries
        self._files = files
        self._problems = problems
        self._models: dict[int, str | None] = {}
        self._loras: dict[int, tuple[LoraSpec, ...]] = {}
        self.allow_pickle = self._flag("allow_pickle")
        self.carry_weights = self._flag("carry_weights")
        self.components = self._components()
        self.controlnets = self._controlnets()
        self.ip_adapters = self._ip_adapters()
        self.generate = self._generate()

    def nets(self, model: str) -> dict[str, str]:
        """The ControlNets of the workflow, and those in the model's folder that the workflow does not mention."""
        node = self._entries.get("controlnets")
        said = node.entries if isinstance(node, YamlMap) else {}
        own = {name: reference for name, reference in nets_in_folder(model).items() if name not in said}
        return {**own, **self.controlnets}

    def model(self, node: Node) -> str | None:
        """The reference of a model; None if it is invalid, which is reported."""
        if id(node) not in self._models:
            self._models[id(node)] = self._reference(node, "`model`")
        return self._models[id(node)]

    def loras(self, node: Node | None) -> tuple[LoraSpec, ...]:
        """A list of LoRAs without invalid ones, which are reported."""
        written = self._written(node, YamlList, "a list of LoRAs like {file: …, scale: 1.0}", "`loras`")
        if written is None:
            return ()
        if id(written) not in self._loras:
            items = written.items if self._within("LoRAs", [item.mark for item in written.items], MOST_LORAS) else ()
            specs = [lora_spec(item, self._lora_folder(item), self._problems) for item in items]
            self._loras[id(written)] = tuple(spec for spec in specs if spec is not None)
        return self._loras[id(written)]

    def remote(self) -> RemoteSpec | None:
        """The shared cache, if the workflow names one; a folder's path is made absolute."""
        node = self._map("cache", "a map like {remote: s3://bucket/prefix}, or null")
        fields = None if node is None else check(CacheFields, node, "cache", self._problems)
        if node is None or fields is None or fields.remote is None:
            return None
        remote = RemoteFields(url=fields.remote) if isinstance(fields.remote, str) else fields.remote
        place = node.entries["remote"]
        if (remedy := unknown_scheme(remote.url)) is not None:
            self._problems.add(place.mark, f"{without_secrets(remote.url)!r} is not the URL of a remote cache", remedy)
            return None
        url = remote.url
        if not is_url(url):
            written = place.entries["url"] if isinstance(place, YamlMap) else place
            url = at(str((self._files.folder(written.mark) / Path(url).expanduser()).resolve()), "cache")
        timeout = TIMEOUT if remote.timeout is None else remote.timeout
        folder = self._files.folder(place.mark)
        trust = tuple(str(folder / Path(each).expanduser()) if is_file(each) else each for each in remote.trust)
        return RemoteSpec(url, push=fields.push, timeout=timeout, trust=trust)

    def _written(self, node: Node | None, kind: type[Kind], words: str, what: str) -> Kind | None:
        """The node if it is of this kind; None for null, and for other kinds, which are reported."""
        if node is None or is_null(node):
            return None
        if isinstance(node, kind):
            return node
        expect_kind(node, words, what, self._problems)
        return None

    def _map(self, key: str, words: str) -> YamlMap | None:
        return self._written(self._entries.get(key), YamlMap, words, f"`{key}`")

    def _reference(self, node: Node, what: str) -> str | None:
        return model_reference(node, self._files.folder(node.mark), self.allow_pickle, self._problems, what)

    def _flag(self, key: str) -> bool:
        node = self._entries.get(key)
        if node is None:
            return False
        if isinstance(node, YamlScalar) and isinstance(node.value, bool):
            return node.value
        expect_kind(node, "true or false", f"`{key}`", self._problems)
        return False

    def _components(self) -> dict[str, str | None]:
        """Component -> its source, or None to leave it out. For a required component, null means the model's own."""
        exchangeable, omittable = any_family.exchangeable_components(), any_family.omittable_components()
        node = self._map("components", f"a map like {{{next(iter(exchangeable))}: hf:owner/name}}, or null")
        if node is None:
            return {}
        unknown_keys(node, {**exchangeable, **omittable}, "component", self._problems)
        found: dict[str, str | None] = {}
        for name, each in node.entries.items():
            what = f"`components.{name}`"
            if name in omittable and is_null(each):
                found[name] = None
            elif name in omittable and name not in exchangeable:
                expect_kind(each, "null, which leaves it out: only the model can bring it", what, self._problems)
            elif name in exchangeable and not is_null(each) and (reference := self._reference(each, what)) is not None:
                found[name] = reference
        return found

    def _controlnets(self) -> dict[str, str]:
        node = self._map("controlnets", "a map like {canny: hf:owner/name}, or null")
        if node is None or not self._within("ControlNets", list(node.keys.values()), MOST_NETS):
            return {}
        found = {}
        for name, each in node.entries.items():
            if not re.fullmatch(NET_NAME, name):
                kind = "up to 32 of a-z, 0-9, _ and -, of which the first is a letter or a digit"
                self._problems.add(node.keys[name], f"{name!r} is not a valid name for a ControlNet", kind)
            elif not is_null(each):
                found[name] = self._reference(each, f"`controlnets.{name}`")
        return {name: reference for name, reference in found.items() if reference is not None}

    def _ip_adapters(self) -> tuple[AdapterReference, ...]:
        words = "a list of IP-Adapters like {file: …}, or null"
        node = self._written(self._entries.get("ip_adapters"), YamlList, words, "`ip_adapters`")
        if node is None or not self._within("IP-Adapters", [item.mark for item in node.items], MOST_ADAPTERS):
            return ()
        found = [adapter_reference(item, self._files.folder, self.allow_pickle, self._problems) for item in node.items]
        return tuple(each for each in found if each is not None)

    def _within(self, what: str, marks: Sequence[Mark], most: int) -> bool:
        """Whether the limit is kept; otherwise the first excess item is reported."""
        if len(marks) > most:
            self._problems.add(marks[most], f"{len(marks):,} {what}", f"at most {most} per pipeline")
        return len(marks) <= most

    def _generate(self) -> dict[str, Any]:
        node = self._map("generate", "a map of steps, guidance_scale and scheduler, or null")
        fields = None if node is None else check(GenerateFields, node, "generate", self._problems)
        return fields.model_dump(exclude_none=True, by_alias=True) if fields else {}

    def _lora_folder(self, item: Node) -> Path:
        written = item.entries.get("file", item) if isinstance(item, YamlMap) else item
        return self._files.folder(written.mark)


def evaluate_of(node: Node | None, problems: Problems) -> EvaluateSpec:
    """Parse the measurements after the build; null is none. Mistakes are reported to `problems`."""
    if node is None:
        return EvaluateSpec()
    if is_null(node):
        return EvaluateSpec(latency=None, image=None)
    written = as_map(node, "a map of latency, image and allow_fallback, or null", "`evaluate`", problems)
    fields = None if written is None else check(EvaluateFields, written, "evaluate", problems)
    return evaluate_spec(fields) if fields else EvaluateSpec()


def verify_of(node: Node | None, problems: Problems) -> VerifySpec | None:
    """Parse the verification; None turns it off."""
    if node is None:
        return VerifySpec()
    if isinstance(node, YamlScalar):
        if node.value in (None, False, "off"):
            return None
        if node.value in (True, "quick", "full"):
            return VerifySpec(level="full" if node.value == "full" else "quick")
    kinds = "quick, full, false, or a map of level, steps, height and width"
    written = as_map(node, kinds, "`verify`", problems)
    fields = None if written is None else check(VerifyFields, written, "verify", problems)
    return VerifySpec(**fields.model_dump()) if fields else None
