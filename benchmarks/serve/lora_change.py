"""Measure a change of LoRAs in the server's engine at full size: the next request's latency, and bit-identical weights.

    python benchmarks/serve/lora_change.py GRAPHS NAME... [--steps 20] [--rank 16] [--rounds 6]

GRAPHS: output of benchmarks/gpu/structures.py for `synthetic:` models; NAME: one of them. Their weights are bound here.
Two random LoRAs change every linear layer and 1x1 convolution of the attentions, and the text encoders' layers. A job
is timed from submission to image: with the previous job's LoRAs, with others that are kept, and with others at a new
scale. The weights that the sessions then read are compared with the output of `bind`, byte by byte.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", type=Path)
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, help="the figures as JSON")
    given = parser.parse_args()
    from benchmarks.gpu.pipelines_on_gpu import say

    found = {}
    for name in given.names:
        with tempfile.TemporaryDirectory(prefix="sdflow-loras-") as scratch:
            found[name] = measured(given, given.graphs / name, Path(scratch))
        if given.out:
            given.out.write_text(json.dumps(found, indent=1) + "\n")
    say("| pipeline | image, the same LoRA | + another, kept | + another, new | bits |\n|---|---|---|---|---|")
    for name, row in found.items():
        same, bits = row["same"], f"{row['equal']} of {row['weights']} weights, {row['bytes'] / 1e6:.0f} MB"
        say(f"| {name} | {same:.3f} s | {row['kept'] - same:+.3f} s | {row['new'] - same:+.3f} s | {bits} |")


def measured(given: Any, graphs: Path, scratch: Path) -> dict[str, Any]:
    from benchmarks.gpu.pipelines_on_gpu import materialize, say
    from sdflow.manifest import read_manifest
    from sdflow.serve.engine.served_pipeline import ServedPipeline
    from sdflow.serve.jobs import LoraFile
    from sdflow.serve.loras.live_loras import Structure
    from sdflow.serve.loras.lora_pipelines import LoraPipelines
    from sdflow.sources import PlainDigests, reopen_checkpoint

    begun = time.perf_counter()

    def told(what: str) -> None:
        say(f"[{graphs.name}] {time.perf_counter() - begun:.1f} s: {what}")

    folder = scratch / graphs.name
    materialize(graphs, folder)
    told("its weights are written")
    checkpoint = reopen_checkpoint(read_manifest(graphs).origin, str(graphs), digests=PlainDigests())
    structures = {
        name: Structure(name, graphs / name, checkpoint.submodels[name].load, ())
        for name in checkpoint.family.with_loras
        if (graphs / name).is_dir()
    }
    for number, name in enumerate(("first", "second")):
        count = write_lora(scratch / f"{name}.safetensors", structures, given.rank, number)
    told(f"two LoRAs of rank {given.rank}, {count} layers each")
    base = ServedPipeline.load(folder)
    pipelines = LoraPipelines(folder, base, scratch, 64 << 30)
    pipelines.built_from = checkpoint, structures  # not of a cache

    def seconds(*wanted: tuple[str, float]) -> float:
        loras = tuple(LoraFile(each, str(scratch / f"{each}.safetensors"), each, scale) for each, scale in wanted)
        return draw(pipelines, loras, given.steps)

    plain = [seconds() for _ in range(4)]
    told(f"an image without LoRAs: {statistics.median(plain[1:]):.3f} s")
    pipelines.prepare()
    told("sessions for LoRAs are made")
    first = [seconds(("first", 1.0)), seconds(("second", 1.0))]
    told(f"the first images with them, captured now: {first[0]:.3f} s, and with the second LoRA {first[1]:.3f} s")
    same, kept, new = [], [], []
    for number in range(given.rounds):
        name, other = ("first", "second")[:: (-1) ** number]
        seconds((name, 1.0))
        same.append(seconds((name, 1.0)))
        kept.append(seconds((other, 1.0)))
        new.append(seconds((name, 0.5 + number / 100)))
    row: dict[str, Any] = {
        "plain": statistics.median(plain[1:]),
        "first": first,
        "same": statistics.median(same),
        "kept": statistics.median(kept),
        "new": statistics.median(new),
        "every": {"same": same, "kept": kept, "new": new},
        "memory": torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None,
    }
    told(f"measured: {row['every']}")
    seconds(("first", 0.8), ("second", -0.3))
    inputs = [(scratch / "first.safetensors", 0.8), (scratch / "second.safetensors", -0.3)]
    row |= compared(pipelines, structures, scratch / "bound", inputs)
    told(f"compared: {row['equal']} of {row['weights']}")
    return row


def write_lora(path: Path, structures: Mapping[str, Any], rank: int, seed: int) -> int:
    """Random values for the layers that trainers touch; how many."""
    import numpy as np
    from safetensors.numpy import save_file

    random, values = np.random.default_rng(seed), {}
    for submodel, structure in structures.items():
        for key, shape in structure.parameters.items():
            touched = ".attentions." in key if submodel == "unet" else ".self_attn." in key or ".mlp." in key
            if not touched or len(shape) < 2 or not key.endswith(".weight"):
                continue
            module = f"{submodel}.{key.removesuffix('.weight')}"
            for name, size in (("A", (rank, *shape[1:])), ("B", (shape[0], rank, *(1 for _ in shape[2:])))):
                values[f"{module}.lora_{name}.weight"] = (random.standard_normal(size) * 0.02).astype(np.float16)
    save_file(values, path)
    return len(values) // 2


def draw(pipelines: Any, loras: tuple[Any, ...], steps: int) -> float:
    """Seconds until an image is there."""
    from sdflow.serve.engine.engine import Engine
    from sdflow.serve.jobs import Failed, Job, Message

    said: list[Message] = []
    begun = time.perf_counter()
    engine = Engine(lambda job: pipelines.served(job.loras), {"it": {1: 1.0}}, said.append)
    arguments = {"num_inference_steps": steps}
    engine.submit(Job("a", 0, "it", "a photo of an astronaut", 1, arguments=arguments, loras=loras))
    while engine.busy:
        engine.turn()
    for each in said:
        if isinstance(each, Failed):
            raise SystemExit(each.what)
    return time.perf_counter() - begun


def compared(
    pipelines: Any, structures: Mapping[str, Any], scratch: Path, loras: list[tuple[Path, float]]
) -> dict[str, int]:
    """How many weights have the bytes that `bind` writes, of those that the sessions of the last image read from memory."""
    from sdflow.runtime.sessions.live_weights import own_values
    from sdflow.weights.bind import BindRequest, bind
    from sdflow.weights.lora import LoraInput

    live, equal, weights, size = pipelines.prepare(), 0, 0, 0
    for name, structure in structures.items():
        (scratch / name).mkdir(parents=True)
        inputs = [LoraInput(path, scale) for path, scale in loras]
        bind(BindRequest(name, structure.folder, structure.load, inputs), scratch / name)
        held = live.base.submodels[name].session.live
        expected = own_values(scratch / name / "model.onnx", set(held), "cpu")
        for each, values in held.items():
            found = values.cpu().flatten().view(torch.uint8)  # a convolution's is held as a matrix
            equal += torch.equal(found, expected[each].flatten().view(torch.uint8))
            weights, size = weights + 1, size + found.numel()
    return {"equal": equal, "weights": weights, "bytes": size}


if __name__ == "__main__":
    main()
