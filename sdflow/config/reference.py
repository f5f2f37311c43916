"""References to models and LoRAs: checks that need neither the checkpoint nor the network."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from sdflow.config.fields import AdapterFields, LoraFields
from sdflow.config.files import hub_repository, nearest_sibling
from sdflow.config.options import check
from sdflow.config.problems import Problems, nearest
from sdflow.config.tree import Node, as_map, expect_kind, shortened, text_of
from sdflow.config.workflow import LoraSpec, Mark
from sdflow.families import ADAPTER_ARCHITECTURES, ARCHITECTURES, COMPONENT_ARCHITECTURES
from sdflow.sources.reference import FILE_SUFFIXES, PICKLE_SUFFIXES, AdapterReference, split_architecture

SAMPLES = ("shapes", "shapes-klein")
_SCHEMES = ("hf", "synthetic", "sample")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+-]+):(.*)", re.DOTALL)  # at least two letters, since C: is a drive
_HUB = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w][\w./-]*)?", re.ASCII)
_HUB_FILE = re.compile(
    rf"[\w-][\w.-]*/[\w-][\w.-]*(/[\w][\w. ()+-]*)+(?i:{'|'.join(map(re.escape, FILE_SUFFIXES))})"
    r"(?:#(?P<architecture>[^@#]*))?(@[\w][\w./-]*)?",
    re.ASCII,
)
_SEEDED = re.compile(r"([^?]*)(?:\?seed=([0-9]{1,18}))?", re.ASCII)


def model_reference(
    node: Node, folder: Path, allow_pickle: bool, problems: Problems, what: str = "`model`"
) -> str | None:
    """Return the checked reference with an absolute path, or None with a problem.

    folder: base of a relative path. what: the reference's key, for messages.
    """
    text, mark = text_of(node), node.mark
    if text is None:
        expect_kind(node, "a reference to a checkpoint", what, problems)
        return None
    scheme = _SCHEME.fullmatch(text)
    if scheme is None:
        return _model_path(text, folder, allow_pickle, mark, problems)
    kind, rest = scheme.groups()
    if kind == "hf":
        file = None if what.startswith("`ip_adapters.") else _HUB_FILE.fullmatch(rest)
        if file is None:
            return _hub(text, rest, mark, problems)
        return text if _is_known(file["architecture"], mark, problems) else None
    if kind not in ("synthetic", "sample"):
        _report_scheme(kind, mark, problems, _SCHEMES)
        return None
    names = _synthetic_names(what) if kind == "synthetic" else SAMPLES
    seeded = _SEEDED.fullmatch(rest)
    if seeded is None or (kind == "sample" and seeded.group(2) is not None):
        form = "synthetic:sd15?seed=0" if kind == "synthetic" else "sample:shapes"
        problems.add(mark, f"{shortened(text)!r} is not of the form {form}")
        return None
    if seeded.group(1) not in names:
        problems.add(mark, f"unknown {kind} model {shortened(seeded.group(1))!r}", nearest(seeded.group(1), names))
        return None
    return text


def _synthetic_names(what: str) -> tuple[str, ...]:
    """The architectures allowed at this key; for a component, also those of that component alone."""
    if what.startswith("`ip_adapters."):
        return tuple(ADAPTER_ARCHITECTURES)
    alone = (name for name, component in COMPONENT_ARCHITECTURES.items() if what == f"`components.{component}`")
    return (*ARCHITECTURES, *alone)


def adapter_reference(
    node: Node, folders: Callable[[Mark], Path], allow_pickle: bool, problems: Problems
) -> AdapterReference | None:
    """Return the checked IP-Adapter with absolute paths, or None with problems. folders: base folder for a mark."""
    written = as_map(node, "a map like {file: …}", "an IP-Adapter", problems)
    fields = None if written is None else check(AdapterFields, written, "IP-Adapter", problems)
    if written is None or fields is None:
        return None
    found: dict[str, str | None] = {}
    for key in ("file", "encoder"):
        if getattr(fields, key) is not None:
            place = written.entries[key]
            found[key] = model_reference(place, folders(place.mark), allow_pickle, problems, f"`ip_adapters.{key}`")
            if found[key] is None:
                return None
    file, mark = found["file"], written.entries["file"].mark
    assert file is not None
    if fields.weight_name is None and (file.startswith("hf:") or Path(file).is_dir()):
        problems.add(
            mark, "the file name is missing", "add weight_name: models/ip-adapter_sd15.safetensors, or another"
        )
        return None
    return AdapterReference(file, fields.weight_name, found.get("encoder"), fields.encoder_folder)


def lora_spec(node: Node, folder: Path, problems: Problems) -> LoraSpec | None:
    """Return the checked LoRA with an absolute path, or None with problems. folder: base of a relative path."""
    written = as_map(node, "a map like {file: …, scale: 1.0}", "a LoRA", problems)
    fields = None if written is None else check(LoraFields, written, "LoRA", problems)
    if written is None or fields is None:
        return None
    mark = written.entries["file"].mark
    scheme = _SCHEME.fullmatch(fields.file)
    if scheme is None:
        reference = _lora_path(fields, folder, mark, problems)
    elif scheme.group(1) == "hf":
        reference = _hub(fields.file, scheme.group(2), mark, problems)
    else:
        _report_scheme(scheme.group(1), mark, problems, ("hf",))
        reference = None
    return LoraSpec(reference, fields.scale, fields.weight_name, node.mark) if reference else None


def _report_scheme(kind: str, mark: Mark, problems: Problems, schemes: tuple[str, ...]) -> None:
    if kind.lower() in ("http", "https"):
        remedy: str | None = "download it and give the path, or name it on the hub as hf:owner/name"
    else:
        remedy = nearest(kind, schemes)
    problems.add(mark, f"unknown kind of reference {kind + ':'!r}", remedy)


def _hub(text: str, rest: str, mark: Mark, problems: Problems) -> str | None:
    if _HUB.fullmatch(rest):
        return text
    problems.add(mark, f"{shortened(text)!r} is not of the form hf:owner/name or hf:owner/name@revision")
    return None


def _resolve(text: str, folder: Path, mark: Mark, problems: Problems) -> Path | None:
    """The absolute path of an existing file or folder, symbolic links in it kept; None with a problem."""
    try:
        path = folder / Path(text).expanduser()
        if path.exists():
            return Path(path.absolute())
        remedy = nearest_sibling(path)
        if (repository := hub_repository(text)) and not path.parent.is_dir():
            remedy = f"write hf:{repository} for the repository on the hub"
        if remedy is None and not Path(text).expanduser().is_absolute():
            remedy = f"paths are relative to {str(folder.absolute())!r}"
        problems.add(mark, f"there is no file or folder {shortened(text)!r}", remedy)
    except (OSError, ValueError, RuntimeError) as error:  # a NUL, a name too long, an unknown ~user
        problems.add(mark, f"not a path: {shortened(text)!r} ({error})")
    return None


def _is_known(architecture: str | None, mark: Mark, problems: Problems) -> bool:
    """Whether the architecture after # is known or omitted."""
    if architecture is None or architecture in ARCHITECTURES:
        return True
    problems.add(
        mark, f"unknown architecture {shortened(architecture)!r} after #", nearest(architecture, ARCHITECTURES)
    )
    return False


def _model_path(text: str, folder: Path, allow_pickle: bool, mark: Mark, problems: Problems) -> str | None:
    text, architecture = split_architecture(text)
    if not _is_known(architecture, mark, problems):
        return None
    path = _resolve(text, folder, mark, problems)
    if path is None:
        return None
    suffix = path.suffix.lower()
    if path.is_dir() and architecture is not None:
        problems.add(
            mark, f"{path.name!r} is a folder, whose config names the architecture", f"leave out #{architecture}"
        )
        return None
    if path.is_dir():
        return str(path)
    if suffix in PICKLE_SUFFIXES and not allow_pickle:
        problems.add(
            mark,
            f"{path.name!r} holds pickled weights, and unpickling can run any code",
            "convert it to .safetensors, or write `allow_pickle: true` to load it with weights_only=True",
        )
        return None
    if suffix not in (*FILE_SUFFIXES, *PICKLE_SUFFIXES):
        known = f"a folder, or a file: {', '.join(FILE_SUFFIXES)}, or pickled {', '.join(PICKLE_SUFFIXES)}"
        problems.add(mark, f"{path.name!r} is not a checkpoint", known)
        return None
    return str(path) if architecture is None else f"{path}#{architecture}"


def _lora_path(fields: LoraFields, folder: Path, mark: Mark, problems: Problems) -> str | None:
    path = _resolve(fields.file, folder, mark, problems)
    if path is None:
        return None
    if not path.is_dir():
        if path.suffix.lower() != ".safetensors":
            problems.add(mark, f"{path.name!r} is not a LoRA that can be read", "LoRAs come as .safetensors")
            return None
        if fields.weight_name is not None:
            problems.add(mark, "`weight_name` is for folders and repositories, and this is a file", "leave it out")
            return None
        return str(path)
    if fields.weight_name is not None:
        return str(path) if _resolve(fields.weight_name, path, mark, problems) else None
    found = sorted(entry.name for entry in path.iterdir() if entry.suffix.lower() == ".safetensors")
    if len(found) == 1:
        return str(path)
    if found:
        remedy = f"weight_name: one of {', '.join(found[:12])}"
        problems.add(mark, f"{path.name!r} holds several .safetensors files", remedy)
    elif below := sorted(file.relative_to(path).as_posix() for file in path.glob("*/*.safetensors")):
        # Several adapters that PEFT saved together, or one per part of a model.
        folders = dict.fromkeys(name.split("/")[0] for name in below)
        problems.add(
            mark,
            f"{path.name!r} holds LoRAs in {len(folders)} of its folders: {', '.join([*folders][:12])}",
            f"weight_name: one of {', '.join(below[:12])}",
        )
    else:
        problems.add(mark, f"{path.name!r} holds no .safetensors file")
    return None
