"""`sdflow verify --fix` proposes the smallest set of nodes in fp32 with which a pipeline that overflows passes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from sdflow.cli.app import app
from sdflow.config import load_workflow
from sdflow.passes import registry
from sdflow.report.verify import print_verifications
from sdflow.run.fix import Fix, smallest
from sdflow.run.options import RunOptions
from sdflow.run.run import run_workflow
from sdflow.store import Cache
from tests.support.small_workflows import Events
from tests.verify.sample_artifacts import ROOT

LAYER = "encoder.layers.1.self_attn"
EARLIER = "*/layers.0/mlp/fc1/MatMul"
"""A node that the workflow keeps in fp32 already."""


@pytest.mark.parametrize("needed", [{1}, {0, 7}, {2, 3, 6}, {0, 1, 2, 3, 4, 5, 6, 7}, set()])
def test_the_smallest_set_is_found_in_few_trials(needed: set[int]) -> None:
    tried = []

    def passes(nodes: Sequence[str]) -> bool:
        tried.append(nodes)
        return needed <= {int(node) for node in nodes}

    found = smallest((), [str(number) for number in range(8)], passes)
    assert {int(node) for node in found} == needed
    assert len(tried) <= 1 + 2 * len(needed) * 4


def test_the_lines_are_those_of_a_workflow() -> None:
    content = yaml.safe_load(Fix("unet", ("/conv_in/Conv", "a b"), 3).yaml())
    passes = content["submodels"]["unet"]["passes"]
    assert passes == {"OnnxFloatToFloat16": {"node_block_list": ["/conv_in/Conv", "a b"]}}


def test_both_outputs_have_the_existing_entries(capsys: pytest.CaptureFixture[str]) -> None:
    found = Fix("vae_decoder", ("/conv_in/Conv",), 3, existing=("*/Softmax",))
    passes = yaml.safe_load(found.yaml())["submodels"]["vae_decoder"]["passes"]
    assert passes == {"OnnxFloatToFloat16": {"node_block_list": ["*/Softmax", "/conv_in/Conv"]}}
    print_verifications([], as_json=True, fixes={"sdxl": [found]})
    (printed,) = json.loads(capsys.readouterr().out)["fixes"]["sdxl"]
    assert printed["node_block_list"] == ["*/Softmax", "/conv_in/Conv"]


def _overflowing(folder: Path) -> Path:
    """The sample; in its text encoder, values that attention hands over are 2^18 times as large: the same function."""
    shutil.copytree(ROOT / "samples/shapes", folder)
    path = folder / "text_encoder/model.safetensors"
    weights = {name: values.astype(np.float32) for name, values in load_file(path).items()}
    for name in ("v_proj.weight", "v_proj.bias"):
        weights[f"{LAYER}.{name}"] *= 2.0**18
    weights[f"{LAYER}.out_proj.weight"] /= 2.0**18
    save_file(weights, path, metadata={"format": "pt"})
    return folder


@pytest.mark.slow
def test_a_pipeline_that_overflows_is_fixed_by_the_lines_that_are_printed(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    content = {
        "extends": "base/shapes.yaml",
        "target": "cuda",
        "model": str(_overflowing(tmp_path / "checkpoint")),
        "submodels": {
            **dict.fromkeys(("unet", "vae_encoder", "vae_decoder")),
            "text_encoder": {"passes": {"OnnxFloatToFloat16": {"node_block_list": [EARLIER]}}},
        },
        "evaluate": {"image": None, "latency": None},
    }
    path.write_text(yaml.safe_dump(content))
    cache = Cache(tmp_path / "cache")
    options = RunOptions(out=tmp_path / "pipelines", results=tmp_path / "results", verify=False)
    run_workflow(load_workflow(path, catalog=registry.catalog()), cache, options, Events())

    arguments = ["verify", str(tmp_path / "pipelines/large"), "--quick", "--fix", "--cache", str(cache.root), "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code != 0, "the folder is as bad as it was"
    printed = json.loads(done.stdout)
    ((one,),) = printed["fixes"].values()
    assert one["submodel"] == "text_encoder"
    assert one["node_block_list"][0] == EARLIER, "the lines replace the workflow's own list"
    kept = set(one["node_block_list"][1:])
    operators = {"Attention", "MatMul"}
    assert len(kept) == 2
    assert all(any(operator in name for name in kept) for operator in operators), kept
    overflowing = printed["pipelines"][0]["overflowing"]["text_encoder"]
    assert kept <= set(overflowing)

    content["submodels"]["text_encoder"] = {
        "passes": {"OnnxFloatToFloat16": {"node_block_list": one["node_block_list"]}}
    }
    path.write_text(yaml.safe_dump(content))
    fixed = RunOptions(out=tmp_path / "pipelines", results=tmp_path / "results")
    (result,) = run_workflow(load_workflow(path, catalog=registry.catalog()), cache, fixed, Events()).pipelines
    assert result.verification is not None
    assert result.verification.passed


def test_the_lines_for_a_quantized_submodel_have_what_is_kept_already() -> None:
    lines = Fix("unet", ("/ff/MatMul",), 3, "QuantizeInt8", "keep", ("*/to_k/*",)).yaml()
    passes = yaml.safe_load(lines)["submodels"]["unet"]["passes"]
    assert passes == {"QuantizeInt8": {"keep": ["*/to_k/*", "/ff/MatMul"]}}
