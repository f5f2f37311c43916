"""Compare the files of a pipeline folder with its checkpoint's: every difference that the table does not allow is a
finding with file and key."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from sdflow.artifact import CONFIG_FILE, INDEX_FILE
from sdflow.disk.input_file import is_regular, parse_json, read_input
from sdflow.errors import CheckpointError, os_errors_as
from sdflow.manifest import MANIFEST_FILE, REFINER, Manifest
from sdflow.manifest.provenance import PROVENANCE_FILE
from sdflow.sources.companions import KNOWN
from sdflow.verify.finding import Finding
from sdflow.verify.folder.on_purpose import ABSENT, Expected
from sdflow.verify.folder.source import Source

CHECK = "source"
REBUILD = "build the pipeline again: sdflow run"
MOST_FINDINGS = 5
"""Maximum number of differences reported per file."""

Difference = tuple[str, Any, Any]
"""A dotted key, the value found, and the value expected; ABSENT if there is none."""


def compare_folder(folder: Path, manifest: Manifest, source: Source) -> Iterator[Finding]:
    """Yield unintended differences between the folder and the checkpoint.

    Raises CheckpointError if a file of the checkpoint cannot be read.
    """
    expected = Expected(source, tuple(manifest.parts))
    yield from _submodels(manifest, source)
    yield from _foreign(folder, expected, {REFINER} if manifest.origin.refiner == REFINER else set())
    yield from _json_file(folder, INDEX_FILE, source.index, expected)
    for submodel in expected.submodels:
        if submodel in source.configs:
            yield from _json_file(folder, f"{submodel}/{CONFIG_FILE}", source.configs[submodel], expected, submodel)
    for name, place in source.companions.items():
        for file in sorted({path.name for path in Path(place).iterdir()} & KNOWN):
            yield from _companion_file(folder, f"{name}/{file}", Path(place) / file, expected)


def _error(node: str, what: str, submodel: str = "", count: int = 1) -> Finding:
    return Finding(submodel, CHECK, "error", node, what, REBUILD, count)


def _submodels(manifest: Manifest, source: Source) -> Iterator[Finding]:
    """Check the set of submodels: sdflow.json must list those that the workflow left out. Also checks the family, which
    sdflow bake relies on."""
    if manifest.origin.family != source.family:
        yield _error(MANIFEST_FILE, f"family is {manifest.origin.family}, expected {source.family}")
    left_out = manifest.origin.left_out
    for name in source.configs:
        if name in manifest.parts or name in (left_out or ()):
            continue
        if left_out is None:
            what = (
                f"{name} is in the checkpoint and not in the folder; an earlier sdflow did not record what was left out"
            )
            yield Finding("", CHECK, "warning", MANIFEST_FILE, what, REBUILD)
        else:
            yield _error(
                MANIFEST_FILE, f"{name} is missing under submodels: the checkpoint has it, left_out does not name it"
            )
    for name in manifest.parts:
        if name not in source.configs:
            yield _error(MANIFEST_FILE, f"{name} is under submodels, but the checkpoint has none")


def _foreign(folder: Path, expected: Expected, inside: set[str]) -> Iterator[Finding]:
    """Find files in the folder that are not part of it. inside: nested pipelines.

    A tokenizer may read any file in its folder.
    """
    known = {INDEX_FILE, MANIFEST_FILE, PROVENANCE_FILE, *expected.submodels, *expected.companions, *inside}
    for path in sorted(folder.iterdir()):
        if path.name not in known:
            yield Finding("", CHECK, "warning", path.name, "is not part of the pipeline", "move it away")
    for name in expected.companions:
        place = folder / name
        if not place.is_dir():
            yield _error(name, "is missing: there is no such folder")
            continue
        theirs = {path.name for path in Path(expected.source.companions[name]).iterdir()} & KNOWN
        for path in sorted(place.iterdir()):
            if path.name not in theirs:
                yield _error(f"{name}/{path.name}", "is not among the checkpoint's files")


def _companion_file(folder: Path, file: str, theirs: Path, expected: Expected) -> Iterator[Finding]:
    with os_errors_as("cannot be read", theirs, kind=CheckpointError):
        wanted = read_input(theirs)
    found = _content(folder, file)
    if theirs.suffix == ".json":
        try:
            content = parse_json(wanted, finite=False)
        except ValueError as error:
            raise CheckpointError(f"not valid JSON: {error}", where=str(theirs), remedy="Download it again.") from error
        if found != wanted or _has_keys(file, expected):  # a vocabulary has 50,000 entries
            yield from _json_file(folder, file, content, expected)
        return
    if isinstance(found, Finding):
        yield found
    elif found != wanted:
        yield from _findings(file, "", lines_apart(found, wanted))


def _json_file(folder: Path, file: str, wanted: Any, expected: Expected, submodel: str = "") -> Iterator[Finding]:
    found = _content(folder, file, submodel)
    if isinstance(found, Finding):
        yield found
        return
    try:
        content = parse_json(found, finite=False)
    except ValueError as error:
        yield _error(file.removeprefix(f"{submodel}/"), f"is not JSON: {error}", submodel)
        return
    if not isinstance(content, dict) or not isinstance(wanted, Mapping) or not _has_keys(file, expected):
        apart: Iterator[Difference] = values_apart("", content, wanted)
    else:
        apart = _keys_apart(file, content, wanted, expected)
    yield from _findings(file, submodel, apart)


def _has_keys(file: str, expected: Expected) -> bool:
    """Whether the table has rows for entries of this file."""
    return any(row.key for row in expected.rows(file))


def _content(folder: Path, file: str, submodel: str = "") -> bytes | Finding:
    path = folder / file
    if not is_regular(path):
        return _error(file.removeprefix(f"{submodel}/"), "is missing", submodel)
    try:
        return read_input(path)
    except OSError as error:
        return _error(file.removeprefix(f"{submodel}/"), f"cannot be read: {error.strerror}", submodel)


def _keys_apart(
    file: str, found: Mapping[str, Any], wanted: Mapping[str, Any], expected: Expected
) -> Iterator[Difference]:
    for key in dict.fromkeys([*expected.keys(file, wanted), *found]):
        have, allowed = found.get(key, ABSENT), expected.allowed(file, key, wanted.get(key, ABSENT))
        if allowed is not None and not any(_same(have, each) for each in allowed):
            yield from values_apart(key, have, allowed[0])


def values_apart(key: str, found: Any, wanted: Any) -> Iterator[Difference]:
    """The differences between two JSON values, by innermost keys."""
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        for name in dict.fromkeys([*wanted, *found]):
            yield from values_apart(f"{key}.{name}" if key else name, found.get(name, ABSENT), wanted.get(name, ABSENT))
    elif isinstance(found, list) and isinstance(wanted, list) and len(wanted) > MOST_FINDINGS:
        yield from ((f"{key}: {name}" if key else name, have, want) for name, have, want in _lists_apart(found, wanted))
    elif not _same(found, wanted):
        yield key, found, wanted


def lines_apart(found: bytes, wanted: bytes) -> Iterator[Difference]:
    """The differences between two texts, by lines."""
    yield from _lists_apart(*(text.decode("utf-8", "replace").splitlines() for text in (found, wanted)))


def _lists_apart(found: list[Any], wanted: list[Any]) -> Iterator[Difference]:
    """Entries that one of two lists lacks; if both have the same, the first one out of order."""
    have, want = ({json.dumps(each) for each in entries} for entries in (found, wanted))
    apart = [(f"entry {index + 1}", ABSENT, each) for index, each in enumerate(wanted) if json.dumps(each) not in have]
    apart += [(f"entry {index + 1}", each, ABSENT) for index, each in enumerate(found) if json.dumps(each) not in want]
    if not apart and found != wanted:
        pairs = enumerate([*found, *[ABSENT] * (len(wanted) - len(found))])
        index, each = next((index, each) for index, each in pairs if index >= len(wanted) or each != wanted[index])
        apart = [(f"entry {index + 1}", each, wanted[index] if index < len(wanted) else ABSENT)]
    yield from apart


def _same(one: Any, other: Any) -> bool:
    """Equality in JSON: 1 equals 1.0, true does not equal 1; NaN, which Python writes, equals itself."""
    if one is ABSENT or other is ABSENT:
        return one is other
    if type(one) is type(other) and isinstance(one, str | int):  # a vocabulary has 49,000
        return bool(one == other)
    return json.dumps(_plain(one), sort_keys=True) == json.dumps(_plain(other), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _findings(file: str, submodel: str, apart: Iterator[Difference]) -> Iterator[Finding]:
    """A finding for each of a file's first differences, and one for the rest."""
    node = file.removeprefix(f"{submodel}/") if submodel else file
    for key, found, wanted in islice(apart, MOST_FINDINGS):
        yield _error(node, f"{key or 'its content'} {_said(found, wanted)}", submodel)
    if rest := sum(1 for _ in apart):
        yield _error(node, f"{rest} more keys or lines differ from the checkpoint's", submodel, rest)


def _said(found: Any, wanted: Any) -> str:
    if found is ABSENT:
        return f"is missing, expected {_short(wanted)}"
    if wanted is ABSENT:
        return f"is {_short(found)}, expected nothing"
    return f"is {_short(found)}, expected {_short(wanted)}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
