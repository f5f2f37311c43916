"""Reference images, without a model: who takes them, at which sizes, and into which graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
from onnx import TensorProto, helper
from PIL import Image

from sdflow.errors import UsageError
from sdflow.families.flux2.references import Flux2References
from sdflow.runtime.draw_request import GenerateRequest
from sdflow.runtime.request_check import check_request


def test_a_pipeline_without_support_refuses_them(tiny_pipeline: Path, tmp_path: Path) -> None:
    request = GenerateRequest(tiny_pipeline, ["an otter"], tmp_path / "out", references=(tmp_path / "a.png",))
    with pytest.raises(UsageError, match="takes no reference images") as error:
        check_request(request)
    assert error.value.where == "--reference"


@pytest.mark.parametrize("size", [(64, 64), (1000, 700), (1025, 1024), (3001, 1003), (600, 4000)])
def test_an_image_is_read_at_the_size_that_diffusers_reads_it_at(size: tuple[int, int]) -> None:
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    shrunk = image
    if size[0] * size[1] > 1024 * 1024:
        shrunk = Flux2ImageProcessor._resize_to_target_area(image, 1024 * 1024)
    references = Flux2References()
    expected = (shrunk.height // 16 * 16, shrunk.width // 16 * 16)
    assert references.size(*size, 16) == expected
    assert tuple(references.pixels(image, 16).shape) == (1, 3, *expected)


def test_a_graph_without_the_places_for_them_is_refused() -> None:
    """Its latents meet a weight at once, and no token has a place."""
    axes = ["batch", 4, "latent_height", "latent_width"]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, axes) for name in ("sample", "out_sample")]
    weight = helper.make_tensor("weight", TensorProto.FLOAT, [1], [2.0])
    nodes = [helper.make_node("Mul", ["sample", "weight"], ["out_sample"])]
    model = helper.make_model(helper.make_graph(nodes, "changed", values[:1], values[1:], [weight]))
    before = onnx.ModelProto.FromString(model.SerializeToString())
    with pytest.raises(UsageError, match="unexpected form, so reference images cannot be added"):
        Flux2References().extend(model)
    assert model == before
