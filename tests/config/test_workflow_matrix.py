"""`matrix`: every combination is a pipeline, with a name that is readable, stable and its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sdflow.config import load_workflow
from sdflow.config.workflow import PipelineSpec

from .workflow_catalog import SmallCatalog

CHAINS = {
    "evaluate": None,
    "submodels": {"unet": {"passes": [{"pass": "OnnxConversion"}, {"pass": "LoraMerge"}]}},
}


def load(folder: Path, workflow: dict[str, Any], stem: str = "w", **given: Any) -> tuple[PipelineSpec, ...]:
    path = folder / f"{stem}.yaml"
    path.write_text(yaml.safe_dump({**CHAINS, **workflow}, sort_keys=False))
    return load_workflow(path, catalog=SmallCatalog(), **given).pipelines


def names(folder: Path, workflow: dict[str, Any], **given: Any) -> list[str]:
    return [pipeline.name for pipeline in load(folder, workflow, **given)]


def test_the_only_pipeline_is_called_after_its_file(tmp_path: Path) -> None:
    assert names(tmp_path, {"model": "synthetic:sd15", "target": "cpu"}, stem="my flow!") == ["my-flow"]
    assert names(tmp_path, {"model": "synthetic:sd15", "target": ["cpu"], "name": "other"}) == ["other"]


def test_every_combination_of_models_loras_and_targets_is_a_pipeline(tmp_path: Path) -> None:
    found = load(
        tmp_path,
        {
            "matrix": {
                "model": ["synthetic:sd15", "hf:owner/dreams@v2"],
                "loras": {"none": [], "ink": [{"file": "hf:a/b", "scale": 0.5}]},
                "target": ["cpu", "cuda"],
            }
        },
    )
    assert [pipeline.name for pipeline in found] == [
        "w-sd15-none-cpu", "w-sd15-none-cuda", "w-sd15-ink-cpu", "w-sd15-ink-cuda",
        "w-dreams-none-cpu", "w-dreams-none-cuda", "w-dreams-ink-cpu", "w-dreams-ink-cuda",
    ]  # fmt: skip
    assert [(pipeline.model, len(pipeline.loras), pipeline.target) for pipeline in found[1:4]] == [
        ("synthetic:sd15", 0, "cuda"), ("synthetic:sd15", 1, "cpu"), ("synthetic:sd15", 1, "cuda")
    ]  # fmt: skip
    assert [len(pipeline.submodels["unet"]) for pipeline in found] == [1, 1, 2, 2] * 2


def test_a_list_of_loras_is_called_after_its_files_and_scales(tmp_path: Path) -> None:
    for name in ("ink.safetensors", "gold leaf.safetensors"):
        (tmp_path / name).touch()
    ink, gold = {"file": "ink.safetensors", "scale": 0.8}, {"file": "gold leaf.safetensors"}
    workflow = {"model": "synthetic:sd15", "target": "cpu", "matrix": {"loras": [[], [ink], [ink, gold]]}}
    assert names(tmp_path, workflow) == ["w-plain", "w-ink-0.8", "w-ink-0.8+gold-leaf"]


def test_equal_labels_of_different_values_are_numbered(tmp_path: Path) -> None:
    workflow = {"target": "cpu", "matrix": {"model": ["hf:a/same", "hf:b/same", "hf:c/SAME"]}}
    assert names(tmp_path, workflow) == ["w-same", "w-same-2", "w-SAME-3"]


def test_another_target_than_the_files_gets_a_name_of_its_own(tmp_path: Path) -> None:
    workflow = {"model": "synthetic:sd15", "target": "cuda"}
    assert names(tmp_path, workflow, targets=["cuda"]) == ["w"]
    assert names(tmp_path, workflow, targets=["cpu"]) == ["w-cpu"]
    assert names(tmp_path, workflow, targets=["cpu", "cuda", "cpu"]) == ["w-cpu", "w"]


def test_a_target_of_several_keeps_its_name_when_it_is_built_alone(tmp_path: Path) -> None:
    workflow = {"model": "synthetic:sd15", "target": ["cpu", "cuda"]}
    assert names(tmp_path, workflow) == ["w-cpu", "w-cuda"]
    assert names(tmp_path, workflow, targets=["cuda"]) == ["w-cuda"]


WORD = st.text(alphabet="abAB-._2 é/", min_size=1, max_size=5)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    st.lists(WORD, min_size=1, max_size=4, unique=True),
    st.lists(WORD, min_size=1, max_size=4, unique=True),
    st.lists(st.sampled_from(["cpu", "cuda", "rocm"]), min_size=1, unique=True),
)
def test_names_are_unique_folder_names_and_the_same_every_time(
    tmp_path: Path, models: list[str], styles: list[str], targets: list[str]
) -> None:
    workflow = {
        "matrix": {
            "model": {word: f"synthetic:sd15?seed={seed}" for seed, word in enumerate(models)},
            "loras": {word: [{"file": f"hf:a/b{seed}"}] for seed, word in enumerate(styles)},
            "target": targets,
        }
    }
    found = names(tmp_path, workflow)
    assert len(found) == len(models) * len(styles) * len(targets)
    assert len({name.casefold() for name in found}) == len(found)
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._+-") for name in found)
    assert all(name[0] not in ".-" and name[-1] not in "." for name in found)
    assert found == names(tmp_path, workflow)


def test_the_name_of_a_pipeline_tells_what_its_weights_are_quantized_to(tmp_path: Path) -> None:
    chain = "[{pass: OnnxConversion}, {pass: QuantizeInt8}]"
    for name, told in (("small", "small_int8"), ("small_int8_cpu", "small_int8_cpu")):
        text = f"name: {name}\nmodel: synthetic:sd15-tiny\ntarget: cpu\nevaluate: {{image: null}}\n"
        (tmp_path / "w.yaml").write_text(f"{text}submodels: {{unet: {{passes: {chain}}}}}\n")
        (pipeline,) = load_workflow(tmp_path / "w.yaml", catalog=SmallCatalog()).pipelines
        assert pipeline.name == told
