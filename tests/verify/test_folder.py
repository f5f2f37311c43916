"""What lies beside the graphs is the checkpoint's, or otherwise on purpose: every fault is named with file and key."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import diffusers
import pytest
from original_layout import original_layout
from safetensors.torch import save_file

from sdflow.errors import UsageError
from sdflow.families import ARCHITECTURES, FAMILIES
from sdflow.families.shared.noising import DIFFUSION
from sdflow.runtime.denoiser.schedule import named_scheduler, trace
from sdflow.runtime.files.folder import folder_defaults
from sdflow.sources import Checkpoint, load_pipeline
from sdflow.verify.finding import Finding
from sdflow.verify.folder import hold_folder
from sdflow.verify.folder.on_purpose import ABSENT, ON_PURPOSE, Expected
from sdflow.verify.folder.tokenizers import texts
from tests.verify.described_folder import described_folder, opened, request_for

TINY = [name for name in ARCHITECTURES if name.endswith("-tiny")]
EXCHANGED: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "the sample": ("sample:shapes", {}, ()),
    "a ControlNet": ("synthetic:sd15-tiny", {"nets": {"edges": "synthetic:sd15-tiny"}}, ()),
    "a ControlNet of XL": ("synthetic:sdxl-tiny", {"nets": {"edges": "synthetic:sdxl-tiny"}}, ()),
    "TAESD": ("synthetic:sd15-tiny", {"components": {"vae": "synthetic:taesd-tiny"}}, ()),
    "the VAE of another": ("synthetic:sd15-tiny", {"components": {"vae": "synthetic:sd21-tiny"}}, ()),
    "parts left out": ("synthetic:sd15-tiny", {}, ("safety_checker", "vae_encoder")),
    "text encoders alone": ("synthetic:sdxl-tiny", {}, ("unet", "vae_encoder", "vae_decoder")),
    "LCM's scheduler": ("synthetic:sd15-tiny", {"said": {"scheduler": "lcm"}}, ()),
    "TCD's scheduler": ("synthetic:sdxl-tiny", {"said": {"scheduler": "tcd"}}, ()),
    "Euler's scheduler": ("synthetic:sdxl-tiny", {"said": {"scheduler": "euler_trailing"}}, ()),
}


def found_in(folder: Path, checkpoint: Checkpoint, *, whole: bool = True) -> list[Finding]:
    return list(hold_folder(request_for(folder, checkpoint, whole=whole), lambda phrase: None).findings)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return opened("synthetic:sd15-tiny")


@pytest.fixture(scope="module")
def good(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return described_folder(checkpoint, tmp_path_factory.mktemp("good"))


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """To be damaged."""
    return Path(shutil.copytree(good, tmp_path / "pipeline"))


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


# No false alarm


@pytest.mark.parametrize("architecture", TINY)
def test_a_good_folder_of_every_family_is_the_checkpoints(architecture: str, tmp_path: Path) -> None:
    checkpoint = opened(f"synthetic:{architecture}")
    whole = architecture == next(name for name in checkpoint.family.architectures if name in TINY)
    assert found_in(described_folder(checkpoint, tmp_path), checkpoint, whole=whole) == []


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=pytest.mark.slow) if what == "Euler's scheduler" else what for what in EXCHANGED]
)
def test_a_good_folder_with_parts_from_elsewhere_is_too(what: str, tmp_path: Path) -> None:
    reference, more, left_out = EXCHANGED[what]
    checkpoint = opened(reference, **more)
    whole = "said" in more or reference == "sample:shapes"
    assert found_in(described_folder(checkpoint, tmp_path, left_out), checkpoint, whole=whole) == []


def test_a_folder_as_diffusers_saves_it_needs_the_rows_of_the_table(tmp_path: Path) -> None:
    load_pipeline(opened("synthetic:sdxl-tiny")).save_pretrained(tmp_path / "checkpoint")
    for name in ("text_encoder", "text_encoder_2"):  # diffusers did not load these with what sdflow sets
        edit(tmp_path / "checkpoint" / name / "config.json", lambda config: config.pop("output_hidden_states"))
    checkpoint = opened(str(tmp_path / "checkpoint"))
    assert found_in(described_folder(checkpoint, tmp_path), checkpoint, whole=False) == []


def test_what_one_file_has_not_comes_from_its_architecture(tmp_path: Path) -> None:
    path = tmp_path / "tiny.safetensors"
    save_file(original_layout(opened("synthetic:sd15-tiny")), path)
    checkpoint = opened(str(path))
    folder = described_folder(checkpoint, tmp_path)
    assert found_in(folder, checkpoint, whole=False) == []
    edit(folder / "unet/config.json", lambda config: config.update(flip_sin_to_cos=False))
    (finding,) = found_in(folder, checkpoint, whole=False)
    assert str(finding).startswith("unet: config.json: flip_sin_to_cos is false, expected true")


# Faults


def drop_merge(folder: Path) -> None:
    path = folder / "tokenizer/merges.txt"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    assert lines[100] == "s e</w>\n"
    path.write_text("".join(lines[:100] + lines[101:]), encoding="utf-8")


def exchange_ids(folder: Path) -> None:
    def exchange(vocabulary: dict[str, Any]) -> None:
        vocabulary["cat</w>"], vocabulary["dog</w>"] = vocabulary["dog</w>"], vocabulary["cat</w>"]

    edit(folder / "tokenizer/vocab.json", exchange)


def entry(file: str, key: str, value: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / file, lambda content: content.update({key: value}))


def scaled(file: str, key: str, factor: float) -> Callable[[Path], None]:
    return lambda folder: edit(folder / file, lambda content: content.update({key: content[key] * factor}))


def without_encoder(folder: Path) -> None:
    """As if it had been built without it."""
    shutil.rmtree(folder / "vae_encoder")
    edit(folder / "model_index.json", lambda index: index.pop("vae_encoder"))
    edit(folder / "sdflow.json", lambda manifest: manifest["submodels"].pop("vae_encoder"))


INDEX, SCHEDULER, WORDS = "model_index.json", "scheduler/scheduler_config.json", "tokenizer/vocab.json"

FAULTS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "a merge missing": (drop_merge, ('tokenizer/merges.txt: entry 101 is missing, expected "s e</w>"',)),
    "two words' ids exchanged": (
        exchange_ids,
        (f"{WORDS}: dog</w> is 2368, expected 1929", f"{WORDS}: cat</w> is 1929, expected 2368"),
    ),
    "steps_offset": (entry(SCHEDULER, "steps_offset", 0), (f"{SCHEDULER}: steps_offset is 0, expected 1",)),
    "num_train_timesteps": (
        entry(SCHEDULER, "num_train_timesteps", 990),
        (f"{SCHEDULER}: num_train_timesteps is 990, expected 1000",),
    ),
    "clip_sample as a number": (
        entry(SCHEDULER, "clip_sample", 0),
        (f"{SCHEDULER}: clip_sample is 0, expected false",),
    ),
    "an entry more": (entry(SCHEDULER, "timestep_type", "continuous"), (f"{SCHEDULER}: timestep_type is",)),
    "the decoder's scale 1 % off": (
        scaled("vae_decoder/config.json", "scaling_factor", 1.01),
        ("vae_decoder: config.json: scaling_factor is 0.18397",),
    ),
    "the encoder's scale of another model": (
        entry("vae_encoder/config.json", "scaling_factor", 0.13025),
        ("vae_encoder: config.json: scaling_factor is 0.13025, expected 0.18215",),
    ),
    "the pipeline's class": (
        entry(INDEX, "_class_name", "OnnxStableDiffusionInpaintPipeline"),
        (f'{INDEX}: _class_name is "OnnxStableDiffusionInpaintPipeline", expected "OnnxStableDiffusionPipeline"',),
    ),
    "a component's class": (
        entry(INDEX, "scheduler", ["diffusers", "DDIMScheduler"]),
        (f'{INDEX}: scheduler is ["diffusers", "DDIMScheduler"], expected ["diffusers", "PNDMScheduler"]',),
    ),
    "a component more": (entry(INDEX, "vae", ["diffusers", "AutoencoderKL"]), (f"{INDEX}: vae is",)),
    "a filter that is not asked for": (entry(INDEX, "requires_safety_checker", False), (f"{INDEX}: requires_safety",)),
    "the encoder removed": (without_encoder, ("sdflow.json: vae_encoder is missing under submodels",)),
    "another family": (
        entry("sdflow.json", "family", "stable_diffusion_xl"),
        ("sdflow.json: family is stable_diffusion_xl, expected stable_diffusion",),
    ),
    "the encoder not named": (
        lambda folder: edit(folder / INDEX, lambda index: index.pop("vae_encoder")),
        (f"{INDEX}: vae_encoder is missing",),
    ),
    "the index gone": (lambda folder: (folder / INDEX).unlink(), (f"{INDEX}: is missing",)),
    "the index no JSON": (lambda folder: (folder / INDEX).write_text("{"), (f"{INDEX}: is not JSON",)),
    "a file that a tokenizer reads": (
        lambda folder: (folder / "tokenizer/added_tokens.json").write_text('{"cat": 5}'),
        ("tokenizer/added_tokens.json: is not among the checkpoint's files",),
    ),
    "a file missing": (
        lambda folder: (folder / "tokenizer/special_tokens_map.json").unlink(),
        ("tokenizer/special_tokens_map.json: is missing",),
    ),
    "a folder missing": (
        lambda folder: shutil.rmtree(folder / "scheduler"),
        ("scheduler: is missing: there is no such folder", f"{SCHEDULER}: is missing"),
    ),
    "the filter's images": (
        entry("feature_extractor/preprocessor_config.json", "do_normalize", False),
        ("feature_extractor/preprocessor_config.json: do_normalize is false, expected true",),
    ),
    "an attention's heads": (
        entry("unet/config.json", "attention_head_dim", 3),
        ("unet: config.json: attention_head_dim is 3",),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_file_and_key(fault: str, folder: Path, checkpoint: Checkpoint) -> None:
    damage, told = FAULTS[fault]
    damage(folder)
    found = found_in(folder, checkpoint, whole=False)
    assert {finding.level for finding in found} == {"error"}
    assert len(found) == len(told), [str(finding) for finding in found]
    for finding, wanted in zip(found, told, strict=True):
        assert str(finding).startswith(wanted)
        assert "sdflow run" in finding.remedy


def test_a_tokenizer_that_lost_its_config_is_told_without_being_tried(folder: Path, checkpoint: Checkpoint) -> None:
    """It says no length then, and transformers cannot count as far as what it puts in its place."""
    (folder / "tokenizer/tokenizer_config.json").unlink()
    told = [str(finding) for finding in found_in(folder, checkpoint)]
    assert any(each.startswith("tokenizer/tokenizer_config.json: is missing") for each in told)
    assert any("model_max_length is" in each for each in told)


def test_many_differences_are_a_few_and_their_number(folder: Path, checkpoint: Checkpoint) -> None:
    edit(folder / WORDS, lambda words: words.update({word: index + 1 for word, index in words.items()}))
    found = found_in(folder, checkpoint, whole=False)
    assert [finding.count for finding in found] == [1, 1, 1, 1, 1, 49403]


def test_a_folder_that_does_not_say_what_was_left_out_is_warned_of(folder: Path, checkpoint: Checkpoint) -> None:
    """As an earlier sdflow left it."""
    without_encoder(folder)
    edit(folder / "sdflow.json", lambda manifest: manifest.pop("left_out"))
    (finding,) = found_in(folder, checkpoint, whole=False)
    assert (finding.level, finding.node) == ("warning", "sdflow.json")
    assert finding.what.startswith("vae_encoder is in the checkpoint and not in the folder")


def test_what_nobody_put_there_is_warned_of(folder: Path, checkpoint: Checkpoint) -> None:
    (folder / "notes.txt").write_text("mine")
    (finding,) = found_in(folder, checkpoint, whole=False)
    assert (finding.level, finding.node) == ("warning", "notes.txt")


# What they do


def test_texts_tell_two_tokenizers_apart(folder: Path, checkpoint: Checkpoint) -> None:
    exchange_ids(folder)
    (finding,) = (finding for finding in found_in(folder, checkpoint) if finding.node == "tokenizer")
    count = sum("cat" in text.lower() or "dog" in text.lower() for text in texts())
    assert 0 < int(finding.what.split()[0]) <= count
    assert "expected 2368" in finding.what


def test_schedules_tell_two_schedulers_apart(folder: Path, checkpoint: Checkpoint) -> None:
    entry(SCHEDULER, "num_train_timesteps", 990)(folder)
    *_, finding = found_in(folder, checkpoint)
    assert finding.node == SCHEDULER
    assert finding.level == "error"
    assert finding.what.startswith("the schedule is not the checkpoint's: timestep 1 of 4 steps is 742, expected 751")


def test_coefficients_tell_where_timesteps_do_not(folder: Path, checkpoint: Checkpoint) -> None:
    entry(SCHEDULER, "beta_end", 0.0121)(folder)
    *_, finding = found_in(folder, checkpoint)
    assert "the denoiser's input in run 2 is" in finding.what


def with_scheduler(folder: Path, scheduler: Any, *without: str) -> Checkpoint:
    """The checkpoint in a folder, with a scheduler as diffusers saves it. without: keys that are not there."""
    scheduler.save_pretrained(folder / "scheduler")
    edit(folder / "model_index.json", lambda index: index.update(scheduler=["diffusers", type(scheduler).__name__]))
    edit(folder / SCHEDULER, lambda config: [config.pop(key, None) for key in without])
    return opened(str(folder))


NOISE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
ORDINARY = {
    "DDIMScheduler": {"clip_sample": True},
    "DPMSolverMultistepScheduler": {"algorithm_type": "sde-dpmsolver++", "use_karras_sigmas": True},
    "EulerAncestralDiscreteScheduler": {},
    "EulerDiscreteScheduler": {"timestep_spacing": "leading"},
    "PNDMScheduler": {"skip_prk_steps": True},
    "UniPCMultistepScheduler": {},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of both kinds, as diffusers saves them."""
    place = tmp_path_factory.mktemp("saved")
    for architecture in ("sd15-tiny", "sdxl-tiny"):
        load_pipeline(opened(f"synthetic:{architecture}")).save_pretrained(place / architecture)
    return place


OLDER = ("clip_sample", "steps_offset")
"""What older releases did not write."""


STEPPED = ("EulerAncestralDiscreteScheduler",)
"""Schedulers that a default run steps through: one with noise of its own. One of second order: the next test."""


@pytest.mark.parametrize(
    ("name", "without", "whole"),
    [
        pytest.param(name, without, whole, marks=pytest.mark.slow if whole and name not in STEPPED else ())
        for name, without in (*((name, ()) for name in ORDINARY), ("PNDMScheduler", OLDER), ("DDIMScheduler", OLDER))
        for whole in ([True] if name in STEPPED else [False, True])
    ],
)
def test_a_checkpoint_with_any_scheduler_of_diffusers_passes(
    name: str, without: tuple[str, ...], whole: bool, saved: Path, tmp_path: Path
) -> None:
    """DPMSolverMultistepScheduler writes "lambda_min_clipped": -Infinity, and draws in float32 whatever it is fed."""
    checkpoint = Path(shutil.copytree(saved / "sd15-tiny", tmp_path / "checkpoint"))
    read = with_scheduler(checkpoint, getattr(diffusers, name)(**NOISE, **ORDINARY[name]), *without)
    folder = described_folder(read, tmp_path)
    assert found_in(folder, read, whole=whole) == []
    assert (folder / SCHEDULER).read_bytes() == (checkpoint / SCHEDULER).read_bytes()
    ours, theirs = (getattr(diffusers, name).from_pretrained(each / "scheduler") for each in (folder, checkpoint))
    assert ours.config == theirs.config


def test_minus_infinity_reaches_the_scheduler_that_a_workflow_asks_for(saved: Path, tmp_path: Path) -> None:
    """The config is written anew then, by sdflow."""
    checkpoint = Path(shutil.copytree(saved / "sd15-tiny", tmp_path / "checkpoint"))
    read = with_scheduler(checkpoint, diffusers.DPMSolverMultistepScheduler(**NOISE))
    read = replace(read, said={"scheduler": "dpm++_2m"})
    folder = described_folder(read, tmp_path)
    assert found_in(folder, read) == []
    assert diffusers.DPMSolverMultistepScheduler.from_pretrained(folder / "scheduler").config.lambda_min_clipped == -inf
    assert folder_defaults(folder)["text"].steps == 50


def test_a_scheduler_that_nobody_chose_is_a_note_and_is_refused_when_it_is_chosen(saved: Path, tmp_path: Path) -> None:
    """XL's pipeline leaves clip_sample as it is: with diffusers, DDIM then clips the latents, which sdflow does not do."""
    checkpoint = Path(shutil.copytree(saved / "sdxl-tiny", tmp_path / "checkpoint"))
    read = with_scheduler(checkpoint, diffusers.PNDMScheduler(**NOISE, skip_prk_steps=True))
    folder = described_folder(read, tmp_path)
    (finding,) = found_in(folder, read)
    assert finding.level == "note" and finding.node == SCHEDULER
    assert finding.what.startswith("ddim, ddim_trailing differ from diffusers with this checkpoint: ")
    own = diffusers.PNDMScheduler.from_pretrained(folder / "scheduler")
    with pytest.raises(UsageError, match="is not linear in the latents") as refused:
        trace(named_scheduler("ddim", own.config, DIFFUSION), 4, FAMILIES["stable_diffusion_xl"].scheduler_config)
    assert "--scheduler" in (refused.value.remedy or "")


@pytest.mark.parametrize("companion", ["tokenizer", "scheduler"])
def test_one_that_cannot_be_loaded_is_told(companion: str, folder: Path, checkpoint: Checkpoint) -> None:
    file = {"tokenizer": "vocab.json", "scheduler": "scheduler_config.json"}[companion]
    (folder / companion / file).write_text("[]")
    found = {finding.node for finding in found_in(folder, checkpoint)}
    assert {f"{companion}/{file}", companion} <= found


# The table


def test_every_row_of_the_table_is_needed_and_says_why(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A row that nothing needs would hide a fault some day."""
    pipelines = [(checkpoint, ()), (opened("synthetic:sdxl-refiner-tiny"), ())]
    pipelines += [(opened(reference, **more), left_out) for reference, more, left_out in EXCHANGED.values()]
    used = set()
    for opened_one, left_out in pipelines:
        source = source_with_authors(opened_one)
        expected = Expected(source, [name for name in source.configs if name not in left_out])
        files = {
            "model_index.json": source.index,
            **{f"{name}/config.json": source.configs[name] for name in expected.submodels},
        }
        config = Path(source.companions["scheduler"]) / "scheduler_config.json"
        files[SCHEDULER] = json.loads(config.read_text(encoding="utf-8"))
        for file, content in files.items():
            for key in expected.keys(file, content):
                value = content.get(key, ABSENT)
                if (row := expected.row(file, key)) and expected.allowed(file, key, value) != (value,):
                    used.add(row)
    unused = [row for row in ON_PURPOSE if row.key and row not in used]
    assert unused == []
    assert all(len(row.why) > 30 for row in ON_PURPOSE)


def source_with_authors(checkpoint: Checkpoint) -> Any:
    """As checkpoints are published: their files say who wrote them, and nothing that only sdflow needs."""
    from sdflow.verify.folder import Source, source_of

    source, family = source_of(checkpoint), checkpoint.family
    written = {"_diffusers_version": "0.20.0", "_name_or_path": "/home/me", "transformers_version": "4.30.0"}
    configs = {}
    for name, config in source.configs.items():
        set_by_us = {**family.part(name).config, **family.part(name).controlled}
        configs[name] = {key: value for key, value in config.items() if key not in set_by_us} | written
    index = {key: value for key, value in source.index.items() if key not in family.options}
    return Source(source.family, {**index, **written}, configs, source.companions, source.scheduler)


def test_the_texts_are_a_few_hundred_of_all_kinds() -> None:
    assert len(texts()) == len(set(texts())) >= 300
    assert "" in texts()
    for wanted in ("<|endoftext|>", "\n", "😀", "猫", "क"):
        assert any(wanted in text for text in texts())
    assert max(len(text.split()) for text in texts()) > 77
