"""Run pipelines at full size on a GPU: node placement on CUDA, times and memory; images are kept to compare with
PyTorch.

    python benchmarks/gpu/pipelines_on_gpu.py GRAPHS --draw 'NAME {"num_inference_steps": 4}' ... --drawn DIR [--rounds 5]
        [--weights DIR] [--target cpu]
    python benchmarks/gpu/pipelines_beside_torch.py GRAPHS DIR NAME [--compile]

GRAPHS: output of benchmarks/gpu/structures.py for pipelines built from `synthetic:` models. Their weights are bound
here, as in BindWeights. NAME: a pipeline. The JSON holds arguments of its call; "control": true adds an image for each
ControlNet, "shown": 0.6 an image prompt at this scale for each IP-Adapter, "refiner_start" its refiner from there on,
"images": 8 is the batch size. The second command reads the inputs of each call from DIR. Memory is the driver's figure
for this process. --weights: output of benchmarks/gpu/with_weights.py. Needs torch, diffusers, transformers, accelerate,
onnx and ONNX Runtime. Failures are printed in full and skipped. Use `--target cpu` to try it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import sqrt
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu.image_latency import session_of

PROMPT = "a photo of an astronaut riding a horse on mars"
REFINER = "refiner"
"""The folder in a base's, where `sdflow run` puts it."""


def say(*words: object) -> None:
    print(*words, flush=True)


def materialize(graphs: Path, out: Path, linked: Mapping[str, Path] = MappingProxyType({})) -> None:
    """The pipeline folder with its weights; a refiner's in it. linked: submodels that are elsewhere, or will be."""
    from sdflow.manifest import read_manifest
    from sdflow.sources import PlainDigests, find_lora, reopen_checkpoint
    from sdflow.weights.bind import BindRequest, bind
    from sdflow.weights.lora import LoraInput

    manifest = read_manifest(graphs)
    checkpoint = reopen_checkpoint(manifest.origin, str(graphs), digests=PlainDigests())
    left = {REFINER, *manifest.parts}
    shutil.copytree(
        graphs, out, ignore=lambda folder, names: [n for n in names if Path(folder) == graphs and n in left]
    )

    found = [
        (find_lora(lora.reference, lora.weight_name, download=False), lora.scale) for lora in manifest.origin.loras
    ]
    loras = [LoraInput(path, scale) for path, scale in found]

    def weights(name: str) -> None:
        if name in linked:
            (out / name).symlink_to(linked[name], target_is_directory=True)
            return
        (out / name).mkdir()
        taken = loras if name in checkpoint.family.with_loras else []
        bind(BindRequest(name, graphs / name, checkpoint.submodels[name].load, taken), out / name)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(weights, manifest.parts))
    if (graphs / REFINER).is_dir():
        materialize(graphs / REFINER, out / REFINER)


@contextmanager
def bound_pipeline(name: str, options: argparse.Namespace) -> Iterator[Path]:
    """The folder of a pipeline with its weights: of --weights, or bound now and gone afterwards."""
    if options.weights is not None:
        yield options.weights / name
        return
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="on-gpu-") as scratch:
        materialize(options.graphs / name, Path(scratch) / name)
        say(f"{name}: weights bound in {time.perf_counter() - begun:.0f} s")
        yield Path(scratch) / name


def distance(drawn: Any, expected: Any) -> float:
    """Relative L2 of the pixels around the expected image's mean."""
    return sqrt(float(((drawn - expected) ** 2).sum() / ((expected - expected.mean()) ** 2).sum()))


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def milliseconds(run: Callable[[], Any], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        synchronize()
        begun = time.perf_counter()
        run()
        synchronize()
        times.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(times)


def used() -> float:
    """GB in use on the device, by anybody."""
    if not torch.cuda.is_available():
        return float("nan")
    synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e9


def own_gigabytes() -> float:
    """In use on the device by this process, as the driver says."""
    if not torch.cuda.is_available():
        return float("nan")
    synchronize()
    asked = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    lines = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.splitlines()
    found = [line.split(",") for line in lines if line.count(",") == 1]
    own = [float(used) * 2**20 / 1e9 for pid, used in found if int(pid) == os.getpid()]
    return own[0] if own else float("nan")


def edges(size: int) -> Any:
    """An image of lines, as an edge detector gives."""
    import numpy as np

    rows, columns = np.mgrid[:size, :size]
    lines = ((rows + columns) % (size // 8) < 3) | ((rows - columns) % (size // 8) < 3)
    return np.repeat((255 * lines).astype("uint8")[..., None], 3, axis=2)


def given_to(pipeline: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """A call as arrays: latents, the images of its ControlNets and image prompts, and the rest as JSON."""
    import numpy as np
    from PIL import Image

    from sdflow.families.shared.image_prompts import adapter_count

    base = getattr(pipeline, "base", pipeline)
    more = dict(arguments)
    size = int(more.pop("size", base.latents.image_size))
    nets = len(base.nets) if more.pop("control", False) else 0
    adapters = adapter_count(base.configs[base.family.denoiser])
    images = int(more.pop("images", 1))
    more |= {"num_images_per_prompt": images} if images > 1 else {}
    shape = (images, base.latents.channels, size // base.latents.scale, size // base.latents.scale)
    shown = [np.asarray(Image.fromarray(edges(256)).rotate(30 * index)) for index in range(adapters)]
    return {
        "scale": float(more.pop("shown", 0.0)),
        "latents": torch.randn(shape, generator=torch.Generator().manual_seed(7)).numpy(),
        "control": np.stack([edges(size)] * nets) if nets else np.zeros(0),
        "shown": np.stack(shown) if shown else np.zeros(0),
        "call": json.dumps({"height": size, "width": size, **more}),
    }


def draw(pipeline: Any, given: dict[str, Any]) -> Any:
    """The image, as an array."""
    from PIL import Image

    base = getattr(pipeline, "base", pipeline)
    more: dict[str, Any] = {}
    if len(given["control"]):
        more["control"] = dict(zip(base.nets, map(Image.fromarray, given["control"]), strict=True))
    if given["scale"]:
        more["ip_adapter_image"] = [Image.fromarray(each) for each in given["shown"]]
        more["ip_adapter_scale"] = [given["scale"]] * len(given["shown"])
    # A generator of the CPU: schedulers that draw noise in every step draw the same everywhere.
    return pipeline(
        PROMPT,
        latents=torch.from_numpy(given["latents"]),
        generator=torch.Generator().manual_seed(0),
        output_type="np",
        **json.loads(given["call"]),
        **more,
    ).images


def placements(pipeline: Any, folder: Path) -> None:
    """Where the nodes of every session ran: a line each."""
    from sdflow.runtime.sessions.placement import placement

    for name, submodel in pipeline.submodels.items():
        for bound in submodel._bound.values():
            say(f"  {name}: {placement(bound.session, (folder / name / 'model.onnx').resolve())}")
    for denoiser in pipeline.denoisers.kept.values():
        for attribute in ("_text", "_step"):
            if hasattr(denoiser, attribute):
                path = (folder / pipeline.family.denoiser / "model.onnx").resolve()
                say(f"  {attribute}: {placement(session_of(getattr(denoiser, attribute)), path)}")


def measure(name: str, calls: list[dict[str, Any]], options: argparse.Namespace) -> None:
    import numpy as np

    from sdflow.runtime.ensemble import Ensemble
    from sdflow.runtime.pipeline import Pipeline

    with bound_pipeline(name, options) as folder:
        if torch.cuda.is_available():
            torch.zeros(1, device="cuda")
            torch.cuda.empty_cache()
        before, begun = own_gigabytes(), time.perf_counter()
        if any("refiner_start" in call for call in calls):
            ours: Any = Ensemble.load(folder, folder / REFINER, options.target, checker=False)
        else:
            ours = Pipeline.load(folder, options.target, checker=False)
        for index, call in enumerate(calls):
            given = given_to(ours, call)
            drawn = draw(ours, given)
            say(f"{name} {json.dumps(call)}: first image {time.perf_counter() - begun:.1f} s after loading began")
            np.savez(options.drawn / f"{name}-{index}.npz", drawn=drawn, **given)
            draw(ours, given)
            took = milliseconds(lambda given=given: draw(ours, given), options.rounds)
            say(
                f"  sdflow: {took:.1f} ms; device memory {own_gigabytes() - before:.2f} GB beside a context's {before:.2f}"
            )
            begun = time.perf_counter()
        placements(getattr(ours, "base", ours), folder)
        if hasattr(ours, "refiner"):
            placements(ours.refiner, folder / REFINER)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", type=Path)
    parser.add_argument("--draw", action="append", required=True, metavar="NAME JSON")
    parser.add_argument("--drawn", type=Path, required=True, metavar="DIR")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--target", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    options.drawn.mkdir(parents=True, exist_ok=True)
    calls: dict[str, list[dict[str, Any]]] = {}
    for each in options.draw:
        name, _, text = each.partition(" ")
        calls.setdefault(name, []).append(json.loads(text or "{}"))
    failed = False
    for name, wanted in calls.items():
        try:
            measure(name, wanted, options)
        except Exception:  # noqa: BLE001  the others are measured all the same
            traceback.print_exc()
            failed = True
    sys.exit(failed)


if __name__ == "__main__":
    main()
