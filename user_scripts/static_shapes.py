"""An example of a pass of one's own: makes the named axes of a model's inputs static.

    passes:
      - {pass: OnnxConversion}
      - {pass: ../user_scripts/static_shapes.py, sizes: {batch: 2, latent_height: 64, latent_width: 64}}

DirectML and MIGraphX run fastest, or only, with static shapes; a CUDA graph needs them too.
"""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from sdflow.artifact import MODEL_FILE, Facts
from sdflow.errors import PassError
from sdflow.onnx_model.facts import graph_facts
from sdflow.onnx_model.files import store_proto
from sdflow.passes.base import Pass, PassConfig, PassInputs
from sdflow.passes.olive import copy_companions


class StaticShapesConfig(PassConfig):
    """Options of StaticShapes."""

    sizes: dict[str, int] = Field(min_length=1, description="name of an axis -> its size")


class StaticShapes(Pass[StaticShapesConfig]):
    """Gives named axes a fixed size."""

    name: ClassVar[str] = "StaticShapes"
    version: ClassVar[int] = 1
    uses: ClassVar[tuple[str, ...]] = ("onnx",)
    Config: ClassVar[type[PassConfig]] = StaticShapesConfig

    def run(self, inputs: PassInputs, out: Path, config: StaticShapesConfig) -> Facts:
        import onnx

        assert inputs.model is not None  # a pass that accepts "onnx" always has one
        model = onnx.load(str(inputs.model / MODEL_FILE), load_external_data=False)
        fixed = set()
        # Shapes within the graph were inferred with the axes open; ONNX Runtime infers them anew.
        del model.graph.value_info[:]
        for port in (*model.graph.input, *model.graph.output):
            for axis in port.type.tensor_type.shape.dim:
                if axis.dim_param in config.sizes:
                    fixed.add(axis.dim_param)
                    axis.dim_value = config.sizes[axis.dim_param]
        if missing := sorted(set(config.sizes) - fixed):
            raise PassError(f"the model has no axis {', '.join(missing)}", where=self.name)
        store_proto(model, inputs.model, out)
        copy_companions(inputs.model, out)
        return {**graph_facts(out / MODEL_FILE), "fixed_axes": sorted(fixed)}
