"""The workflows of small models are for every target: their graphs have no fusion that is for wider models alone, or that
fails on the target."""

from __future__ import annotations

import pytest

from sdflow.config import load_workflow
from sdflow.disk.shipped import shipped_workflows
from sdflow.passes.registry import catalog

TINY = [name.removesuffix(".yaml") for name in shipped_workflows() if "tiny" in name]


@pytest.mark.parametrize("target", ["cuda", "webgpu"])
@pytest.mark.parametrize("name", TINY)
def test_a_small_model_is_built_without_gated_gelus_that_cuda_or_webgpu_refuses(name: str, target: str) -> None:
    """CUDA's have the widths of Stable Diffusion alone; WebGPU's does not compile in float16."""
    (base,) = load_workflow(name, catalog=catalog(), targets=[target]).pipelines
    for pipeline in filter(None, (base, base.refiner)):
        narrow = [
            chain for name, chain in pipeline.submodels.items() if name == "unet" or name.startswith("controlnet")
        ]
        fusions = [step for chain in narrow for step in chain if step.pass_name == "OrtTransformersOptimization"]
        assert len(fusions) == len(narrow)
        for step in fusions:
            options = step.options["optimization_options"]
            assert (options["enable_bias_splitgelu"], options["enable_bias_add"]) == (False, False)
            if pipeline is base:  # a refiner has the chains of its base, and promises of its own
                assert (step.expect["BiasSplitGelu"], step.expect["BiasAdd"]) == (0, 0)
