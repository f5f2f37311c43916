"""A pipeline as one graph draws what `Pipeline` draws (fp32 on the CPU), whatever the family and the scheduler."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from converted import Converted

from sdflow.build.assemble import assemble, copy_file
from sdflow.errors import CacheError, PassError, SlowerWarning, UsageError
from sdflow.export.one_file import Exported, Wanted, export_one_file, folder_schedule
from sdflow.families.shared.noising import DIFFUSION
from sdflow.manifest import Origin
from sdflow.runtime.denoiser.schedule import named_scheduler
from sdflow.runtime.pipeline import Pipeline
from sdflow.sources import PlainDigests, open_checkpoint

TOLERANCE = 1e-4  # of pixel values in [0, 1]
PROMPTS, NEGATIVES = ["a horse", "two cats"], ["blurry", "grey"]
ROWS, COLUMNS = 8, 16
STEPS = 3


def build(architecture: str, root: Path, converted: Converted) -> Path:
    """The folder of a small pipeline of an architecture, converted and not fused."""
    checkpoint = open_checkpoint(f"synthetic:{architecture}", digests=PlainDigests(), download=False)
    assemble(
        root / "pipeline",
        parts=converted(checkpoint, checkpoint.submodels),
        companions=checkpoint.companions,
        origin=Origin(architecture, "cpu", family=checkpoint.family.name),
        options=checkpoint.options,
    )
    return root / "pipeline"


class Drawing:
    """The same image by both: `pipeline` as it is, and `graph`, what the one file gives."""

    def __init__(self, ours: Pipeline, graph: Path, scale: float | None = None, *, optimized: bool = False) -> None:
        self.told = json.loads(Path(f"{graph}.json").read_bytes())
        self.ours = ours
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        if not optimized:  # to optimize takes longer than to run
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        self.session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
        self.inputs = {each.name for each in self.session.get_inputs()}
        self.scale = self.ours.defaults["text"].guidance_scale if scale is None else scale
        shape = (len(PROMPTS), self.ours.latents.channels, ROWS, COLUMNS)
        self.latents = torch.randn(shape, generator=torch.Generator().manual_seed(1))

    def ids(self, texts: Sequence[str], name: str) -> np.ndarray:
        tokenizer = self.ours.companions[f"tokenizer{name.rpartition('input_ids')[2]}"]
        options = {"padding": "max_length", "max_length": 77, "truncation": True, "return_tensors": "np"}
        return np.asarray(tokenizer(list(texts), **options).input_ids, np.int32)

    def graph(self, **more: np.ndarray) -> list[np.ndarray]:
        feeds = {"latents": self.latents.numpy()}
        for name in self.inputs:
            if name.endswith(("input_ids", "input_ids_2")):
                feeds[name] = self.ids(NEGATIVES if name.startswith("negative") else PROMPTS, name)
        if "guidance_scale" in self.inputs:
            feeds["guidance_scale"] = np.array([self.scale], np.float32)
        if "noises" in self.inputs and "noises" not in more:
            generator = torch.Generator().manual_seed(2)
            drawn = [
                torch.randn(self.latents.shape, generator=generator) for _ in range(self.told["schedule"]["draws"])
            ]
            feeds["noises"] = torch.stack(drawn).numpy()
        return self.session.run(None, {**feeds, **more})

    def pipeline(self, steps: int, *, negative: bool = True) -> np.ndarray:
        images = self.ours(
            PROMPTS,
            negative_prompt=NEGATIVES if negative else None,
            num_inference_steps=steps,
            guidance_scale=self.scale,
            height=ROWS * self.ours.latents.scale,
            width=COLUMNS * self.ours.latents.scale,
            latents=self.latents,
            generator=torch.Generator().manual_seed(2),
            output_type="np",
        ).images
        return np.asarray(images)


@pytest.fixture(scope="module")
def tiny(tiny_pipeline: Path) -> Pipeline:
    return Pipeline.load(tiny_pipeline, "cpu", threads=1)


@pytest.fixture
def scheduled(tiny: Pipeline) -> Iterator[Callable[[str], Pipeline]]:
    """The pipeline with the scheduler of this name."""
    own = tiny.scheduler

    def with_scheduler(name: str) -> Pipeline:
        tiny.scheduler = named_scheduler(name, own.config, DIFFUSION)
        return tiny

    yield with_scheduler
    tiny.scheduler = own


def exported(folder: Path, out: Path, **wanted: Any) -> Exported:
    return export_one_file(folder, out, Wanted(**{"steps": STEPS, **wanted}))


def one_size(ours: Pipeline) -> dict[str, int]:
    scale = ours.latents.scale
    return {"height": ROWS * scale, "width": COLUMNS * scale, "images": len(PROMPTS)}


def assert_same(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.shape == theirs.shape
    assert theirs.std() > 0.1, "an image, not a grey plane"
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)


def test_the_graph_draws_what_the_pipeline_draws(tiny_pipeline: Path, tiny: Pipeline, tmp_path: Path) -> None:
    made = exported(tiny_pipeline, tmp_path / "tiny.onnx")
    drawing = Drawing(tiny, tmp_path / "tiny.onnx", optimized=True)
    assert drawing.inputs == {"input_ids", "negative_input_ids", "latents", "guidance_scale"}
    images, flags = drawing.graph()
    assert_same(images, drawing.pipeline(STEPS))
    assert flags.tolist() == [False, False]
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in made.files}
    onnx.checker.check_model(str(tmp_path / "tiny.onnx"))


SLOW_SCHEDULERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("ddim", "euler", "unipc", "tcd", "lcm")]


@pytest.mark.parametrize("scheduler", ["euler_a", "dpm++_2m", "pndm", *SLOW_SCHEDULERS])
def test_an_open_schedule_takes_every_scheduler(
    scheduler: str, open_graph: Path, tiny_pipeline: Path, scheduled: Callable[[str], Pipeline]
) -> None:
    table = folder_schedule(tiny_pipeline, Wanted(scheduler=scheduler, steps=4))
    drawing = Drawing(scheduled(scheduler), open_graph)
    generator = torch.Generator().manual_seed(2)
    noises = torch.zeros(table.draws, *drawing.latents.shape)
    for index in range(table.draws):
        noises[index] = torch.randn(drawing.latents.shape, generator=generator)
    more = {"timesteps": table.timesteps, "coefficients": table.table, "noises": noises.numpy()}
    assert_same(drawing.graph(**more)[0], drawing.pipeline(4))


@pytest.fixture(scope="module")
def open_graph(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("open") / "open.onnx"
    exported(tiny_pipeline, out, open_schedule=True, checker=False)
    return out


def test_noises_of_a_baked_schedule_are_an_input(
    tiny_pipeline: Path, scheduled: Callable[[str], Pipeline], tmp_path: Path
) -> None:
    made = exported(tiny_pipeline, tmp_path / "tiny.onnx", scheduler="euler_a")
    assert f"noises float ({made.schedule.draws}, images, 4, rows, columns)" in made.inputs
    drawing = Drawing(scheduled("euler_a"), tmp_path / "tiny.onnx")
    assert_same(drawing.graph()[0], drawing.pipeline(STEPS))


def test_without_guidance_there_is_neither_scale_nor_negative_prompt(
    tiny_pipeline: Path, tiny: Pipeline, tmp_path: Path
) -> None:
    exported(tiny_pipeline, tmp_path / "tiny.onnx", guidance_scale=1.0)
    drawing = Drawing(tiny, tmp_path / "tiny.onnx", scale=1.0)
    assert drawing.inputs == {"input_ids", "latents"}
    assert_same(drawing.graph()[0], drawing.pipeline(STEPS, negative=False))


def test_a_guidance_scale_up_to_1_is_none(tiny_pipeline: Path, tiny: Pipeline, tmp_path: Path) -> None:
    exported(tiny_pipeline, tmp_path / "tiny.onnx", checker=False)
    drawing = Drawing(tiny, tmp_path / "tiny.onnx", scale=0.3)
    assert_same(drawing.graph()[0], drawing.pipeline(STEPS, negative=False))


def test_a_graph_of_one_size_works_out_no_shape_in_a_round(tiny_pipeline: Path, tiny: Pipeline, tmp_path: Path) -> None:
    made = exported(tiny_pipeline, tmp_path / "tiny.onnx", **one_size(tiny))
    assert f"latents float (2, 4, {ROWS}, {COLUMNS})" in made.inputs
    assert "input_ids int32 (2, 77)" in made.inputs
    drawing = Drawing(tiny, tmp_path / "tiny.onnx")
    assert (drawing.told["latents"]["rows"], drawing.told["latents"]["columns"]) == (ROWS, COLUMNS)
    assert_same(drawing.graph()[0], drawing.pipeline(STEPS))
    graph = onnx.load(tmp_path / "tiny.onnx", load_external_data=False).graph
    (loop,) = (node for node in graph.node if node.op_type == "Loop")
    body = loop.attribute[0].g.node
    kinds = {node.op_type for node in body}
    assert max(len(node.output) for node in [*graph.node, *body]) < 8, "WebGPU binds 8 buffers, with what is read"
    assert not kinds & {"Shape", "Sin", "Cos"}, "the timesteps are embedded in front of it"
    assert "MatMul" in kinds


def test_a_denoiser_that_cannot_be_taken_apart_runs_whole_and_that_is_told(
    tiny_pipeline: Path, tiny: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any, **options: Any) -> None:
        raise PassError("its time embedding reads the latents", where="split")

    monkeypatch.setattr("sdflow.export.once.split", refuse)
    with pytest.warns(SlowerWarning, match="reads the latents"):
        exported(tiny_pipeline, tmp_path / "tiny.onnx", checker=False, **one_size(tiny))
    drawing = Drawing(tiny, tmp_path / "tiny.onnx")
    assert_same(drawing.graph()[0], drawing.pipeline(STEPS))


def test_weights_may_be_in_the_graph(
    tiny_pipeline: Path, tiny: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = exported(tiny_pipeline, tmp_path / "tiny.onnx", checker=False, embed=True)
    assert {path.name for path in made.files} == {"tiny.onnx", "tiny.onnx.json"}
    drawing = Drawing(tiny, tmp_path / "tiny.onnx")
    assert drawing.told["data"] == []
    assert_same(drawing.graph()[0], drawing.pipeline(STEPS))
    monkeypatch.setattr("sdflow.export.one_file.EMBEDDED", 1000)
    with pytest.raises(UsageError, match="but a graph holds at most 1"):
        exported(tiny_pipeline, tmp_path / "tiny.onnx", embed=True)


def test_a_size_that_the_model_cannot_draw_is_told(tiny_pipeline: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="height is 100 pixels"):
        exported(tiny_pipeline, tmp_path / "tiny.onnx", height=100)
    with pytest.raises(UsageError, match="0 images were requested"):
        exported(tiny_pipeline, tmp_path / "tiny.onnx", images=0)
    assert list(tmp_path.iterdir()) == []


def changed(pipeline: Path, folder: Path, file: str, **entries: Any) -> Path:
    """The pipeline with other entries in one of its JSON files."""
    folder.mkdir()
    inside = Path(file).parent
    for path in pipeline.iterdir():
        if path.name != inside.name:
            (folder / path.name).symlink_to(path)
    (folder / inside).mkdir()
    for path in (pipeline / inside).iterdir():
        if path.name != Path(file).name:
            (folder / inside / path.name).symlink_to(path)
    content = {**json.loads((pipeline / file).read_bytes()), **entries}
    (folder / file).write_text(json.dumps({name: each for name, each in content.items() if each != "absent"}))
    return folder


@pytest.mark.parametrize("sized", [False, True])
def test_tokenizers_of_unequal_length_are_refused(sized: bool, converted: Converted, tmp_path: Path) -> None:
    """The denoiser reads what both make of a text as one; so nothing can be drawn with them either."""
    whole = build("sdxl-tiny", tmp_path, converted)
    folder = changed(whole, tmp_path / "unequal", "tokenizer_2/tokenizer_config.json", model_max_length=64)
    more = one_size(Pipeline.load(whole, "cpu", threads=1)) if sized else {}
    with pytest.raises(UsageError, match="tokenizers have different lengths.* tokenizer 77, tokenizer_2 64"):
        exported(folder, tmp_path / "out/one.onnx", **more)
    with pytest.raises(UsageError, match="tokenizer 77, tokenizer_2 64"):
        Pipeline.load(folder, "cpu")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("file", "entry", "value", "message"),
    [
        ("unet/config.json", "block_out_channels", "absent", "has no entry 'block_out_channels'"),
        ("unet/config.json", "block_out_channels", 5, "its block_out_channels is 5"),
        ("vae_decoder/config.json", "block_out_channels", "absent", "has no entry 'block_out_channels'"),
        ("vae_decoder/config.json", "scaling_factor", "x", "its scaling_factor is 'x'"),
        ("vae_decoder/config.json", "scaling_factor", None, "its scaling_factor is None"),
    ],
)
def test_a_config_that_does_not_fit_is_told(
    tiny_pipeline: Path, tmp_path: Path, file: str, entry: str, value: Any, message: str
) -> None:
    folder = changed(tiny_pipeline, tmp_path / "changed", file, **{entry: value})
    with pytest.raises(UsageError, match=message) as caught:
        exported(folder, tmp_path / "out/one.onnx")
    assert caught.value.where == str(folder / file)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("wanted", "where"),
    [
        ({"images": 10**30}, "--images"),
        ({"images": -1}, "--images"),
        ({"guidance_scale": float("nan")}, "--guidance-scale"),
        ({"guidance_scale": float("inf")}, "--guidance-scale"),
    ],
)
def test_numbers_that_no_graph_can_have_are_refused(
    tiny_pipeline: Path, tmp_path: Path, wanted: dict[str, Any], where: str
) -> None:
    with pytest.raises(UsageError) as caught:
        exported(tiny_pipeline, tmp_path / "out/one.onnx", **wanted)
    assert caught.value.where == where
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "architecture", ["sdxl-tiny", *(pytest.param(each, marks=pytest.mark.slow) for each in ("sd21-tiny", "lcm-tiny"))]
)
def test_every_family_is_one_graph(architecture: str, converted: Converted, tmp_path: Path) -> None:
    folder = build(architecture, tmp_path, converted)
    exported(folder, tmp_path / "one.onnx")
    ours = Pipeline.load(folder, "cpu", threads=1)
    drawing = Drawing(ours, tmp_path / "one.onnx")
    guided = any(name.startswith("negative") for name in drawing.inputs)
    assert guided == (architecture != "lcm-tiny")
    assert_same(drawing.graph()[0], drawing.pipeline(STEPS, negative=guided))
    exported(folder, tmp_path / "one.onnx", **one_size(ours))
    assert_same(Drawing(ours, tmp_path / "one.onnx").graph()[0], drawing.pipeline(STEPS, negative=guided))
    if guided:  # for SDXL zeros, for others the embeddings of an empty text
        exported(folder, tmp_path / "one.onnx", negative=False)
        drawing = Drawing(ours, tmp_path / "one.onnx")
        assert not any(name.startswith("negative") for name in drawing.inputs)
        assert_same(drawing.graph()[0], drawing.pipeline(STEPS, negative=False))


def test_a_scheduler_that_is_not_linear_is_refused(tiny_pipeline: Path, tmp_path: Path) -> None:
    folder = tmp_path / "clipping"
    folder.mkdir()
    for path in tiny_pipeline.iterdir():
        if path.name != "scheduler":
            (folder / path.name).symlink_to(path)
    (folder / "scheduler").mkdir()
    config = json.loads((tiny_pipeline / "scheduler/scheduler_config.json").read_bytes())
    changed = {**config, "thresholding": True}
    (folder / "scheduler/scheduler_config.json").write_text(json.dumps(changed))
    with pytest.raises(UsageError, match="linear"):
        exported(folder, tmp_path / "one.onnx", scheduler="ddim")
    assert not (tmp_path / "one.onnx").exists()


def test_submodels_of_two_versions_of_operators_are_refused(tiny_pipeline: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    for path in tiny_pipeline.iterdir():
        if path.name != "vae_decoder":
            (folder / path.name).symlink_to(path)
    (folder / "vae_decoder").mkdir()
    for path in (tiny_pipeline / "vae_decoder").iterdir():
        (folder / "vae_decoder" / path.name).write_bytes(path.read_bytes())
    model = onnx.load(folder / "vae_decoder/model.onnx", load_external_data=False)
    model.opset_import[0].version += 1
    (folder / "vae_decoder/model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(PassError, match="one graph has one version"):
        exported(folder, tmp_path / "one.onnx")


def test_a_full_disk_leaves_what_was_there(
    tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported(tiny_pipeline, tmp_path / "tiny.onnx", checker=False)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    copy, copied = copy_file, []

    def until_it_is_full(source: Path, destination: Path) -> None:
        copied.append(destination)
        if len(copied) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        copy(source, destination)

    monkeypatch.setattr("sdflow.export.one_file.copy_file", until_it_is_full)
    with pytest.raises(CacheError, match="No space left"):
        exported(tiny_pipeline, tmp_path / "tiny.onnx", steps=STEPS + 1, checker=False)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_no_model_of_the_pipeline_is_written_over(tiny_pipeline: Path) -> None:
    for place in ("one.onnx", "unet/model.onnx", "new/one.onnx"):
        with pytest.raises(UsageError, match="inside the pipeline"):
            exported(tiny_pipeline, tiny_pipeline / place)
    assert not (tiny_pipeline / "new").exists()


def test_what_generate_does_besides_is_told(tiny_pipeline: Path, tmp_path: Path) -> None:
    folder = tmp_path / "approximating"
    folder.mkdir()
    for path in tiny_pipeline.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "sdflow.json").unlink()
    manifest = json.loads((tiny_pipeline / "sdflow.json").read_bytes())
    said = {"reuse": {"every": 2}, "guidance_interval": {"from": 0.25}}
    (folder / "sdflow.json").write_text(json.dumps({**manifest, "generate": said, "refiner": "refiner"}))
    reuse, interval, refiner = exported(folder, tmp_path / "one.onnx").left_out
    assert reuse.startswith("reuse every=2,")
    assert reuse.endswith("--reuse off")
    assert interval == "guidance_interval from=0.25,to=1: the result is as with --guidance-interval off"
    assert refiner == "the refiner: the result is as with --refiner-start 1"


def test_a_pipeline_that_takes_images_is_refused_as_that(tiny_pipeline: Path, tmp_path: Path) -> None:
    for path in tiny_pipeline.iterdir():
        if path.name != "unet":
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "unet").mkdir()
    for path in (tiny_pipeline / "unet").iterdir():
        (tmp_path / "unet" / path.name).symlink_to(path)
    config = json.loads((tiny_pipeline / "unet/config.json").read_bytes())
    (tmp_path / "unet/config.json").unlink()
    (tmp_path / "unet/config.json").write_text(json.dumps({**config, "ip_adapter_tokens": [4]}))
    with pytest.raises(UsageError, match="has IP-Adapters, which take images"):
        exported(tmp_path, tmp_path / "out/one.onnx")
    assert not (tmp_path / "out").exists()
