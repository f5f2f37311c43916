"""Reference images for FLUX.2: their latents are additional tokens after the image's, each image at its own time.

Based on diffusers' Flux2KleinPipeline (0.42): `prepare_image_latents`, `_prepare_image_ids`. The rotary embedding reads
the time on the first of its four axes; the generated image is at time 0, references at 10, 20, ...
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from sdflow.errors import UsageError
from sdflow.families.shared.references import REFERENCE_TOKENS, REFERENCES, References
from sdflow.models.base import Config
from sdflow.models.ports import Port

if TYPE_CHECKING:
    import torch

    from sdflow.families.shared.request import Tensors

EXTENDED = "reads_references"
"""sdflow's own config entry of a denoiser whose graph has the inputs for reference images."""
TOKENS, PLACES = "reference_hidden_states", "reference_ids"
"""Names of the added inputs."""
_TIME_APART = 10
_MOST_AREA = 1024 * 1024
_CARRIED = ("Cast", "Reshape", "Flatten", "Transpose")
"""Operators between the graph's latents and its tokens, at both ends."""


def reference_ports(config: Config) -> tuple[Port, ...]:
    """Return the added inputs, if the config says that the graph has them."""
    if not config.get(EXTENDED):
        return ()
    return (
        Port(TOKENS, "float32", ("batch", REFERENCE_TOKENS, config["in_channels"])),
        Port(PLACES, "int64", (1, REFERENCE_TOKENS, 4)),
    )


class Flux2References(References):
    """Reference images as tokens after the image's."""

    def config(self, denoiser: Config) -> Config:
        return {**denoiser, EXTENDED: True}

    def size(self, width: int, height: int, multiple: int) -> tuple[int, int]:
        width, height = _within_area(width, height)
        return height - height % multiple, width - width % multiple

    def pixels(self, image: Any, multiple: int) -> torch.Tensor:
        """As in diffusers: scale down to an area of 1024 x 1024 pixels, then center-crop to a multiple."""
        from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
        from PIL.Image import Resampling

        reader = Flux2ImageProcessor(vae_scale_factor=multiple)
        try:
            reader.check_image_input(image)
        except ValueError as error:
            remedy = "Use PIL images with sides of at least 64 pixels and an aspect ratio of at most 8."
            raise UsageError(str(error), where=REFERENCES, remedy=remedy) from error
        height, width = self.size(image.width, image.height, multiple)
        if (within := _within_area(*image.size)) != image.size:
            image = image.resize(within, Resampling.LANCZOS)
        found: torch.Tensor = reader.preprocess(image, height=height, width=width, resize_mode="crop")
        return found

    def inputs(self, latents: Sequence[torch.Tensor], rows: int) -> Tensors:
        import torch

        tokens = torch.cat([each.flatten(2).transpose(1, 2) for each in latents], dim=1)
        places = [_places(number, *each.shape[2:]) for number, each in enumerate(latents)]
        return {TOKENS: tokens.expand(rows, -1, -1), PLACES: torch.cat(places)[None]}

    def by_diffusers(self, module: Any, inputs: Tensors, latents: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        import torch
        from diffusers import Flux2KleinPipeline as Library

        sample, text = inputs["sample"], inputs["encoder_hidden_states"]
        ids, own = Library._prepare_latent_ids(sample), Library._pack_latents(sample)
        shown = torch.cat([Library._pack_latents(each.to(sample.dtype)) for each in latents], dim=1)
        places = Library._prepare_image_ids(list(latents))
        found = module(
            hidden_states=torch.cat([own, shown.repeat(len(sample), 1, 1)], dim=1),
            timestep=inputs["timestep"].expand(len(sample)).to(sample.dtype) / 1000,
            encoder_hidden_states=text,
            txt_ids=Library._prepare_text_ids(text),
            img_ids=torch.cat([ids, places.repeat(len(sample), 1, 1)], dim=1),
        ).sample[:, : own.shape[1]]
        return {"out_sample": Library._unpack_latents_with_ids(found, ids, *sample.shape[2:])}

    def of_diffusers(self, images: Sequence[Any]) -> dict[str, Any]:
        return {"image": list(images)}

    def extend(self, graph: Any) -> None:
        """Change three places: concatenate tokens and their rotary positions to the image's, and slice the references
        off the output."""
        from onnx import TensorProto, helper

        _Extension(graph.graph, TensorProto, helper).make()


def _within_area(width: int, height: int) -> tuple[int, int]:
    """Return width and height, scaled down to the maximum area of a reference."""
    if width * height <= _MOST_AREA:
        return width, height
    scale = math.sqrt(_MOST_AREA / (width * height))
    return int(width * scale), int(height * scale)


def _places(number: int, rows: int, columns: int) -> torch.Tensor:
    """Return (rows * columns, 4): time, row, column, and text token."""
    import torch

    found = torch.zeros(rows, columns, 4, dtype=torch.int64)
    found[..., 0] = _TIME_APART * (1 + number)
    found[..., 1] = torch.arange(rows)[:, None]
    found[..., 2] = torch.arange(columns)
    return found.flatten(0, 1)


class _Extension:
    """Adds the inputs to a graph."""

    def __init__(self, graph: Any, types: Any, helper: Any) -> None:
        self._graph, self._types, self._helper = graph, types, helper
        self._producers = {name: node for node in graph.node for name in node.output if name}
        self._readers: dict[str, list[Any]] = {}
        for node in graph.node:
            for name in node.input:
                self._readers.setdefault(name, []).append(node)

    def make(self) -> None:
        (sample,) = (item for item in self._graph.input if item.name == "sample")
        tokens, element = self._tokens(sample)
        places, out = self._image_places(), self._out()
        axes = {TOKENS: ["batch", REFERENCE_TOKENS, sample.type.tensor_type.shape.dim[1].dim_value]}
        axes[PLACES] = [1, REFERENCE_TOKENS, 4]
        for name, kind in ((TOKENS, element), (PLACES, self._types.INT64)):
            self._graph.input.append(self._helper.make_tensor_value_info(name, kind, axes[name]))
        self._constant("references/place", [0])
        self._constant("references/token_axis", [1])
        node = self._helper.make_node
        self._behind(tokens, [node("Concat", [tokens, TOKENS], ["references/tokens"], "references/Concat", axis=1)])
        flat = node("Squeeze", [PLACES, "references/place"], ["references/ids"], "references/Squeeze")
        joined = node("Concat", [places, "references/ids"], ["references/places"], "references/Concat_1", axis=0)
        self._behind(places, [flat, joined])
        size = node("Shape", [tokens], ["references/shape"], "references/Shape")
        count = node("Gather", ["references/shape", "references/token_axis"], ["references/count"], "references/Gather")
        span = [out, "references/place", "references/count", "references/token_axis"]
        self._behind(out, [size, count, node("Slice", span, ["references/image"], "references/Slice")])
        del self._graph.value_info[:]  # token counts in value infos are no longer valid

    def _constant(self, name: str, values: list[int]) -> None:
        self._graph.initializer.append(self._helper.make_tensor(name, self._types.INT64, [len(values)], values))

    def _behind(self, value: str, nodes: Sequence[Any]) -> None:
        """Insert nodes after a value's producer, and connect the value's readers to the last node's output."""
        for reader in self._readers.get(value, ()):
            reader.input[:] = [nodes[-1].output[0] if name == value else name for name in reader.input]
        made = self._producers[value]
        index = next(i for i, node in enumerate(self._graph.node) if node.output == made.output)
        for node in reversed(nodes):
            self._graph.node.insert(index + 1, node)

    def _tokens(self, sample: Any) -> tuple[str, int]:
        """Return the image's tokens (batch, tokens, channels) and their element type: the latents just before the first
        weight."""
        name, element = sample.name, sample.type.tensor_type.elem_type
        while True:
            following = [node for node in self._readers.get(name, ()) if node.op_type in _CARRIED]
            if not following:
                break
            node = _only(following)
            if node.op_type == "Cast":
                element = next(item.i for item in node.attribute if item.name == "to")
            name = node.output[0]
        if name == sample.name:
            raise _changed()
        return name, element

    def _image_places(self) -> str:
        """Return the image's positions (tokens, 4): four columns computed from the latents' size and read one by
        one."""
        found = [
            node.output[0]
            for node in self._graph.node
            if node.op_type == "Concat"
            and len(node.input) == 4
            and len(self._readers.get(node.output[0], ())) == 4
            and all(reader.op_type == "Gather" for reader in self._readers[node.output[0]])
            and self._comes_from(node, "sample")
        ]
        return str(_only(found))

    def _comes_from(self, node: Any, name: str) -> bool:
        coming, seen = [*node.input], set[str]()
        while coming:
            each = coming.pop()
            if each == name:
                return True
            if each not in seen and each in self._producers:
                seen.add(each)
                coming += self._producers[each].input
        return False

    def _out(self) -> str:
        """Return the last weight's output, (batch, tokens, channels), before it is folded to latents."""
        name = str(self._graph.output[0].name)
        while self._producers[name].op_type in _CARRIED:
            name = self._producers[name].input[0]
        return name


def _only(found: Iterable[Any]) -> Any:
    listed = list(found)
    if len(listed) != 1:
        raise _changed()
    return listed[0]


def _changed() -> UsageError:
    return UsageError(
        "the denoiser's graph has an unexpected form, so reference images cannot be added",
        where=REFERENCES,
        remedy="Remove passes that change its first or last nodes, and rebuild the pipeline.",
    )
