"""The inputs of a pipeline other than sdflow: the files that a lock pins and that its provenance names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdflow.build.plan import PipelinePlan

LORA = "LoRA"


@dataclass(frozen=True)
class Input:
    """A source that a pipeline is built from.

    role: "model", "component NAME", "ControlNet NAME", "IP-Adapter 1", "LoRA". reference: as in the workflow. origin:
    identifies the content: kind, commit, path, files. place: the folder or file, if known.
    """

    role: str
    reference: str
    origin: Mapping[str, Any]
    place: Path | None = None

    @property
    def files(self) -> dict[str, str]:
        """File -> SHA-256."""
        return dict(self.origin.get("files", {}))

    @property
    def commit(self) -> str | None:
        """The commit of the hub repository, if any."""
        return self.origin.get("commit")


def inputs_of(plan: PipelinePlan) -> Iterator[Input]:
    """Every model, component and LoRA of a pipeline, without its refiner's."""
    pipeline, checkpoint = plan.pipeline, plan.checkpoint
    assert checkpoint is not None, "planned with download=True"
    provenance = checkpoint.provenance
    scheduler = checkpoint.companions.get("scheduler")
    place = Path(provenance["path"]) if "path" in provenance else scheduler.parent if scheduler else None
    yield Input("model", pipeline.model, provenance, place)
    for name, origin in provenance.get("components", {}).items():
        yield Input(f"component {name}", str(pipeline.components[name]), origin, _path(origin))
    for name, origin in provenance.get("controlnets", {}).items():
        yield Input(f"ControlNet {name}", pipeline.controlnets[name], origin, _path(origin))
    for name, origin in provenance.get("ip_adapters", {}).items():
        adapter = pipeline.ip_adapters[int(name) if name.isdigit() else 0]
        if name.isdigit():
            yield Input(f"IP-Adapter {int(name) + 1}", adapter.file, origin, _path(origin))
        else:
            yield Input("image encoder", adapter.encoder or adapter.file, origin, _path(origin))
    for spec, lora in zip(pipeline.loras, plan.loras, strict=True):
        origin = {"kind": "lora", "files": {spec.weight_name or lora.path.name: lora.sha256}}
        yield Input(LORA, lora.reference, origin | ({"commit": lora.commit} if lora.commit else {}), lora.path)


def _path(origin: Mapping[str, Any]) -> Path | None:
    return Path(origin["path"]) if "path" in origin else None


def scripts_of(plan: PipelinePlan) -> list[Path]:
    """The user scripts of the pipeline's passes, with the files that they import."""
    chains = plan.together.values()
    steps = (step for chain in chains for step in (*chain.steps, *chain.carried))
    return sorted({Path(stamp["path"]) for step in steps for stamp in step.script_stamps})


def packages_of(plan: PipelinePlan) -> dict[str, str]:
    """Distribution -> version, for those in the pipeline's keys."""
    return dict(
        sorted({(k, v) for chain in plan.together.values() for step in chain.steps for k, v in step.uses.items()})
    )
