"""Output of `sdflow export`."""

from __future__ import annotations

from pathlib import Path

from sdflow.export.browser import BrowserExport
from sdflow.export.one_file import Exported
from sdflow.export.schedule import Coefficients
from sdflow.report.output import print_json, print_table, put
from sdflow.units import spell_bytes


def print_export(exported: Exported, *, as_json: bool = False) -> None:
    """The files, and the graph's inputs and outputs."""
    if as_json:
        content = {
            "files": [str(path) for path in exported.files],
            "bytes": exported.bytes,
            "inputs": list(exported.inputs),
            "outputs": list(exported.outputs),
            "scheduler": exported.schedule.scheduler,
            "steps": exported.schedule.steps,
            "left_out": list(exported.left_out),
        }
        print_json("export", content)
        return
    rows = [(str(path), spell_bytes(size)) for path, size in exported.files.items()]
    print_table("", ("file", "bytes"), rows, ("bytes",))
    for value in exported.inputs:
        put(f"  in   {value}")
    for value in exported.outputs:
        put(f"  out  {value}")
    for each in exported.left_out:
        put(f"  without {each}")
    put(f"{_words(exported.schedule)}. Keep the files together.")


def print_browser(exported: BrowserExport, *, as_json: bool = False) -> None:
    """The folder, a visitor's download, and how to serve it."""
    if as_json:
        content = {
            "folder": str(exported.folder),
            "files": exported.files,
            "bytes": exported.weights,
            "float16": exported.float16,
            "scheduler": exported.schedule.scheduler,
            "steps": exported.schedule.steps,
            "onnxruntime_web": exported.runtime.url,
            "left_out": list(exported.left_out),
        }
        print_json("export_browser", content)
        return
    precision = "float16: WebGPU needs shader-f16" if exported.float16 else "float32"
    put(
        f"{exported.folder}: a page, and {exported.files} files that a visitor downloads once, {spell_bytes(exported.weights)}"
    )
    put(f"  {precision}; {_words(exported.schedule)}")
    if not exported.runtime.files:
        put(f"  visitors load ONNX Runtime Web from {exported.runtime.url}")
    for each in exported.left_out:
        put(f"  without {each}")
    put(f"Try it: python -m http.server --directory {exported.folder}")


def print_schedule(table: Coefficients, path: Path, *, as_json: bool = False) -> None:
    """The table's path and scheduler."""
    if as_json:
        print_json("schedule", {"file": str(path), "scheduler": table.scheduler, "steps": table.steps})
        return
    put(f"{path}: {_words(table)}")


def _words(table: Coefficients) -> str:
    noises = f", {table.draws} noise samples" if table.draws else ""
    return f"{table.scheduler}, {table.steps} steps, {len(table.timesteps)} denoiser runs{noises}"
