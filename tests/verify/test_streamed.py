"""What is larger than memory is verified block by block, on both sides: with the same numbers, and the same faults are found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from sdflow.distance import relative_l2
from sdflow.sources import Checkpoint, PlainDigests, load_pipeline, open_checkpoint
from sdflow.store import Cache
from sdflow.verify.artifact.exact import Proof, prove
from sdflow.verify.artifact.graph import RunnableGraph, open_graph, read_graph, run_each
from sdflow.verify.artifact.judge_submodel import Further, judge_submodel
from sdflow.verify.artifact.overflow import ranges
from sdflow.verify.artifact.recipes import RecipeCheck
from sdflow.verify.artifact.stored import BoundModel
from sdflow.verify.lowering import PieceSession
from sdflow.verify.reference.cases import Cases
from sdflow.verify.reference.forwards import Network
from sdflow.verify.reference.half import quick_halves
from sdflow.verify.reference.streamed import RowsOnce
from sdflow.verify.reference.torch_module import LoraMerge, TorchModule
from tests.verify.sample_artifacts import DRAWING, ROOT, Graph, Sample, build, planted
from tests.verify.test_exact import attention_scale, epsilon, quick_gelu, timestep_clipped

MOST = 600_000
"""Bytes of weights in memory at a time, in these tests."""


@cache
def opened(reference: str) -> Checkpoint:
    return open_checkpoint(reference, digests=PlainDigests(), download=False)


def outputs(network: Network, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    import torch

    half = next(network.module.parameters()).dtype == torch.float16
    given = {name: torch.from_numpy(value) for name, value in inputs.items()}
    if half:
        given = {name: value.half() if value.dtype == torch.float32 else value for name, value in given.items()}
    with quick_halves(network.module) if half else torch.no_grad():
        return {name: value.numpy() for name, value in network.model.reference(network.module, given).items()}


def resident(module: Any) -> int:
    """Bytes of a module's weights that have values."""
    import torch

    storages = {each.untyped_storage().data_ptr(): each for each in module.state_dict().values()}
    return sum(each.untyped_storage().nbytes() for each in storages.values() if isinstance(each, torch.Tensor))


def assert_same_outputs(whole: Network, streamed: Network, inputs: Mapping[str, np.ndarray]) -> None:
    """In float32 and in float16, bit for bit, with no more than MOST of the weights in memory."""
    least, most = 4 * max(each.numel() for each in whole.module.state_dict().values()), [0]
    for part in streamed.module.modules():
        part.register_forward_pre_hook(lambda *_: most.append(resident(streamed.module)))
    for kind in ("float32", "float16"):
        expected, found = (outputs(each, inputs) for each in (whole, streamed))
        assert all(np.isfinite(value).all() for value in expected.values())
        for name in expected:
            np.testing.assert_array_equal(found[name], expected[name], err_msg=f"{name} in {kind}")
        for each in (whole, streamed):
            each.to_half()
    small = 1000 * len(streamed.module.state_dict())  # each that is away has the memory of one number
    assert max(most) <= max(MOST, least) + small < resident(whole.module) * 2


@pytest.mark.parametrize("submodel", ["text_encoder", "text_encoder_3", "transformer", "vae_decoder"])
def test_a_module_that_is_streamed_gives_what_the_whole_gives(submodel: str) -> None:
    load = opened("synthetic:sd35-tiny").submodels[submodel].load
    whole, streamed = (TorchModule(submodel, load, most=most).network() for most in (None, MOST))
    assert_same_outputs(whole, streamed, whole.model.dummy(load["config"], whole.model.smallest(load["config"])))


def test_loras_are_merged_into_what_is_streamed_as_into_the_whole(sample_checkpoint: Checkpoint) -> None:
    load = sample_checkpoint.submodels["unet"].load
    loras = [LoraMerge(ROOT / f"samples/loras/{name}.safetensors", 0.7) for name in ("stripes", "outline")]
    counts: list[int] = []
    plain, whole, streamed = (
        TorchModule("unet", load, loras if merged else (), load["config"], most=most).network(
            lambda lora, layers: counts.append(layers)
        )
        for merged, most in ((False, None), (True, None), (True, MOST))
    )
    inputs = whole.model.dummy(load["config"], whole.model.smallest(load["config"]))
    assert relative_l2(outputs(plain, inputs)["out_sample"], outputs(whole, inputs)["out_sample"]) > 1e-3
    assert counts[:2] == counts[2:]
    assert_same_outputs(whole, streamed, inputs)


def test_what_a_library_reads_from_a_folder_is_streamed_from_its_files(tmp_path: Path) -> None:
    """In float16, of which T5's class keeps some in float32."""
    import torch

    load_pipeline(opened("synthetic:sd35-tiny")).to(torch.float16).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path), digests=PlainDigests(), download=False)
    for submodel in ("text_encoder_3", "transformer"):
        load = checkpoint.submodels[submodel].load
        whole, streamed = (TorchModule(submodel, load, most=most).network() for most in (None, MOST))
        assert_same_outputs(whole, streamed, whole.model.dummy(load["config"], whole.model.smallest(load["config"])))


def test_a_weight_that_is_used_out_of_its_turn_shows() -> None:
    load = opened("synthetic:sd35-tiny").submodels["text_encoder_3"].load
    streamed = TorchModule("text_encoder_3", load, most=MOST).network()
    streamed.module.encoder.final_layer_norm.forward = lambda values: values * streamed.module.shared.weight.sum()
    assert np.isnan(
        outputs(streamed, streamed.model.dummy(load["config"], streamed.model.smallest(load["config"])))[
            "last_hidden_state"
        ]
    ).all()


def test_prompts_go_through_a_streamed_text_encoder_once() -> None:
    import torch

    load = opened("synthetic:sd35-tiny").submodels["text_encoder_3"].load
    network = TorchModule("text_encoder_3", load).network()
    runs: list[int] = []
    network.module.encoder.register_forward_pre_hook(
        lambda _, args, kwargs: runs.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    ids = torch.arange(30).reshape(3, 10)
    with torch.no_grad():
        expected = network.module(input_ids=ids).last_hidden_state
        rows = RowsOnce(network.module)
        network.module(ids[[1, 0]])
        found = network.module(input_ids=ids).last_hidden_state
        rows.forget()
        again = network.module(input_ids=ids[[2, 2]]).last_hidden_state
    assert runs == [3, 2, 1, 1], "what is known already, or twice in one call, is not computed"
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(again, expected[[2, 2]])


def pieces_of(graph: RunnableGraph) -> PieceSession:
    assert isinstance(graph.session, PieceSession)
    return graph.session


@pytest.fixture(scope="module")
def cpu(code_cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> Sample:
    """As built for the CPU, whose graphs are run as they are: a graph for CUDA has operators that only CUDA has."""
    return build(code_cache, tmp_path_factory.mktemp("cpu"), "cpu")


@pytest.mark.parametrize(
    ("submodel", "target"),
    [
        *((submodel, "cuda") for submodel in DRAWING if submodel != "unet"),
        pytest.param("unet", "cuda", marks=pytest.mark.slow),
        ("vae_decoder", "cpu"),
    ],
)
def test_a_graph_in_pieces_gives_what_the_whole_gives(
    submodel: str, target: str, request: pytest.FixtureRequest, sample_cases: dict[str, Cases]
) -> None:
    sample: Sample = request.getfixturevalue(target)
    folder, cases = sample.artifact(submodel), sample_cases[submodel]
    given = [cases.get(index, "inputs") for index, _ in cases]
    whole, cut = (open_graph(folder, target, threads=1, most=most) for most in (None, MOST))
    pieces = pieces_of(cut).pieces
    assert len(pieces) > 1
    for expected, found in zip(run_each(whole, given), run_each(cut, given), strict=True):
        assert expected.keys() == found.keys()
        assert all(relative_l2(found[name], value) < 2e-4 for name, value in expected.items())
    operators = [{*node.input} for node in read_graph(folder / "model.onnx").graph.node]
    for piece in pieces:
        held = sum(4 * prod(tensor.dims) for tensor in piece.model.graph.initializer)
        alone = any(piece.weights <= read for read in operators)  # a convolution with its bias cannot be cut
        assert held <= MOST or alone, (held, sorted(piece.weights))


def test_what_is_run_with_the_cases_gives_what_it_gives_alone(cuda: Sample, sample_cases: dict[str, Cases]) -> None:
    cases = sample_cases["text_encoder"]
    graph = open_graph(cuda.artifact("text_encoder"), "cuda", threads=1, most=MOST)
    further = Further(cases.get(1, "inputs"))
    verdict = judge_submodel("text_encoder", graph, cases, further=further)
    assert verdict.passed
    assert verdict.cases == judge_submodel("text_encoder", graph, cases).cases
    assert further.outputs is not None
    alone = next(run_each(graph, [further.inputs] * len(cases.cases)))  # as often, so that weights are packed here too
    for name, value in alone.items():
        np.testing.assert_array_equal(further.outputs[name], value)


def test_ranges_of_values_are_the_same_in_pieces(cuda: Sample, sample_cases: dict[str, Cases]) -> None:
    path = cuda.artifact("text_encoder") / "model.onnx"
    feeds = [sample_cases["text_encoder"].get(0, "inputs")]
    whole, cut = (ranges(path, feeds, threads=1, most=most) for most in (None, MOST))
    assert [(each.node, each.value, each.largest_step, each.nan_step) for each in cut] == [
        (each.node, each.value, each.largest_step, each.nan_step) for each in whole
    ]
    assert [each.largest for each in cut] == pytest.approx([each.largest for each in whole], rel=1e-4)


def proofs(cuda: Sample, submodel: str, folder: Path, cases: dict[str, Cases]) -> tuple[Proof, Proof]:
    """Of the whole, and block by block."""
    structure = cuda.steps[submodel][-2].record.artifact.path
    check = RecipeCheck(submodel, structure, BoundModel(folder, cuda.checkpoint.submodels[submodel].load))
    whole, streamed = (prove(check, cases[submodel], threads=1, most=most) for most in (None, MOST))
    return whole, streamed


@pytest.mark.parametrize("submodel", ["text_encoder", pytest.param("unet", marks=pytest.mark.slow)])
def test_the_proof_of_a_good_artifact_is_the_same(submodel: str, cuda: Sample, sample_cases: dict[str, Cases]) -> None:
    whole, streamed = proofs(cuda, submodel, cuda.artifact(submodel), sample_cases)
    assert (streamed.findings, streamed.problems, streamed.missing) == ([], (), "")
    assert streamed.weights == whole.weights
    assert [(each.name, each.limit, each.passed) for each in streamed.outputs] == [
        (each.name, each.limit, each.passed) for each in whole.outputs
    ]
    assert all(each.distance < each.limit / 2 for each in streamed.outputs)


def blocks_swapped(graph: Graph) -> None:
    """The first product of one block's feed-forward layer with the weights of another's."""
    first, second = (name for name in _names(graph, ".mlp.fc1.weight")[:2])
    for node in graph.proto.graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = {first: second, second: first}.get(name, name)


def _names(graph: Graph, ending: str) -> list[str]:
    found = [tensor.name for tensor in graph.proto.graph.initializer if tensor.name.endswith(ending)]
    assert len(found) > 1, [tensor.name for tensor in graph.proto.graph.initializer]
    return found


@pytest.mark.parametrize(
    ("plant", "submodel"),
    [
        pytest.param(epsilon, "unet", marks=pytest.mark.slow),
        pytest.param(attention_scale, "unet", marks=pytest.mark.slow),
        pytest.param(timestep_clipped, "unet", marks=pytest.mark.slow),
        (quick_gelu, "text_encoder"),
        (blocks_swapped, "text_encoder"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_fault_is_found_and_its_block_named_as_of_the_whole(
    plant: Callable[[Graph], None], submodel: str, cuda: Sample, sample_cases: dict[str, Cases], tmp_path: Path
) -> None:
    wrong = planted(cuda.artifact(submodel), tmp_path / submodel, plant)
    whole, streamed = proofs(cuda, submodel, wrong, sample_cases)
    assert "without rounding" in streamed.problems[0][0]
    assert whole.block is not None and streamed.block is not None
    assert (streamed.block.first, streamed.block.there) == (whole.block.first, whole.block.there)
    assert [each.distance for each in streamed.outputs] == pytest.approx(
        [each.distance for each in whole.outputs], rel=0.05
    )


@pytest.mark.parametrize(
    ("submodel", "blocks"),
    [("text_encoder", ".layers."), pytest.param("unet", "up_blocks.", marks=pytest.mark.slow)],
)
def test_a_wrong_weight_in_a_late_block_is_found(
    submodel: str, blocks: str, cuda: Sample, sample_cases: dict[str, Cases], tmp_path: Path
) -> None:
    model = onnx.load(str(cuda.artifact(submodel) / "model.onnx"), load_external_data=False)
    late = [
        each.name
        for each in model.graph.initializer
        if blocks in each.name and len(each.dims) > 1 and prod(each.dims) > 99
    ]
    wrong = planted(cuda.artifact(submodel), tmp_path / submodel, lambda graph: graph.change(late[-1], np.flipud))
    whole, streamed = proofs(cuda, submodel, wrong, sample_cases)
    assert [(each.node, each.what) for each in streamed.findings] == [(each.node, each.what) for each in whole.findings]
    assert streamed.findings[0].node == late[-1]
    graph = open_graph(wrong, "cuda", threads=1, most=MOST)
    assert not judge_submodel(submodel, graph, sample_cases[submodel]).passed
