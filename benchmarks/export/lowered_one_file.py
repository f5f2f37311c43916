"""Run a graph of `sdflow export --one-file` for any target on the CPU. Its contrib operators, including those of the
loop body, are lowered as in `sdflow verify`; float16 stays where the graph has it.

    python benchmarks/export/lowered_one_file.py PIPELINE... [--steps 4] [--latents 8] [--any-size]

Generates an image with each pipeline's graph, one in diffusers' plain loop with its lowered submodels, and two with
PyTorch in float32 and float16. The first two should be equal, and no farther from float32 PyTorch than float16 PyTorch
is.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.export.one_file_feeds import graph_feeds

sys.path.insert(0, str(Path(__file__).parents[2]))

LOOP, TIMESTEP, TIMESTEPS = "Loop", "timestep", "timesteps"
PROMPT = "a large red circle on a blue background"


def lowered(graph: Path, folder: Path, names: Iterable[str], more: Iterable[Any] = ()) -> Any:
    """The ModelProto, of standard operators alone. folder: of the pipeline, whose submodels' graphs tell what ranks their values
    have. more: what tells of further values (`of_one_size`). Raises VerificationError for an operator that cannot be lowered."""
    import onnx

    from sdflow.onnx_model.nodes import in_order, read_by
    from sdflow.verify.lowering import lower

    model = onnx.load(graph, load_external_data=False)
    told = {info.name: info for name in names for info in _declared(_read(folder / name / "model.onnx"), f"{name}/")}
    told |= {info.name: info for info in more}
    ports = {f"{name}/{port}" for name in names for port in _ports(folder / name / "model.onnx")}
    ports |= {f"{name}/{TIMESTEPS}/{TIMESTEP}" for name in names}
    (loop,) = (node for node in model.graph.node if node.op_type == LOOP)
    (body,) = (attribute.g for attribute in loop.attribute if attribute.name == "body")
    rest = onnx.ModelProto()
    rest.CopyFrom(model)
    del rest.graph.node[:]
    rest.graph.node.extend(node for node in model.graph.node if node.op_type != LOOP)
    rest.graph.value_info.extend(told.values())
    casts = _set_aside(rest.graph, ports, told)
    loop_inputs = [name for name in loop.input if name]
    outer = read_by(body.node) | {item.name for item in body.output}
    outer -= {name for node in body.node for name in node.output} | {item.name for item in body.input}
    outer -= {tensor.name for tensor in body.initializer}
    for name in loop.output:
        rest.graph.input.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [None, None]))
    made = {name for node in rest.graph.node for name in node.output}
    read = {*outer, *loop_inputs, *(name for cast in casts for name in cast.input)}
    outside = lower(rest, expose=sorted(made & read))
    given = {item.name: item for item in (*outside.model.graph.input, *outside.model.graph.output)}
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}

    inner = onnx.ModelProto(ir_version=model.ir_version)
    inner.opset_import.extend(model.opset_import)
    inner.graph.CopyFrom(body)
    inner.graph.value_info.extend(told.values())
    inner_casts = _set_aside(inner.graph, ports, told)
    for name in sorted(outer):
        if name in tensors:
            inner.graph.initializer.append(tensors[name])
        else:
            item = inner.graph.input.add()
            item.CopyFrom(given[name])
            if name in told:
                item.type.CopyFrom(told[name].type)
    made = {name for node in inner.graph.node for name in node.output}
    inside = lower(inner, expose=sorted(made & {name for cast in inner_casts for name in cast.input})).model.graph
    nodes = in_order([*inside.node, *inner_casts])
    del inside.node[:], inside.output[len(body.output) :]
    inside.node.extend(nodes)
    _rename(inside, "in_the_loop/", keep={*outer, *(item.name for item in (*body.input, *body.output))})
    del inside.input[len(body.input) :]
    kept = [tensor for tensor in inside.initializer if tensor.name not in tensors]
    del inside.initializer[:]
    inside.initializer.extend(kept)

    whole = outside.model
    outputs = {item.name for item in model.graph.output}
    for items, wanted in (
        (whole.graph.output, outputs),
        (whole.graph.input, {item.name for item in model.graph.input}),
    ):
        chosen = [item for item in items if item.name in wanted]
        del items[:]
        items.extend(chosen)
    there = {tensor.name for tensor in whole.graph.initializer}
    whole.graph.initializer.extend(tensor for name, tensor in tensors.items() if name in {*outer, *loop_inputs} - there)
    again = onnx.helper.make_node(LOOP, loop.input, loop.output, loop.name, body=inside)
    nodes = in_order([*whole.graph.node, *casts, again])
    del whole.graph.node[:]
    whole.graph.node.extend(nodes)
    return whole


def of_one_size(model: Any, name: str, sizes: dict[str, int], guided: bool, runs: int) -> list[Any]:
    """What is known of the values of a denoiser that is taken apart for one size."""
    from sdflow.export.once import cut
    from sdflow.runtime.denoiser.moving import Moving
    from sdflow.runtime.denoiser.split import STEPS
    from sdflow.runtime.sessions.specialize import specialize

    found = cut(model, sizes, moving=Moving("sample", "timestep"), guided=guided)
    if found is None:
        return []
    return [
        *_declared(specialize(model, sizes).graph, f"{name}/"),
        *_declared(found.model.graph, f"{name}/"),
        *_declared(specialize(found.timestep, {STEPS: runs}).graph, f"{name}/{TIMESTEPS}/"),
    ]


def _read(path: Path) -> Any:
    import onnx

    return onnx.load(path, load_external_data=False).graph


def _declared(graph: Any, prefix: str) -> list[Any]:
    """What a submodel's graph says of its values, its ports among them, under the names that they have in the whole."""
    import onnx

    found = []
    for info in (*graph.input, *graph.value_info, *graph.output):
        item = onnx.ValueInfoProto()
        item.CopyFrom(info)
        item.name = prefix + info.name
        found.append(item)
    return found


def _ports(path: Path) -> list[str]:
    return [item.name for item in _read(path).input]


def _set_aside(graph: Any, ports: set[str], told: dict[str, Any]) -> list[Any]:
    """Takes the casts to a submodel's inputs out: the inputs become the graph's, for what is cast may be of any rank."""
    casts = [node for node in graph.node if node.output[0] in ports]
    kept = [node for node in graph.node if node.output[0] not in ports]
    del graph.node[:]
    graph.node.extend(kept)
    graph.input.extend(told[node.output[0]] for node in casts)
    return casts


def _rename(graph: Any, prefix: str, keep: set[str]) -> None:
    """All names but these get a prefix: those that a lowering makes up are the same in every graph."""

    def new(name: str) -> str:
        return name if name in keep or not name else prefix + name

    for node in graph.node:
        node.input[:] = [new(name) for name in node.input]
        node.output[:] = [new(name) for name in node.output]
    for tensor in graph.initializer:
        tensor.name = new(tensor.name)


def session_of(model: Any, folder: Path, threads: int) -> Any:
    """On the CPU, with nothing fused. folder: where the weights lie."""
    from sdflow.verify.lowering import Lowered
    from sdflow.verify.lowering import session_of as lowered_session

    return lowered_session(Lowered(model, {}, {}, {}), folder, threads=threads)


def runner(folder: Path, threads: int) -> Callable[[str, Any], Any]:
    """Runs submodels, lowered, one session at a time."""
    from sdflow.verify.artifact.graph import open_graph, run_graph

    held: dict[str, Any] = {}

    def run(name: str, inputs: Any) -> Any:
        if name not in held:
            held.clear()
            held[name] = open_graph(folder / name, "cuda", threads=threads)
        return run_graph(held[name], inputs)

    return run


def by_plain_loop(folder: Path, noise: Any, steps: int, scale: float, threads: int) -> Any:
    """The image that diffusers' loop draws with the submodels, each lowered by itself."""
    from sdflow.runtime.files.folder import folder_family
    from sdflow.verify.images import text_to_image
    from sdflow.verify.reference.selection import Selection

    what = Selection((), (PROMPT,), steps, scale, 0, noise.shape[2], noise.shape[3], (), ())
    return text_to_image(runner(folder, threads), folder_family(folder), folder, [PROMPT], noise, steps, what)


def by_pytorch(folder: Path, noise: Any, steps: int, scale: float, half: bool) -> Any:
    """The image of diffusers' own pipeline, with the weights of the checkpoint that the folder was built of."""
    import torch

    from sdflow.manifest import read_manifest
    from sdflow.sources import PlainDigests, reopen_checkpoint
    from sdflow.sources.load import load_pipeline

    checkpoint = reopen_checkpoint(read_manifest(folder).origin, str(folder), digests=PlainDigests())
    pipeline = load_pipeline(checkpoint)
    pipeline.set_progress_bar_config(disable=True)
    if half:
        pipeline.to(torch.float16)
    latents = torch.from_numpy(noise).to(pipeline.unet.dtype)
    size = {"height": noise.shape[2] * pipeline.vae_scale_factor, "width": noise.shape[3] * pipeline.vae_scale_factor}
    drawn = pipeline(PROMPT, latents=latents, num_inference_steps=steps, guidance_scale=scale, output_type="np", **size)
    return drawn.images


@dataclass(frozen=True)
class Draw:
    """One file of a pipeline, and the noise that it takes."""

    folder: Path
    noise: Any
    steps: int
    threads: int = 1

    def graph(self, out: Path, *, any_size: bool = False) -> tuple[Any, dict[str, Any]]:
        """The image of the exported graph, lowered; and what the JSON beside the graph says."""
        from sdflow.export.one_file import Wanted, export_one_file
        from sdflow.models.ports import Sizes
        from sdflow.runtime.files.folder import load_companions, onnx_submodels, submodel_config
        from sdflow.runtime.sessions.session import read_graph

        companions = load_companions(self.folder)
        names = onnx_submodels(self.folder)
        own = {name: submodel_config(self.folder, name) for name in names}
        images, _, rows, columns = self.noise.shape
        family = _family(self.folder)
        scale = family.latents(own).scale
        size = {} if any_size else {"height": rows * scale, "width": columns * scale, "images": images}
        export_one_file(self.folder, out, Wanted(steps=self.steps, negative=False, checker=False, **size))
        told = json.loads(Path(f"{out}.json").read_bytes())
        more: list[Any] = []
        if not any_size:
            (tokens,) = {each["length"] for each in told["tokenizers"].values()}
            guided = told["guidance_scale"] is not None
            sizes = Sizes((1 + guided) * images, rows * scale, columns * scale, scale, tokens).axes()
            sizes |= family.part(family.denoiser).model.more_axes(own[family.denoiser])
            denoiser = read_graph(self.folder / family.denoiser / "model.onnx")
            runs = len(told["schedule"]["timesteps"])
            more = of_one_size(denoiser, family.denoiser, sizes, guided, runs)
        session = session_of(lowered(out, self.folder, names, more), out.parent, self.threads)
        feeds = graph_feeds(session, told, companions.__getitem__, self.noise, PROMPT)
        return session.run(["images"], feeds)[0], told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipelines", type=Path, nargs="+", metavar="PIPELINE")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--latents", type=int, default=8, help="rows and columns")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--any-size", action="store_true")
    parser.add_argument("--no-pytorch", action="store_true")
    options = parser.parse_args()
    from sdflow.distance import psnr, relative_l2

    for folder in options.pipelines:
        noise = np.random.default_rng(0).standard_normal((1, 4, options.latents, options.latents), np.float32)
        draw = Draw(folder, noise, options.steps, options.threads)
        begun = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="lowered-") as scratch:
            image, told = draw.graph(Path(scratch) / "one.onnx", any_size=options.any_size)
        scale = told["guidance_scale"] or 1.0
        plain = by_plain_loop(folder, noise, options.steps, scale, options.threads)
        said = f"{folder.name}: {psnr(image, plain):.1f} dB from the plain loop, {relative_l2(image, plain):.1e}"
        if not options.no_pytorch:
            exact, half = (by_pytorch(folder, noise, options.steps, scale, each) for each in (False, True))
            said += (
                f"; {psnr(image, exact):.1f} dB from PyTorch in float32, PyTorch in float16 {psnr(half, exact):.1f} dB"
            )
            said += f"; spread {exact.std():.3f}"
        print(f"{said}; {time.perf_counter() - begun:.0f} s", flush=True)


def _family(folder: Path) -> Any:
    from sdflow.runtime.files.folder import folder_family

    return folder_family(folder)


if __name__ == "__main__":
    main()
