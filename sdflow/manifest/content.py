"""What `sdflow.json` says: what a pipeline was built from, and what files it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sdflow import __version__
from sdflow.digest import FileEntry
from sdflow.errors import UsageError
from sdflow.families import DEFAULT

REFINER = "refiner"
"""The folder within a base's, and what its submodels' names begin with where both are spoken of: refiner/SUBMODEL."""
NOT_SAID = ""
"""`Origin.verified` of a manifest that says nothing of it."""
REBUILD = "Another version of sdflow wrote it, or it is damaged: run the pipeline's workflow again."


@dataclass(frozen=True)
class WrittenPass:
    """A pass as the workflow has it, without defaults. name: of a user's pass, the absolute path and the class."""

    name: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class FinishedPass:
    """A pass as it ran. action: the digest of its cache key. uses: distribution -> version. facts: what it measured."""

    name: str
    action: str
    config: Mapping[str, Any]
    uses: Mapping[str, str]
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Quantization:
    """What a submodel's weights were quantized to ("int8"), and how far the workflow lets its outputs be from the fp32 PyTorch
    model (relative L2); None where it does not say so. by: the pass. layers: how many are. kept: those that could be and are
    not."""

    to: str
    by: str
    limit: float | None = None
    layers: int = 0
    kept: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chain:
    """What made a submodel. written: what `sdflow bake` runs again; None where the file does not say it. quantized: None for
    floating-point numbers throughout."""

    written: tuple[WrittenPass, ...] | None
    steps: tuple[FinishedPass, ...]
    quantized: Quantization | None = None

    @property
    def precision(self) -> str:
        """What most bits of its weights are in: "bfloat16", "float16" or "float32"; "" where no step says it."""
        said = (step.facts["dtypes"] for step in reversed(self.steps) if "dtypes" in step.facts)
        found: Mapping[str, Any] = next(said, {})
        return next((name for name in ("bfloat16", "float16", "float32") if name in found), "")


@dataclass(frozen=True)
class MergedLora:
    """A LoRA of the pipeline. reference: as in the workflow. sha256: of the file that was merged. commit: of its repository."""

    reference: str
    weight_name: str | None
    sha256: str
    scale: float
    commit: str | None = None

    @property
    def pinned(self) -> str:
        """The reference, a repository of the hub at the commit that was used."""
        return _pinned(self.reference, {"commit": self.commit})


@dataclass(frozen=True)
class Origin:
    """What a pipeline was built from, and for what.

    model: as the workflow has it; None where it is not said. components: those that are not the checkpoint's own, and
    where they are from; None: it is left out. controlnets: name -> where it is from. ip_adapters: what the workflow says of
    each. checkpoint: what identifies its content. chains: submodel -> what made it. verified: the level at which it passed
    before it was put together; None: it was not verified; NOT_SAID: nothing is known. family: which submodels there are, and
    how they draw. generate: what the workflow says of how it draws (`sdflow.manifest.form.Said`). few_steps: what the names of
    the model and the LoRAs say, and `because`. refiner: the folder, from this one, of the pipeline that refines its images.
    left_out: submodels of the checkpoint that the workflow does not build; None: it is not said.
    """

    name: str
    target: str
    model: str | None = None
    checkpoint: Mapping[str, Any] | None = None
    allow_pickle: bool = False
    carry_weights: bool = False
    loras: tuple[MergedLora, ...] = ()
    chains: Mapping[str, Chain] = field(default_factory=dict)
    verified: str | None = NOT_SAID
    family: str = DEFAULT
    components: Mapping[str, str | None] = field(default_factory=dict)
    controlnets: Mapping[str, str] = field(default_factory=dict)
    ip_adapters: tuple[Mapping[str, str], ...] = ()
    generate: Mapping[str, Any] = field(default_factory=dict)
    few_steps: Mapping[str, Any] = field(default_factory=dict)
    refiner: str | None = None
    left_out: tuple[str, ...] | None = None

    @property
    def quantized(self) -> dict[str, str]:
        """Submodel -> what its weights were quantized to; those of floating-point numbers are not in it."""
        return {name: chain.quantized.to for name, chain in self.chains.items() if chain.quantized is not None}

    @property
    def low_bits(self) -> dict[str, str]:
        """Component, or "model" -> the format and types of the file in low bits that its weights were dequantized from."""
        found = self.checkpoint or {}
        files = {"model": found, **found.get("components", {}), **found.get("controlnets", {})}
        return {name: _types(each["quantized"]) for name, each in files.items() if "quantized" in each}

    @property
    def said(self) -> dict[str, Any]:
        """What is said of how it draws besides what its configs tell: the workflow's word is the last."""
        return {**self.few_steps, **self.generate}

    def pinned_model(self, where: str) -> str:
        """The model, a checkpoint of the hub at the commit that was used.

        where: of the manifest, for the message. Raises UsageError when it is not said.
        """
        if self.model is None:
            raise UsageError(
                "does not say what the pipeline was built from: 'model' is missing", where=where, remedy=REBUILD
            )
        return _pinned(self.model, self.checkpoint or {})

    def pinned_components(self) -> dict[str, str | None]:
        """The components that are not the checkpoint's own, those of the hub at the commit that was used; None: left out."""
        others = {name: reference for name, reference in self.components.items() if reference is not None}
        return {**self.components, **self._pinned(others, "components")}

    def pinned_nets(self) -> dict[str, str]:
        """The ControlNets by name, those of the hub at the commit that was used."""
        return self._pinned(self.controlnets, "controlnets")

    def pinned_adapters(self) -> list[dict[str, str]]:
        """The IP-Adapters, those of the hub at the commit that was used, and so their image encoder."""
        found = (self.checkpoint or {}).get("ip_adapters", {})
        pinned = []
        for index, each in enumerate(self.ip_adapters):
            provenance = found.get(str(index), {})
            others = {"encoder": _pinned(each["encoder"], found.get("encoder", {}))} if "encoder" in each else {}
            pinned.append({**each, "file": _pinned(each["file"], provenance), **others})
        return pinned

    def _pinned(self, references: Mapping[str, str], kind: str) -> dict[str, str]:
        found = (self.checkpoint or {}).get(kind, {})
        return {name: _pinned(reference, found.get(name, {})) for name, reference in references.items()}


def _types(quantized: Any) -> str:
    """{"format": "gguf", "types": {"Q4_K": 304, "F32": 58}} in words."""
    said = quantized if isinstance(quantized, Mapping) else {}
    types = said.get("types")
    named = ", ".join(types) if isinstance(types, Mapping) else ""
    return f"{said.get('format', 'low bits')} ({named})" if named else str(said.get("format", "low bits"))


def _pinned(reference: str, provenance: Mapping[str, Any]) -> str:
    commit = provenance.get("commit")
    return f"{reference.partition('@')[0]}@{commit}" if commit else reference


@dataclass(frozen=True)
class Part:
    """A submodel as it lies in the folder. artifact: the tree digest of its files."""

    artifact: str
    files: tuple[FileEntry, ...]


@dataclass(frozen=True)
class Manifest:
    """A pipeline folder. copied: its submodels are copies, no links. files: all, as POSIX paths; a link is one."""

    origin: Origin
    parts: Mapping[str, Part]
    files: tuple[str, ...]
    copied: bool = False
    sdflow_version: str = __version__

    @property
    def artifacts(self) -> dict[str, str]:
        """Submodel -> the digest of its artifact."""
        return {name: part.artifact for name, part in self.parts.items()}
