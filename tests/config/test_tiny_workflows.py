"""The workflows of small models are for every target: their graphs have no fusion that is for wider models alone."""

from __future__ import annotations

import pytest

from sdflow.config import load_workflow
from sdflow.disk.shipped import shipped_workflows
from sdflow.passes.registry import catalog

TINY = [name.removesuffix(".yaml") for name in shipped_workflows() if "tiny" in name]


@pytest.mark.parametrize("name", TINY)
def test_a_small_model_is_built_for_cuda_without_what_has_the_widths_of_stable_diffusion_alone(name: str) -> None:
    (base,) = load_workflow(name, catalog=catalog(), targets=["cuda"]).pipelines
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
