"""How much memory a verification takes, told and looked at before it starts.

One stage of the reference is in memory at a time, then one graph (`sdflow.verify.reference.reference`,
`sdflow.verify.artifact.judge`). What is
counted: the weights, as each stage holds them, and the largest activations of the decoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sdflow.artifact import MODEL_FILE, WEIGHTS_FILE
from sdflow.errors import VerificationError
from sdflow.families.base import Family
from sdflow.onnx_model.reading import load_graph
from sdflow.units import spell_bytes
from sdflow.verify.lowering.session import LARGE
from sdflow.verify.reference.half import KEPT
from sdflow.verify.reference.selection import Selection

LIBRARIES = 8 * 10**8
"""Resident bytes of a process that has imported torch, diffusers and ONNX Runtime."""
MAPS = 6
"""Maps of the decoder's widest level in the image's size that are in memory together."""


def reference_bytes(family: Family, parameters: Mapping[str, int], activations: int) -> int:
    """The most that a stage of the reference takes. parameters: submodel -> how many; without one that is not loaded.
    activations: bytes, of the decoder."""
    nets = family.nets(parameters).values()
    together = [family.text, (family.denoiser, family.decoder, *nets)]
    together += [(name,) for name in family.prompters(parameters)]
    together += [(name,) for name in (family.encoder, family.checker) if name is not None]
    counts = [sum(parameters.get(name, 0) for name in stage) for stage in together]
    return LIBRARIES + activations + max(max(4 * count, 2 * count + min(4 * count, KEPT)) for count in counts)


def graph_bytes(file: int, *, float16: bool) -> int:
    """What a graph takes in a session. file: bytes of its weights. Up to LARGE there is a converted and a packed copy, and of
    float16 the file beside them, which the exact weights are held to as they are made; beyond, what converts one weight after
    the other leaves holes in the memory, as much as the exact weights of the run before."""
    if (2 * file if float16 else file) > LARGE:
        return LIBRARIES + (2 * file if float16 else file + file // 4)
    return LIBRARIES + (5 * file if float16 else 2 * file)


def activation_bytes(selection: Selection, scale: int, width: int) -> int:
    """Of the decoder, at the largest images. scale: pixels per latent. width: channels of its widest level at full size."""
    shapes = [(1, selection.rows, selection.columns), *selection.vae_shapes]
    return MAPS * 4 * width * max(batch * rows * scale * columns * scale for batch, rows, columns in shapes)


def require_memory(
    family: Family,
    loads: Mapping[str, Mapping[str, Any]] | None,
    selection: Selection,
    folder: Path,
    submodels: Sequence[str],
    available: int,
) -> int:
    """The bytes that a verification needs. loads: of the reference's submodels; None when it is there already.

    folder: the pipeline's. available: bytes. Raises VerificationError where they do not suffice.
    """
    graphs = {name: _graph_in(folder / name) for name in submodels}
    # ControlNets stay in memory beside the denoiser while the image is drawn.
    stepped = [graphs[name] for name in (family.denoiser, *family.nets(submodels).values()) if name in graphs]
    needed = max(*graphs.values(), sum(stepped))
    if loads is not None:
        needed = max(needed, _reference(family, loads, selection))
    if needed > available:
        raise VerificationError(
            f"it needs about {spell_bytes(needed)} of memory, and {spell_bytes(available)} are available",
            where=str(folder),
            remedy="Close other programs, verify submodel by submodel (--submodel), or do it on a machine with more memory.",
        )
    return needed


def _reference(family: Family, loads: Mapping[str, Mapping[str, Any]], selection: Selection) -> int:
    from math import prod

    from sdflow.sources.load import parameter_shapes

    parameters = {
        name: sum(prod(shape) for shape in parameter_shapes(name, load).values()) for name, load in loads.items()
    }
    configs = {name: load["config"] for name, load in loads.items()}
    widths = configs[family.decoder]["block_out_channels"]
    # The last level of the decoder gets the channels of the one before.
    activations = activation_bytes(selection, family.latents(configs).scale, max(widths[:2]))
    return reference_bytes(family, parameters, activations)


def _graph_in(folder: Path) -> int:
    import onnx

    from sdflow.onnx_model.files import decode_errors

    weights = folder / WEIGHTS_FILE
    unreadable: tuple[type[Exception], ...] = (OSError, ValueError, VerificationError, *decode_errors())
    try:
        graph = load_graph(folder / MODEL_FILE).graph
        file = weights.stat().st_size if weights.is_file() else 0
    except unreadable:
        return LIBRARIES  # it will not be loaded either, and that will be said
    float16 = any(tensor.data_type == onnx.TensorProto.FLOAT16 for tensor in graph.initializer)
    return graph_bytes(file, float16=float16)
