"""A user's pass that breaks its model: a bias becomes zero."""

from __future__ import annotations

from sdflow.artifact import MODEL_FILE, Facts
from sdflow.passes.base import Pass, PassConfig, PassInputs


class ZeroBias(Pass[PassConfig]):
    """Sets the biases of the first MLP to zero."""

    name, version, uses = "ZeroBias", 1, ("onnx",)
    Config = PassConfig

    def run(self, inputs: PassInputs, out, config: PassConfig) -> Facts:  # type: ignore[no-untyped-def]
        import numpy as np
        import onnx
        from onnx import numpy_helper

        assert inputs.model is not None
        model = onnx.load(str(inputs.model / MODEL_FILE))
        for tensor in model.graph.initializer:
            if tensor.name.endswith("layers.0.mlp.fc1.bias"):
                tensor.CopyFrom(numpy_helper.from_array(np.zeros(tensor.dims, np.float32), tensor.name))
        onnx.save(model, str(out / MODEL_FILE))
        return {}
