"""Time a step of a diffusion transformer in turns in one process: sdflow, and PyTorch with compiled repeated blocks.

Used by `beside_float32.py --compiled`. Compiling a whole transformer of 24 to 57 blocks takes minutes; its two or three
kinds of blocks are each compiled once.
"""

from __future__ import annotations

import copy
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.gpu.in_turns import in_turns
from benchmarks.gpu.pipelines_on_gpu import say, synchronize
from benchmarks.gpu.step_latency import kernels_of, lines, told

Run = Callable[[], Any]
IN_A_ROW = 10
"""Steps for one measurement."""
FLOAT8 = "float8"
"""What PyTorch's modules in bfloat16 are called whose large products are in float8 (float8_linear.py)."""


def halves_of(dtype: str) -> torch.dtype:
    """The 16 bits that a module of this name has its other values in."""
    return torch.bfloat16 if dtype == FLOAT8 else getattr(torch, dtype)


def compile_blocks(module: Any) -> int:
    """Compile the blocks that a transformer holds in lists, in place; how many."""
    blocks = [each for part in module.children() if isinstance(part, torch.nn.ModuleList) for each in part]
    blocks = [each for each in blocks if list(each.children())]
    for each in blocks:
        each.compile(fullgraph=True, dynamic=False)
    return len(blocks)


def captured(run: Run) -> Run:
    """The same as one CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def torch_runs(dtype: str, network: Any, inputs: Mapping[str, torch.Tensor], device: str) -> dict[str, Run]:
    """Ways to run PyTorch's module by name: eager and with its blocks compiled. inputs: of its ports, on the host."""
    kind = halves_of(dtype)
    exact = {port.name for port in network.ports.inputs if port.exact}
    given = {
        name: value.to(device, kind) if value.is_floating_point() and name not in exact else value.to(device)
        for name, value in inputs.items()
    }
    calls = []
    hook = network.module.register_forward_pre_hook(
        lambda module, positional, named: calls.append((positional, named)), with_kwargs=True
    )
    network.model.reference(network.module, given)
    hook.remove()
    ((positional, named),) = calls
    module = copy.deepcopy(network.module)
    begun = time.perf_counter()
    blocks = compile_blocks(module)
    compiled = partial(module, *positional, **named)
    compiled()
    synchronize()
    say(f"PyTorch, {dtype}: {blocks} blocks compiled in {time.perf_counter() - begun:.0f} s")
    return {f"eager {dtype}": partial(network.module, *positional, **named), f"compiled {dtype}": compiled}


def our_run(pipeline: Any, prompt: str, latents: torch.Tensor, call: Mapping[str, Any]) -> Run:
    """A step of a drawing, as its loop runs it."""
    drawing = pipeline.drawing(prompt, latents=latents, **call)
    with pipeline.place.current():
        noise = drawing.latents()

    def run() -> Any:
        with pipeline.place.current():
            return drawing.denoiser.run(drawing.inputs, noise, 1)

    return run


def measure(runs: Mapping[str, Run], rounds: int, in_a_row: int = IN_A_ROW) -> dict[str, list[float]]:
    """Milliseconds of a step by name, one number a round."""
    return in_turns([("step", name, run) for name, run in runs.items()], rounds, in_a_row)["step"]


def profiled(runs: Mapping[str, Run], top: int = 12) -> dict[str, Any]:
    """The kernels of a step by name: [kernel, milliseconds, launches], the longest first; the first ones are printed."""
    found = {}
    for name, run in runs.items():
        try:
            kernels = kernels_of(SimpleNamespace(run=lambda what, run=run: run()), "step")  # type: ignore[arg-type]
        except Exception:  # noqa: BLE001  the times are there
            say(f"{name}: no profile: {traceback.format_exc(limit=1)}")
            continue
        found[name] = [[*each] for each in kernels]
        say("\n".join([f"{name}: {told(kernels)}", *lines(kernels)[:top]]))
    return found
