"""sdflow.json: the bytes that a build writes, and what is read of files of this version and of others."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_workflows import SMALL_PASSES, Bench

from sdflow import __version__
from sdflow.config import load_workflow
from sdflow.digest import digest_tree
from sdflow.errors import UsageError
from sdflow.manifest import MANIFEST_FILE, NOT_SAID, Quantization, as_bytes, as_json, from_json, read_manifest
from sdflow.passes import registry
from sdflow.run.options import RunOptions
from sdflow.run.run import run_workflow

EXAMPLE = Path(__file__).parents[1] / "data" / "tiny_ink.sdflow.json"
"""What sdflow 0.1.0 wrote for synthetic:sd15-tiny with a LoRA, on the CPU."""

Edit = Callable[[dict[str, Any]], object]


def test_a_build_writes_these_bytes(bench: Bench) -> None:
    path = bench.workflow([{"pass": "Convert", "text": "a"}, {"pass": "Append", "text": "b"}], verify=False)
    options = RunOptions(bench.folder / "pipelines", bench.folder / "results")
    (built,) = run_workflow(
        load_workflow(path, catalog=registry.catalog()), bench.cache, options, bench.events
    ).pipelines
    steps = built.steps["unet"]
    last = steps[-1].record.artifact
    companions = {
        f"{folder}/{name}"
        for folder in ("tokenizer", "scheduler", "feature_extractor")
        for name in (path.name for path in (built.folder / folder).iterdir())
    }
    expected = {
        "allow_pickle": False,
        "carry_weights": False,
        "checkpoint": {"architecture": "sd15-tiny", "generator": 1, "kind": "synthetic", "seed": 0},
        "copied": False,
        "files": sorted({"model_index.json", "sdflow.json", "unet", *companions}),
        "format_version": 1,
        "left_out": ["safety_checker", "text_encoder", "vae_decoder", "vae_encoder"],
        "loras": [],
        "model": "synthetic:sd15-tiny",
        "name": "small",
        "sdflow_version": __version__,
        "submodels": {
            "unet": {
                "artifact": last.digest,
                "files": [{"bytes": each.size, "path": each.path, "sha256": each.sha256} for each in last.files],
                "passes": [
                    {"options": {"text": "a"}, "pass": f"{SMALL_PASSES}:Convert"},
                    {"options": {"text": "b"}, "pass": f"{SMALL_PASSES}:Append"},
                ],
                "steps": [
                    {
                        "action": step.record.action.digest,
                        "config": dict(step.step.config),
                        "facts": dict(step.record.facts),
                        "pass": step.step.name,
                        "uses": dict(step.step.uses),
                    }
                    for step in steps
                ],
            }
        },
        "target": "cpu",
        "verified": None,
    }
    text = json.dumps(expected, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    assert (built.folder / "sdflow.json").read_text(encoding="utf-8") == text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with nothing but the example's sdflow.json."""
    (tmp_path / MANIFEST_FILE).write_bytes(EXAMPLE.read_bytes())
    return tmp_path


def edit(folder: Path, change: Edit) -> None:
    content = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
    change(content)
    (folder / MANIFEST_FILE).write_text(json.dumps(content), encoding="utf-8")


def test_what_sdflow_wrote_is_read_in_full(folder: Path) -> None:
    manifest = read_manifest(folder)
    origin = manifest.origin
    assert (origin.name, origin.target, origin.model) == ("tiny_ink", "cpu", "synthetic:sd15-tiny")
    assert origin.checkpoint == {"architecture": "sd15-tiny", "generator": 1, "kind": "synthetic", "seed": 0}
    assert [(lora.reference, lora.scale, lora.weight_name) for lora in origin.loras] == [
        ("/home/me/loras/ink.safetensors", 0.8, None)
    ]
    assert (origin.allow_pickle, origin.carry_weights, origin.verified) == (False, False, None)
    assert origin.family == "stable_diffusion"
    assert sorted(manifest.parts) == ["safety_checker", "text_encoder", "unet", "vae_decoder", "vae_encoder"]
    for part in manifest.parts.values():
        assert digest_tree(part.files) == part.artifact
    unet = origin.chains["unet"]
    assert unet.written is not None
    assert [each.name for each in unet.written][:2] == ["OnnxConversion", "LoraMerge"]
    assert unet.steps[-1].name == "BindWeights"
    assert "model_index.json" in manifest.files
    assert manifest.copied is False
    assert as_bytes(manifest) == EXAMPLE.read_bytes()


@pytest.mark.parametrize("verified", ["quick", None, NOT_SAID])
def test_what_is_written_is_read_again(folder: Path, verified: str | None) -> None:
    manifest = read_manifest(folder)
    changed = replace(manifest, origin=replace(manifest.origin, verified=verified))
    assert from_json(json.loads(as_bytes(changed)), "here") == changed
    assert ("verified" in as_json(changed)) == (verified != NOT_SAID)


def test_a_family_is_written_when_it_is_another_than_stable_diffusion(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert "family" not in as_json(manifest)
    other = replace(manifest, origin=replace(manifest.origin, family="stable_diffusion_xl"))
    (folder / MANIFEST_FILE).write_bytes(as_bytes(other))
    assert json.loads(as_bytes(other))["family"] == "stable_diffusion_xl"
    assert read_manifest(folder) == other


def test_components_are_written_where_there_are_any(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert manifest.origin.components == {}
    assert "components" not in as_json(manifest)
    other = replace(manifest, origin=replace(manifest.origin, components={"vae": "hf:a/b@main"}))
    (folder / MANIFEST_FILE).write_bytes(as_bytes(other))
    assert json.loads(as_bytes(other))["components"] == {"vae": "hf:a/b@main"}
    assert read_manifest(folder) == other


def test_what_the_first_versions_did_not_write_yet_is_read_as_not_said(folder: Path) -> None:
    def first(content: dict[str, Any]) -> None:
        for key in ("verified", "allow_pickle", "carry_weights"):
            del content[key]
        for lora in content["loras"]:
            del lora["weight_name"]
        for part in content["submodels"].values():
            del part["passes"]

    edit(folder, first)
    origin = read_manifest(folder).origin
    assert origin.verified == NOT_SAID
    assert origin.allow_pickle is False
    assert origin.loras[0].weight_name is None
    assert origin.chains["unet"].written is None
    assert len(origin.chains["unet"].steps) > 2


def test_what_a_later_version_of_this_format_adds_is_passed_over(folder: Path) -> None:
    before = read_manifest(folder)
    edit(folder, lambda content: content.update(unheard_of={"a": 1}))
    assert read_manifest(folder) == before


def test_a_folder_without_a_manifest_is_no_pipeline(tmp_path: Path) -> None:
    # Two levels down: beside it lie no pipelines of other tests, one of which the error would suggest.
    empty = tmp_path / "alone" / "empty"
    empty.mkdir(parents=True)
    with pytest.raises(UsageError, match=r"sdflow\.json: not an sdflow pipeline\n  Build one: sdflow run"):
        read_manifest(empty)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"format_version": 1', r"is damaged: .*\n  Run the pipeline's workflow again"),
        (b"\xff\xfe", "is damaged: it is not UTF-8"),
        ('{"format_version": 1}'.encode("utf-16"), "is damaged: it is not UTF-8"),
        (b"[]", "not an sdflow pipeline: no format_version"),
        (b'{"name": "x"}', "not an sdflow pipeline: no format_version"),
        (b'{"format_version": 2}', r"a newer sdflow wrote it: format_version 2 .* only 1\n  Update sdflow"),
        (b'{"format_version": 0}', "format_version 0 is not known, only 1"),
        (b'{"format_version": "1"}', "format_version '1' is not known, only 1"),
        (b'{"format_version": 1}', "is not a valid manifest: name: field required"),
    ],
)
def test_a_file_that_cannot_be_used_says_what_is_wrong_and_what_to_do(
    tmp_path: Path, content: bytes, says: str
) -> None:
    (tmp_path / MANIFEST_FILE).write_bytes(content)
    with pytest.raises(UsageError, match=says) as raised:
        read_manifest(tmp_path)
    assert raised.value.where == str(tmp_path / MANIFEST_FILE)
    assert raised.value.remedy


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda content: content.pop("target"), "target: field required"),
        (lambda content: content.update(target=5), "target: input should be a valid string, found 5"),
        (lambda content: content.update(name=None), "name: input should be a valid string, found None"),
        (lambda content: content.update(name="a\x1b[2J"), r".* holds characters that a terminal takes for commands"),
        (lambda content: content.update(submodels=[]), r"submodels: .*, found \[\]"),
        (lambda content: content.update(submodels={"unet": 1}), "submodels.unet: .*, found 1"),
        (lambda content: content["submodels"]["unet"].pop("artifact"), "submodels.unet.artifact: field required"),
        (lambda content: content["submodels"]["unet"]["files"].append(1), r"submodels.unet.files.\d+: .*, found 1"),
        (
            lambda content: content["submodels"]["unet"]["files"][0].update(bytes="1"),
            "submodels.unet.files.0.bytes: input should be a valid integer, found '1'",
        ),
        (lambda content: content["submodels"]["unet"]["files"][0].update(bytes=True), ".*bytes: .*, found True"),
        (lambda content: content["submodels"]["unet"]["steps"][0].pop("pass"), r"submodels.unet.steps.0.pass: field"),
        (lambda content: content.pop("loras"), "loras: field required"),
        (lambda content: content["loras"][0].update(scale="much"), "loras.0.scale: .* valid number, found 'much'"),
        (lambda content: content.update(components=[1]), r"components: .*, found \[1\]"),
        (lambda content: content.update(components={"vae": 1}), "components.vae: .* valid string, found 1"),
        (lambda content: content.update(checkpoint={"components": [1]}), r"checkpoint.components: .*, found \[1\]"),
        (lambda content: content.update(checkpoint={"components": {"vae": 1}}), "checkpoint.components.vae: .*found 1"),
        (lambda content: content.update(family="pixart"), "family: known are stable_diffusion, .*, found 'pixart'"),
        (lambda content: content.update(refiner="../x"), "refiner: a refiner is always in the folder refiner, found"),
        (lambda content: content.update(files=[1]), "files.0: input should be a valid string, found 1"),
        (
            lambda content: content.update(allow_pickle="no"),
            "allow_pickle: input should be a valid boolean, found 'no'",
        ),
    ],
)
def test_a_part_that_is_missing_or_of_another_kind_is_named(folder: Path, change: Edit, says: str) -> None:
    edit(folder, change)
    with pytest.raises(UsageError, match=f"is not a valid manifest: {says}"):
        read_manifest(folder)


def test_the_checkpoint_of_a_hub_is_pinned_to_the_commit_that_was_used(folder: Path) -> None:
    origin = read_manifest(folder).origin
    assert origin.pinned_model("here") == "synthetic:sd15-tiny"
    hub = replace(origin, model="hf:a/b@main", checkpoint={"commit": "c" * 40})
    assert hub.pinned_model("here") == f"hf:a/b@{'c' * 40}"
    with pytest.raises(UsageError, match="here: does not name the pipeline's model: 'model' is missing"):
        replace(origin, model=None).pinned_model("here")


QUANTIZED = {"to": "int8", "by": "QuantizeInt8", "limit": 0.02, "layers": 3, "kept": ["a", "b"]}


def quantized(folder: Path, **changed: Any) -> dict[str, Any]:
    """What sdflow.json says, its UNet quantized."""
    value = as_json(read_manifest(folder))
    value["submodels"]["unet"]["quantized"] = {**QUANTIZED, **changed}
    return value


def test_what_is_quantized_is_written_and_read_again(folder: Path) -> None:
    assert read_manifest(folder).origin.quantized == {}
    read = from_json(quantized(folder), "here")
    assert read.origin.quantized == {"unet": "int8"}
    assert read.origin.chains["unet"].quantized == Quantization("int8", "QuantizeInt8", 0.02, 3, ("a", "b"))
    assert as_json(read)["submodels"]["unet"]["quantized"] == {**QUANTIZED, "kept": ("a", "b")}
    assert "quantized" not in as_json(read)["submodels"]["vae_decoder"]
    assert from_json(json.loads(as_bytes(read)), "here") == read
    free = from_json(quantized(folder, limit=None), "here").origin.chains["unet"].quantized
    assert free is not None and free.limit is None


@pytest.mark.parametrize("changed", [{"limit": -1}, {"limit": "near"}, {"to": None}, {"layers": "all"}, {"kept": [1]}])
def test_what_is_said_of_quantization_and_makes_no_sense_is_refused(folder: Path, changed: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="is not a valid manifest"):
        from_json(quantized(folder, **changed), "here")


@pytest.mark.parametrize("path", ["a\0b", "x" * 300, "a/" * 600 + "b", "/dev/zero", "../../x", "a\\b", "C:/x", "", "."])
def test_every_file_that_it_names_is_in_its_folder(folder: Path, path: str) -> None:
    """A path that nothing has would end in a traceback, one that leads elsewhere would be read."""
    for change in (
        lambda content: content["submodels"]["unet"]["files"][0].update(path=path),
        lambda content: content["files"].append(path),
        lambda content: content["submodels"].update({path: content["submodels"]["unet"]}),
    ):
        before = (folder / MANIFEST_FILE).read_bytes()
        edit(folder, change)
        with pytest.raises(
            UsageError, match="is not a file in its folder|is not a folder name|holds characters"
        ) as raised:
            read_manifest(folder)
        assert len(str(raised.value)) < 500
        (folder / MANIFEST_FILE).write_bytes(before)
