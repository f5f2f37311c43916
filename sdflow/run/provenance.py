"""Write `provenance.json`: an in-toto statement of a pipeline's inputs, builder and verdict.

The predicate is SLSA's provenance v1. `sdflow.json` (every pass with its options, every file) is not repeated, but
included as a subject with its digest. Times and places appear only under `runDetails`.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sdflow import __version__
from sdflow.build.inputs import LORA, Input, inputs_of, packages_of, scripts_of
from sdflow.build.pipeline_folder import Layout
from sdflow.build.plan import PipelinePlan
from sdflow.digest import canonical_json
from sdflow.manifest.provenance import BUILD_TYPE, SLSA, STATEMENT
from sdflow.sources import FileDigests
from sdflow.sources.companions import companion_files
from sdflow.sources.licence import declared_licence
from sdflow.sources.loras.lora import lora_files
from sdflow.sources.reference import HubReference, LocalReference, parse_reference
from sdflow.verify import Verification
from sdflow.verify.result import worst_output

BUILDER_VARIABLE = "SDFLOW_BUILDER_ID"
LOCAL_BUILDER = "urn:sdflow:local"
Descriptor = dict[str, Any]


@dataclass(frozen=True)
class Build:
    """A build of one pipeline. actions: submodel -> each step's pass and cache key. files: the workflow's, with SHA-256
    from before the build; for a bake, the base's sdflow.json. started: its start."""

    plan: PipelinePlan
    actions: Mapping[str, Sequence[Mapping[str, str]]]
    files: Sequence[tuple[Path, str]]
    started: datetime
    verification: Verification | None
    digests: FileDigests

    def statement(self, layout: Layout) -> bytes:
        """The file's content for a folder with this layout."""
        return f"{json.dumps(self._statement(layout), indent=2, sort_keys=True, ensure_ascii=False)}\n".encode()

    def _statement(self, layout: Layout) -> dict[str, Any]:
        pipeline = self.plan.pipeline
        loras = [{"reference": self._shown(each.reference), "scale": each.scale} for each in self.plan.loras]
        return {
            "_type": STATEMENT,
            "subject": [_file(name, digest) for name, digest in sorted(_subjects(layout, self.digests))],
            "predicateType": SLSA,
            "predicate": {
                "buildDefinition": {
                    "buildType": BUILD_TYPE,
                    "externalParameters": {
                        "workflow": self.files[0][0].name,
                        "pipeline": pipeline.name,
                        "target": pipeline.target,
                        "model": self._shown(pipeline.model),
                        "loras": loras,
                    },
                    "internalParameters": {"actions": self.actions},
                    "resolvedDependencies": [*self._dependencies()],
                },
                "runDetails": {
                    "builder": {
                        "id": os.environ.get(BUILDER_VARIABLE) or LOCAL_BUILDER,
                        "version": {"sdflow": __version__, "python": platform.python_version()},
                    },
                    "metadata": {"startedOn": _time(self.started), "finishedOn": _time(datetime.now(UTC))},
                    "byproducts": [_verdict(self.verification)] if self.verification is not None else [],
                },
            },
        }

    def _shown(self, reference: str) -> str:
        """A reference without local paths: relative to the workflow, or only the name."""
        parsed = parse_reference(reference)
        if not isinstance(parsed, LocalReference):
            return reference
        folder = self.files[0][0].absolute().parent
        inside = parsed.path.is_relative_to(folder)
        shown = parsed.path.relative_to(folder).as_posix() if inside else parsed.path.name
        return shown + (f"#{parsed.architecture}" if parsed.architecture else "")

    def _dependencies(self) -> Iterator[Descriptor]:
        for plan in filter(None, (self.plan, self.plan.refiner)):
            for each in inputs_of(plan):
                yield from self._of_input(each)
        for file, digest in self.files:
            yield _file(f"workflow/{file.name}", digest)
        for script in scripts_of(self.plan):
            yield _file(f"script/{script.name}", self.digests.digest(script))
        for name, version in packages_of(self.plan).items():
            yield {"name": name, "uri": f"pkg:pypi/{name}@{quote(version)}"}

    def _of_input(self, each: Input) -> Iterator[Descriptor]:
        parsed = parse_reference(each.reference)
        licence = declared_licence(each.place) if each.place is not None else None
        said = {"annotations": {"license": licence}} if licence else {}
        if isinstance(parsed, HubReference) and each.commit:
            uri = f"pkg:huggingface/{parsed.repository}@{each.commit}"
            yield {"name": each.role, "uri": uri, "digest": {"gitCommit": each.commit}, **said}
            said = {}
        elif not isinstance(parsed, LocalReference):
            yield {"name": each.role, "uri": each.reference, **said}
            said = {}
        files = each.files
        if each.place is not None and each.role == LORA:
            files = {path.name: self.digests.digest(path) for path in lora_files(each.place)}
        for name, digest in files.items():
            yield {**_file(f"{each.role}/{name}", digest), **said}


def actions_of(chains: Mapping[str, Iterable[Any]]) -> dict[str, list[dict[str, str]]]:
    """The value of `Build.actions`. chains: submodel -> its finished steps."""
    return {
        name: [{"pass": step.step.name, "action": step.record.action.digest} for step in chain]
        for name, chain in chains.items()
    }


def _subjects(layout: Layout, digests: FileDigests) -> set[tuple[str, str]]:
    """Every file with its digest. Links to submodels of the same folder are not repeated."""
    found = {
        f"{name}/{file}": digests.digest(folder / file)
        for name, folder in layout.companions.items()
        for file in companion_files(folder)
    }
    found |= {f"{name}/{each.path}": each.sha256 for name, part in layout.parts.items() for each in part.files}
    found |= {name: sha256(content).hexdigest() for name, content in layout.described.items()}
    return {*found.items()}


def _file(name: str, digest: str) -> Descriptor:
    return {"name": name, "digest": {"sha256": digest}}


def _verdict(verification: Verification) -> Descriptor:
    """The verdict, with the digest of the verification as JSON, which --results keeps."""
    outputs = {name: worst_output(part.outputs) for name, part in verification.submodels.items() if part.outputs}
    return {
        "name": "verification",
        "mediaType": "application/json",
        "digest": {"sha256": sha256(canonical_json(verification.to_json())).hexdigest()},
        "annotations": {
            "passed": verification.passed,
            "level": verification.level,
            "target": verification.target,
            "machine": f"{platform.system()} {platform.machine()}",
            "provider": "CPUExecutionProvider",
            "versions": dict(verification.versions),
            "submodels": {
                name: {"output": each.name, "distance": each.distance, "limit": each.limit}  # finite: it passed
                for name, each in outputs.items()
            },
        },
    }


def _time(when: datetime) -> str:
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")
