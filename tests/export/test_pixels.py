"""The safety checker within the graph sees what CLIP's image processor makes of the image."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper
from PIL import Image

from sdflow.export.builder import Builder
from sdflow.export.pixels import add_reader


@pytest.mark.parametrize("size", [(512, 512), (96, 64), (300, 517), (224, 224)], ids=str)
def test_images_are_read_as_the_image_processor_reads_them(size: tuple[int, int]) -> None:
    from transformers import CLIPImageProcessor

    processor = CLIPImageProcessor()
    height, width = size
    random = np.random.default_rng(0)
    coarse = Image.fromarray(random.integers(0, 256, (11, 13, 3), np.uint8)).resize((width, height))
    image = np.asarray(coarse, np.float32) / 255
    graph = Builder("reader")
    seen = add_reader(graph, "images", processor.to_dict())
    made = helper.make_graph(
        graph.nodes,
        "reader",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["images", "height", "width", 3])],
        [helper.make_tensor_value_info(seen, TensorProto.FLOAT, ["images", 3, "rows", "columns"])],
        graph.initializers,
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"images": image[None]})
    wanted = processor(coarse, return_tensors="np").pixel_values
    assert found.shape == wanted.shape == (1, 3, 224, 224)
    level = 1 / 255 / min(processor.image_std)
    assert abs(found - wanted).max() <= 2.01 * level, "a rounding of 8 bits apart in each of the two ways at most"
    assert np.mean(abs(found - wanted) > 0.5 * level) < 0.05, "and seldom"
