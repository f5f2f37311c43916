"""Latents to pixels, and the safety checker, as a graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdflow.export.builder import Builder
from sdflow.export.inline import inlined
from sdflow.families.shared.latents import Latents
from sdflow.models.ports import Ports, Role


def add_decoder(graph: Builder, model: Any, name: str, ports: Ports, latents: str, what: Latents) -> str:
    """Images, float32 (images, height, width, 3) in [0, 1], from a decoder's ModelProto with these ports."""
    scaled = graph.add("Div", latents, graph.constant(what.factor, "float32"))
    if what.shift:
        scaled = graph.add("Add", scaled, graph.constant(what.shift, "float32"))
    decoder = inlined(model, name, {ports.of(Role.LATENTS): scaled}, [ports.of(Role.PIXELS)])
    graph.nodes.extend(decoder.nodes)
    graph.initializers.extend(decoder.initializers)
    half = graph.constant(0.5, "float32")
    pixels = graph.add("Add", graph.add("Mul", decoder.outputs[ports.of(Role.PIXELS)], half), half)
    pixels = graph.add("Clip", pixels, graph.constant(0.0, "float32"), graph.constant(1.0, "float32"))
    return graph.add("Transpose", pixels, perm=[0, 2, 3, 1])


def add_checker(
    graph: Builder, model: Any, name: str, ports: Ports, images: str, reader: Mapping[str, Any]
) -> tuple[str, str]:
    """Return the images with flagged ones blackened, and one flag per image.

    ports: of the ModelProto. reader: config of the checker's feature extractor, which reads images of 8 bits.
    """
    seen = add_reader(graph, images, reader)
    given = {ports.of(Role.SEEN): seen, ports.of(Role.PIXELS): images}
    checked, flags = ports.of(Role.CHECKED), ports.of(Role.FLAGS)
    checker = inlined(model, name, given, [checked, flags])
    graph.nodes.extend(checker.nodes)
    graph.initializers.extend(checker.initializers)
    return checker.outputs[checked], checker.outputs[flags]


def add_reader(graph: Builder, images: str, reader: Mapping[str, Any]) -> str:
    """Preprocess images in [0, 1], (images, height, width, 3), as CLIP's image processor: (images, 3, side, side).

    The short side is resized to the config's size, and the center is cropped. Resizing matches Pillow: bicubic, with a
    filter that widens when the image shrinks, and rounded to 8 bits after each axis.
    """
    wanted, cut = _side(reader["size"], "shortest_edge"), _side(reader["crop_size"], "height")
    bytes_ = graph.constant(255.0, "float32")
    pixels = graph.add("Round", graph.add("Mul", graph.add("Transpose", images, perm=[0, 3, 1, 2]), bytes_))
    height, width = graph.size(pixels, 2), graph.size(pixels, 3)
    shorter = graph.add("Min", height, width)
    to_height, to_width = (
        graph.add("Div", graph.add("Mul", size, graph.whole(wanted)), shorter) for size in (height, width)
    )
    across = _weights(graph, width, to_width)
    pixels = _to_bytes(graph, graph.add("MatMul", pixels, graph.add("Transpose", across, perm=[1, 0])), bytes_)
    pixels = _to_bytes(graph, graph.add("MatMul", _weights(graph, height, to_height), pixels), bytes_)
    two, side = graph.whole(2), graph.whole(cut)
    begins = [graph.add("Div", graph.add("Sub", size, side), two) for size in (to_height, to_width)]
    begin = graph.joined(*begins)
    pixels = graph.part(pixels, begin, graph.add("Add", begin, side), [2, 3])
    scaled = graph.add("Mul", pixels, graph.constant(reader.get("rescale_factor", 1 / 255), "float32"))
    mean, deviation = (
        graph.constant([[[each]] for each in reader[name]], "float32") for name in ("image_mean", "image_std")
    )
    return graph.add("Div", graph.add("Sub", scaled, mean), deviation)


def _side(size: Any, name: str) -> int:
    return int(size[name] if isinstance(size, Mapping) else size)


def _to_bytes(graph: Builder, pixels: str, most: str) -> str:
    rounded = graph.add("Round", pixels)
    return graph.add("Clip", rounded, graph.constant(0.0, "float32"), most)


def _weights(graph: Builder, size: str, to: str) -> str:
    """Weights (to, size) of the old pixels in each new one.

    Pillow's bicubic (src/libImaging/Resample.c, `bicubic_filter` with a = -0.5, `precompute_coeffs`).
    """

    def number(value: float) -> str:
        return graph.constant(value, "float32")

    def places(count: str) -> str:
        zero, one = graph.constant(0, "int64"), graph.constant(1, "int64")
        indices = graph.add("Range", zero, graph.add("Squeeze", count, graph.whole(0)), one)
        return graph.add("Add", graph.cast(indices, _FLOAT), number(0.5))

    ratio = graph.add("Div", graph.cast(size, _FLOAT), graph.cast(to, _FLOAT))
    wide = graph.add("Max", ratio, number(1.0))
    centers = graph.add("Mul", places(to), ratio)
    centers = graph.add("Unsqueeze", centers, graph.whole(1))
    x = graph.add("Abs", graph.add("Div", graph.add("Sub", places(size), centers), wide))
    a = -0.5
    square = graph.add("Mul", x, x)
    # ((a + 2) x - (a + 3)) x^2 + 1 up to 1, (((x - 5) x + 8) x - 4) a up to 2, both of |x|
    near = graph.add("Sub", graph.add("Mul", x, number(a + 2)), number(a + 3))
    near = graph.add("Add", graph.add("Mul", near, square), number(1.0))
    far = graph.add("Add", graph.add("Mul", graph.add("Sub", x, number(5.0)), x), number(8.0))
    far = graph.add("Mul", graph.add("Sub", graph.add("Mul", far, x), number(4.0)), number(a))
    beyond = graph.add("Where", graph.add("Less", x, number(2.0)), far, number(0.0))
    weights = graph.add("Where", graph.add("Less", x, number(1.0)), near, beyond)
    sums = graph.add("ReduceSum", weights, graph.whole(1), keepdims=1)
    return graph.add("Div", weights, sums)


_FLOAT = 1
"""TensorProto.FLOAT."""
