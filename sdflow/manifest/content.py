"""The content of `sdflow.json`: a pipeline's origin and its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sdflow import __version__
from sdflow.digest import FileEntry
from sdflow.errors import UsageError
from sdflow.families import DEFAULT

REFINER = "refiner"
"""The refiner's folder within a base's, and the prefix of its submodels' names: refiner/SUBMODEL."""
NOT_SAID = ""
"""`Origin.verified` of a manifest without this information."""
REBUILD = "Another version of sdflow wrote it, or it is damaged: run the pipeline's workflow again."


@dataclass(frozen=True)
class WrittenPass:
    """A pass as in the workflow, without defaults. name: for a user's pass, the absolute path and the class."""

    name: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class FinishedPass:
    """A pass as it ran. action: the digest of its cache key. uses: distribution -> version. facts: its measurements."""

    name: str
    action: str
    config: Mapping[str, Any]
    uses: Mapping[str, str]
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Quantization:
    """The quantization of a submodel's weights: the type ("int8"), and the workflow's limit for its outputs' distance
    from the fp32 PyTorch model (relative L2), or None. by: the pass. layers: number of quantized ones. kept: layers
    left unquantized on purpose."""

    to: str
    by: str
    limit: float | None = None
    layers: int = 0
    kept: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chain:
    """How a submodel was made. written: the passes that `sdflow bake` repeats; None if missing. quantized: None for
    floating-point weights."""

    written: tuple[WrittenPass, ...] | None
    steps: tuple[FinishedPass, ...]
    quantized: Quantization | None = None

    @property
    def precision(self) -> str:
        """The type of most of its weights: "bfloat16", "float16" or "float32"; "" if no step recorded it."""
        said = (step.facts["dtypes"] for step in reversed(self.steps) if "dtypes" in step.facts)
        found: Mapping[str, Any] = next(said, {})
        return next((name for name in ("bfloat16", "float16", "float32") if name in found), "")


@dataclass(frozen=True)
class MergedLora:
    """A LoRA of the pipeline. reference: as in the workflow. sha256: of the merged file. commit: of its repository."""

    reference: str
    weight_name: str | None
    sha256: str
    scale: float
    commit: str | None = None

    @property
    def pinned(self) -> str:
        """The reference, with a hub repository at the commit that was used."""
        return _pinned(self.reference, {"commit": self.commit})


@dataclass(frozen=True)
class Origin:
    """The inputs and settings of a pipeline.

    model: as in the workflow; None if missing. components: replaced ones -> their source; None if left out.
    controlnets: name -> source. ip_adapters: as in the workflow. checkpoint: identifies its content. chains: submodel
    -> how it was made.
    verified: the level passed before assembly; None: not verified; NOT_SAID: unknown. family: determines the submodels
    and how images are generated. generate: the workflow's defaults (`sdflow.manifest.form.Said`). few_steps: defaults
    implied by names of the model and the LoRAs, and the reason, `because`. refiner: relative folder of the refiner's
    pipeline.
    left_out: submodels of the checkpoint that the workflow does not build; None if missing.
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
        """Submodel -> its quantized type, for quantized submodels only."""
        return {name: chain.quantized.to for name, chain in self.chains.items() if chain.quantized is not None}

    @property
    def low_bits(self) -> dict[str, str]:
        """Component, or "model" -> format and types of the low-bit file from which its weights were dequantized."""
        found = self.checkpoint or {}
        files = {"model": found, **found.get("components", {}), **found.get("controlnets", {})}
        return {name: _types(each["quantized"]) for name, each in files.items() if "quantized" in each}

    @property
    def said(self) -> dict[str, Any]:
        """Settings for generating that override the configs'; the workflow's take precedence."""
        return {**self.few_steps, **self.generate}

    def pinned_model(self, where: str) -> str:
        """The model, with a hub checkpoint at the commit that was used.

        where: of the manifest, for the message. Raises UsageError if it is missing.
        """
        if self.model is None:
            raise UsageError("does not name the pipeline's model: 'model' is missing", where=where, remedy=REBUILD)
        return _pinned(self.model, self.checkpoint or {})

    def pinned_components(self) -> dict[str, str | None]:
        """The replaced components, with hub repositories at the commit that was used; None: left out."""
        others = {name: reference for name, reference in self.components.items() if reference is not None}
        return {**self.components, **self._pinned(others, "components")}

    def pinned_nets(self) -> dict[str, str]:
        """The ControlNets by name, with hub repositories at the commit that was used."""
        return self._pinned(self.controlnets, "controlnets")

    def pinned_adapters(self) -> list[dict[str, str]]:
        """The IP-Adapters and their image encoder, with hub repositories at the commit that was used."""
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
    """A submodel in the folder. artifact: the tree digest of its files."""

    artifact: str
    files: tuple[FileEntry, ...]


@dataclass(frozen=True)
class Manifest:
    """A pipeline folder. copied: whether submodels are copies instead of links. files: all, as POSIX paths; a link
    counts as one."""

    origin: Origin
    parts: Mapping[str, Part]
    files: tuple[str, ...]
    copied: bool = False
    sdflow_version: str = __version__

    @property
    def artifacts(self) -> dict[str, str]:
        """Submodel -> the digest of its artifact."""
        return {name: part.artifact for name, part in self.parts.items()}
