"""ONNX Runtime Web for a page: npm's files next to the page, or a public CDN."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from sdflow.errors import UsageError

VERSION = "1.30.0"
"""The version that the page was tested with."""
PACKAGE = "onnxruntime-web"
CDN = f"https://cdn.jsdelivr.net/npm/{PACKAGE}@{VERSION}/dist/"
CDN_WORD = "cdn"
FILES = (
    "ort.webgpu.min.mjs",
    "ort-wasm-simd-threaded.asyncify.mjs",
    "ort-wasm-simd-threaded.asyncify.wasm",
    "ort.wasm.min.mjs",
    "ort-wasm-simd-threaded.mjs",
    "ort-wasm-simd-threaded.wasm",
)
"""The page's files: three for WebGPU, three for the CPU."""
INSTALL = f"npm install --ignore-scripts {PACKAGE}@{VERSION}"


@dataclass(frozen=True)
class Runtime:
    """ONNX Runtime Web, as the page uses it.

    url: of the folder that the page loads it from. files: to copy next to the page.
    """

    url: str
    files: tuple[Path, ...] = ()
    version: str = VERSION


def find_runtime(place: str | None, folder: Path) -> Runtime:
    """Find ONNX Runtime Web. place: a package folder from npm, `cdn`, or None: node_modules in `folder`.

    Raises UsageError if it is missing, incomplete or of another version.
    """
    if place == CDN_WORD:
        return Runtime(CDN)
    package = folder / "node_modules" / PACKAGE if place is None else Path(place)
    if not (package / "package.json").is_file():
        raise UsageError(
            f"{PACKAGE} is not in {package}",
            where="--ort",
            remedy=f"Run {INSTALL} here, or write --ort {CDN_WORD}: visitors then load it from jsdelivr.net.",
        )
    try:
        version = json.loads((package / "package.json").read_bytes())["version"]
    except (ValueError, KeyError, TypeError):
        version = "unknown"
    files = tuple(package / "dist" / name for name in FILES)
    missing = [path.name for path in files if not path.is_file()]
    if version != VERSION or missing:
        what = f"it is version {version!s:.40}" if version != VERSION else f"it lacks {', '.join(missing)}"
        raise UsageError(f"{what}; the page needs {VERSION}", where=str(package), remedy=f"{INSTALL}.")
    return Runtime("./", files)
