"""OnnxConversion: export a submodel with Olive's pass of the same name and torch's TorchScript exporter.

sdflow adds input and output names, axes and the traced module (`sdflow.models`), and the map from initializers to
parameters (`weight_names`). Weights stay float32; OnnxFloatToFloat16 converts them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from sdflow.artifact import CONFIG_FILE, MODEL_FILE, Facts
from sdflow.errors import PassError
from sdflow.families import FAMILIES
from sdflow.models.ports import Ports
from sdflow.onnx_model.facts import graph_facts
from sdflow.onnx_model.files import write_graph
from sdflow.passes.base import TRACES, InputKind, Pass, PassConfig, PassInputs
from sdflow.passes.olive import TorchModel, run_olive_pass
from sdflow.passes.tracing import traced_module, weights_kept_apart
from sdflow.passes.weight_names import fold_weights, write_weight_names

_REFUSED = {
    "torch_dtype": "the export is always float32; name OnnxFloatToFloat16 as a later pass",
    "optimize": "it belongs to the dynamo exporter, which is not used",
    "parallel_jobs": "it is for models distributed over ranks",
    "past_key_value_name": "no submodel of Stable Diffusion has past keys and values",
    "merge_adapter_weights": "name LoRAs in the workflow and LoraMerge as the next pass",
    "save_metadata_for_token_generation": "no submodel of Stable Diffusion generates tokens",
    "save_as_external_data": "large weights are always external",
    "all_tensors_to_one_file": "external weights are always in one file",
    "external_data_name": "external weights are always in model.onnx.data",
    "size_threshold": "weights of 1024 bytes and more are external",
    "convert_attribute": "attributes are never external",
    "user_script": "sdflow loads the model itself, from `model:`",
    "script_dir": "sdflow loads the model itself, from `model:`",
}

# Who saved the checkpoint, and where: excluded from the cache key, so also from the artifact.
_ORIGIN = ("_diffusers_version", "_name_or_path", "transformers_version")


class OnnxConversionConfig(PassConfig):
    """The options of Olive's pass that apply here.

    target_opset: version of the standard operator set. LayerNormalization is one operator from 17 on, as the fusions
        require; the TorchScript exporter supports up to 20.
    """

    target_opset: int = Field(default=17, ge=14, le=20)
    use_dynamo_exporter: Literal[False] = False
    device: Literal["cpu"] = "cpu"
    dynamic: Literal[True] = True

    @model_validator(mode="before")
    @classmethod
    def _say_why_not(cls, options: Any) -> Any:
        reasons = {
            "use_dynamo_exporter": (False, "ONNX Runtime's fusions do not match the graphs of the dynamo exporter"),
            "device": ("cpu", "tracing runs on the CPU; the graph does not depend on where it was traced"),
            "dynamic": (True, "one model serves all sizes; a target fixes them when it creates its session"),
        }
        if isinstance(options, dict):
            for option, (only, reason) in reasons.items():
                if options.get(option, only) != only:
                    raise ValueError(f"{option} can only be {json.dumps(only)}: {reason}")
            for option in options:
                if option in _REFUSED:
                    raise ValueError(f"{option} is an Olive option that does not apply here: {_REFUSED[option]}")
        return options


class OnnxConversion(Pass[OnnxConversionConfig]):
    """Writes model.onnx, model.onnx.data, the submodel's config.json and weights.json.

    Facts, besides the graph's: `parameters`, number of elements of all floating-point parameters; `weights`, number of
    initializers mapped to a parameter; `unmapped`, parameters that the graph does not use.
    """

    name: ClassVar[str] = "OnnxConversion"
    version: ClassVar[int] = 1
    uses: ClassVar[tuple[str, ...]] = (
        "torch",
        "diffusers",
        "transformers",
        "onnx",
        "onnxscript",
        "onnx-ir",
        "olive-ai",
    )
    needs: ClassVar[tuple[str, ...]] = ("accelerate",)
    imports = TRACES
    accepts: ClassVar[InputKind] = "checkpoint"
    moves_weights: ClassVar[bool] = True
    Config: ClassVar[type[PassConfig]] = OnnxConversionConfig

    def run(self, inputs: PassInputs, out: Path, config: OnnxConversionConfig) -> Facts:
        """Raises PassError if the architecture's inputs do not match or tracing fails."""
        import onnx
        import torch

        from sdflow.sources import load_module, submodel_config

        submodel = inputs.submodel
        architecture = submodel_config(inputs.checkpoint)
        network = FAMILIES[inputs.family].part(submodel).of(architecture).model
        ports = network.ports(architecture)
        sizes: dict[str, int] = {}

        def load() -> Any:
            inputs.progress("loading the weights")
            module = traced_module(network, load_module(submodel, inputs.checkpoint))
            weights = module.state_dict()
            sizes.update({key: value.numel() for key, value in weights.items() if value.is_floating_point()})
            inputs.progress("tracing")
            return module

        def dummy_inputs(_model: object) -> tuple[torch.Tensor, ...]:
            arrays = network.dummy(architecture, network.smallest(architecture))
            return tuple(torch.from_numpy(array) for array in arrays.values())

        io_config = {
            "input_names": [port.name for port in ports.inputs],
            "output_names": [port.name for port in ports.outputs],
            "dynamic_axes": ports.dynamic_axes,
        }
        with weights_kept_apart():
            run_olive_pass(self.name, config.model_dump(), TorchModel(load, io_config, dummy_inputs), out)
        inputs.progress("folding the weights")
        model = onnx.load(str(out / MODEL_FILE), load_external_data=False)
        names = fold_weights(model, out, sizes.keys())
        _declare_shapes(model.graph, ports)
        write_graph(model, out)
        write_weight_names(names, out)
        config_json = {key: value for key, value in architecture.items() if key not in _ORIGIN}
        (out / CONFIG_FILE).write_text(json.dumps(config_json, indent=2, sort_keys=True) + "\n")
        unmapped = sorted(sizes.keys() - names.keys())
        if not names:
            raise PassError("the graph has none of the module's parameters", where=f"{submodel}: {self.name}")
        return {
            **graph_facts(out / MODEL_FILE),
            "parameters": sum(sizes.values()),
            "weights": len(names),
            "unmapped": unmapped,
        }


def _declare_shapes(graph: Any, ports: Ports) -> None:
    """Set the ports' axes on inputs and outputs: the exporter invents names for sizes that it cannot infer."""
    for value, port in zip((*graph.input, *graph.output), (*ports.inputs, *ports.outputs), strict=True):
        for dimension, axis in zip(value.type.tensor_type.shape.dim, port.axes, strict=True):
            dimension.Clear()
            if isinstance(axis, str):
                dimension.dim_param = axis
            else:
                dimension.dim_value = axis
