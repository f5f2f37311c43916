"""Write and read `sdflow.json`, only here. It contains no dates and no path of the folder, so equal pipelines have
equal bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sdflow.disk.input_file import alike, is_there, read_json
from sdflow.errors import UsageError
from sdflow.families import DEFAULT
from sdflow.manifest.content import NOT_SAID, REBUILD, Chain, FinishedPass, Manifest, WrittenPass

MANIFEST_FILE = "sdflow.json"
FORMAT_VERSION = 1
NO_CLASS = (
    "diffusers and optimum have no class for a base with its refiner: each of the two folders is a pipeline, and the base's "
    "latents (denoising_end) are passed to the refiner (denoising_start)"
)


_ALWAYS = ("name", "target", "model", "checkpoint", "allow_pickle", "carry_weights")
_BESIDE: Mapping[str, Any] = {
    "verified": NOT_SAID, "family": DEFAULT, "refiner": None, "ip_adapters": (),
    "components": {}, "controlnets": {}, "generate": {}, "few_steps": {},
}  # fmt: skip
"""Keys that are omitted at their default."""


class NewerManifest(UsageError):
    """A newer sdflow wrote it: it may be fine, but cannot be interpreted."""


def as_json(manifest: Manifest) -> dict[str, Any]:
    """Plain JSON with its `format_version`."""
    origin = manifest.origin
    submodels = {
        name: {
            **_chain_json(origin.chains.get(name)),
            "artifact": part.artifact,
            "files": [{"path": each.path, "bytes": each.size, "sha256": each.sha256} for each in part.files],
        }
        for name, part in manifest.parts.items()
    }
    content = {
        "format_version": FORMAT_VERSION,
        "sdflow_version": manifest.sdflow_version,
        "copied": manifest.copied,
        **{name: getattr(origin, name) for name in _ALWAYS},
        "loras": [_without_none(asdict(lora), "commit") for lora in origin.loras],
        "submodels": submodels,
        "files": sorted(manifest.files),
        **{name: getattr(origin, name) for name, default in _BESIDE.items() if getattr(origin, name) != default},
    }
    if origin.refiner is not None:
        content["about_refiner"] = NO_CLASS
    if origin.left_out is not None:
        content["left_out"] = sorted(origin.left_out)
    return content


def as_bytes(manifest: Manifest) -> bytes:
    """The content of the file."""
    text = json.dumps(as_json(manifest), indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return f"{text}\n".encode()


def from_json(value: Mapping[str, Any], where: str) -> Manifest:
    """Parse `as_json`'s result, from this version or an earlier one. where: of the file, for messages.

    Raises UsageError for another format or missing entries.
    """
    from sdflow.manifest.form import manifest_of

    _require_format(value.get("format_version"), where)
    try:
        return manifest_of(value)
    except ValueError as error:
        raise UsageError(f"is not a valid manifest: {error}", where=where, remedy=REBUILD) from error


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a pipeline folder. Raises UsageError if it is missing, damaged, or of another format."""
    path = folder / MANIFEST_FILE
    try:
        value = read_json(path)
    except OSError as error:
        cause = "" if isinstance(error, FileNotFoundError) else f": {error.strerror or error}"
        meant = None if cause else _meant(folder)
        remedy = "Build one: sdflow run." if meant is None else f"Did you mean {meant}?"
        if not cause and not is_there(folder):
            cause = ": there is no such folder"
        raise UsageError(f"not an sdflow pipeline{cause}", where=str(path), remedy=remedy) from error
    except ValueError as error:
        raise UsageError(
            f"is damaged: {error}", where=str(path), remedy="Run the pipeline's workflow again."
        ) from error
    if not isinstance(value, dict) or "format_version" not in value:
        raise UsageError("not an sdflow pipeline: no format_version", where=str(path), remedy="Build one: sdflow run.")
    return from_json(value, str(path))


def _meant(folder: Path) -> Path | None:
    """The pipeline probably meant by an invalid folder: of this name in pipelines/, where `sdflow run` puts them, or of
    a similar name there or next to it."""
    built = Path("pipelines")
    try:
        if not folder.is_absolute() and (built / folder / MANIFEST_FILE).is_file():
            return built / folder
        for place in dict.fromkeys((folder.parent, built)):
            found = sorted(each.parent.name for each in place.glob(f"*/{MANIFEST_FILE}")) if place.is_dir() else ()
            if (name := alike(folder.name, found)) is not None:
                return place / name
    except (OSError, ValueError):
        return None
    return None


def _require_format(found: object, where: str) -> None:
    if found == FORMAT_VERSION:
        return
    if isinstance(found, int) and found > FORMAT_VERSION:
        raise NewerManifest(
            f"a newer sdflow wrote it: format_version {found} is not known here, only {FORMAT_VERSION}",
            where=where,
            remedy="Update sdflow, or run the pipeline's workflow again with this one, into another folder.",
        )
    raise UsageError(
        f"format_version {found!r:.40} is not known, only {FORMAT_VERSION}",
        where=where,
        remedy="Run the pipeline's workflow again, into another folder.",
    )


def _without_none(content: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in content.items() if name != key or value is not None}


def _chain_json(chain: Chain | None) -> dict[str, Any]:
    if chain is None:
        return {}
    content: dict[str, Any] = {"steps": [_pass_json(step) for step in chain.steps]}
    if chain.quantized is not None:
        content["quantized"] = asdict(chain.quantized)
    if chain.written is not None:
        content["passes"] = [_pass_json(each) for each in chain.written]
    return content


def _pass_json(each: FinishedPass | WrittenPass) -> dict[str, Any]:
    return {"pass" if name == "name" else name: value for name, value in vars(each).items()}
