"""A VAE in bands of rows gives the image that it gives as a whole, for every family, on graphs of CPU and CUDA."""

from __future__ import annotations

import warnings
import weakref
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from converted import Converted
from fused import Fused
from onnx import TensorProto, helper

from sdflow.errors import PassError, TiledWarning
from sdflow.machine.onnx_runtime import numpy_type
from sdflow.models.ports import Role
from sdflow.onnx_model.reading import load_graph
from sdflow.runtime import vae
from sdflow.runtime.bands import run
from sdflow.runtime.bands.decompose import decompose
from sdflow.runtime.bands.memory import band_bytes, stored_bytes
from sdflow.runtime.bands.norms import Norm, Statistics
from sdflow.runtime.bands.run import Bands
from sdflow.runtime.bands.stages import Decomposition
from sdflow.runtime.pipeline import Pipeline
from sdflow.runtime.sessions.bound import Bound
from sdflow.runtime.sessions.place import place
from sdflow.runtime.sessions.session import PLAIN, create_session
from sdflow.sources import Checkpoint, PlainDigests, open_checkpoint
from sdflow.targets import TARGETS
from sdflow.verify.lowering.lower import lower

WORKFLOWS = {
    "tiny": "sd15-tiny", "sdxl_tiny": "sdxl-tiny", "sd35_tiny": "sd35-tiny", "flux1_schnell_tiny": "flux1-schnell-tiny",
    "flux2_tiny": "flux2-tiny", "z_image_tiny": "z-image-tiny",
}  # fmt: skip
ALIKE = ("sdxl_tiny", "flux1_schnell_tiny", "z_image_tiny")
"""Their VAEs have the graphs of Stable Diffusion 1 and 3 with other numbers."""
HALVES = ("vae_encoder", "vae_decoder")
ROWS, COLUMNS, BAND = 13, 6, 5
"""Of latents: the bands do not divide the image, which is no square."""


class Cut:
    """A half of a tiny VAE, its graph for a target, and its decomposition."""

    def __init__(self, checkpoint: Checkpoint, name: str, folder: Path, band: int = BAND) -> None:
        part = checkpoint.family.part(name).of(checkpoint.submodels[name].load["config"])
        self.model, self.config = part.model, checkpoint.submodels[name].load["config"]
        self.path = folder / "model.onnx"
        self.graph = load_graph(self.path)
        self.scale = self.model.scale(self.config) or 1
        (port,) = self.model.ports(self.config).inputs
        self.factor = 1 if port.role is Role.LATENTS else self.scale
        self.shape = (1, port.axes[1], ROWS * self.factor, COLUMNS * self.factor)
        names = [name for name in port.axes if isinstance(name, str)]
        self.parts = decompose(
            self.graph,
            lambda rows: dict(zip(names, (1, rows * self.factor, COLUMNS * self.factor), strict=True)),
            ROWS,
            band,
        )

    def whole(self, graph: Any, image: torch.Tensor) -> np.ndarray:
        session = create_session(self.path, TARGETS["cpu"], graph=graph)
        (given,) = session.get_inputs()
        found: np.ndarray = session.run(None, {given.name: image.to(getattr(torch, numpy_type(given))).numpy()})[0]
        return np.asarray(found, np.float32)

    def in_bands(self, image: torch.Tensor, lowered: bool = False) -> np.ndarray:
        def part_session(graph: Any, *, capture: bool) -> Any:
            return create_session(self.path, TARGETS["cpu"], graph=lower(graph).model if lowered else graph)

        half: Any = SimpleNamespace(place=place("cpu"), part_session=part_session)
        return np.asarray(Bands(half, self.parts, "cpu")(image).float())


@pytest.fixture(params=[pytest.param(each, marks=pytest.mark.slow) if each in ALIKE else each for each in WORKFLOWS])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def cuts(family: str, target: str, converted: Converted, root: Path) -> list[Cut]:
    checkpoint = open_checkpoint(f"synthetic:{WORKFLOWS[family]}", digests=PlainDigests(), download=False)
    made = Fused(family, target, converted, root)(checkpoint, HALVES)
    return [Cut(checkpoint, name, made[name].path) for name in HALVES]


def banded(parts: Decomposition) -> int:
    return sum(stage.rows < parts.rows for stage in parts.stages)


def test_bands_give_the_whole_image(family: str, converted: Converted, tmp_path: Path) -> None:
    for cut in cuts(family, "cpu", converted, tmp_path):
        image = torch.randn(cut.shape, generator=torch.Generator().manual_seed(1))
        expected = cut.whole(cut.graph, image)
        assert banded(cut.parts) > 2 and any(stage.norms for stage in cut.parts.stages if stage.rows < ROWS)
        np.testing.assert_allclose(cut.in_bands(image), expected, atol=1e-4)
        assert cut.parts.stored <= stored_bytes(cut.config, ROWS * cut.scale, COLUMNS * cut.scale)
        assert cut.parts.size <= band_bytes(cut.model, cut.config, (ROWS, COLUMNS), BAND, cut.scale)


def test_graphs_for_cuda_give_it_too(family: str, converted: Converted, tmp_path: Path) -> None:
    """Lowered to operators of the CPU, which compute what CUDA computes: in 16 bits, channels last."""
    for cut in cuts(family, "cuda", converted, tmp_path):
        assert any(node.op_type == "NhwcConv" for stage in cut.parts.stages for node in stage.model.graph.node)
        assert not any("GroupNorm" in node.op_type for stage in cut.parts.stages for node in stage.model.graph.node)
        image = torch.randn(cut.shape, generator=torch.Generator().manual_seed(1))
        expected = cut.whole(lower(cut.graph).model, image)
        np.testing.assert_allclose(cut.in_bands(image, lowered=True), expected, atol=2e-2)


def test_both_targets_are_cut_at_the_same_places(converted: Converted, tmp_path: Path) -> None:
    for on_cpu, on_cuda in zip(
        *(cuts("tiny", target, converted, tmp_path / target) for target in ("cpu", "cuda")), strict=True
    ):
        found = [
            [[(norm.groups, norm.epsilon) for norm in stage.norms] for stage in cut.parts.stages]
            for cut in (on_cpu, on_cuda)
        ]
        assert [[groups for groups, _ in each] for each in found[0]] == [
            [groups for groups, _ in each] for each in found[1]
        ]


def test_attention_reads_all_keys_in_every_band(converted: Converted, tmp_path: Path) -> None:
    """A band that takes little more memory than its keys and values runs attention in bands as well."""
    (_, decoder) = cuts("tiny", "cpu", converted, tmp_path)
    (attention,) = (stage for stage in decoder.parts.stages if stage.whole)
    assert {value.shape for value in attention.whole.values()} == {
        (1, 1, 64, ROWS * COLUMNS), (1, 1, ROWS * COLUMNS, 64)
    }  # fmt: skip


def test_statistics_of_bands_are_those_of_the_whole() -> None:
    """Also where the mean is a thousand times the deviation, and bands differ."""
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn((1, 8, 30, 7), generator=generator) + 1000 * torch.arange(1, 9).reshape(1, 8, 1, 1)
    whole += torch.arange(30).reshape(1, 1, 30, 1)
    found = Statistics(1)
    for band in whole.split(7, 2):
        found.add(band)
    norm = Norm("x", "scale", "shift", (8, 1, 1), 1, 4, 1e-5)
    given = found.parameters(norm)
    normalized = (whole.double() * given["scale"].double() + given["shift"].double()).reshape(4, -1)
    expected = torch.nn.functional.group_norm(whole.double(), 4, eps=1e-5).reshape(4, -1)
    assert (normalized - expected).abs().max() < 1e-2, "float32 holds seven digits of the shift"
    assert (
        given["scale"][::2, 0, 0]
        .double()
        .allclose(1 / (whole.double().reshape(4, -1).var(1, correction=0) + 1e-5).sqrt(), rtol=1e-6)
    )


def test_on_a_gpu_sessions_are_kept_but_not_the_tensors_of_all_stages(
    converted: Converted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These took several times as much memory as any stage: 36 GB instead of 18 for SDXL's decoder at 2048 x 2048."""
    bounds: list[weakref.ref[Bound]] = []
    told: list[bool] = []
    alive: list[int] = []

    class Watched(Bound):
        def __init__(self, session: Any, where: Any, inputs: Any, *, prepared: bool = False) -> None:
            alive.append(sum(each() is not None for each in bounds))
            super().__init__(session, place("cpu"), inputs)
            bounds.append(weakref.ref(self))
            told.append(prepared)

    monkeypatch.setattr(run, "Bound", Watched)
    (_, cut) = cuts("tiny", "cpu", converted, tmp_path)
    created: list[Any] = []

    def part_session(graph: Any, *, capture: bool) -> Any:
        created.append(graph)
        return create_session(cut.path, TARGETS["cpu"], graph=graph)

    where = SimpleNamespace(device="cpu", stream=object(), selected=nullcontext)
    half: Any = SimpleNamespace(place=where, part_session=part_session)
    bands, count = Bands(half, cut.parts, "cpu:0"), len(cut.parts.stages)
    image = torch.randn(cut.shape, generator=torch.Generator().manual_seed(1))
    first, again = bands(image), bands(image)
    assert len(created) == count and told == [False] * count + [True] * count
    assert max(alive) <= 1, "the last stage's, until the next has its own"
    assert torch.equal(first, again)
    np.testing.assert_allclose(np.asarray(first), cut.whole(cut.graph, image), atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["cuda", "cpu"])
def test_on_a_gpu_bands_give_the_whole_image_and_keep_no_host_memory(
    storage: str, converted: Converted, tmp_path: Path
) -> None:
    where = place("cuda")
    for cut in cuts("tiny", "cuda", converted, tmp_path):

        def part_session(graph: Any, *, capture: bool, model: Path = cut.path) -> Any:
            return create_session(model, TARGETS["cuda"], replace(PLAIN, stream=where.stream.cuda_stream), graph=graph)

        half: Any = SimpleNamespace(place=where, part_session=part_session)
        bands = Bands(half, cut.parts, storage)
        image = torch.randn(cut.shape, generator=torch.Generator().manual_seed(1))
        expected = cut.whole(lower(cut.graph).model, image)
        with where.current(), torch.no_grad():
            for _ in range(2):
                np.testing.assert_allclose(bands(image.cuda()).float().cpu().numpy(), expected, atol=2e-2)
    if storage == "cpu":
        assert torch.cuda.host_memory_stats()["allocated_bytes.current"] == 0


def graph_of(*nodes: Any) -> Any:
    axes = [1, 4, "latent_height", "latent_width"]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, axes) for name in ("x", "y")]
    return helper.make_model(
        helper.make_graph(list(nodes), "g", ends[:1], ends[1:]), opset_imports=[helper.make_opsetid("", 17)]
    )


@pytest.mark.parametrize(
    ("node", "why"),
    [
        (helper.make_node("CumSum", ["x", "axis"], ["y"], "sums"), "CumSum sums cannot run in bands: it is not known"),
        (helper.make_node("Softmax", ["x"], ["y"], "down", axis=2), "Softmax down cannot run in bands"),
        (helper.make_node("Concat", ["x", "x"], ["y"], "twice", axis=2), "Concat twice cannot run in bands"),
    ],
)
def test_an_operator_that_may_read_any_row_is_refused(node: Any, why: str) -> None:
    graph = graph_of(node)
    graph.graph.initializer.append(onnx.numpy_helper.from_array(np.array(2, np.int64), "axis"))
    with pytest.raises(PassError, match=why):
        decompose(graph, lambda rows: {"latent_height": rows, "latent_width": 6}, ROWS, BAND)


def test_bands_no_higher_than_their_margins_are_refused() -> None:
    names = ["x", "a", "b", "y"]
    convs = [
        helper.make_node("Conv", [before, "w"], [after], after, pads=[1, 1, 1, 1]) for before, after in pairwise(names)
    ]
    graph = graph_of(*convs)
    graph.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((4, 4, 3, 3), np.float32), "w"))
    with pytest.raises(PassError, match="bands of 6 rows are too small for margins of 3"):
        decompose(graph, lambda rows: {"latent_height": rows, "latent_width": 6}, ROWS, 6)
    assert decompose(graph, lambda rows: {"latent_height": rows, "latent_width": 6}, ROWS, 7).stages[0].margin == 3


@pytest.mark.parametrize(("rows", "band"), [(52, 28), (53, 28), (13, 12)])
def test_a_graph_with_fewer_rows_than_the_latents_is_refused(rows: int, band: int) -> None:
    """A band may begin between two of its rows."""
    names = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    graph = graph_of(
        helper.make_node("Conv", ["x", "w"], ["half"], "halves", pads=[1, 1, 1, 1], strides=[2, 1]),
        helper.make_node("Resize", ["half", "", "twice"], ["y"], **names),
    )
    for name, value in {"w": np.ones((4, 4, 3, 3), np.float32), "twice": np.array([1, 1, 2, 1], np.float32)}.items():
        graph.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    with pytest.raises(PassError, match="Conv halves cannot run in bands"):
        decompose(graph, lambda count: {"latent_height": count, "latent_width": 6}, rows, band)


def test_a_graph_that_knows_the_places_of_rows_is_refused() -> None:
    """Folded into a constant, they are the band's."""
    nodes = [
        helper.make_node("Shape", ["x"], ["height"], start=2, end=3),
        helper.make_node("Squeeze", ["height"], ["rows"]),
        helper.make_node("Range", ["zero", "rows", "one"], ["places"]),
        helper.make_node("Cast", ["places"], ["heights"], to=TensorProto.FLOAT),
        helper.make_node("Reshape", ["heights", "column"], ["grid"]),
        helper.make_node("Add", ["x", "grid"], ["y"]),
    ]
    graph = graph_of(*nodes)
    for name, value in {"zero": 0, "one": 1, "column": [1, 1, -1, 1]}.items():
        graph.graph.initializer.append(onnx.numpy_helper.from_array(np.array(value, np.int64), name))
    with pytest.raises(PassError, match="the graph differs between image sizes"):
        decompose(graph, lambda rows: {"latent_height": rows, "latent_width": 6}, ROWS, BAND)


@pytest.mark.parametrize("others", [0, 1])
def test_a_graph_that_needs_statistics_of_its_input_is_refused(others: int) -> None:
    """They would not be measured, with or without other results of the first stage."""
    nodes = [
        helper.make_node("Reshape", ["x", "groups"], ["grouped"]),
        helper.make_node("InstanceNormalization", ["grouped", "one", "zero"], ["normalized"], "first"),
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Reshape", ["normalized", "shape"], ["a"]),
        helper.make_node("Conv", ["x" if others else "a", "w"], ["b"], pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["a", "b"], ["y"]),
    ]
    graph = graph_of(*nodes)
    for name, value in {
        "groups": np.array([0, 2, -1]), "one": np.ones(2, np.float32), "zero": np.zeros(2, np.float32),
        "w": np.ones((4, 4, 3, 3), np.float32),
    }.items():  # fmt: skip
        graph.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    with pytest.raises(
        PassError, match="InstanceNormalization first cannot run in bands: it normalizes the graph's input"
    ):
        decompose(graph, lambda rows: {"latent_height": rows, "latent_width": 6}, ROWS, BAND)


def test_a_graph_that_cannot_run_in_bands_is_tiled_and_a_warning_names_the_operator(tiny_pipeline: Path) -> None:
    pipeline = Pipeline.load(tiny_pipeline, "cpu", threads=1, checker=False, vae_tiles=True)

    def with_a_shrink(graph: Any) -> None:
        (last,) = (node for node in graph.graph.node if node.output[0] == "sample")
        last.output[0] = "unshrunk"
        graph.graph.node.append(helper.make_node("Shrink", ["unshrunk"], ["sample"], "shrunk", bias=0.0, lambd=0.0))

    decoder = pipeline.submodels["vae_decoder"].changed(with_a_shrink)
    latents = torch.randn(1, 4, 24, 32, generator=torch.Generator().manual_seed(1))
    with pytest.warns(TiledWarning, match="decoder is tiled, which changes the image slightly: Shrink shrunk"):
        how, (found,) = vae.decode(decoder, latents, pipeline.latents, tiles=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TiledWarning)
        _, (exact,) = vae.decode(pipeline.submodels["vae_decoder"], latents, pipeline.latents, tiles=True)
    assert how == vae.Tiling(vae.tile_pixels(decoder.config), None), "what an image's record says"
    assert found.shape == exact.shape and (found - exact).abs().max() > 1e-3
