"""`sdflow.json`, as it is written and read: here alone. It holds no date and no path of the folder: equal pipelines have equal
bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sdflow.digest import FileEntry, inside
from sdflow.disk.input_file import read_json
from sdflow.errors import UsageError
from sdflow.families import DEFAULT, FAMILIES
from sdflow.families.approximation import GUIDANCE_INTERVAL, REUSE, Approximation
from sdflow.families.defaults import SAID
from sdflow.families.schedulers import SCHEDULERS
from sdflow.manifest.content import (
    NOT_SAID,
    REBUILD,
    Chain,
    FinishedPass,
    Manifest,
    MergedLora,
    Origin,
    Part,
    Quantization,
    WrittenPass,
)
from sdflow.printable import printable

MANIFEST_FILE = "sdflow.json"
FORMAT_VERSION = 1
NO_CLASS = (
    "diffusers and optimum have no class for a base with its refiner: each of the two folders is a pipeline, and the latents of "
    "the base (denoising_end) go on in the refiner (denoising_start)"
)


class NewerManifest(UsageError):
    """A newer sdflow wrote it: nothing is wrong with it, and nothing is known of what it says."""


def as_json(manifest: Manifest) -> dict[str, Any]:
    """Plain JSON with its `format_version`."""
    origin = manifest.origin
    content = {
        "format_version": FORMAT_VERSION,
        "sdflow_version": manifest.sdflow_version,
        "copied": manifest.copied,
        "name": origin.name,
        "target": origin.target,
        "model": origin.model,
        "checkpoint": origin.checkpoint,
        "allow_pickle": origin.allow_pickle,
        "carry_weights": origin.carry_weights,
        "loras": [asdict(lora) for lora in origin.loras],
        "submodels": {
            name: {**_chain_json(origin.chains.get(name)), **_part_json(part)} for name, part in manifest.parts.items()
        },
        "files": sorted(manifest.files),
    }
    if origin.verified != NOT_SAID:
        content["verified"] = origin.verified
    if origin.family != DEFAULT:
        content["family"] = origin.family
    if origin.refiner is not None:
        content["refiner"] = origin.refiner
        content["about_refiner"] = NO_CLASS
    if origin.left_out is not None:
        content["left_out"] = sorted(origin.left_out)
    if origin.ip_adapters:
        content["ip_adapters"] = [dict(each) for each in origin.ip_adapters]
    for name in ("components", "controlnets", "generate", "few_steps"):
        if found := getattr(origin, name):
            content[name] = dict(found)
    return content


def as_bytes(manifest: Manifest) -> bytes:
    """The content of the file."""
    text = json.dumps(as_json(manifest), indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return f"{text}\n".encode()


def from_json(value: Mapping[str, Any], where: str) -> Manifest:
    """The manifest that `as_json` made, in this version or an earlier one. where: of the file, for messages.

    Raises UsageError when it is of another format or lacks something.
    """
    _require_format(value.get("format_version"), where)
    try:
        return _manifest(value)
    except ValueError as error:
        raise UsageError(f"does not say how the pipeline was built: {error}", where=where, remedy=REBUILD) from error


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a pipeline folder. Raises UsageError when it is missing, damaged, or of another format."""
    path = folder / MANIFEST_FILE
    try:
        value = read_json(path)
    except OSError as error:
        cause = "" if isinstance(error, FileNotFoundError) else f": {error.strerror or error}"
        raise UsageError(
            f"this is no pipeline of sdflow{cause}", where=str(path), remedy="Build one: sdflow run."
        ) from error
    except ValueError as error:
        raise UsageError(
            f"is damaged: {error}", where=str(path), remedy="Run the pipeline's workflow again."
        ) from error
    if not isinstance(value, dict) or "format_version" not in value:
        raise UsageError(
            "this is no pipeline of sdflow: no format_version", where=str(path), remedy="Build one: sdflow run."
        )
    return from_json(value, str(path))


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


# To JSON


def _chain_json(chain: Chain | None) -> dict[str, Any]:
    if chain is None:
        return {}
    steps = [
        {"pass": step.name, "action": step.action, "config": step.config, "uses": step.uses, "facts": step.facts}
        for step in chain.steps
    ]
    quantized = {} if chain.quantized is None else {"quantized": asdict(chain.quantized)}
    if chain.written is None:
        return {"steps": steps, **quantized}
    return {
        "steps": steps,
        **quantized,
        "passes": [{"pass": each.name, "options": dict(each.options)} for each in chain.written],
    }


def _part_json(part: Part) -> dict[str, Any]:
    files = [{"path": entry.path, "bytes": entry.size, "sha256": entry.sha256} for entry in part.files]
    return {"artifact": part.artifact, "files": files}


# From JSON. ValueError says which key is wrong.


def _manifest(value: Mapping[str, Any]) -> Manifest:
    submodels = _get(value, "submodels", dict)
    for name, each in submodels.items():
        if not isinstance(each, dict):
            raise ValueError(f"'submodels': {name:.40} is no object")
        if not inside(name) or "/" in name:
            raise ValueError(f"'submodels' has {name!r:.40}, which is no folder's name")
    origin = Origin(
        name=_get(value, "name", str),
        target=_get(value, "target", str),
        model=_get_or(value, "model", str, None),
        checkpoint=_checkpoint(value),
        allow_pickle=_get_or(value, "allow_pickle", bool, False),
        carry_weights=_get_or(value, "carry_weights", bool, False),
        loras=tuple(_lora(each) for each in _objects(value, "loras")),
        chains={name: _chain(each) for name, each in submodels.items() if "steps" in each},
        verified=_get_or(value, "verified", str, None) if "verified" in value else NOT_SAID,
        family=_family(value),
        components=_components(value),
        controlnets=_references(value, "controlnets"),
        ip_adapters=_adapters(value),
        generate=_said(value, "generate"),
        few_steps=_said(value, "few_steps"),
        refiner=_get_or(value, "refiner", str, None),
        left_out=_texts(value, "left_out") if "left_out" in value else None,
    )
    files = _texts(value, "files")
    for name in files:
        _require_inside(name)
    return Manifest(
        origin,
        parts={name: _part(each) for name, each in submodels.items()},
        files=files,
        copied=_get_or(value, "copied", bool, False),
        sdflow_version=str(value.get("sdflow_version", "")),
    )


def _checkpoint(value: Mapping[str, Any]) -> Mapping[str, Any] | None:
    found: dict[str, Any] | None = _get_or(value, "checkpoint", dict, None)
    components = _get_or(found or {}, "components", dict, None) or {}
    for name in components:
        _get(components, name, dict)
    return found


def _family(value: Mapping[str, Any]) -> str:
    """A manifest that names none is of the family that was there first."""
    found: str = _get_or(value, "family", str, None) or DEFAULT
    if found not in FAMILIES:
        raise ValueError(f"'family' is {found!r:.40}, known are {', '.join(FAMILIES)}")
    return found


def _components(value: Mapping[str, Any]) -> dict[str, str | None]:
    """null: of one that is left out."""
    found = _get_or(value, "components", dict, None) or {}
    return {name: None if found[name] is None else _get(found, name, str) for name in found}


def _references(value: Mapping[str, Any], key: str) -> dict[str, str]:
    found = _get_or(value, key, dict, None) or {}
    return {name: _get(found, name, str) for name in found}


def _adapters(value: Mapping[str, Any]) -> tuple[dict[str, str], ...]:
    if value.get("ip_adapters") is None:
        return ()
    keys = ("file", "weight_name", "encoder", "encoder_folder")
    return tuple(
        {"file": _get(each, "file", str), **{key: _get(each, key, str) for key in keys if key in each}}
        for each in _objects(value, "ip_adapters")
    )


def _said(value: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = _get_or(value, key, dict, None) or {}
    said = {name: _get(found, name, kind) for name, kind in {**SAID, "because": str}.items() if name in found}
    try:
        Approximation.of(said.get(REUSE), said.get(GUIDANCE_INTERVAL))
    except UsageError as error:
        raise ValueError(f"'{key}' has {error}") from error
    for name, number in said.items():
        if not isinstance(number, str | dict) and not int(name == "steps") <= number < math.inf:
            raise ValueError(f"'{key}' has {name} {number}")
    if said.get("scheduler", next(iter(SCHEDULERS))) not in SCHEDULERS:
        raise ValueError(f"'{key}' names the scheduler {said['scheduler']!r:.40}, known are {', '.join(SCHEDULERS)}")
    return said


def _lora(value: Mapping[str, Any]) -> MergedLora:
    return MergedLora(
        _get(value, "reference", str),
        _get_or(value, "weight_name", str, None),
        _get(value, "sha256", str),
        _get(value, "scale", int | float),
    )


def _chain(value: Mapping[str, Any]) -> Chain:
    steps = (
        FinishedPass(
            _get(step, "pass", str),
            _get(step, "action", str),
            _get_or(step, "config", dict, None) or {},
            _get_or(step, "uses", dict, None) or {},
            _get_or(step, "facts", dict, None) or {},
        )
        for step in _objects(value, "steps")
    )
    quantized = _quantization(value["quantized"]) if value.get("quantized") is not None else None
    if "passes" not in value:
        return Chain(None, tuple(steps), quantized)
    written = (WrittenPass(_get(step, "pass", str), _get(step, "options", dict)) for step in _objects(value, "passes"))
    return Chain(tuple(written), tuple(steps), quantized)


def _quantization(value: Any) -> Quantization:
    if not isinstance(value, dict):
        raise ValueError(f"'quantized' is {value!r:.40}, which is no object")
    limit = _get_or(value, "limit", int | float, None)
    if limit is not None and not 0 < limit < math.inf:
        raise ValueError(f"'quantized' has the limit {limit}")
    return Quantization(
        _get(value, "to", str), _get(value, "by", str), limit, _get(value, "layers", int), _texts(value, "kept")
    )


def _part(value: Mapping[str, Any]) -> Part:
    entries = (
        FileEntry(_get(file, "path", str), _get(file, "bytes", int), _get(file, "sha256", str))
        for file in _objects(value, "files")
    )
    part = Part(_get(value, "artifact", str), tuple(entries))
    for entry in part.files:
        _require_inside(entry.path)
    return part


def _require_inside(path: str) -> None:
    if not inside(path):
        raise ValueError(f"{path!r:.60} is no file in its folder")


_KINDS: Mapping[Any, str] = {str: "text", dict: "object", list: "list", bool: "truth value", int: "whole number"}


def _get(value: Mapping[str, Any], key: str, kind: Any) -> Any:
    """What stands at the key. Raises ValueError when nothing does, or something of another kind."""
    if key not in value:
        raise ValueError(f"'{key}' is missing")
    found = value[key]
    if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
        raise ValueError(f"'{key}' is {found!r:.40}, which is no {_KINDS.get(kind, 'number')}")
    if isinstance(found, str) and printable(found) != found:
        raise ValueError(f"'{key}' holds characters that a terminal takes for commands")
    return found


def _get_or(value: Mapping[str, Any], key: str, kind: Any, default: Any) -> Any:
    """As `_get`; the default where nothing stands, or null."""
    return default if value.get(key) is None else _get(value, key, kind)


def _texts(value: Mapping[str, Any], key: str) -> tuple[str, ...]:
    found: list[Any] = _get(value, key, list)
    if not all(isinstance(each, str) for each in found):
        raise ValueError(f"'{key}' holds something that is no text")
    return tuple(found)


def _objects(value: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    found: list[Any] = _get(value, key, list)
    if not all(isinstance(each, dict) for each in found):
        raise ValueError(f"'{key}' holds something that is no object")
    return found
