"""FLUX.2-klein, a few channels wide, from a folder that diffusers wrote: built once, then compared with diffusers' own pipeline
of that folder, and used by the commands."""

from __future__ import annotations

import base64
import io
import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import httpx
import numpy as np
import pytest
import torch
from beside_diffusers import PROMPT, assert_equal, generator, pattern
from flux2_layout import flux2_tensors
from one_file_program import draw_by_one_file
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from PIL import Image
from safetensors.torch import save_file
from serve.conftest import running_server
from shell import Shell
from transformers import Qwen3Config, Qwen3ForCausalLM
from until import PATIENCE

from sdflow.digest import digest_file
from sdflow.errors import UsageError
from sdflow.families import FAMILIES
from sdflow.runtime.denoiser.schedule import trace
from sdflow.runtime.pipeline import Pipeline
from sdflow.serve import jobs as asked_for
from sdflow.serve.engine.engine import Engine
from sdflow.serve.engine.served_pipeline import ServedPipeline
from sdflow.serve.jobs import Drawn, Failed, Job, Message, Turned
from sdflow.sources import PlainDigests, load_module, load_pipeline, open_checkpoint
from tests.sources.hub_cache import COMMIT, cached_repository

WORKFLOW = """
extends: base/flux2.yaml
model: {model}
target: cpu
evaluate: {{latency: null, image: {{steps: 2, height: 32, width: 32, references: 1}}}}
"""
SIZE = ("--height", "32", "--width", "48", "--steps", "2", "--seed", "1", "--threads", "1")
LAYERS = ("to_q", "add_k_proj", "to_qkv_mlp_proj", "linear_out")


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory, started_python: Any) -> Shell:
    return Shell(tmp_path_factory.mktemp("flux2"), started_python)


@pytest.fixture(scope="module")
def folder(shell: Shell) -> Path:
    """As diffusers saves it, with the modules that its published folders have: Qwen3 with its head, and the VAE's batch norm."""
    checkpoint = open_checkpoint("synthetic:flux2-tiny", digests=PlainDigests(), download=False)
    made = load_pipeline(checkpoint)
    text = Qwen3ForCausalLM(Qwen3Config.from_dict(checkpoint.submodels["text_encoder"].load["config"]))
    text.model.load_state_dict(made.text_encoder.state_dict())
    vae = diffusers.AutoencoderKLFlux2.from_config(made.vae.config)
    vae.load_state_dict(made.vae.state_dict())
    diffusers.Flux2KleinPipeline(
        **{**made.components, "text_encoder": text, "vae": vae}, is_distilled=True
    ).save_pretrained(shell.folder / "model")
    return shell.folder / "model"


def diffusers_own(folder: Path) -> Any:
    pipeline = diffusers.Flux2KleinPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return diffusers_own(folder)


@pytest.fixture(scope="module")
def built(shell: Shell, folder: Path) -> Path:
    """Built and verified."""
    (shell.folder / "flux2.yaml").write_text(WORKFLOW.format(model=folder))
    (pipeline,) = shell.json("run", "flux2.yaml")["pipelines"]
    assert pipeline["verification"]["passed"]
    return shell.folder / "pipelines/flux2"


@pytest.fixture(scope="module")
def ours(built: Path) -> Pipeline:
    return Pipeline.load(built, "cpu")


@pytest.mark.parametrize(
    ("height", "width", "prompt", "length"),
    [(32, 32, PROMPT, None), (64, 48, PROMPT, None), (32, 64, "ein Füchslein 狐, " * 60, None), (32, 32, "", 96)],
)
def test_an_image_from_text_is_diffusers(
    ours: Pipeline, theirs: Any, height: int, width: int, prompt: str, length: int | None
) -> None:
    """At sizes that are not square too, for prompts that are short, empty, and longer than the model reads."""
    latents = torch.randn((1, 32, height // 4, width // 4), generator=generator())
    given: dict[str, Any] = {} if length is None else {"max_sequence_length": length}
    given |= {"height": height, "width": width, "num_inference_steps": 4, "latents": latents, "output_type": "np"}
    assert_equal(ours(prompt, **given).images, theirs(prompt=prompt, **given).images)


@pytest.mark.parametrize(
    ("references", "size", "length"),
    [
        ([(72, 64)], None, None),
        ([(101, 83), (64, 130)], (32, 48), 96),
    ],
    ids=["one, which sets the size", "two of other sizes, with a shorter text"],
)
def test_an_image_from_references_is_diffusers(
    ours: Pipeline, theirs: Any, references: list[tuple[int, int]], size: tuple[int, int] | None, length: int | None
) -> None:
    """References of sizes that the model cannot take whole are cropped, as there. None of it is in the graph that was built."""
    images = [pattern(seed, height, width) for seed, (width, height) in enumerate(references)]
    height, width = size or (references[0][1], references[0][0])
    given: dict[str, Any] = {"num_inference_steps": 2, "output_type": "np"}
    given |= {} if size is None else {"height": height, "width": width}
    given |= {} if length is None else {"max_sequence_length": length}
    given["latents"] = torch.randn((1, 32, height // 4, width // 4), generator=generator())
    drawn = ours(PROMPT, references=images, **given).images
    assert_equal(drawn, theirs(prompt=PROMPT, image=images, **given).images)
    plain = ours(PROMPT, **{**given, "height": height, "width": width}).images
    assert np.abs(drawn - plain).max() > 0.01, "they count"


def test_references_that_the_model_does_not_take_are_refused(ours: Pipeline) -> None:
    for references, says in (
        (Image.new("RGB", (63, 80)), "too small"),
        (Image.new("RGB", (64, 600)), "ratio"),
        (torch.zeros(1, 3, 64, 64), "PIL"),
        ([pattern(1)] * 9, "9 reference images"),
    ):
        with pytest.raises(UsageError, match=says) as error:
            ours(PROMPT, references=references, num_inference_steps=1)
        assert error.value.where == "references"


def test_the_schedule_is_that_of_diffusers_for_every_size() -> None:
    from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    noising = FAMILIES["flux2"].noising
    for tokens, steps in ((64, 4), (4096, 4), (4096, 50), (5000, 7)):
        schedule = trace(scheduler, steps, noising=noising, tokens=tokens)
        wanted = diffusers.FlowMatchEulerDiscreteScheduler.from_config(scheduler.config)
        wanted.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=compute_empirical_mu(tokens, steps))
        assert torch.equal(schedule.timesteps[:, 0], wanted.timesteps)


def test_a_distilled_model_takes_four_steps_without_guidance(ours: Pipeline, theirs: Any) -> None:
    """Whatever guidance is asked for, as in diffusers."""
    own = ours.defaults["text"]
    assert (own.steps, own.guidance_scale) == (4, 1.0)
    given = {"height": 32, "width": 32, "num_inference_steps": 2, "guidance_scale": 4.0, "output_type": "np"}
    latents = torch.randn((1, 32, 8, 8), generator=generator())
    assert_equal(ours(PROMPT, latents=latents, **given).images, theirs(prompt=PROMPT, latents=latents, **given).images)


def test_a_model_that_is_not_distilled_is_guided_as_in_diffusers(shell: Shell, folder: Path, built: Path) -> None:
    """The same weights, by the entry of model_index.json alone."""
    base = shutil.copytree(folder, shell.folder / "base")
    index = json.loads((folder / "model_index.json").read_text())
    (base / "model_index.json").write_text(json.dumps({**index, "is_distilled": False}))
    (shell.folder / "base.yaml").write_text(WORKFLOW.format(model=base))
    shell.json("run", "base.yaml", "--no-evaluate", "--no-verify")  # the artifacts that are verified as `built`
    ours, theirs = Pipeline.load(shell.folder / "pipelines/base", "cpu"), diffusers_own(base)
    assert (ours.defaults["text"].steps, ours.defaults["text"].guidance_scale) == (50, 4.0)
    given = {"height": 32, "width": 48, "num_inference_steps": 3, "output_type": "np"}
    latents, reference = torch.randn((1, 32, 8, 12), generator=generator()), pattern(5)
    given["latents"] = latents
    assert_equal(ours(PROMPT, **given).images, theirs(prompt=PROMPT, **given).images)
    drawn = ours(PROMPT, references=reference, **given).images
    assert_equal(drawn, theirs(prompt=PROMPT, image=reference, **given).images)
    size = ("--height", "32", "--width", "48", "--schedule", "flow_euler,3")
    done = shell.run("export", "pipelines/base", "--one-file", "one/base.onnx", *size)
    assert done.returncode == 0, done.stderr
    expected = ours(PROMPT, negative_prompt="a heron " * 70, **given).images
    graph = shell.folder / "one/base.onnx"
    assert_equal(draw_by_one_file(graph, PROMPT, latents.numpy(), "a heron " * 70, 4.0), expected)


def test_diffusers_converter_agrees_on_every_name_of_the_original_layout(theirs: Any, tmp_path: Path) -> None:
    """And a workflow takes such a file for the folder's transformer."""
    from diffusers.loaders.single_file_utils import convert_flux2_transformer_checkpoint_to_diffusers

    own = theirs.transformer.state_dict()
    original = flux2_tensors(theirs.transformer)
    converted = convert_flux2_transformer_checkpoint_to_diffusers(dict(original))
    assert converted.keys() == own.keys() and all(torch.equal(converted[name], own[name]) for name in own)
    save_file(original, tmp_path / "flux2.safetensors")
    opened = open_checkpoint(
        "synthetic:flux2-tiny?seed=3",
        digests=PlainDigests(),
        download=False,
        components={"transformer": str(tmp_path / "flux2.safetensors")},
    )
    ours = load_module("transformer", opened.submodels["transformer"].load).state_dict()
    assert ours.keys() == own.keys() and all(torch.equal(ours[name], own[name]) for name in own)


def pixels(shell: Shell, folder: str, out: str, *more: str) -> np.ndarray:
    shell.json("generate", folder, "--prompt", "an otter", *SIZE, *more, "--out", out)
    with Image.open(shell.folder / out / "001-1.png") as image:
        return np.asarray(image)


SLOW = pytest.mark.slow  # each bakes and verifies with a text encoder of 28 layers


@pytest.mark.parametrize("by", [pytest.param("diffusers", marks=SLOW), "PEFT", pytest.param("kohya", marks=SLOW)])
def test_a_lora_is_baked_and_verified_against_diffusers(shell: Shell, built: Path, theirs: Any, by: str) -> None:
    """Over layers of both kinds of blocks; kohya's has q, k and v in one module of the original layout."""
    torch.manual_seed(7)
    place = shell.folder / by
    place.mkdir()
    module = diffusers.Flux2Transformer2DModel.from_config(theirs.transformer.config)
    if by == "kohya":
        width = module.inner_dim
        shapes = {"double_blocks_0_img_attn_qkv": (3 * width, width), "single_blocks_2_linear2": (width, 4 * width)}
        tensors = {}
        for name, (rows, columns) in shapes.items():
            tensors[f"lora_unet_{name}.lora_up.weight"] = torch.randn(rows, 2)
            tensors[f"lora_unet_{name}.lora_down.weight"] = torch.randn(2, columns)
            tensors[f"lora_unet_{name}.alpha"] = torch.tensor(1.0)
        save_file(tensors, place / "lora.safetensors")
    else:
        config = LoraConfig(r=2, lora_alpha=4, target_modules=list(LAYERS), init_lora_weights=False)
        if by == "PEFT":
            get_peft_model(module, config).save_pretrained(place)
        else:
            module.add_adapter(config)
            layers = get_peft_model_state_dict(module)
            diffusers.Flux2KleinPipeline.save_lora_weights(place, transformer_lora_layers=layers)
    lora = next(path for path in sorted(place.iterdir()) if path.suffix == ".safetensors")
    given = ("--lora", f"{lora}:0.5", "--out", f"baked/{by}", "--verify")
    baked = shell.json("bake", "--base", str(built), *given)["pipeline"]
    assert baked["verification"]["passed"]
    assert (pixels(shell, f"baked/{by}", f"with_{by}") != pixels(shell, str(built), f"without_{by}")).any()


def test_generate_starts_from_an_image_and_keeps_what_a_mask_keeps(shell: Shell, built: Path) -> None:
    Image.new("RGB", (48, 32), (200, 30, 90)).save(shell.folder / "image.png")
    mask = Image.new("L", (48, 32), 0)
    mask.paste(255, (0, 0, 48, 16))
    mask.save(shell.folder / "mask.png")
    from_image = ("--image", "image.png", "--strength", "0.9")
    assert (pixels(shell, str(built), "from_image", *from_image)[16:] != (200, 30, 90)).any()
    masked = pixels(shell, str(built), "masked", *from_image, "--mask", "mask.png")
    assert (masked[16:] == (200, 30, 90)).all() and (masked[:16] != (200, 30, 90)).any()


def test_generate_takes_references_and_their_file_says_so(shell: Shell, built: Path) -> None:
    for seed, name in enumerate(("one.png", "other.png")):
        pattern(seed, 64, 80).save(shell.folder / name)
    both = pixels(shell, str(built), "both", "--reference", "one.png", "--reference", "other.png")
    assert both.shape == (32, 48, 3)
    with Image.open(shell.folder / "both/001-1.png") as image:
        said = json.loads(image.info["sdflow"])["references"]
    assert [each["name"] for each in said] == ["one.png", "other.png"]
    assert said[0]["sha256"] == digest_file(shell.folder / "one.png")


def test_inspect_and_init_know_it(shell: Shell, folder: Path) -> None:
    assert "flux2-tiny" in shell.run("inspect", str(folder)).stdout
    done = shell.run("init", "--model", str(folder), "--target", "cpu", "--out", "mine.yaml")
    assert done.returncode == 0, done.stderr
    assert "extends: base/flux2.yaml" in (shell.folder / "mine.yaml").read_text()
    assert shell.run("validate", "mine.yaml").returncode == 0


def test_a_repository_of_the_hub_is_the_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the digests that make up cache keys, beside which the commit stands."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    shutil.copytree(folder, cached_repository(tmp_path, "owner/klein") / "snapshots" / COMMIT)
    own, fetched = (
        open_checkpoint(each, digests=PlainDigests(), download=False) for each in (str(folder), "hf:owner/klein")
    )
    assert fetched.family is FAMILIES["flux2"] and fetched.options == own.options
    assert fetched.submodels.keys() == own.submodels.keys()
    for name, each in own.submodels.items():
        assert {**fetched.submodels[name].identity, **each.identity} == fetched.submodels[name].identity


@pytest.mark.slow
def test_tune_chooses(shell: Shell, built: Path) -> None:
    tuned = shell.json(
        "tune", str(built), "--size", "32", "--steps", "1", "--rounds", "1", "--option", "memory_pattern"
    )
    assert tuned["kind"] == "tune"


def test_bench_compares_it_with_diffusers(shell: Shell, built: Path) -> None:
    settings = ("--size", "32", "--steps", "2", "--rounds", "1", "--threads", "1", "--references", "1")
    measured = shell.json("bench", str(built), *settings, "-e", "ort-cpu", "-e", "torch-sdpa")
    assert measured["settings"]["references"] == 1
    verdicts = {each["name"]: each["cases"][0]["verdict"] for each in measured["engines"] if each["cases"]}
    assert verdicts == {"ort-cpu": "right", "torch-sdpa": "right"}


def test_a_server_draws_with_it(shell: Shell, built: Path) -> None:
    with running_server(
        str(built), "--batch-sizes", "1", environment=shell.environment(), started=shell.started
    ) as server:
        wanted = {"prompt": "an otter", "size": "32x48", "steps": 2, "response_format": "b64_json"}
        answer = httpx.post(f"{server.url}/v1/images/generations", json=wanted, timeout=PATIENCE)
        assert answer.status_code == 200, answer.text
        assert decoded(answer).size == (32, 48)
        (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert model["sdflow"]["references"] == 8
        files = [png(pattern(seed, 64, 80)) for seed in range(2)]
        own = {
            "prompt": "an otter",
            "steps": 2,
            "seed": 1,
            "references": [base64.b64encode(each).decode() for each in files],
        }
        drawn = decoded(httpx.post(f"{server.url}/v1/images/generations", json=own, timeout=PATIENCE))
        form = {"prompt": "an otter", "steps": "2", "seed": "1"}
        several = [("image[]", (f"{number}.png", each, "image/png")) for number, each in enumerate(files)]
        edit = httpx.post(f"{server.url}/v1/images/edits", data=form, files=several, timeout=PATIENCE)
        assert drawn.size == (80, 64) and decoded(edit).tobytes() == drawn.tobytes()
        from_first = {**form, "strength": "0.9"}
        other = httpx.post(f"{server.url}/v1/images/edits", data=from_first, files=several, timeout=PATIENCE)
        assert decoded(other).tobytes() != drawn.tobytes()
        small = {**own, "references": [base64.b64encode(png(pattern(1, 32, 80))).decode()]}
        refused = httpx.post(f"{server.url}/v1/images/generations", json=small, timeout=PATIENCE)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "references")


def asked(number: int, *sizes: tuple[int, int]) -> Job:
    """A request with references of these widths and heights, each its own, and a prompt, steps and seed of its own."""
    shown = [pattern(10 * number + index, height, width) for index, (width, height) in enumerate(sizes)]
    given = tuple(asked_for.Image(each.mode, each.size, each.tobytes()) for each in shown)
    arguments = {"height": 64, "width": 80, "num_inference_steps": 2 + number % 2}
    conditioning = asked_for.ConditioningImages(references=given)
    return Job(str(number), 0, "flux2", f"thing {number}", seed=number, arguments=arguments, conditioning=conditioning)


def test_requests_with_references_of_equal_sizes_share_runs(
    built: Path, ours: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each gets the image that it gets alone, within 1 of 255, also beside images at other timesteps."""
    monkeypatch.setattr("sdflow.serve.engine.shared_steps.LACKED_RUNS", 0)  # a batch's session is made at once
    served, told = ServedPipeline(Pipeline.load(built, "cpu", threads=1)), list[Message]()
    jobs = [asked(number, (80, 64), (64, 96)) for number in range(3)]
    jobs += [asked(3, (64, 96), (80, 64)), asked(4, (80, 64)), asked(5), asked(6)]  # as many tokens, fewer, none
    engine = Engine(lambda job: served, {"flux2": {1: 1.0, 4: 1.5}}, told.append, places=6)
    for each in jobs:
        engine.submit(each)
    while engine.busy:
        engine.turn()
    assert [each for each in told if isinstance(each, Failed)] == []
    batches = [images for each in told if isinstance(each, Turned) for images, _, _ in each.batches]
    assert max(batches) == 3 and len(batches) < sum(each.arguments["num_inference_steps"] for each in jobs)
    drawn = {
        each.request: np.asarray(Image.open(io.BytesIO(each.file)), np.int16)
        for each in told
        if isinstance(each, Drawn)
    }
    for each in jobs:
        shown = [Image.frombytes(one.mode, one.size, one.pixels) for one in each.conditioning.references]
        seeded = torch.Generator().manual_seed(each.seed)
        own = ours(each.prompt, references=shown or None, generator=[seeded], **each.arguments).images[0]
        assert np.abs(drawn[each.request] - np.asarray(own, np.int16)).max() <= 1, each.request


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def decoded(answer: httpx.Response) -> Image.Image:
    assert answer.status_code == 200, answer.text
    return Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"])))
