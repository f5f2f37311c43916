"""A LoRA that makes a model draw in few steps changes what the pipeline does by itself: said when it is planned, built and drawn
with, written where diffusers reads it, and given up for whatever the user says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import diffusers
import pytest
import yaml
from small_lora import write_lora
from small_workflows import TESTS, Bench

from sdflow.artifact import Artifact
from sdflow.build.assemble import assemble
from sdflow.build.plan import make_plan
from sdflow.config import load_workflow
from sdflow.errors import UsageError, WorkflowError
from sdflow.families.shared.schedulers import renamed
from sdflow.manifest import Manifest, Origin, as_json, from_json, read_manifest
from sdflow.passes import registry
from sdflow.run.bake import bake
from sdflow.run.options import RunOptions
from sdflow.run.run import run_workflow
from sdflow.runtime.draw_request import GenerateRequest
from sdflow.runtime.files.folder import folder_defaults
from sdflow.runtime.generate import Progress, generate
from sdflow.runtime.pipeline import Pipeline
from sdflow.sources import Checkpoint, reopen_checkpoint
from sdflow.verify.reference.selection import select

HYPER = "Hyper-SD15-8steps-lora.safetensors"
pytestmark = pytest.mark.usefixtures("forked_workers")
CHAIN = [{"pass": "OnnxConversion"}, {"pass": "LoraMerge"}]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One cache for all: the UNet is converted once."""
    folder = tmp_path_factory.mktemp("few_steps")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setenv("PYTHONPATH", str(TESTS.parent))
        yield Bench(folder)


def workflow(bench: Bench, name: str, **fields: Any) -> Path:
    content = {
        "model": "synthetic:sd15-tiny",
        "target": "cpu",
        "submodels": {"unet": {"passes": CHAIN}},
        "evaluate": None,
        "verify": False,
        **fields,
    }
    path = bench.folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def built(bench: Bench, path: Path) -> Any:
    options = RunOptions(out=bench.folder / "out", results=bench.folder / "results", evaluate=False)
    (result,) = run_workflow(
        load_workflow(path, catalog=registry.catalog()), bench.cache, options, bench.events
    ).pipelines
    return result


def scheduler_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "scheduler/scheduler_config.json").read_text())
    index = json.loads((folder / "model_index.json").read_text())
    assert index["scheduler"] == ["diffusers", config["_class_name"]], "diffusers loads it by this name"
    return config


def test_a_baked_lora_leaves_its_scheduler_and_its_defaults_in_the_folder(bench: Bench) -> None:
    lora = write_lora(bench.folder / HYPER, ("unet",))
    plain = built(bench, workflow(bench, "plain"))
    assert plain.plan.few_steps == {} and plain.plan.notes == ()
    assert scheduler_of(plain.folder)["_class_name"] == "PNDMScheduler"
    before = (plain.folder / "sdflow.json").read_bytes()
    assert not {"generate", "few_steps"} & json.loads(before).keys(), "where nothing is said, nothing is written"

    result = bake(plain.folder, [str(lora)], bench.folder / "out/fast", bench.cache, bench.events)
    (note,) = result.plan.notes
    assert note == f"{HYPER} is Hyper-SD, so the defaults are 8 steps, no guidance, scheduler ddim_trailing"
    config = scheduler_of(result.folder)
    assert (config["_class_name"], config["timestep_spacing"]) == ("DDIMScheduler", "trailing")
    own = folder_defaults(result.folder)
    assert (own["text"].steps, own["text"].guidance_scale) == (8, 0.0)
    assert own["image"].strength == 0.8, "what nobody speaks of stays"
    # What is verified, and what is baked again, is the same.
    origin = read_manifest(result.folder).origin
    checkpoint = reopen_checkpoint(origin, "sdflow.json", digests=bench.cache.stat)
    assert checkpoint.said["scheduler"] == "ddim_trailing" and checkpoint.defaults() == own
    again = bake(plain.folder, [str(lora)], bench.folder / "out/fast", bench.cache, bench.events)
    assert again.ran == 0 and scheduler_of(again.folder) == config
    # Without the LoRA it is as it was.
    assert (plain.folder / "sdflow.json").read_bytes() == before


def test_the_users_word_is_the_last(bench: Bench) -> None:
    lora = write_lora(bench.folder / "lcm-lora-sdv1-5.safetensors", ("unet",))
    loras = [{"file": str(lora), "scale": 1.0}]
    said = {"steps": 6, "scheduler": "euler"}
    result = built(bench, workflow(bench, "mine", loras=loras, generate=said))
    assert "6 steps, no guidance, scheduler euler" in result.plan.notes[0]
    assert scheduler_of(result.folder)["_class_name"] == "EulerDiscreteScheduler"
    own = folder_defaults(result.folder)["text"]
    assert (own.steps, own.guidance_scale) == (6, 1.0)
    hyper = write_lora(bench.folder / HYPER, ("unet",), seed=1)
    baked = bake(result.folder, [str(hyper)], bench.folder / "out/baked", bench.cache, bench.events)
    assert scheduler_of(baked.folder)["_class_name"] == "EulerDiscreteScheduler", "the workflow said it"
    assert folder_defaults(baked.folder)["text"].steps == 6


def test_a_lora_at_scale_0_changes_nothing(bench: Bench) -> None:
    lora = write_lora(bench.folder / HYPER, ("unet",))
    path = workflow(bench, "off", loras=[{"file": str(lora), "scale": 0.0}])
    (plan,) = make_plan(load_workflow(path, catalog=registry.catalog()), bench.cache).pipelines
    assert plan.few_steps == {} and plan.notes == ()


@pytest.mark.parametrize(
    ("generate", "says"),
    [
        ({"steps": 0}, "generate: 'steps' must be greater than or equal to 1"),
        (
            {"scheduler": "eulr"},
            "generate: 'scheduler' is invalid: no scheduler is named 'eulr'; did you mean 'euler'",
        ),
        ({"guidance": 1.0}, "generate: unknown option 'guidance'"),
        ({"strength": 1.5}, "generate: 'strength'"),
        (8, "`generate` must be a map of steps, guidance_scale and scheduler"),
    ],
)
def test_what_is_wrong_in_a_workflow_is_told(bench: Bench, generate: Any, says: str) -> None:
    path = workflow(bench, "wrong", generate=generate)
    with pytest.raises(WorkflowError) as caught:
        load_workflow(path, catalog=registry.catalog())
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("few_steps", {"steps": "4"}),
        ("few_steps", {"steps": 0}),
        ("few_steps", {"guidance_scale": -1.0}),
        ("generate", {"scheduler": "eulr"}),
        ("generate", [4]),
    ],
)
def test_a_damaged_manifest_is_told(key: str, value: Any) -> None:
    content = {**as_json(Manifest(Origin("tiny", "cpu"), {}, ())), key: value}
    with pytest.raises(UsageError, match="is not a valid manifest"):
        from_json(content, "sdflow.json")


def test_the_manifest_keeps_both_words_apart() -> None:
    origin = Origin(
        "tiny", "cpu", generate={"steps": 6}, few_steps={"steps": 4, "scheduler": "lcm", "because": "its name"}
    )
    kept = from_json(as_json(Manifest(origin, {}, ())), "sdflow.json").origin
    assert (kept.generate, kept.few_steps) == (origin.generate, origin.few_steps)
    assert kept.said == {"steps": 6, "scheduler": "lcm", "because": "its name"}


# Drawing


FEW: Mapping[str, Any] = {
    "steps": 2,
    "guidance_scale": 0.0,
    "eta": 0.3,
    "scheduler": "tcd",
    "because": "tcd-lora is TCD",
}


@pytest.fixture(scope="module")
def fast(
    tiny_artifacts: dict[str, Artifact], tiny_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A whole pipeline that says that it draws in two steps with TCD."""
    out = tmp_path_factory.mktemp("fast") / "fast"
    config = json.loads((tiny_checkpoint.companions["scheduler"] / "scheduler_config.json").read_text())
    assemble(
        out,
        parts=tiny_artifacts,
        companions=tiny_checkpoint.companions,
        origin=Origin("fast", "cpu", few_steps=FEW),
        changed={"scheduler/scheduler_config.json": renamed(config, "tcd")},
    )
    return out


def drawn(folder: Path, out: Path, **settings: Any) -> tuple[dict[str, Any], tuple[str, ...], list[str]]:
    told: list[str] = []
    request = GenerateRequest(
        folder, ["a horse"], out, seed=1, height=64, width=64, threads=1, checker=False, **settings
    )
    result = generate(request, Progress(phase=told.append))
    return result.settings, result.notes, told


def test_generate_draws_as_the_folder_says_and_says_so(fast: Path, tmp_path: Path) -> None:
    settings, notes, told = drawn(fast, tmp_path)
    assert {name: settings[name] for name in ("steps", "guidance_scale", "eta", "scheduler")} == {
        "steps": 2,
        "guidance_scale": 0.0,
        "eta": 0.3,
        "scheduler": "TCDScheduler",
    }
    assert notes == ("tcd-lora is TCD: 2 steps, no guidance, TCDScheduler",) and notes[0] in told


def test_generate_draws_as_the_user_says(fast: Path, tmp_path: Path) -> None:
    settings, notes, _ = drawn(fast, tmp_path, steps=3, guidance_scale=4.0, eta=0.0, scheduler="ddim")
    assert (settings["steps"], settings["guidance_scale"], settings["eta"]) == (3, 4.0, 0.0)
    assert settings["scheduler"] == "DDIMScheduler" and "3 steps, guidance 4, DDIMScheduler" in notes[0]


def test_generate_says_nothing_of_an_ordinary_model(tiny_pipeline: Path, tmp_path: Path) -> None:
    settings, notes, _ = drawn(tiny_pipeline, tmp_path, steps=1, target="cpu")
    assert (settings["guidance_scale"], settings["eta"], notes) == (7.5, 0.0, ())


def test_python_and_the_verification_follow_the_folder(
    fast: Path, tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from sdflow.config.workflow import ImageSpec, VerifySpec

    pipeline = Pipeline.load(fast, "cpu", threads=1, checker=False)
    steps: list[int] = []
    pipeline("a horse", height=64, width=64, callback_on_step_end=lambda index, time, count: steps.append(count))
    assert steps == [2, 2]
    plain = select(VerifySpec(), ImageSpec(), tiny_checkpoint.family.submodels, tiny_checkpoint)
    few = select(VerifySpec(), ImageSpec(), tiny_checkpoint.family.submodels, replace(tiny_checkpoint, said=FEW))
    assert (plain.steps, plain.guidance_scale) == (3, 7.5)
    assert (few.steps, few.guidance_scale) == (2, 0.0)


def test_diffusers_loads_the_folder_with_its_scheduler(fast: Path) -> None:
    loaded = diffusers.OnnxStableDiffusionPipeline.from_pretrained(
        fast, provider="CPUExecutionProvider", local_files_only=True
    )
    assert type(loaded.scheduler).__name__ == "TCDScheduler"
