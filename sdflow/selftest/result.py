"""What a self-test found: plain data, its JSON, and reading that of somebody else."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from sdflow.disk.input_file import read_json
from sdflow.errors import UsageError

KIND, FORMAT_VERSION = "selftest", 1
MOST_BYTES = 16 << 20
MOST_PIXELS = 1 << 20
"""Characters of an image in base64: the sample's have some 20,000."""

Verdict = Literal["passed", "failed", "unavailable", "broken"]
"""passed, failed: it ran. unavailable: the target is not on this machine. broken: it could not be built, or did not run."""


@dataclass(frozen=True)
class Ran:
    """A submodel on the target. nodes: provider -> how many. fallen: name, operator and provider of those that should run on
    the target's and do not. inputs: name -> shape and type. median_ms: of one run, copies included."""

    nodes: Mapping[str, int]
    shapes_on_cpu: int
    fallen: tuple[tuple[str, str, str], ...]
    inputs: Mapping[str, str]
    load_seconds: float
    median_ms: float | None


@dataclass(frozen=True)
class DrawnPair:
    """An image of the target's and PyTorch's of the same latents. decibels: PSNR, 200 where they are equal. shows: whether the
    shape and its colour are those of the prompt. png: pixels in base64."""

    prompt: str
    seed: int
    decibels: float
    ssim: float
    largest: float
    shows: bool
    shown_by_pytorch: bool
    png: str
    pytorch_png: str


@dataclass(frozen=True)
class Report:
    """All of it. reason: why it is not passed. device: processor, cores, memory, system, accelerator."""

    target: str
    verdict: Verdict = "broken"
    reason: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    device: Mapping[str, Any] = field(default_factory=dict)
    provider: str | None = None
    submodels: Mapping[str, Ran] = field(default_factory=dict)
    steps: int | None = None
    build_seconds: float | None = None
    first_image_ms: float | None = None
    image_ms: float | None = None
    peak_memory_bytes: int | None = None
    images: tuple[DrawnPair, ...] = ()
    notes: tuple[str, ...] = ()


def to_json(report: Report) -> dict[str, Any]:
    """Plain JSON: lists in place of tuples."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(report), allow_nan=False))
    return plain


def document(report: Report) -> bytes:
    content = {"kind": KIND, "format_version": FORMAT_VERSION, **to_json(report)}
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def read_report(path: Path) -> Report:
    """The report in a file that `sdflow selftest --report` wrote, here or elsewhere. Raises UsageError for any other."""
    remedy = "Give the .json that `sdflow selftest --report` wrote."
    try:
        content = read_json(path, MOST_BYTES)
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror or error}", where=str(path), remedy=remedy) from error
    except ValueError as error:
        raise UsageError(f"is damaged, or no JSON: {error}", where=str(path), remedy=remedy) from error
    if not isinstance(content, dict) or content.pop("kind", None) != KIND:
        raise UsageError("is no report of a self-test", where=str(path), remedy=remedy)
    if (version := content.pop("format_version", None)) != FORMAT_VERSION:
        raise UsageError(
            f"has the format {version!r}, and this sdflow reads {FORMAT_VERSION}",
            where=str(path),
            remedy="Read it with the sdflow that wrote it.",
        )
    try:
        return from_json(content)
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"is damaged: {error}", where=str(path), remedy=remedy) from error


def from_json(content: Mapping[str, Any]) -> Report:
    """The report of its JSON. Raises ValueError, which says what is wrong where, for anything that is none."""
    _keys(content, Report, "the report")
    _must(content["verdict"] in get_args(Verdict), f"there is no verdict {content['verdict']!r}")
    for name, wanted in (("target", str), ("versions", dict), ("device", dict), ("submodels", dict), ("images", list)):
        _must(isinstance(content[name], wanted), f"{name} is no {wanted.__name__}")
    for name in ("reason", "provider"):
        _must(content[name] is None or isinstance(content[name], str), f"{name} is no text")
    for name in ("steps", "build_seconds", "first_image_ms", "image_ms", "peak_memory_bytes"):
        _number(content[name], name, optional=True)
    _must(isinstance(content["notes"], list) and all(isinstance(each, str) for each in content["notes"]), "notes")
    for group in ("versions", "device"):
        plain = (str, int, float, type(None))
        _must(
            all(isinstance(each, plain) for each in content[group].values()),
            f"{group} holds more than texts and numbers",
        )
    return Report(
        **{
            **content,
            "submodels": {name: _ran(name, part) for name, part in content["submodels"].items()},
            "images": tuple(_pair(index, each) for index, each in enumerate(content["images"])),
            "notes": tuple(content["notes"]),
        }
    )


def _ran(name: str, part: Any) -> Ran:
    _keys(part, Ran, name)
    for key in ("nodes", "inputs"):
        _must(isinstance(part[key], dict), f"{name}: {key} is no table")
    _must(all(isinstance(count, int) for count in part["nodes"].values()), f"{name}: a number of nodes is none")
    _must(all(isinstance(each, str) for each in part["inputs"].values()), f"{name}: an input's shape is no text")
    for key in ("shapes_on_cpu", "load_seconds"):
        _number(part[key], f"{name}: {key}")
    _number(part["median_ms"], f"{name}: median_ms", optional=True)
    _must(isinstance(part["fallen"], list), f"{name}: fallen is no list")
    for node in part["fallen"]:
        shape = isinstance(node, list) and len(node) == 3 and all(isinstance(each, str) for each in node)
        _must(shape, f"{name}: a node that fell is not its name, operator and provider")
    return Ran(**{**part, "fallen": tuple((node[0], node[1], node[2]) for node in part["fallen"])})


def _pair(index: int, pair: Any) -> DrawnPair:
    where = f"image {index + 1}"
    _keys(pair, DrawnPair, where)
    _must(isinstance(pair["prompt"], str), f"{where}: its prompt is no text")
    for key in ("seed", "decibels", "ssim", "largest"):
        _number(pair[key], f"{where}: {key}")
    for key in ("shows", "shown_by_pytorch"):
        _must(isinstance(pair[key], bool), f"{where}: {key} is neither true nor false")
    for key in ("png", "pytorch_png"):
        _must(isinstance(pair[key], str) and len(pair[key]) <= MOST_PIXELS, f"{where}: {key} is no image")
        content = base64.b64decode(pair[key], validate=True)
        _must(content.startswith(b"\x89PNG\r\n\x1a\n"), f"{where}: {key} is no PNG")
    return DrawnPair(**pair)


def _keys(content: Any, kind: type, where: str) -> None:
    _must(isinstance(content, dict), f"{where} is no table")
    names = {each.name for each in fields(kind)}
    if missing := sorted(names - content.keys()):
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    if foreign := sorted(content.keys() - names):
        raise ValueError(f"{where} has {', '.join(foreign)[:200]}, which no report has")


def _number(value: Any, where: str, *, optional: bool = False) -> None:
    given = isinstance(value, int | float) and not isinstance(value, bool)
    _must(given or (optional and value is None), f"{where} is no number")


def _must(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
