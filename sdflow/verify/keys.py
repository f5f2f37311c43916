"""Cache keys of references and verifications."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

from sdflow.artifact import Action, Record
from sdflow.config.workflow import VerifySpec
from sdflow.digest import FileEntry, digest_json, digest_tree
from sdflow.machine.packages import distribution_version
from sdflow.manifest import MANIFEST_FILE
from sdflow.manifest.provenance import PROVENANCE_FILE
from sdflow.store import Cache
from sdflow.verify.artifact import judge
from sdflow.verify.as_json import as_json
from sdflow.verify.folder import VERSION as FOLDER_VERSION
from sdflow.verify.folder import source_of
from sdflow.verify.reference import reference
from sdflow.verify.reference.selection import Selection
from sdflow.verify.reference.torch_images import sample_cases
from sdflow.verify.requests import Built, submodels_of_reference
from sdflow.verify.subject import Subject

ACTION_FORMAT = 1


def reference_action(subject: Subject, selection: Selection, cache: Cache) -> Action:
    """The key of the reference."""
    checkpoint = subject.checkpoint
    needed = submodels_of_reference(selection, subject)
    config = {name: value for name, value in as_json(selection).items() if name != "tokens" or value is not None}
    return Action(
        {
            "format": ACTION_FORMAT,
            "pass": {"name": "VerifyReference", "version": reference.VERSION},
            "submodel": "pipeline",
            "config": config,
            "inputs": {
                "checkpoint": {name: checkpoint.submodels[name].identity for name in needed},
                "companions": {name: tree_digest(path, cache) for name, path in checkpoint.companions.items()},
                **({"options": dict(checkpoint.options)} if checkpoint.options else {}),
                **({"scheduler": checkpoint.said["scheduler"]} if "scheduler" in checkpoint.said else {}),
                **({"bfloat16": subject.bfloat16} if subject.bfloat16 else {}),
                "loras": [{"sha256": lora.sha256, "scale": lora.scale} for lora in subject.loras],
                **({"prompts": _sample_prompts(selection)} if selection.sample_cases else {}),
            },
            "uses": {name: distribution_version(name) for name in reference.USES},
            "salt": cache.salt,
        }
    )


def _sample_prompts(selection: Selection) -> str:
    """Digest of the prompts of a sample's images."""
    return digest_json([case.prompt for case in sample_cases(selection)])


def verification_action(subject: Subject, spec: VerifySpec, built: Built, exact: Record, cache: Cache) -> Action:
    """The key of the verification. exact: the reference."""
    return Action(
        {
            "format": ACTION_FORMAT,
            "pass": {"name": "Verify", "version": judge.VERSION},
            "submodel": "pipeline",
            "config": {
                "level": spec.level,
                "target": subject.target,
                "submodels": sorted(built.submodels),
                "allow_fallback": subject.allow_fallback,
                **({"references": 1} if subject.checkpoint.family.references is not None else {}),
            },
            "inputs": {
                "artifacts": built.digests,
                "unproved": sorted(built.unproved),
                "structures": {name: tree_digest(path, cache) for name, path in built.structures.items()},
                "beside": digest_of_other_files(subject.folder, built.digests, cache),
                "manifest": cache.stat.digest(subject.folder / MANIFEST_FILE),
                "source": _source(subject, cache),
                "reference": exact.artifact.digest,
            },
            "uses": {name: distribution_version(name) for name in judge.USES},
            "salt": cache.salt,
        }
    )


def tree_digest(folder: Path, cache: Cache) -> str:
    """The tree digest of a folder's actual files, regardless of its manifest."""
    folder = folder.resolve()
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return digest_tree(
        FileEntry(path.relative_to(folder).as_posix(), path.stat().st_size, cache.stat.digest(path)) for path in files
    )


def digest_of_other_files(folder: Path, submodels: Container[str], cache: Cache) -> str:
    """The digest of all files of the folder except sdflow.json, its provenance and these submodels: a verification
    covers the whole folder."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.name not in (MANIFEST_FILE, PROVENANCE_FILE) and path.name not in submodels:
            found[path.name] = cache.stat.digest(path) if path.is_file() else tree_digest(path, cache)
    return digest_json(found)


def _source(subject: Subject, cache: Cache) -> str:
    """The digest of the folder's expected content, and of the comparison's version."""
    source = as_json(source_of(subject.checkpoint))
    companions = {name: tree_digest(path, cache) for name, path in subject.checkpoint.companions.items()}
    return digest_json({**source, "companions": companions, "version": FOLDER_VERSION})
