"""LoRAs that a request names: the same bits as `sdflow bake` gives, on the real server too."""

from __future__ import annotations

import gc
import io
import json
import pickle
import shutil
import subprocess
import sys
import threading
import time
import weakref
from base64 import b64decode
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import PIL.Image
import pytest
import torch
from kept_builds import KeptBuilds
from safetensors.numpy import load_file, save_file
from serve.conftest import RunningServer, running_server
from started_python import Command, StartedPython
from until import PATIENCE, until

from sdflow.errors import CheckpointError, PassError, UsageError, VerificationError
from sdflow.prompts.wildcards import Wildcards
from sdflow.runtime.denoiser.split import split
from sdflow.runtime.pipeline import Pipeline
from sdflow.runtime.sessions.live_weights import own_values
from sdflow.runtime.sessions.residency import Residency
from sdflow.serve.api_error import ApiError
from sdflow.serve.engine.engine import Engine
from sdflow.serve.engine.served_pipeline import ServedPipeline
from sdflow.serve.http.loras import Loras
from sdflow.serve.jobs import Drawn, Failed, Job, LoraFile, Message, Turned
from sdflow.serve.local import LocalPipeline
from sdflow.serve.loras import live_loras
from sdflow.serve.loras.lora_pipelines import LoraPipelines, Made, Wanted
from sdflow.serve.loras.lora_structures import LoraFit
from sdflow.serve.worker.ready_pipelines import ReadyPipelines

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "samples/loras"
BOTH = (("stripes", 0.8), ("outline", 0.5))


@pytest.fixture(scope="module")
def built(sdflow: Command, cache_of: KeptBuilds, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample pipeline as a user builds it, and baked with two LoRAs, and the cache of both."""
    folder = tmp_path_factory.mktemp("shapes")
    cache_of("shapes_cpu", folder)
    run = ["run", str(ROOT / "workflows/shapes_cpu.yaml"), "--no-evaluate", "--no-verify"]
    loras = [each for name, scale in BOTH for each in ("--lora", f"{SAMPLES / name}.safetensors:{scale}")]
    for command in (run, ["bake", "--base", "pipelines/shapes_cpu", *loras, "--out", "pipelines/baked"]):
        done = sdflow(*command, folder=folder)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def server(built: Path, started_python: StartedPython | None) -> Iterator[RunningServer]:
    width = json.loads((built / "pipelines/shapes_cpu/text_encoder/config.json").read_text())["hidden_size"]
    for name in ("embeddings", "cards"):
        (built / name).mkdir()
    save_file({"emb_params": np.ones((2, width), np.float32)}, built / "embeddings/my-style.safetensors")
    (built / "cards/color.txt").write_text("red\nblue\n")
    folders = ("--embeddings", str(built / "embeddings"), "--wildcards", str(built / "cards"))
    arguments = ("--batch-sizes", "1", "--loras", str(SAMPLES), "--cache", str(built / "cache"), *folders)
    with running_server(str(built / "pipelines/shapes_cpu"), *arguments, started=started_python) as made:
        yield made


def of_samples(*wanted: tuple[str, float]) -> tuple[LoraFile, ...]:
    return Loras(SAMPLES).find(wanted)


def drawn_with(pipeline: ServedPipeline) -> list[Message]:
    told: list[Message] = []
    engine = Engine(lambda job: pipeline, {"shapes": {1: 1.0}}, told.append)
    engine.submit(Job("a", 0, "shapes", "a large red circle", 1, arguments={"num_inference_steps": 1}))
    while engine.busy:
        engine.turn()
    return told


def weights_of(pipeline: ServedPipeline, submodel: str) -> dict[str, bytes]:
    """What the sessions of a submodel read from memory now, by the names of the initializers."""
    return {name: value.numpy().tobytes() for name, value in pipeline.base.submodels[submodel].session.live.items()}


def stored(folder: Path, submodel: str, names: Iterable[str]) -> dict[str, bytes]:
    found = own_values((folder / submodel / "model.onnx").resolve(), set(names), "cpu")
    return {name: value.numpy().tobytes() for name, value in found.items()}


def test_the_weights_are_those_that_bake_writes_and_go_back_to_their_own(built: Path) -> None:
    base = ServedPipeline.load(built / "pipelines/shapes_cpu", threads=1)
    pipelines = LoraPipelines(built / "pipelines/shapes_cpu", base, built / "cache", memory=1 << 30)
    made, other = (pipelines.served(of_samples(*each)) for each in (BOTH, [("stripes", 0.8)]))
    changed = {name for name, each in made.base.submodels.items() if each is not base.base.submodels[name]}
    assert changed == {"text_encoder", "unet"}
    drawn_with(made)
    for submodel in changed:
        weights = weights_of(made, submodel)
        assert weights == stored(built / "pipelines/baked", submodel, weights)
        assert weights != stored(built / "pipelines/shapes_cpu", submodel, weights)
    sessions = [made.base.submodels[submodel].session for submodel in changed]
    drawn_with(other)  # without a change of the text encoder
    weights = weights_of(other, "text_encoder")
    assert weights == stored(built / "pipelines/shapes_cpu", "text_encoder", weights)
    assert [other.base.submodels[submodel].session for submodel in changed] == sessions
    assert pipelines.served(of_samples(*BOTH)) is made
    assert pipelines.served(of_samples(("stripes", 0.0))) is base


def test_a_local_pipeline_draws_with_loras_what_the_baked_pipeline_draws(built: Path) -> None:
    """As ComfyUI's nodes do: in one process, under inference mode, LoRAs added one by one."""
    plain = LocalPipeline.load(built / "pipelines/shapes_cpu", built / "cache", threads=1)
    both = plain
    for name, scale in BOTH:
        both = both.with_lora(SAMPLES / f"{name}.safetensors", scale)
    given = {"num_inference_steps": 2, "guidance_scale": 3.0}
    with torch.inference_mode():
        drawn = [each.sample("a large red circle", None, (64, 64), [3, 4], **given) for each in (both, plain, both)]
    for folder, latents in (("baked", drawn[0]), ("shapes_cpu", drawn[1]), ("baked", drawn[2])):
        pipe = Pipeline.load(built / "pipelines" / folder, "cpu", threads=1)
        seeds = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
        prompts, size = ["a large red circle"] * 2, {"height": 64, "width": 64}
        expected = pipe(prompts, generator=seeds, output_type="latent", **size, **given).images
        np.testing.assert_allclose(pipe.latents.from_vae(latents).numpy(), expected, atol=2e-3)
    assert (drawn[0] - drawn[1]).abs().max() > 0.1
    with pytest.raises(UsageError, match=r"absent\.safetensors: no such file"):
        plain.with_lora(SAMPLES / "absent.safetensors", 1.0)


def test_a_file_of_the_server_says_what_it_was_drawn_with(built: Path, server: RunningServer) -> None:
    """LoRAs, a word of the folder of embeddings, and a wildcard, chosen by the seed."""
    fields = {"prompt": "a __color__ circle in my-style", "size": "64x64", "steps": 1, "seed": 7, "n": 2}
    loras = [{"name": "stripes", "scale": 0.8}]
    answer = httpx.post(f"{server.url}/v1/images/generations", json={**fields, "loras": loras}, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    for data, seed in zip(answer.json()["data"], (7, 8), strict=True):
        info = PIL.Image.open(io.BytesIO(b64decode(data["b64_json"]))).info
        said = json.loads(info["sdflow"])
        color = Wildcards(built / "cards").resolve("__color__", seed)
        assert (said["prompt"], said["seed"]) == (f"a {color} circle in my-style", seed)
        assert said["loras"] == loras and said["embeddings"] == {"my-style": {}} and said["pipeline"] == "shapes_cpu"
        assert info["parameters"].startswith(
            f"a {color} circle in my-style <lora:stripes:0.8>\nNegative prompt: \nSteps: 1, "
        )
    refused = httpx.post(
        f"{server.url}/v1/images/generations", json={**fields, "prompt": "__colour__"}, timeout=PATIENCE
    )
    assert refused.status_code == 400 and "did you mean 'color'?" in refused.json()["error"]["message"]


def test_words_of_a_folder_of_embeddings_are_known_with_loras_too(built: Path, tmp_path: Path) -> None:
    width = ServedPipeline.load(built / "pipelines/shapes_cpu", threads=1).base.configs["text_encoder"]["hidden_size"]
    torch.manual_seed(0)
    save_file({"emb_params": torch.randn(3, width).numpy()}, tmp_path / "my-style.safetensors")
    base = ServedPipeline.load(built / "pipelines/shapes_cpu", 1, embeddings=tmp_path)
    pipelines = LoraPipelines(built / "pipelines/shapes_cpu", base, built / "cache", memory=1 << 30)
    for folder, served in (("shapes_cpu", base), ("baked", pipelines.served(of_samples(*BOTH)))):
        pipe = Pipeline.load(built / "pipelines" / folder, "cpu", threads=1, embeddings=[tmp_path])
        given = {"num_inference_steps": 2, "height": 64, "width": 64}
        (drawing,) = served.drawings(Job("a", 0, "", "a circle in my-style", 1, arguments=given))
        while not drawing.done:
            served.step([drawing], 1)
        drawn = [np.asarray(each.images[0], int) for each in (
            drawing.finish(), pipe("a circle in my-style", generator=[torch.Generator().manual_seed(1)], **given)
        )]  # fmt: skip
        assert np.abs(drawn[0] - drawn[1]).max() <= 1


def test_weights_that_cannot_be_changed_in_a_session_are_written(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_loras, "READERS", frozenset())
    base = ServedPipeline.load(built / "pipelines/shapes_cpu", threads=1)
    pipelines = LoraPipelines(built / "pipelines/shapes_cpu", base, built / "cache", memory=1 << 30)
    made = pipelines.served(of_samples(*BOTH))
    for submodel in ("text_encoder", "unet"):
        path = made.base.submodels[submodel].path
        assert path is not None
        for name in ("model.onnx", "model.onnx.data", "config.json"):
            expected = built / "pipelines/baked" / submodel / name
            assert (path.parent / name).read_bytes() == expected.read_bytes(), (submodel, name)


def test_written_weights_take_turns_where_those_of_the_pipeline_do(built: Path) -> None:
    base = ServedPipeline.load(built / "pipelines/shapes_cpu")
    pipelines = LoraPipelines(built / "pipelines/shapes_cpu", base, built / "cache", memory=1 << 30)
    pipelines.use_files()
    before = pipelines.served(of_samples(("stripes", 0.8))).base
    assert all(each.residency is None for each in before.submodels.values()) and not before.moving
    turns = Residency(lambda: 1 << 40, lambda: None)
    base.base.moving = True
    for each in base.base.submodels.values():
        each.residency = turns
    made = pipelines.served(of_samples(("stripes", 0.5))).base
    assert made.submodels["unet"] is not base.base.submodels["unet"]
    assert all(each.residency is turns for each in made.submodels.values()) and made.moving


def test_a_lora_that_changes_seldom_weights_gets_sessions_of_its_own(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random, module = np.random.default_rng(0), "unet.down_blocks.0.resnets.0.conv1.lora_"
    factors = {"A.weight": (4, 64, 3, 3), "B.weight": (64, 4, 1, 1)}
    values = {module + name: random.standard_normal(shape).astype(np.float32) for name, shape in factors.items()}
    save_file(values, tmp_path / "conv.safetensors")
    shutil.copyfile(SAMPLES / "stripes.safetensors", tmp_path / "stripes.safetensors")
    found, base = Loras(tmp_path), ServedPipeline.load(built / "pipelines/shapes_cpu", threads=1)
    both = found.find([("stripes", 1.0), ("conv", 0.3)])
    pipelines = LoraPipelines(built / "pipelines/shapes_cpu", base, built / "cache", memory=1 << 30)
    first, made = pipelines.served(found.find([("stripes", 1.0)])), pipelines.served(both)
    assert first.base.submodels["unet"] is not made.base.submodels["unet"]
    drawn_with(made)
    weights = weights_of(made, "unet")
    monkeypatch.setattr(live_loras, "READERS", frozenset())
    pipelines = LoraPipelines(built / "pipelines/shapes_cpu", base, built / "cache", memory=1 << 30)
    path = pipelines.served(both).base.submodels["unet"].path
    assert path is not None
    assert weights == stored(path.parents[1], "unet", weights)
    assert len(weights) == 1 + len(weights_of(first, "unet"))


def test_what_gives_infinite_weights_is_refused_by_its_file(built: Path, tmp_path: Path) -> None:
    values = load_file(SAMPLES / "stripes.safetensors")
    for name in [name for name in values if "mid_block" in name]:
        values[name] = values[name].astype(np.float32) * np.float32(1e25)
    save_file(values, tmp_path / "large.safetensors")
    base = ServedPipeline.load(built / "pipelines/shapes_cpu", threads=1)
    pipelines = LoraPipelines(built / "pipelines/shapes_cpu", base, built / "cache", memory=1 << 30)
    large = Loras(tmp_path).find([("large", 0.5)])
    with pytest.raises(CheckpointError, match="added to mid_block.* are NaN or infinite") as told:
        pipelines.served((*of_samples(("outline", 0.5)), *large))
    assert told.value.where == str(tmp_path / "large.safetensors")


def test_a_file_that_became_another_is_not_taken_for_what_was_asked_for(built: Path, tmp_path: Path) -> None:
    """It is kept by the digest that it had when it was asked for."""
    path = tmp_path / "mine.safetensors"
    shutil.copyfile(SAMPLES / "outline.safetensors", path)
    base = ServedPipeline.load(built / "pipelines/shapes_cpu", threads=1)
    pipelines = LoraPipelines(built / "pipelines/shapes_cpu", base, built / "cache", memory=1 << 30)
    asked = Loras(tmp_path).find([("mine", 1.0)])
    shutil.copyfile(SAMPLES / "stripes.safetensors", path)
    with pytest.raises(CheckpointError, match="changed while it was being read"):
        pipelines.read(asked)
    path.unlink()
    with pytest.raises(CheckpointError):
        pipelines.read(asked)
    shutil.copyfile(SAMPLES / "outline.safetensors", path)
    assert pipelines.read(asked).names == pipelines.read(of_samples(("outline", 1.0))).names


def test_what_failed_for_one_request_is_tried_again_for_the_next(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one goes away before it hears of it."""
    path = tmp_path / "stripes.safetensors"
    shutil.copyfile(SAMPLES / "stripes.safetensors", path)
    base = ServedPipeline.load(built / "pipelines/shapes_cpu", threads=1)
    pipelines = ReadyPipelines(built / "pipelines/shapes_cpu", base, built / "cache", memory=1 << 30)
    loras = Loras(tmp_path).find([("stripes", 1.0)])
    first, second = (Job(name, 0, "shapes", "a circle", 1, loras=loras) for name in ("first", "second"))
    path.rename(tmp_path / "away")
    assert not pipelines.ready(first, begin=True)
    until(lambda: pipelines.ready(first, begin=False))
    (tmp_path / "away").rename(path)
    assert not pipelines.ready(second, begin=False)
    assert not pipelines.ready(second, begin=True)
    until(lambda: pipelines.ready(second, begin=False))
    assert pipelines.find(second) is pipelines.find(first) is not base


def test_what_was_only_read_for_a_request_that_went_away_is_not_made_for_the_next(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where files alone are read beside the engine. What the first one's would fail of is nobody's matter."""
    base = ServedPipeline.load(built / "pipelines/shapes_cpu", threads=1)
    pipelines = ReadyPipelines(built / "pipelines/shapes_cpu", base, built / "cache", memory=1 << 30)
    monkeypatch.setattr(pipelines, "_in_background", False)
    first, second = (
        Job(name, 0, "shapes", "a circle", 1, loras=of_samples((name, 1.0))) for name in ("outline", "stripes")
    )
    made, carry_out = [], LoraPipelines.carry_out

    def counted(self: LoraPipelines, wanted: Wanted) -> Made:
        made.append(wanted.loras)
        return carry_out(self, wanted)

    monkeypatch.setattr(LoraPipelines, "carry_out", counted)
    for job in (first, second):
        assert not pipelines.ready(job, begin=True)
        until(lambda job=job: pipelines.ready(job, begin=False))
    assert pipelines.find(second) is not base
    assert made == [second.loras]


def test_where_sessions_for_loras_cannot_draw_each_lora_gets_files(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = ServedPipeline.load(built / "pipelines/shapes_cpu", threads=1)
    pipelines = ReadyPipelines(built / "pipelines/shapes_cpu", base, built / "cache", memory=1 << 30)
    monkeypatch.setattr(pipelines, "_in_background", False)
    job = Job("a", 0, "shapes", "a circle", 1, loras=of_samples(("outline", 1.0)))

    def warm(pipeline: ServedPipeline) -> None:
        raise VerificationError("cannot generate: out of memory", where="shapes")

    pipelines.prepare(job, [1], warm)
    found = pipelines.find(job)
    assert found is not base
    path = found.base.submodels["unet"].path
    assert path is not None and "sdflow-loras-" in str(path), "its weights are in files of its own"


def test_they_are_made_beside_the_drawing_and_no_graph_is_taken_apart_for_them(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that makes them is held up until an image without any is drawn."""
    base = ServedPipeline.load(built / "pipelines/shapes_cpu", threads=1)
    pipelines = ReadyPipelines(built / "pipelines/shapes_cpu", base, built / "cache", memory=1 << 30)
    told: list[Message] = []
    engine = Engine(
        pipelines.find, {"shapes": {1: 1.0}}, told.append, ready=lambda job, begin: pipelines.ready(job, begin=begin)
    )

    def submit(name: str, loras: tuple[LoraFile, ...]) -> None:
        arguments = {"num_inference_steps": 4}
        engine.submit(Job(name, 0, "shapes", "a large red circle", 1, arguments=arguments, loras=loras))

    def drawn() -> dict[str, bytes]:
        return {each.request: each.file for each in told if isinstance(each, Drawn)}

    submit("first", ())
    while engine.busy:
        engine.turn()
    monkeypatch.setattr("sdflow.serve.engine.cuts.split", None)  # the parts are there
    held, carry_out = threading.Event(), LoraPipelines.carry_out

    def made_later(self: LoraPipelines, wanted: Wanted) -> Made:
        assert held.wait(PATIENCE)
        return carry_out(self, wanted)

    monkeypatch.setattr(LoraPipelines, "carry_out", made_later)
    submit("with", of_samples(*BOTH))
    submit("without", ())
    submit("again", of_samples(*BOTH))
    while "without" not in drawn():
        engine.turn()
    assert "with" not in drawn()
    held.set()
    while engine.busy:
        time.sleep(0 if engine.turn() else 0.01)
    assert [each for each in told if isinstance(each, Failed)] == []
    assert list(drawn())[:2] == ["first", "without"] and drawn().keys() >= {"with", "again"}
    assert drawn()["without"] == drawn()["first"] and drawn()["again"] == drawn()["with"]
    for name, folder in (("without", "shapes_cpu"), ("with", "baked")):
        found = np.asarray(PIL.Image.open(io.BytesIO(drawn()[name])), np.int16)
        np.testing.assert_allclose(found, by_itself(built / "pipelines" / folder), atol=1)
    assert np.abs(by_itself(built / "pipelines/baked") - by_itself(built / "pipelines/shapes_cpu")).max() > 50


def test_the_last_ones_stay_as_far_as_there_is_room(built: Path) -> None:
    base = ServedPipeline.load(built / "pipelines/shapes_cpu", threads=1)
    whole = LoraPipelines(built / "pipelines/shapes_cpu", base, built / "cache", memory=1 << 30)
    one = whole.carry_out(whole.read(of_samples(("stripes", 1.0)))).size
    room = whole.size_of_sessions + 2 * one + one // 2
    pipelines = LoraPipelines(built / "pipelines/shapes_cpu", base, built / "cache", memory=room)
    first, second, third = (of_samples(("stripes", scale)) for scale in (0.1, 0.2, 0.3))
    for each in (first, second, first, third):
        pipelines.served(each)
    assert list(pipelines._made) == [first, third]


def test_what_was_made_with_a_removed_lora_is_released(built: Path) -> None:
    base = ServedPipeline.load(built / "pipelines/shapes_cpu", threads=1)
    pipelines = LoraPipelines(built / "pipelines/shapes_cpu", base, built / "cache", memory=1 << 30)
    stripes, both, outline = (
        of_samples(*each) for each in ([("stripes", 1.0)], [("stripes", 0.5), ("outline", 1.0)], [("outline", 1.0)])
    )
    for each in (outline, both, stripes):
        drawn_with(pipelines.served(each))
    weights = {each: weakref.ref(pipelines.values._kept[each]) for each in (both, outline, stripes)}
    being_made = pipelines.carry_out(pipelines.read(stripes))
    pipelines.forget(stripes[0].path)
    drawn_with(pipelines.keep(being_made))
    del being_made
    gc.collect()
    assert list(pipelines._made) == [outline]
    assert [weights[each]() is None for each in (stripes, both, outline)] == [True, True, False]
    pipelines.served(stripes)
    assert list(pipelines._made) == [outline, stripes], "it was sent again"


def test_without_its_cache_it_says_so(built: Path, tmp_path: Path) -> None:
    base = ServedPipeline.load(built / "pipelines/shapes_cpu", threads=1)
    with pytest.raises(UsageError, match="is not in this cache"):
        LoraPipelines(built / "pipelines/shapes_cpu", base, tmp_path / "empty", memory=1).read(of_samples(*BOTH))


def draw(server: RunningServer, *loras: tuple[str, float], **more: Any) -> httpx.Response:
    named = [{"name": name, "scale": scale} for name, scale in loras]
    body = {"prompt": "a large red circle", "steps": 4, "seed": 1, "loras": named, **more}
    return httpx.post(f"{server.url}/v1/images/generations", json=body, timeout=PATIENCE)


def pixels(answer: httpx.Response) -> np.ndarray:
    assert answer.status_code == 200, answer.text
    return np.asarray(PIL.Image.open(io.BytesIO(b64decode(answer.json()["data"][0]["b64_json"]))), np.int16)


def by_itself(folder: Path, **more: Any) -> np.ndarray:
    pipeline = Pipeline.load(folder, "cpu", threads=1)
    generator = [torch.Generator().manual_seed(1)]
    result = pipeline("a large red circle", num_inference_steps=4, generator=generator, **more)
    return np.asarray(result.images[0], np.int16)


@pytest.mark.slow  # a server of the sample pipeline
def test_requests_with_and_without_loras_get_what_baked_pipelines_draw(server: RunningServer, built: Path) -> None:
    plain, baked = (by_itself(built / "pipelines" / name) for name in ("shapes_cpu", "baked"))
    for expected, loras in ((plain, ()), (baked, BOTH), (plain, ()), (baked, BOTH)):
        np.testing.assert_allclose(pixels(draw(server, *loras)), expected, atol=1)


@pytest.mark.slow  # a server of the sample pipeline
def test_one_is_sent_used_and_taken_away(server: RunningServer) -> None:
    url = f"{server.url}/v1/loras"
    content = (SAMPLES / "stripes.safetensors").read_bytes()
    sent = httpx.post(url, files={"file": ("mine.safetensors", content)}, timeout=PATIENCE)
    assert (sent.status_code, sent.json()["id"]) == (201, "mine")
    names = {each["id"]: each["sent"] for each in httpx.get(url, timeout=PATIENCE).json()["data"]}
    assert names == {"outline": False, "stripes": False, "mine": True}
    again = httpx.post(url, files={"file": ("mine.safetensors", content)}, timeout=PATIENCE)
    assert (again.status_code, again.json()["error"]["code"]) == (409, "lora_exists")
    np.testing.assert_array_equal(pixels(draw(server, ("mine", 1.0))), pixels(draw(server, ("stripes", 1.0))))
    assert httpx.delete(f"{url}/mine", timeout=PATIENCE).json()["deleted"] is True
    gone = draw(server, ("mine", 1.0))
    assert (gone.status_code, gone.json()["error"]["code"]) == (400, "lora_not_found")
    assert httpx.delete(f"{url}/mine", timeout=PATIENCE).status_code == 404


def test_of_two_that_are_sent_under_one_name_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are looked at side by side, and so both were free to be taken."""
    loras, together = Loras(None), threading.Barrier(2)
    loras.require_fit = lambda path: together.wait(60) and None
    content = (SAMPLES / "stripes.safetensors").read_bytes()
    said: list[object] = []

    def send() -> None:
        try:
            said.append(loras.add("mine", io.BytesIO(content))["id"])
        except ApiError as error:
            said.append(error.status)

    both = [threading.Thread(target=send) for _ in range(2)]
    for each in both:
        each.start()
    for each in both:
        each.join(60)
    assert sorted(map(str, said)) == ["409", "mine"]
    assert [path.name for path in loras.files()["mine"].parent.iterdir()] == ["mine.safetensors"]
    there = loras.files()
    loras.remove("mine")
    monkeypatch.setattr(loras, "files", lambda: there)
    assert loras.to_json() == [], "it was taken away while all were listed"
    loras.close()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("../evil", None, "a name has at most"),
        ("/etc/passwd", None, "a name has at most"),
        (".hidden", None, "a name has at most"),
        ("ink", b"no LoRA at all", "not a LoRA"),
        ("ink", b"\xff" * 64, "not a LoRA"),
    ],
)
def test_what_cannot_be_sent(name: str, content: bytes | None, says: str) -> None:
    loras = Loras(SAMPLES)
    stripes = (SAMPLES / "stripes.safetensors").read_bytes()
    try:
        with pytest.raises(ApiError, match=says):
            loras.add(name, io.BytesIO(stripes if content is None else content))
        assert set(loras.files()) == {"outline", "stripes"}
    finally:
        loras.close()


def test_one_that_fits_no_pipeline_is_not_taken(built: Path, tmp_path: Path) -> None:
    from small_lora import write_lora

    write_lora(tmp_path / "tiny.safetensors")
    for cache, says in ((built / "cache", "it fits none of the pipelines"), (tmp_path, "is not in this cache")):
        loras = Loras(
            None, None, LoraFit({"shapes": SimpleNamespace(folder=built / "pipelines/shapes_cpu")}, cache).require
        )
        try:
            with (tmp_path / "tiny.safetensors").open("rb") as file, pytest.raises(ApiError, match=says) as refused:
                loras.add("tiny", file)
            assert (refused.value.status, refused.value.code) == (400, "invalid_lora")
            assert loras.files() == {} and list(loras._sent.iterdir()) == []
        finally:
            loras.close()
    taken = Loras(
        None, None, LoraFit({"shapes": SimpleNamespace(folder=built / "pipelines/shapes_cpu")}, built / "cache").require
    )
    with (SAMPLES / "stripes.safetensors").open("rb") as file:
        assert taken.add("mine", file)["id"] == "mine"
    taken.close()


def test_what_was_sent_to_a_killed_server_is_removed_by_the_next(tmp_path: Path) -> None:
    """Also where the nodes of a cluster have it."""
    script = "import os, sys, pathlib; from sdflow.serve.http.loras import Loras; it = Loras(None, pathlib.Path(sys.argv[1])); "
    script += "os._exit(9)"
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False).returncode == 9
    (left,) = tmp_path.iterdir()
    loras, others = Loras(None, tmp_path), Loras(None, tmp_path)
    assert not left.exists() and len(list(tmp_path.iterdir())) == 2
    with (SAMPLES / "stripes.safetensors").open("rb") as file:
        loras.add("mine", file)
    passed_on = pickle.loads(pickle.dumps(loras))
    assert (set(loras.files()), passed_on.files()) == ({"mine"}, {}), "each process has its own"
    for each in (loras, others, passed_on):
        each.close()
    assert list(tmp_path.iterdir()) == []


def test_a_size_that_cannot_be_taken_apart_is_drawn_alone_and_no_other(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With LoRAs in the sessions, too."""
    base = ServedPipeline.load(built / "pipelines/shapes_cpu", threads=1)
    pipelines = LoraPipelines(built / "pipelines/shapes_cpu", base, built / "cache", memory=1 << 30)

    def but_for_one_size(model: Any, sizes: Any, **options: Any) -> Any:
        if sizes["latent_height"] == 12:
            raise PassError("no")
        return split(model, sizes, **options)

    def image(height: int) -> tuple[np.ndarray, list[int]]:
        told: list[Message] = []
        engine = Engine(lambda job: pipelines.served(job.loras), {"shapes": {1: 1.0, 2: 1.0}}, told.append)
        for number in range(2):
            arguments = {"num_inference_steps": 4, "height": height}
            engine.submit(
                Job("a", number, "shapes", "a large red circle", 1, arguments=arguments, loras=of_samples(*BOTH))
            )
        while engine.busy:
            engine.turn()
        files = [each.file for each in told if isinstance(each, Drawn)]
        assert len(files) == 2, told
        batches = [images for each in told if isinstance(each, Turned) for images, _, _ in each.batches]
        return np.asarray(PIL.Image.open(io.BytesIO(files[0])), np.int16), batches

    monkeypatch.setattr("sdflow.serve.engine.cuts.split", but_for_one_size)
    monkeypatch.setattr("sdflow.serve.engine.shared_steps.LACKED_RUNS", 0)  # a batch's session is made at once
    before, _ = image(128)
    odd, batches = image(96)
    assert set(batches) == {1}
    np.testing.assert_allclose(odd, by_itself(built / "pipelines/baked", height=96), atol=1)
    after, batches = image(128)
    np.testing.assert_array_equal(after, before)
    assert set(batches) == {2}


def test_one_for_another_model_is_refused(built: Path, tmp_path: Path) -> None:
    from small_lora import write_lora

    base = ServedPipeline.load(built / "pipelines/shapes_cpu", threads=1)
    pipelines = LoraPipelines(built / "pipelines/shapes_cpu", base, built / "cache", memory=1 << 30)
    write_lora(tmp_path / "tiny.safetensors")
    with pytest.raises(CheckpointError):
        pipelines.served(Loras(tmp_path).find([("tiny", 1.0)]))


def test_a1111s_lists_tell_of_embeddings_and_what_is_in_a_loras_file(server: RunningServer) -> None:
    listed = httpx.get(f"{server.url}/sdapi/v1/embeddings", timeout=PATIENCE).json()
    assert listed["loaded"]["my-style"]["vectors"] == 2 and listed["skipped"] == {}
    loras = {each["name"]: each for each in httpx.get(f"{server.url}/sdapi/v1/loras", timeout=PATIENCE).json()}
    assert loras["outline"]["metadata"]["ss_network_module"] == "networks.lora"
    assert [each["words"] for each in httpx.get(f"{server.url}/v1/loras", timeout=PATIENCE).json()["data"]] == [[], []]
