"""The sample pipeline built for CUDA, its reference cases, and copies of a graph in which something is wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from filelock import FileLock
from forked_workers import forking
from onnx import helper, numpy_helper
from started_python import StartedPython

import sdflow.passes
import sdflow.sources
import sdflow.weights
from sdflow.build.execute import Executor
from sdflow.build.listener import FinishedStep
from sdflow.build.plan import make_plan
from sdflow.config import load_workflow
from sdflow.config.workflow import VerifySpec
from sdflow.digest import digest_json
from sdflow.passes import registry
from sdflow.sources import Checkpoint, PlainDigests, open_checkpoint
from sdflow.store import Cache
from sdflow.verify.artifact.graph import open_graph
from sdflow.verify.artifact.judge_submodel import judge_submodel
from sdflow.verify.reference.cases import Cases, read_cases
from sdflow.verify.reference.reference import compute
from sdflow.verify.reference.reference_request import ReferenceRequest
from sdflow.verify.reference.selection import Selection, select
from sdflow.verify.reference.torch_module import LoraMerge
from sdflow.verify.result import SubmodelVerdict
from sdflow.verify.subject import own_image
from sdflow.weights.bind import BindRequest, bind
from sdflow.weights.lora import LoraInput
from tests.support.small_workflows import Events

ROOT = Path(__file__).parents[2]
DRAWING = ("text_encoder", "unet", "vae_decoder")


@dataclass
class Sample:
    """The sample pipeline's submodels for a target: submodel -> its finished steps."""

    steps: dict[str, tuple[FinishedStep, ...]]
    checkpoint: Checkpoint
    folder: Path

    def artifact(self, submodel: str) -> Path:
        return self.steps[submodel][-1].record.artifact.path

    def bound(self, submodel: str, loras: Sequence[LoraInput]) -> Path:
        """The submodel with LoRAs, bound as the last step of its chain binds it."""
        out = self.folder / f"bound-{len(list(self.folder.iterdir()))}"
        out.mkdir()
        structure = self.steps[submodel][-2].record.artifact.path
        bind(BindRequest(submodel, structure, self.checkpoint.submodels[submodel].load, loras), out)
        return out


@pytest.fixture(scope="session")
def code_cache(request: pytest.FixtureRequest) -> Cache:
    """A cache of sdflow's own, kept between test runs for as long as nothing that builds artifacts changes."""
    made_by = [sdflow.passes, sdflow.sources, sdflow.weights]
    code = [path.read_text() for module in made_by for path in sorted(Path(module.__path__[0]).rglob("*.py"))]
    root = request.config.cache.mkdir("verify-artifacts") / digest_json(code)[:16]
    with FileLock(request.config.cache.mkdir("locks") / "verify-artifacts"):  # the other worker of pytest-xdist waits
        if not root.exists():
            for stale in root.parent.iterdir():
                Cache(stale).clean()
            root.mkdir()
    return Cache(root)


def build(cache: Cache, folder: Path, target: str, *overrides: str) -> Sample:
    """Build the sample's submodels that draw images."""
    off = ("submodels.vae_encoder=null", "evaluate.image=null", *overrides)
    loaded = load_workflow("shapes", catalog=registry.catalog(), overrides=off, targets=[target])
    (plan,) = make_plan(loaded, cache).pipelines
    assert plan.checkpoint is not None
    return Sample(dict(Executor(cache, Events()).run(plan)), plan.checkpoint, folder)


@pytest.fixture(scope="session")
def cuda(code_cache: Cache, started_python: StartedPython | None, tmp_path_factory: pytest.TempPathFactory) -> Sample:
    """As fused for CUDA, before the passes that split packs, move biases and replace Resize: faults are planted there."""
    without = [
        f"submodels.{submodel}.passes.{name}=null"
        for submodel, names in {
            "unet": ("ConvBiasFusion", "SubpixelConv", "SeparateQkv"),
            "vae_decoder": ("ConvBiasFusion", "SubpixelConv"),
        }.items()
        for name in names
    ]
    with forking(started_python):
        return build(code_cache, tmp_path_factory.mktemp("cuda"), "cuda", *without)


@pytest.fixture(scope="session")
def sample_checkpoint() -> Checkpoint:
    return open_checkpoint("sample:shapes", digests=PlainDigests(), download=False)


def few_cases(checkpoint: Checkpoint, submodels: Sequence[str]) -> Selection:
    """A selection of two steps, for tests that only want to see a fault."""
    named = replace(checkpoint, reference="not the sample's own images")
    chosen = select(VerifySpec(steps=2), own_image("sample:shapes"), submodels, named)
    return Selection(**{**vars(chosen), "shapes": ((1, 8, 16),), "vae_shapes": ((1, 8, 16),)})


def reference(folder: Path, checkpoint: Checkpoint, submodels: Sequence[str], *loras: LoraMerge) -> dict[str, Cases]:
    """The cases of these submodels, computed in this process."""
    loads = {name: part.load for name, part in checkpoint.submodels.items()}
    selection, family = few_cases(checkpoint, submodels), checkpoint.family.name
    request = ReferenceRequest(family, loads, checkpoint.companions, loras, selection, folder, checkpoint.options)
    compute(request, lambda phrase: None)
    return {name: read_cases(folder, name) for name in submodels}


@pytest.fixture(scope="session")
def sample_cases(sample_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Cases]:
    return reference(tmp_path_factory.mktemp("reference"), sample_checkpoint, DRAWING)


@dataclass
class Graph:
    """A graph with its weights, to plant faults in."""

    proto: Any

    def weight(self, name: str) -> np.ndarray:
        """A copy of an initializer's values."""
        return numpy_helper.to_array(self._tensor(name)).copy()

    def put(self, name: str, values: np.ndarray) -> None:
        tensor = self._tensor(name)
        assert values.shape == tuple(tensor.dims)
        tensor.CopyFrom(numpy_helper.from_array(values.astype(numpy_helper.to_array(tensor).dtype), name))

    def change(self, name: str, function: Callable[[np.ndarray], np.ndarray]) -> None:
        before = self.weight(name)
        after = np.ascontiguousarray(function(before.copy()))
        assert not np.array_equal(before, after), f"{name} is as it was"
        self.put(name, after)

    def nodes(self, op_type: str) -> list[Any]:
        found = [node for node in self.proto.graph.node if node.op_type == op_type]
        assert found, f"the graph has no {op_type}"
        return found

    def node(self, name: str) -> Any:
        (found,) = [node for node in self.proto.graph.node if node.name == name]
        return found

    def attribute(self, node: Any, name: str, value: Any) -> None:
        """Set an attribute that is there."""
        (found,) = [attribute for attribute in node.attribute if attribute.name == name]
        assert helper.get_attribute_value(found) != value
        found.CopyFrom(helper.make_attribute(name, value))

    def behind(self, value: str, op_type: str, **attributes: Any) -> None:
        """Put a node behind a value: whoever read the value reads the node's output."""
        readers = [
            (node, index) for node in self.proto.graph.node for index, name in enumerate(node.input) if name == value
        ]
        assert readers
        for node, index in readers:
            node.input[index] = f"{value}/{op_type}"
        self.proto.graph.node.append(helper.make_node(op_type, [value], [f"{value}/{op_type}"], **attributes))

    def bypass(self, node: Any, instead: str) -> None:
        """Take a node out: whoever read its output reads `instead`."""
        for other in self.proto.graph.node:
            for index, name in enumerate(other.input):
                if name == node.output[0]:
                    other.input[index] = instead
        self.proto.graph.node.remove(node)

    def _tensor(self, name: str) -> Any:
        (found,) = [tensor for tensor in self.proto.graph.initializer if tensor.name == name]
        return found


def planted(artifact: Path, folder: Path, plant: Callable[[Graph], None]) -> Path:
    """A copy of an artifact in the new directory `folder`, with a fault in it."""
    graph = Graph(onnx.load(str(artifact / "model.onnx")))
    plant(graph)
    folder.mkdir()
    onnx.save(graph.proto, str(folder / "model.onnx"))
    shutil.copyfile(artifact / "config.json", folder / "config.json")
    return folder


def verdict(submodel: str, artifact: Path, target: str, cases: dict[str, Cases]) -> SubmodelVerdict:
    return judge_submodel(submodel, open_graph(artifact, target, threads=1), cases[submodel])


def shown(part: SubmodelVerdict) -> str:
    """Each output's distance in units of plain fp16 PyTorch's, for the tests' output."""
    return ", ".join(f"{each.name} {each.distance / each.yardstick:.3g}x" for each in part.outputs if each.yardstick)
