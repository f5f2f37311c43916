"""The table of engines: their settings, requirements, and whether they run by default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sdflow.artifact import MODEL_FILE
from sdflow.bench.device import Device
from sdflow.errors import TargetUnavailableError, UsageError
from sdflow.families.shared.approximation import EXACT, Approximation
from sdflow.machine.providers import onnxruntime_for
from sdflow.manifest import read_manifest
from sdflow.onnx_model.facts import precision_of
from sdflow.runtime.files.folder import folder_family, refiner_of
from sdflow.targets import TARGETS

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Engine:
    """One way to generate the image.

    target: of sdflow's runtime on ONNX Runtime. Without it: diffusers' pipeline on PyTorch, which the other fields
    describe.
    attention: diffusers' implementation: "plain" matrix products, PyTorch's scaled_dot_product_attention, or xFormers.
    compile_mode: of torch.compile. flags: of its compiler, in addition to the mode's. fused_qkv: projections as one
    product.
    int8: linear layers in int8, with dynamically quantized inputs. needs: packages. cuda: requires a CUDA device.
    slow: compiles for minutes, so it only runs on request. fewer: its approximation; none in the table has one;
    exact: the engine that it approximates.
    """

    name: str
    title: str
    target: str = ""
    attention: Literal["plain", "sdpa", "xformers"] = "sdpa"
    compile_mode: str | None = None
    flags: Mapping[str, bool] | None = None
    fused_qkv: bool = False
    int8: bool = False
    needs: tuple[str, ...] = ()
    cuda: bool = False
    slow: bool = False
    fewer: Approximation = EXACT
    exact: str = ""


# https://github.com/huggingface/diffusers/blob/main/docs/source/en/tutorials/fast_diffusion.md
_FAST = {
    "conv_1x1_as_mm": True,
    "coordinate_descent_tuning": True,
    "epilogue_fusion": False,
    "coordinate_descent_check_all_directions": True,
}
_FAST_INT8 = {**_FAST, "force_fuse_int_mm_with_mul": True, "use_mixed_mm": True}

_MAX = "max-autotune"

ENGINES: Mapping[str, Engine] = {
    engine.name: engine
    for engine in (
        *(Engine(f"ort-{name}", f"sdflow, ONNX Runtime, {TARGETS[name].title}", target=name) for name in TARGETS),
        Engine("torch-eager", "PyTorch eager, attention as matrix products", attention="plain"),
        Engine("torch-sdpa", "PyTorch eager, scaled_dot_product_attention"),
        Engine("torch-xformers", "PyTorch eager, xFormers", attention="xformers", needs=("xformers",), cuda=True),
        Engine("torch-fused-qkv", "PyTorch eager, SDPA, fused QKV", fused_qkv=True),
        Engine("torch-compile", "torch.compile, reduce-overhead", compile_mode="reduce-overhead"),
        Engine("torch-compile-max", "torch.compile, max-autotune", compile_mode=_MAX, flags=_FAST, slow=True),
        Engine(
            "torch-compile-max-qkv",
            "torch.compile, max-autotune, fused QKV",
            compile_mode=_MAX,
            flags=_FAST,
            fused_qkv=True,
            slow=True,
        ),
        Engine(
            "torch-int8",
            "torch.compile, max-autotune, fused QKV, int8 dynamic",
            flags=_FAST_INT8,
            fused_qkv=True,
            int8=True,
            needs=("torchao",),
            compile_mode=_MAX,
            slow=True,
        ),
    )
}

BASELINES = ("torch-sdpa", "torch-eager")
"""Baselines for ratios: the first one that ran with the right image."""


@dataclass(frozen=True)
class Chosen:
    """An engine of the table, and why it does not run; None if it does."""

    engine: Engine
    skipped: str | None = None


def choose(names: Sequence[str], built_for: str, device: str) -> list[Chosen]:
    """Every engine of the table, or the named ones, each with the reason to skip it.

    built_for: the pipeline's target. device: "cuda" or "cpu", where PyTorch runs.
    Raises UsageError for a name that is not in the table.
    """
    for name in names:
        if name not in ENGINES:
            near = get_close_matches(name, ENGINES, n=1)
            raise UsageError(
                f"no engine is named {name}" + (f"; did you mean {near[0]}?" if near else ""),
                where="--engine",
                remedy=f"Known: {', '.join(ENGINES)}.",
            )
    wanted = [ENGINES[name] for name in dict.fromkeys(names)] or list(ENGINES.values())
    return [
        Chosen(engine, missing(engine, device) or (None if names else not_by_default(engine, built_for, device)))
        for engine in wanted
    ]


def with_approximations(chosen: Sequence[Chosen], fewer: Approximation) -> list[Chosen]:
    """Follow each of sdflow's running engines by its approximation; unchanged without one."""
    found = []
    for each in chosen:
        found.append(each)
        if fewer and each.skipped is None and each.engine.target:
            name, title = f"{each.engine.name}-approximation", f"an approximation: {fewer.spelled()}"
            found.append(Chosen(replace(each.engine, name=name, title=title, fewer=fewer, exact=each.engine.name)))
    return found


def missing(engine: Engine, device: str) -> str | None:
    """The missing requirements of an engine on this machine: `needs torchao`."""
    if engine.target:
        target = TARGETS[engine.target]
        try:
            onnxruntime_for(target)
        except TargetUnavailableError as error:
            return f"needs {target.title}: {error.what}"
        return None
    lacking = [name for name in engine.needs if find_spec(name) is None]
    needs = [*lacking, *(["a CUDA device"] if engine.cuda and device != "cuda" else [])]
    return f"needs {' and '.join(needs)}" if needs else None


def not_by_default(engine: Engine, built_for: str, device: str) -> str | None:
    """Why the engine runs only if `--engine` names it."""
    if engine.target and engine.target != built_for:
        return f"the pipeline was built for {built_for}"
    if engine.slow:
        return "compiles for minutes"
    if engine.compile_mode and device == "cpu":
        return "compiles for minutes on a CPU"
    return None


# The weights of engines


def dtype_of(folder: Path, engine: Engine, device: Device) -> str:
    """The type of the denoiser's weights: PyTorch's float16 on a GPU; a graph's own; TensorRT makes its own float16."""
    if not engine.target:
        return "float16" if device.kind == "cuda" else "float32"
    if engine.target == "tensorrt":
        return "float16"
    import onnx

    graph = onnx.load(folder / folder_family(folder).denoiser / MODEL_FILE, load_external_data=False).graph
    return precision_of(graph)


def quantized_of(folder: Path, engine: Engine) -> str:
    """The quantized types and submodels, such as "int8 in unet"; "" if there are none. PyTorch's weights are
    unquantized."""
    found: dict[str, list[str]] = {}
    for name, to in read_manifest(folder).origin.quantized.items() if engine.target else ():
        found.setdefault(to, []).append(name)
    return ", ".join(f"{to} in {' and '.join(names)}" for to, names in found.items())


def weight_bytes(folder: Path, engine: Engine, device: Device, modules: Mapping[str, torch.nn.Module]) -> int:
    """Bytes that loading an engine adds. modules: PyTorch's, which are already in memory."""
    if engine.target:
        refiner = refiner_of(folder)
        folders = {(folder / name).resolve() for name in folder_family(folder).drawing}
        if refiner is not None:
            folders |= {(refiner / name).resolve() for name in folder_family(refiner).drawing}
        return sum(path.stat().st_size for each in folders for path in each.rglob("*"))
    if device.kind == "cpu":
        return 0  # the modules' own memory is used
    different = {id(module): module for module in modules.values()}
    return sum(2 * parameter.numel() for module in different.values() for parameter in module.parameters())
