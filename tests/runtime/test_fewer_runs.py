"""Fewer runs of the denoiser: what is kept and left out is what a loop over diffusers' own UNet keeps and leaves out.

The reference shares nothing with the runtime: it is diffusers' pipeline in PyTorch, whose UNet computes every layer in every
step; hooks put the features of an earlier step in the place of what comes from below.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from beside_diffusers import PROMPT, SIZE, TOLERANCE, assert_equal, put_together
from converted import Converted
from PIL import Image

from sdflow.config import load_workflow
from sdflow.errors import UsageError, WorkflowError
from sdflow.families.shared.approximation import Approximation, Interval, Reuse, parse
from sdflow.manifest import Manifest, Origin, read_manifest
from sdflow.manifest.file import as_json, from_json
from sdflow.passes.registry import catalog
from sdflow.runtime.denoiser.denoisers import DenoiserRequest, Denoisers
from sdflow.runtime.denoiser.shallow import depths, skip_joins
from sdflow.runtime.denoiser.split import split
from sdflow.runtime.draw_request import GenerateRequest
from sdflow.runtime.ensemble import Ensemble
from sdflow.runtime.files.image_text import SETTINGS
from sdflow.runtime.generate import Progress, generate
from sdflow.runtime.pipeline import Pipeline
from sdflow.runtime.request_check import with_approximation
from sdflow.sources import PlainDigests, load_pipeline, open_checkpoint
from tests.passes.conftest import fused_unet, tiny_unet  # noqa: F401
from tests.runtime.test_split import MOVING, SIZES, load, lowered

STEPS = 6
HALF = {"every": 2, "from": 0.2, "to": 1.0}


class Built:
    """A small pipeline of an architecture, ours and diffusers'."""

    def __init__(self, architecture: str, root: Path, converted: Converted) -> None:
        checkpoint = open_checkpoint(f"synthetic:{architecture}", digests=PlainDigests(), download=False)
        names = [name for name in checkpoint.submodels if name != checkpoint.family.checker]
        put_together(checkpoint, converted, root / "pipeline", names)
        self.ours = Pipeline.load(root / "pipeline", "cpu", threads=1)
        self.theirs = load_pipeline(checkpoint)
        if getattr(self.theirs, "safety_checker", None) is not None:
            self.theirs.safety_checker = None
        self.theirs.set_progress_bar_config(disable=True)
        for one in (self.ours, self.theirs):  # a run a step
            one.scheduler = diffusers.DDIMScheduler.from_config(one.scheduler.config)
        shape = self.ours.latents_shape(1, SIZE, SIZE)
        self.call: dict[str, Any] = {
            "latents": torch.from_numpy(np.random.default_rng(1).standard_normal(shape, dtype=np.float32)),
            "num_inference_steps": STEPS,
            "guidance_scale": 6.0,
            "height": SIZE,
            "width": SIZE,
            "output_type": "np",
        }

    def drawn(self, **how: Any) -> Any:
        return self.ours(PROMPT, **self.call, **how).images

    def expected(self) -> Any:
        return self.theirs(PROMPT, **self.call).images


@pytest.fixture(scope="module")
def built(converted: Converted, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built("sdxl-tiny", tmp_path_factory.mktemp("sdxl-tiny"), converted)


@contextmanager
def features_kept(unet: Any, kept: set[int], layers: int) -> Iterator[None]:
    """diffusers' UNet with the features of the run before in the runs `kept`, counted from 0. layers: of the way up, from its
    end, that read the latents of the run itself."""
    residual = [each for block in unet.up_blocks for each in block.resnets]
    below = residual[-layers - 1].out_channels
    run, stored = -1, torch.zeros(0)

    def count(*_: Any) -> None:
        nonlocal run
        run += 1

    def replaced(_: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        nonlocal stored
        joined, *others = given
        if run not in kept:
            stored = joined[:, :below].clone()
        return torch.cat([stored, joined[:, below:]], dim=1), *others

    hooks = [unet.register_forward_pre_hook(count), residual[-layers].register_forward_pre_hook(replaced)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def guided_in(unet: Any, runs: set[int]) -> Iterator[None]:
    """diffusers' UNet that gives the prompt's half for both in the other runs, so that guidance adds nothing."""
    run = -1

    def halved(_: Any, __: Any, output: Any) -> Any:
        nonlocal run
        run += 1
        if run in runs:
            return output
        prompted = output[0].chunk(2)[1]
        return (torch.cat([prompted, prompted]), *output[1:])

    hook = unet.register_forward_hook(halved)
    try:
        yield
    finally:
        hook.remove()


@pytest.mark.parametrize(("architecture", "layers"), [("sdxl-tiny", 1), ("sdxl-tiny", 3), ("sd15-tiny", 2)])
def test_deep_features_are_kept_as_in_a_loop_over_diffusers_unet(
    architecture: str, layers: int, built: Built, converted: Converted, tmp_path: Path
) -> None:
    if architecture != "sdxl-tiny":
        built = Built(architecture, tmp_path, converted)
    exact = built.expected()
    with features_kept(built.theirs.unet, {2, 4}, layers):
        expected = built.expected()
    drawn = built.drawn(reuse={**HALF, "layers": layers})
    assert_equal(drawn, expected)
    assert np.abs(expected - exact).max() > 10 * TOLERANCE, "what is kept would change nothing"


def test_guidance_in_a_part_of_the_steps(built: Built) -> None:
    exact = built.expected()
    with guided_in(built.theirs.unet, {1, 2, 3}):
        expected = built.expected()
    assert_equal(built.drawn(guidance_interval={"from": 0.2, "to": 0.7}), expected)
    assert np.abs(expected - exact).max() > 10 * TOLERANCE, "what is left out would change nothing"


def test_both_at_once(built: Built) -> None:
    """The batch changes before run 4: its features have other rows, so it is whole."""
    with guided_in(built.theirs.unet, {0, 1, 2, 3}), features_kept(built.theirs.unet, {1, 3, 5}, 1):
        expected = built.expected()
    assert_equal(built.drawn(reuse=Reuse(), guidance_interval=Interval(0.0, 0.7)), expected)
    assert_equal(built.drawn(), built.expected())  # nothing stays behind


def test_several_images_without_guidance(built: Built) -> None:
    shape = built.ours.latents_shape(2, SIZE, SIZE)
    latents = torch.from_numpy(np.random.default_rng(2).standard_normal(shape, dtype=np.float32))
    call = built.call | {"latents": latents, "guidance_scale": 1.0}
    with features_kept(built.theirs.unet, {1, 2, 4, 5}, 1):
        expected = built.theirs([PROMPT, "a horse"], **call).images
    assert_equal(built.ours([PROMPT, "a horse"], **call, reuse={"every": 3}).images, expected)


@pytest.mark.parametrize("guidance", [False, True])
def test_the_two_steps_of_a_graph_for_cuda_give_what_it_gives(fused_unet: Any, guidance: bool) -> None:  # noqa: F811
    model = load(fused_unet.path)
    parts = split(model, SIZES, moving=MOVING, guidance=guidance)
    assert len(skip_joins(parts.step.graph, parts.moving.latents)) == 4
    cut = depths(parts, 2)
    random = np.random.default_rng(3)
    whole, shallow = lowered(cut.whole, fused_unet.path), lowered(cut.shallow, fused_unet.path)
    feeds = {
        item.name: random.standard_normal(item.shape).astype(np.float32)
        for item in lowered(parts.step, fused_unet.path).get_inputs()
    }
    expected, features = whole.run(["out_sample", cut.features], feeds)
    read = {item.name for item in shallow.get_inputs()}
    assert cut.features in read and read - {cut.features} < set(feeds), "it reads less"
    given = {name: value for name, value in {**feeds, cut.features: features}.items() if name in read}
    (found,) = shallow.run(["out_sample"], given)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
    (other,) = shallow.run(["out_sample"], {**given, cut.features: features + 1})
    assert np.abs(other - expected).max() > 0.01, "the features count"
    assert 3 * len(cut.shallow.graph.node) < 2 * len(cut.whole.graph.node)


def test_more_layers_than_there_are(fused_unet: Any) -> None:  # noqa: F811
    parts = split(load(fused_unet.path), SIZES, moving=MOVING, guidance=True)
    with pytest.raises(UsageError, match="4 layers with a skip connection, so 4 cannot run"):
        depths(parts, 4)


@pytest.mark.parametrize(
    ("reuse", "halves", "kept"),
    [
        (Reuse(2), [2] * 6, [1, 3, 5]),
        (Reuse(3), [2] * 7, [1, 2, 4, 5]),
        (Reuse(2, Interval(0.1, 0.9)), [2] * 30, [4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26]),
        (Reuse(2, Interval(0.29, 1)), [1] * 100, list(range(30, 100, 2))),
        (Reuse(2), [2, 2, 2, 2, 1, 1, 1], [1, 3, 5]),
        (Reuse(2), [1], []),
    ],
)
def test_which_runs_take_features(reuse: Reuse, halves: list[int], kept: list[int]) -> None:
    assert [index for index, each in enumerate(reuse.reused(halves)) if each] == kept


@pytest.mark.parametrize(
    ("reuse", "interval", "words"),
    [
        ({"every": 1}, None, "`every` is 1"),
        ({"every": 2.5}, None, "every is 2.5, not a whole number"),
        ({"often": 2}, None, "unknown key 'often'"),
        ({"from": 0.9, "to": 0.1}, None, "from 0.9 to 0.1 is not a valid range"),
        ({"layers": 0}, None, "`layers` is 0"),
        ("every=2", None, "is not a mapping"),
        (None, {"to": 1.5}, "from 0 to 1.5 is not a valid range"),
        (None, {"to": True}, "to is True, not a number"),
        (None, {"to": float("nan")}, "to is nan, not a number"),
    ],
)
def test_what_is_no_approximation_is_told(reuse: Any, interval: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Approximation.of(reuse, interval)


def test_what_an_option_says() -> None:
    assert parse("--reuse", "every=2,from=0.1,to=0.9") == {"every": 2, "from": 0.1, "to": 0.9}
    for text in ("every", "every=x", "every=2,every=3", "from=inf"):
        with pytest.raises(UsageError, match="is not NAME=NUMBER"):
            parse("--reuse", text)


def test_an_interval_needs_guidance(built: Built) -> None:
    with pytest.raises(UsageError, match="there is no guidance to limit"):
        built.ours(PROMPT, **built.call | {"guidance_scale": 1.0}, guidance_interval={"to": 0.5})


def test_where_a_denoiser_is_not_taken_apart_nothing_is_left_out(built: Built) -> None:
    unet, decoder = (built.ours.submodels[name] for name in (built.ours.family.denoiser, built.ours.family.decoder))
    request = DenoiserRequest(built.ours.latents_shape(1, SIZE, SIZE), 2, {}, fewer=Approximation(reuse=Reuse()))
    for nets, parted, words in (
        ({"edges": unet}, True, "ControlNets"),
        ({}, False, "compiles the denoiser as a whole"),
    ):
        denoisers = Denoisers(unet, nets, [], decoder, 8, {"sequence": 77}, split=parted, low_memory=False)
        with pytest.raises(UsageError, match=words):
            denoisers.get(request)


def test_a_refiner_draws_exact_images(built: Built) -> None:
    both = Ensemble(built.ours, built.ours)
    for how in ({"reuse": {"every": 2}}, {"guidance_interval": {"to": 0.5}}):
        with pytest.raises(UsageError, match="approximations are untested with a refiner"):
            both(PROMPT, **built.call, **how)


SAID = {"reuse": {"every": 2, "from": 0.25, "to": 1.0, "layers": 2}, "guidance_interval": {"from": 0.0, "to": 0.5}}


def test_a_folder_says_what_its_workflow_says(tmp_path: Path) -> None:
    manifest = Manifest(Origin("tiny", "cpu", generate=SAID), {}, ())
    assert from_json(as_json(manifest), "there").origin.generate == SAID
    wrong = {**as_json(manifest), "generate": {"reuse": {"every": 0}}}
    with pytest.raises(UsageError, match="generate: reuse: `every` is 0"):
        from_json(wrong, "there")
    request = GenerateRequest(tmp_path, ["a horse"], tmp_path)
    assert with_approximation(request, manifest)[1].settings() == SAID
    assert not with_approximation(replace(request, reuse={}, guidance_interval={}), manifest)[1]
    _, changed = with_approximation(replace(request, reuse={"every": 3}), manifest)
    assert changed == Approximation(Reuse(3), Interval(0.0, 0.5))
    with pytest.raises(UsageError, match="approximations are untested with a refiner"):
        with_approximation(replace(request, refiner=tmp_path), manifest)


def test_an_image_says_that_it_is_an_approximation(tiny_pipeline: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    shutil.copytree(tiny_pipeline, folder, symlinks=True, ignore=lambda *_: ["sdflow.json"])
    content = as_json(read_manifest(tiny_pipeline))
    (folder / "sdflow.json").write_text(json.dumps({**content, "generate": {"reuse": {"every": 2, "from": 0.0}}}))
    told: list[str] = []
    request = GenerateRequest(
        folder, ["a horse"], tmp_path / "out", seed=1, height=64, width=64, steps=3, threads=1, check=False
    )
    result = generate(request, Progress(phase=told.append))
    reuse = {"every": 2, "from": 0.0, "to": 1.0, "layers": 1}
    with Image.open(result.images[0].file) as image:
        assert json.loads(image.info[SETTINGS])["approximation"] == {"reuse": reuse}
    note = "approximates the model's image: reuse every=2,from=0,to=1,layers=1"
    assert note in told and note in result.notes


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"reuse": {"every": 1}}, "'reuse.every' must be greater than or equal to 2"),
        ({"reuse": {"often": 2}}, "unknown option 'often'"),
        ({"guidance_interval": {"from": 0.6, "to": 0.4}}, "from must be less than to"),
    ],
)
def test_a_workflow_that_says_it_wrongly(said: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(json.dumps({"extends": "base/tiny.yaml", "target": "cpu", "generate": said}))
    with pytest.raises(WorkflowError, match=words):
        load_workflow(path, catalog=catalog())


def test_a_workflow_says_it(tmp_path: Path) -> None:
    path = tmp_path / "right.yaml"
    said = {"reuse": {"from": 0.25, "layers": 2}, "guidance_interval": {"to": 0.5}}
    path.write_text(json.dumps({"extends": "base/tiny.yaml", "target": "cpu", "generate": said}))
    (pipeline,) = load_workflow(path, catalog=catalog()).pipelines
    assert pipeline.generate == SAID
