"""`sdflow export --browser`: a static folder for a web server, whose page generates on the visitor's GPU.

pipeline.json names all other files with sizes and digests; the page (`sdflow/export/page`) fetches and stores each
once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.build.assemble import copy_file
from sdflow.disk.atomic_write import replacing_all
from sdflow.errors import CacheError, UsageError, os_errors_as
from sdflow.export.parts import make_parts
from sdflow.export.pieces import Buffer, into_buffers, write_buffer
from sdflow.export.program_data import compact, tokenizer_tables
from sdflow.export.schedule import Coefficients, coefficients
from sdflow.export.source import Source, guidance_of, latents_data, left_out, open_source
from sdflow.export.web_runtime import Runtime
from sdflow.manifest import MANIFEST_FILE, read_manifest
from sdflow.onnx_model.facts import tensor_bytes
from sdflow.onnx_model.files import initializers_and_constants
from sdflow.runtime.denoiser.start import require_size
from sdflow.runtime.files.folder import SCHEDULER, folder_defaults
from sdflow.runtime.sessions.webgpu_angles import with_right_angles
from sdflow.runtime.sessions.webgpu_attention import PROBE_SIZES, attention_probe, has_fused_attention

if TYPE_CHECKING:
    import numpy as np

FORMAT_VERSION = 1
INDEX, TOKENIZERS, SCHEDULES, PROBE = "pipeline.json", "tokenizers.json", "schedules.bin", "attention.onnx"
PAGE = Path(__file__).parent / "page"
STEPS = 50
"""Schedules of up to this many steps are exported, and the default's."""
FILE_BYTES = 64_000_000
"""Maximum bytes of weights per file; static hosts accept 25 MB (Cloudflare Pages), 100 MB (GitHub) and more."""
LEAST_FILE = 1_000_000
WEB_OPERATORS = frozenset(
    (
        *("Attention", "BiasAdd", "BiasGelu", "BiasSplitGelu", "FastGelu", "FusedConv", "FusedMatMul", "Gelu"),
        *("GroupQueryAttention", "MatMulNBits", "MultiHeadAttention", "QuickGelu", "RotaryEmbedding"),
        *("SimplifiedLayerNormalization", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"),
    )
)
"""Operators of com.microsoft that ONNX Runtime Web supports on WebGPU."""


@dataclass(frozen=True)
class BrowserWanted:
    """Options of an export for browsers.

    scheduler, steps, guidance_scale: the page's initial settings; None: the pipeline's. checker: include the safety
    checker, if any. height, width: the page's initial size; None: the model's. file_bytes: maximum bytes of weights per
    file.
    """

    runtime: Runtime
    scheduler: str | None = None
    steps: int | None = None
    guidance_scale: float | None = None
    checker: bool = True
    height: int | None = None
    width: int | None = None
    file_bytes: int = FILE_BYTES


@dataclass(frozen=True)
class BrowserExport:
    """An exported folder with a page.

    weights: a visitor's download in bytes, in `files` files. page: the page's files. schedule: the initial one.
    float16: whether WebGPU needs shader-f16. left_out: see `Exported`.
    """

    folder: Path
    weights: int
    files: int
    float16: bool
    schedule: Coefficients
    runtime: Runtime
    left_out: tuple[str, ...] = ()


def export_browser(folder: Path, out: Path, wanted: BrowserWanted) -> BrowserExport:
    """Write the pipeline of a folder, with a page that runs it, to the folder `out`.

    Raises UsageError for a pipeline that needs more than text, has a tokenizer other than CLIP's, or operators that
    ONNX Runtime Web lacks; CacheError if it cannot be written. An existing folder then stays unchanged.
    """
    if wanted.file_bytes < LEAST_FILE:
        raise UsageError(f"{wanted.file_bytes:,} bytes is too small", where="--file-size", remedy="Use 1MB or more.")
    source = open_source(folder, out, checker=wanted.checker)
    scale = guidance_of(folder, wanted.guidance_scale)
    what = source.family.latents(source.configs)
    require_size(what.granularity, wanted.height, wanted.width)
    parts = make_parts(source, guided=source.family.guided(source.configs, scale))
    traced = parts.traced
    tokenizers = tokenizer_tables(source.companions, traced.ids, traced.lengths, traced.templates)
    _require_clip(tokenizers, folder)
    for name, model in parts.models.items():
        _require_operators(model, name)
        with_right_angles(model)
    schedules = _schedules(source, wanted)
    buffers = {name: into_buffers(model, name, wanted.file_bytes) for name, model in parts.models.items()}
    contents = {f"{name}.onnx": model.SerializeToString(deterministic=True) for name, model in parts.models.items()}
    contents |= {TOKENIZERS: compact(tokenizers), SCHEDULES: schedules.content}
    if fused := any(map(has_fused_attention, parts.models.values())):
        contents[PROBE] = attention_probe()
    page = {path.name: path for path in sorted(PAGE.iterdir()) if path.is_file()}
    runtime = {path.name: path for path in wanted.runtime.files}
    weights = [name for each in buffers.values() for buffer in each for name in buffer.files]
    names = [INDEX, *contents, *weights, *page, *runtime]
    with (
        os_errors_as("cannot be written", out, "Free space or fix the permissions, then run again.", CacheError),
        replacing_all([out / name for name in names]) as written,
    ):
        files = {}
        for name, content in contents.items():
            written[out / name].write_bytes(content)
            files[name] = (len(content), hashlib.sha256(content).hexdigest())
        for each in buffers.values():
            for buffer in each:
                digests = write_buffer(buffer, folder, lambda name: written[out / name])
                files |= {name: (buffer.files[name], digest) for name, digest in digests.items()}
        for name, path in (*page.items(), *runtime.items()):
            copy_file(path, written[out / name])
        size = (what.image_size if each is None else each for each in (wanted.height, wanted.width))
        described = {
            "format_version": FORMAT_VERSION,
            "name": _name(folder),
            "family": source.family.title,
            "onnxruntime_web": {"version": wanted.runtime.version, "folder": wanted.runtime.url},
            "float16": any(map(_has_float16, parts.models.values())),
            "attention": PROBE_SIZES if fused else None,
            "largest": max(map(_largest, parts.models.values())),
            "latents": latents_data(what),
            "size": dict(zip(("height", "width"), size, strict=True)),
            "guidance": {"scale": scale, "offset": source.family.guidance_offset, "rows": parts.guided},
            "conditions": list(parts.conditions),
            "texts": {
                name: {"table": name.removeprefix("negative_"), "negative": negative}
                for name, (_, negative) in traced.ids.items()
            },
            "schedule": {
                "scheduler": schedules.own.scheduler,
                "steps": schedules.own.steps,
                "tables": schedules.tables,
            },
            "graphs": {name: _graph(model, buffers[name]) for name, model in parts.models.items()},
            "files": {name: {"bytes": size, "sha256": digest} for name, (size, digest) in files.items()},
        }
        before = _names_of(out)
        written[out / INDEX].write_bytes(compact(described))
    for name in before - set(names):
        (out / name).unlink(missing_ok=True)
    total = sum(size for size, _ in files.values())
    return BrowserExport(
        out, total, len(files), bool(described["float16"]), schedules.own, wanted.runtime, left_out(folder)
    )


def _require_clip(tokenizers: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    if others := [name for name, table in tokenizers.items() if "merges" not in table]:
        raise UsageError(
            f"the page has only CLIP's tokenizer, but {', '.join(others)} differ",
            where=str(folder),
            remedy="Stable Diffusion 1, 2 and XL can be exported for browsers; others as one graph: --one-file.",
        )


def _require_operators(model: Any, name: str) -> None:
    found = {
        node.op_type if node.domain == "com.microsoft" else f"{node.domain}.{node.op_type}"
        for node in model.graph.node
        if node.domain not in ("", "ai.onnx")
    }
    if lacking := sorted(found - WEB_OPERATORS):
        raise UsageError(
            f"its graph has {', '.join(lacking)}, which ONNX Runtime Web lacks",
            where=name,
            remedy="Export a pipeline that was built for another target, such as cpu.",
        )


@dataclass(frozen=True)
class _Schedules:
    """The schedules that the page can choose from.

    own: the default schedule. tables: steps -> runs, draws, and offset of its numbers in `content`: the timesteps,
    then the rows of the table, all little-endian float32.
    """

    own: Coefficients
    tables: Mapping[int, Mapping[str, int]]
    content: bytes


def _schedules(source: Source, wanted: BrowserWanted) -> _Schedules:
    """The schedules. Raises UsageError if the scheduler cannot make the initial number of steps."""
    family, scheduler = source.family, source.companions[SCHEDULER]
    defaults = folder_defaults(source.folder)["text"]
    steps = defaults.steps if wanted.steps is None else wanted.steps

    def made(count: int) -> Coefficients:
        return coefficients(family, scheduler, wanted.scheduler, count, defaults.eta, scheduler.config)

    own = made(steps)
    tables, content = {}, bytearray()
    for count in (*range(1, STEPS + 1), *([steps] if steps > STEPS else [])):
        try:
            found = own if count == steps else made(count)
        except UsageError:  # the page does not offer these numbers of steps
            continue
        tables[count] = {"runs": len(found.timesteps), "draws": found.draws, "begin": len(content)}
        content += _little(found.timesteps) + _little(found.table)
    return _Schedules(own, tables, bytes(content))


def _little(numbers: np.ndarray) -> bytes:
    return numbers.astype("<f4").tobytes()


def _graph(model: Any, buffers: tuple[Buffer, ...]) -> dict[str, Any]:
    inputs = [item.name for item in model.graph.input]
    return {
        "inputs": inputs,
        "data": [{"path": each.path, "bytes": each.bytes, "files": list(each.files)} for each in buffers],
    }


def _name(folder: Path) -> str:
    if (folder / MANIFEST_FILE).exists():
        return read_manifest(folder).origin.name
    return folder.resolve().name


def _has_float16(model: Any) -> bool:
    from onnx import TensorProto

    return any(tensor.data_type == TensorProto.FLOAT16 for tensor, _ in initializers_and_constants(model))


def _largest(model: Any) -> int:
    return max((tensor_bytes(tensor) for tensor, _ in initializers_and_constants(model)), default=0)


def _names_of(out: Path) -> set[str]:
    """The files of an earlier export; empty if there was none."""
    try:
        found = json.loads((out / INDEX).read_bytes())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return set()
    return {name for name in found if isinstance(name, str) and Path(name).name == name}
