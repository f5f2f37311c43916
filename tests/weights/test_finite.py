"""No weight that is NaN or infinite is published, and what float16 cuts is told: naming file and weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sdflow.disk.file_stamp import file_stamp
from sdflow.errors import CheckpointError
from sdflow.passes.base import PassInputs
from sdflow.passes.lora_merge import LoraMerge, LoraMergeConfig
from sdflow.sources.load import load_module
from sdflow.weights.bind import BindRequest, bind
from sdflow.weights.finite import all_finite, words_beyond_float16
from sdflow.weights.half import LARGEST, AtLimit, to_float16
from sdflow.weights.lora import LoraInput
from sdflow.weights.structure import read_parameters
from sdflow.weights.tensors import open_tensors
from tests.support.small_lora import write_lora
from tests.weights.conftest import Builder, config_of, synthetic

SUBMODEL = "text_encoder"
TARGETS = ("cpu", "cuda")  # float32 and float16


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lora(tmp_path_factory.mktemp("lora") / "style.safetensors", [SUBMODEL])


def checkpoint(structure: Path, folder: Path, key: str, value: float, dtype: Any = np.float32) -> dict[str, Any]:
    """The small text encoder in a file, with one value changed."""
    parameters = read_parameters(structure)
    with open_tensors(SUBMODEL, synthetic(SUBMODEL), parameters) as tensors:
        weights = {name: tensors.read(name).astype(dtype) for name in parameters}
    weights[key].reshape(-1)[3] = value
    save_file(weights, folder / "model.safetensors")
    files = [file_stamp(folder / "model.safetensors")]
    return {"kind": "files", "config": config_of(SUBMODEL), "pickled": False, "files": files}


def bound(structure: Path, out: Path, load: dict[str, Any], *loras: LoraInput) -> dict[str, Any]:
    out.mkdir()
    return dict(bind(BindRequest(SUBMODEL, structure, load, loras), out))


def key_of(structure: Path) -> str:
    return next(key for key in read_parameters(structure) if key.endswith("layers.0.self_attn.q_proj.weight"))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("target", TARGETS)
def test_a_weight_that_is_not_finite_is_refused(
    built: Builder, tmp_path: Path, target: str, dtype: Any, value: float
) -> None:
    structure = built.structure(SUBMODEL, target)
    key = key_of(structure)
    load = checkpoint(structure, tmp_path, key, value, dtype)
    with pytest.raises(CheckpointError, match=f"model.safetensors: 1 of .* values of {key} are NaN or infinite"):
        bound(structure, tmp_path / "out", load)
    assert "model.onnx" not in {path.name for path in (tmp_path / "out").iterdir()}


def test_a_module_that_is_not_finite_is_refused(built: Builder, tmp_path: Path) -> None:
    structure = built.structure(SUBMODEL, "cpu")
    load = checkpoint(structure, tmp_path, key_of(structure), np.nan)
    with pytest.raises(CheckpointError, match=r"model.safetensors: values of .*q_proj.weight are NaN or infinite"):
        load_module(SUBMODEL, load)


@pytest.mark.parametrize(("scale", "factor"), [(1e39, 1), (1.0, 1e21)])
@pytest.mark.parametrize("target", TARGETS)
def test_a_lora_that_makes_weights_infinite_is_refused(
    built: Builder, lora: Path, tmp_path: Path, target: str, scale: float, factor: float
) -> None:
    path = tmp_path / "large.safetensors"
    tensors = load_file(lora)
    large = {name: tensor * np.float32(factor if tensor.ndim else 1) for name, tensor in tensors.items()}
    save_file({name: np.asarray(tensor) for name, tensor in large.items()}, path)
    with pytest.raises(CheckpointError, match=r"large.safetensors: at scale 1.*, [\d,]+ of [\d,]+ values added to"):
        bound(built.structure(SUBMODEL, target), tmp_path / "out", synthetic(SUBMODEL), LoraInput(path, scale))


def test_loras_that_are_infinite_together_are_refused(built: Builder, lora: Path, tmp_path: Path) -> None:
    largest = 0.9 * np.finfo(np.float32).max / delta_of(lora, built)
    both = (LoraInput(lora, largest), LoraInput(lora, largest))
    with pytest.raises(CheckpointError, match=r"style.safetensors, .*style.safetensors: merged, .* is not finite"):
        bound(built.structure(SUBMODEL, "cpu"), tmp_path / "out", synthetic(SUBMODEL), *both)


def delta_of(lora: Path, built: Builder) -> float:
    """The largest value that the LoRA adds to a weight."""
    from sdflow.sources.loras.layers import lora_delta
    from sdflow.sources.loras.lora import read_lora

    shapes = read_parameters(built.structure(SUBMODEL, "cpu"))
    layers = read_lora(lora, {SUBMODEL: shapes})[SUBMODEL]
    return max(float(np.abs(lora_delta(layer, shapes[key], 1.0)).max()) for key, layer in layers.items())


def test_a_merge_that_carries_the_weights_refuses_too(built: Builder, lora: Path, tmp_path: Path) -> None:
    built.carried(SUBMODEL, "cuda")
    converted = built.converted(SUBMODEL)
    with pytest.raises(CheckpointError, match=r"style.safetensors: at scale 1e\+39, .* added to .*weight are NaN"):
        LoraMerge().run(
            PassInputs(SUBMODEL, converted, {}, loras=(LoraInput(lora, 1e39),)), tmp_path, LoraMergeConfig()
        )


def test_what_float16_cuts_is_counted_and_named(built: Builder, lora: Path, tmp_path: Path) -> None:
    from sdflow.sources.loras.layers import lora_delta
    from sdflow.sources.loras.lora import read_lora

    structure = built.structure(SUBMODEL, "cuda")
    shapes = read_parameters(structure)
    layers = read_lora(lora, {SUBMODEL: shapes})[SUBMODEL]
    expected = {}
    with open_tensors(SUBMODEL, synthetic(SUBMODEL), shapes) as tensors:
        for key, layer in layers.items():
            merged = tensors.read(key) + lora_delta(layer, shapes[key], 1e9)
            expected[key] = int(np.count_nonzero(np.abs(merged) > LARGEST))
    facts = bound(structure, tmp_path / "out", synthetic(SUBMODEL), LoraInput(lora, 1e9))["beyond_float16"]
    assert facts["values"] == sum(expected.values()) > 1000
    assert facts["loras"] == [0]
    assert len(facts["most"]) == min(facts["weights"], 5)
    told = words_beyond_float16({"beyond_float16": facts}, ["a at scale 1e+09"], "model")
    assert told is not None
    assert told.startswith(f"{facts['values']:,} values exceed float16") and told.endswith("from a at scale 1e+09")
    assert all(key in told for key in facts["most"])


def test_nothing_is_told_of_weights_that_fit(built: Builder, lora: Path, tmp_path: Path) -> None:
    facts = bound(built.structure(SUBMODEL, "cuda"), tmp_path / "out", synthetic(SUBMODEL), LoraInput(lora, 1.0))
    assert "beyond_float16" not in facts
    assert words_beyond_float16(facts, [], "") is None


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_the_scan_counts_what_it_saw(dtype: Any) -> None:
    counts = AtLimit()
    values = np.array([1, 65504, -65504, np.nan, np.inf, -np.inf, 0], dtype)
    to_float16(values, counts=counts)
    assert (counts.largest, counts.cut, counts.not_finite) == (2, 0, 3)
    counts = AtLimit()
    to_float16(np.array([1e6, -7e4, 65505, 2, 1e-30], np.float32), counts=counts)
    assert (counts.largest, counts.cut, counts.not_finite, counts.smallest) == (3, 3, 0, 1)


def test_a_sum_beyond_float32_is_no_infinite_weight() -> None:
    largest = np.finfo(np.float32).max
    assert all_finite(np.array([largest, largest], np.float32))
    assert not all_finite(np.array([np.inf, -np.inf], np.float32))
