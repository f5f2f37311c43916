"""Measure ONNX Runtime's search for fusions with and without `sdflow.weights.faster_fusion`.

    python benchmarks/build/fusion.py [MODEL] [--target cuda] [--blocks N] [--json FILE]

MODEL: synthetic:sd15 by default, whose UNet is fused. --blocks: use instead the transformer of Stable Diffusion 3.5
with this many blocks of few channels, whose graph has the nodes of a large one. The graph is exported once, without
weights. Each variant runs in a separate process. Times are processor seconds without imports. All variants must write
the same bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.build.structure_and_weights import SILENCE, chain, load_of

WAYS = ("all", "no maps kept", "no expressions kept", "no order", "none")


def steps(model: str, target: str, blocks: int) -> tuple[str, str, dict[str, Any], list[Any]]:
    """Family, submodel, how to load it without weights, and the passes that export and fuse it."""
    from sdflow.passes.chain import ChainStep
    from sdflow.weights.structure import hollow

    export, fuse = chain("unet", target)[:2]
    if not blocks:
        family = "stable_diffusion_xl" if "sdxl" in model else "stable_diffusion"
        return family, "unet", hollow(load_of(model, "unet")), [export, fuse]
    load = hollow(load_of("synthetic:sd35-tiny", "transformer"))
    load["config"]["num_layers"] = blocks
    return "stable_diffusion_3", "transformer", load, [export, ChainStep(fuse.implementation, {"model_type": "mmdit"})]


def run(index: int, source: Path | None, out: Path, options: argparse.Namespace) -> float:
    """Run one pass without weights. Returns its processor seconds."""
    from sdflow.passes.worker import run_pass

    family, submodel, load, passes = steps(options.model, options.target, options.blocks)
    step = passes[index]
    out.mkdir()
    request = {
        "pass": step.implementation.name,
        "folder": ".",
        "submodel": submodel,
        "model": str(source) if source else None,
        "symbolic": True,
        "family": family,
        "checkpoint": {} if source else load,
        "loras": [],
        "config": step.implementation.Config(**step.config).model_dump(mode="json"),
        "out": str(out),
    }
    import olive.model  # noqa: F401
    import onnxruntime.transformers.optimizer  # noqa: F401

    begun = time.process_time()
    run_pass(request, lambda phrase: None)
    return time.process_time() - begun


def fuse(way: str, source: Path, out: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Fuse in one of WAYS. Returns its processor seconds and the digest of what it wrote."""
    from sdflow.weights import faster_fusion

    parts = {"no maps kept": "kept_maps", "no expressions kept": "kept_expressions", "no order": "nodes_in_order"}
    for name in parts.values() if way == "none" else filter(None, [parts.get(way)]):
        setattr(faster_fusion, name, contextlib.nullcontext)
    seconds = run(1, source, out, options)
    return {"way": way, "seconds": seconds, "sha256": hashlib.sha256((out / "model.onnx").read_bytes()).hexdigest()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="synthetic:sd15")
    parser.add_argument("--target", default="cuda")
    parser.add_argument("--blocks", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.update(SILENCE)
    spawn = multiprocessing.get_context("spawn")
    found = []
    with tempfile.TemporaryDirectory(prefix="fusion-") as folder:
        source = Path(folder) / "exported"
        with spawn.Pool(1) as pool:
            pool.apply(run, (0, None, source, options))
        for way in WAYS:
            with spawn.Pool(1) as pool:
                found.append(pool.apply(fuse, (way, source, Path(folder) / way, options)))
            print(f"{way:22} {found[-1]['seconds']:7.1f} s", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    different = len({each["sha256"] for each in found}) > 1
    print("the graphs differ" if different else "the same bytes")
    return int(different)


if __name__ == "__main__":
    sys.exit(main())
