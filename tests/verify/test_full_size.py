"""The full-size workflows as far as no weights are needed: the operators that they expect, and whether the target takes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from small_workflows import Events

from sdflow.artifact import CONFIG_FILE, MODEL_FILE
from sdflow.build.execute import Executor
from sdflow.build.listener import Steps
from sdflow.build.plan import PipelinePlan, make_plan
from sdflow.build.step import Step
from sdflow.config import load_workflow
from sdflow.disk.shipped import shipped_workflow
from sdflow.families import family_of_architecture
from sdflow.passes.registry import catalog
from sdflow.store import Cache
from sdflow.targets import TARGETS
from sdflow.verify.artifact.unsupported_nodes import fits
from sdflow.verify.finding import errors

ARCHITECTURES = {
    "sd15": "sd15",
    "sd21_base": "sd21-base",
    "sd21": "sd21",
    "sdxl": "sdxl",
    **{f"{name}_inpainting": f"{name}-inpainting" for name in ("sd15", "sd2", "sdxl")},
    "sd_turbo": "sd-turbo",
    "sdxl_turbo": "sdxl-turbo",
    "lcm": "lcm",
    "lcm_sdxl": "lcm-sdxl",
    "sdxl_refiner": "sdxl-refiner",
    "sd35_medium": "sd35-medium",
    **{f"{name}_{beside}": name for name in ("sd15", "sdxl") for beside in ("controlnet", "ip_adapter")},
}
"""Base workflow -> the architecture that its checkpoint has."""
BESIDE = {
    "sd15_controlnet": "controlnets.canny=synthetic:sd15",
    "sdxl_controlnet": "controlnets.canny=synthetic:sdxl",
    "sd15_ip_adapter": "ip_adapters=[{file: synthetic:ip-adapter}]",
    "sdxl_ip_adapter": "ip_adapters=[{file: synthetic:ip-adapter}]",
}
"""What stands in place of the nets and adapters that a base workflow takes from the hub."""


@pytest.fixture(scope="session")
def full_cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    """One for all targets: they share the conversions."""
    return Cache(tmp_path_factory.mktemp("full") / "cache")


def planned(base: str, target: str, cache: Cache) -> PipelinePlan:
    """A base workflow for a target, of a checkpoint of its architecture."""
    instead = [f"model=synthetic:{ARCHITECTURES[base]}", *([BESIDE[base]] if base in BESIDE else [])]
    path = shipped_workflow(f"base/{base}.yaml")
    assert path is not None
    workflow = load_workflow(path, catalog=catalog(), overrides=instead, targets=[target])
    (plan,) = make_plan(workflow, cache).pipelines
    return plan


def structures(plan: PipelinePlan, cache: Cache) -> Steps:
    """Every chain run up to where weights come in. Raises PassError where a count differs from `expect`."""
    chains = [replace(chain, steps=symbolic(chain.steps), carried=()) for chain in plan.chains]
    return Executor(cache, Events()).run(replace(plan, chains=tuple(chains)))


def symbolic(steps: Sequence[Step]) -> tuple[Step, ...]:
    *structure, bind = steps
    assert [*(step.weights for step in structure), bind.weights] == ["symbolic"] * len(structure) + ["bound"]
    return tuple(structure)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("base", ARCHITECTURES)
def test_every_chain_that_fuses_says_what_it_expects(base: str, target: str, tmp_path: Path) -> None:
    silent = [
        step.id
        for chain in planned(base, target, Cache(tmp_path / "cache")).chains
        for step in chain.steps
        if step.spec.pass_name == "OrtTransformersOptimization" and not any(step.spec.expect.values())
    ]
    assert silent == []


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("base", ARCHITECTURES)
def test_the_full_structures_are_as_expected_and_fit(base: str, target: str, full_cache: Cache) -> None:
    """`expect` names every fused operator that the optimization made, and the executor holds the counts."""
    family = family_of_architecture(ARCHITECTURES[base])
    for submodel, steps in structures(planned(base, target, full_cache), full_cache).items():
        for made in steps:
            if made.step.spec.pass_name == "OrtTransformersOptimization":
                assert unnamed(made.step.spec.expect, made.record.artifact.path) == set(), made.step.id
        folder = steps[-1].record.artifact.path
        read = family.part(submodel).read
        outputs = read(json.loads((folder / CONFIG_FILE).read_text())) if read else None
        graph = onnx.load(folder / MODEL_FILE, load_external_data=False)
        assert errors(fits(graph, TARGETS[target], submodel, read=outputs)) == []


def unnamed(expect: Mapping[str, int], folder: Path) -> set[str]:
    """ONNX Runtime's own operators in a graph of which `expect` says nothing."""
    graph = onnx.load(folder / MODEL_FILE, load_external_data=False).graph
    return {node.op_type for node in graph.node if node.domain == "com.microsoft"} - expect.keys()
