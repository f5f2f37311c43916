"""LoraMerge: the result is the export of the model that diffusers fuses, and what no LoRA touches keeps its bytes."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from submodels import dummy_inputs

from sdflow.errors import CheckpointError, PassError
from sdflow.passes.base import PassInputs
from sdflow.passes.lora_merge import LoraMerge, LoraMergeConfig
from sdflow.passes.weight_names import Transform, WeightName, read_weight_names, write_weight_names
from sdflow.sources import Checkpoint, PlainDigests, load_module, load_pipeline, open_checkpoint
from sdflow.weights.lora import LoraInput

from .conversion import config_of, convert, initializers, session

MERGED = ("unet", "text_encoder")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint: the tiny one with a UNet of two levels."""
    base = open_checkpoint("synthetic:sd15-tiny", digests=PlainDigests(), download=False)
    config = dict(base.submodels["unet"].load["config"])
    config |= {
        "block_out_channels": [32, 64],
        "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
        "layers_per_block": 1,
    }
    pipeline = load_pipeline(base)
    pipeline.unet = load_module("unet", {"kind": "synthetic", "config": config, "seed": 0})
    path = tmp_path_factory.mktemp("checkpoint")
    pipeline.save_pretrained(path)
    return path


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(str(folder), digests=PlainDigests(), download=False)


def converted_from(folder: Path, out: Path) -> dict[str, Path]:
    checkpoint = opened(folder)
    for submodel in MERGED:
        convert(submodel, checkpoint.submodels[submodel].load, out / submodel)
    return {submodel: out / submodel for submodel in MERGED}


@pytest.fixture(scope="module")
def base(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Submodel -> its conversion."""
    return converted_from(folder, tmp_path_factory.mktemp("base"))


def write_lora(
    folder: Path, path: Path, style: str, *, seed: int, submodels: tuple[str, ...] = MERGED, alpha: float = 3.0
) -> Path:
    """A LoRA of rank 4 on every attention and feed-forward layer and on some convolutions, in this key style."""
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(seed)
    tensors = {}
    checkpoint = opened(folder)
    wanted = ("to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2", "proj_in", "conv1", "fc1")
    wanted += (
        "q_proj",
        "k_proj",
        "v_proj",
        "out_proj",
    )  # diffusers drops attention layers that come without the others
    for submodel in submodels:
        for key, weight in load_module(submodel, checkpoint.submodels[submodel].load).state_dict().items():
            module = key.removesuffix(".weight")
            if not key.endswith(".weight") or not module.endswith(wanted):
                continue
            down = torch.randn(4, *weight.shape[1:], generator=random) * 0.1
            up = torch.randn(weight.shape[0], 4, *(1 for _ in weight.shape[2:]), generator=random) * 0.1
            if style == "diffusers":
                tensors |= {f"{submodel}.{module}.lora_A.weight": down, f"{submodel}.{module}.lora_B.weight": up}
            else:
                prefix = "lora_unet_" if submodel == "unet" else "lora_te_text_model_"
                name = prefix + module.replace(".", "_")
                tensors |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
                tensors[f"{name}.alpha"] = torch.tensor(alpha)
    save_file(tensors, path)
    return path


@pytest.fixture(scope="module")
def loras(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("loras")
    return {
        "diffusers": write_lora(folder, path / "a.safetensors", "diffusers", seed=1),
        "kohya": write_lora(folder, path / "b.safetensors", "kohya", seed=2),
        "unet only": write_lora(folder, path / "c.safetensors", "kohya", seed=3, submodels=("unet",)),
    }


def fuse_with_diffusers(folder: Path, loras: list[tuple[Path, float]]) -> Any:
    pipeline = load_pipeline(opened(folder))
    for path, scale in loras:
        pipeline.load_lora_weights(str(path.parent), weight_name=path.name)
        pipeline.fuse_lora(lora_scale=scale)
        pipeline.unload_lora_weights()
    return pipeline


def merge(
    submodel: str, model: Path | None, loras: list[tuple[Path, float]], out: Path, checkpoint: Any = None
) -> Mapping[str, Any]:
    out.mkdir(parents=True)
    given = tuple(LoraInput(path, scale) for path, scale in loras)
    return LoraMerge().run(PassInputs(submodel, model, checkpoint or {}, loras=given), out, LoraMergeConfig())


def digests(model: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in model.iterdir()}


def assert_close(values: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Equal within 1e-6 of each tensor's norm."""
    assert values.keys() == wanted.keys()
    for name, value in values.items():
        assert np.linalg.norm(value - wanted[name]) <= 1e-6 * np.linalg.norm(wanted[name]), name


@pytest.mark.parametrize("style", [pytest.param("diffusers", marks=pytest.mark.slow), "kohya"])
def test_equals_the_export_of_the_model_that_diffusers_fuses(
    style: str, folder: Path, base: dict[str, Path], loras: dict[str, Path], tmp_path: Path
) -> None:
    fuse_with_diffusers(folder, [(loras[style], 0.7)]).save_pretrained(tmp_path / "fused")
    exported = converted_from(tmp_path / "fused", tmp_path / "exported")
    for submodel in MERGED:
        merged = tmp_path / "merged" / submodel
        facts = merge(submodel, base[submodel], [(loras[style], 0.7)], merged)
        assert facts["touched"] > 0
        assert_close(initializers(merged), initializers(exported[submodel]))
        for name in ("model.onnx", "weights.json", "config.json"):
            assert (merged / name).read_bytes() == (exported[submodel] / name).read_bytes(), name
        inputs = dummy_inputs(submodel, config_of(merged), batch=2, height=64, width=64)
        before = session(base[submodel]).run(None, inputs)[0]
        after, wanted = session(merged).run(None, inputs)[0], session(exported[submodel]).run(None, inputs)[0]
        np.testing.assert_allclose(after, wanted, rtol=0, atol=2e-5)
        assert np.abs(after - before).max() > 1e-2


@pytest.mark.parametrize("order", [("diffusers", "kohya"), ("kohya", "diffusers")])
def test_several_loras_add_up_each_at_its_scale(
    order: tuple[str, str], folder: Path, base: dict[str, Path], loras: dict[str, Path], tmp_path: Path
) -> None:
    scales = {"diffusers": 0.8, "kohya": -0.35}
    given = [(loras[style], scales[style]) for style in order]
    pipeline = fuse_with_diffusers(folder, given)
    for submodel in MERGED:
        facts = merge(submodel, base[submodel], given, tmp_path / submodel)
        stored, names = initializers(tmp_path / submodel), read_weight_names(tmp_path / submodel)
        wanted = {key: value.numpy() for key, value in getattr(pipeline, submodel).state_dict().items()}
        assert_close(stored, {initializer: name.apply(wanted[name.key]) for initializer, name in names.items()})
        assert facts["loras"] == [facts["touched"]] * 2


def test_only_the_touched_weights_change(base: dict[str, Path], loras: dict[str, Path], tmp_path: Path) -> None:
    facts = merge("unet", base["unet"], [(loras["diffusers"], 1.0)], tmp_path / "out")
    before, after = initializers(base["unet"]), initializers(tmp_path / "out")
    changed = {name for name in before if before[name].tobytes() != after[name].tobytes()}
    wanted = {
        initializer
        for initializer, name in read_weight_names(base["unet"]).items()
        if name.key.endswith(("to_q.weight", "to_k.weight", "to_v.weight", "to_out.0.weight", "net.0.proj.weight"))
        or name.key.endswith(("net.2.weight", "proj_in.weight", "conv1.weight"))
    }
    assert changed == wanted
    assert facts["touched"] == len(wanted)
    assert facts["touched_bytes"] == sum(before[name].nbytes for name in wanted)
    sizes = [(path / "model.onnx.data").stat().st_size for path in (base["unet"], tmp_path / "out")]
    assert sizes[0] == sizes[1]


def test_scale_0_changes_no_bit(base: dict[str, Path], loras: dict[str, Path], tmp_path: Path) -> None:
    facts = merge("unet", base["unet"], [(loras["diffusers"], 0.0), (loras["kohya"], 0.0)], tmp_path / "out")
    assert digests(tmp_path / "out") == digests(base["unet"])
    assert facts["touched"] == 0
    assert facts["loras"] == [0, 0]


def test_a_submodel_that_no_lora_touches_comes_out_as_it_went_in(
    base: dict[str, Path], loras: dict[str, Path], tmp_path: Path
) -> None:
    facts = merge("text_encoder", base["text_encoder"], [(loras["unet only"], 1.0)], tmp_path / "one")
    assert digests(tmp_path / "one") == digests(base["text_encoder"])
    assert facts["touched"] == 0
    merge("text_encoder", base["text_encoder"], [], tmp_path / "none")
    assert digests(tmp_path / "none") == digests(base["text_encoder"])


def test_merging_twice_writes_the_same_bytes(base: dict[str, Path], loras: dict[str, Path], tmp_path: Path) -> None:
    for out in ("first", "second"):
        merge("unet", base["unet"], [(loras["kohya"], 0.5), (loras["diffusers"], 0.5)], tmp_path / out)
    assert digests(tmp_path / "first") == digests(tmp_path / "second")


def test_merging_onto_a_merge_adds_up(base: dict[str, Path], loras: dict[str, Path], tmp_path: Path) -> None:
    merge("unet", base["unet"], [(loras["kohya"], 0.5), (loras["diffusers"], 0.5)], tmp_path / "at once")
    merge("unet", base["unet"], [(loras["kohya"], 0.5)], tmp_path / "one")
    merge("unet", tmp_path / "one", [(loras["diffusers"], 0.5)], tmp_path / "then the other")
    assert_close(initializers(tmp_path / "then the other"), initializers(tmp_path / "at once"))


def test_a_tensor_without_a_place_is_an_error_that_names_it(
    base: dict[str, Path], loras: dict[str, Path], tmp_path: Path
) -> None:
    from safetensors.numpy import load_file, save_file

    stray = {"unet.no_such_block.to_q.lora_A.weight": np.zeros((4, 32), np.float32)}
    save_file(load_file(loras["diffusers"]) | stray, tmp_path / "stray.safetensors")
    with pytest.raises(CheckpointError, match=r"unet\.no_such_block\.to_q\.lora_A\.weight"):
        merge("unet", base["unet"], [(tmp_path / "stray.safetensors", 1.0)], tmp_path / "out")
    assert not any((tmp_path / "out").iterdir())
    # The same at scale 0: a typo does not hide behind it.
    with pytest.raises(CheckpointError, match="no_such_block"):
        merge("unet", base["unet"], [(tmp_path / "stray.safetensors", 0.0)], tmp_path / "out 0")


def test_a_file_that_is_no_lora_is_refused(base: dict[str, Path], tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"model.diffusion_model.out.weight": np.zeros((4, 4), np.float32)}, tmp_path / "other.safetensors")
    for submodel in MERGED:
        with pytest.raises(CheckpointError, match=r"model\.diffusion_model\.out\.weight"):
            merge(submodel, base[submodel], [(tmp_path / "other.safetensors", 1.0)], tmp_path / f"out {submodel}")


@pytest.mark.parametrize("submodel", ["vae_encoder", "vae_decoder", "safety_checker"])
def test_submodels_that_no_lora_changes_are_refused(submodel: str, base: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(PassError, match=f"no LoRA has a part for the {submodel}"):
        merge(submodel, base["unet"], [], tmp_path / "out")


def test_a_model_whose_weights_were_changed_in_between_is_refused(
    base: dict[str, Path], loras: dict[str, Path], tmp_path: Path
) -> None:
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    proto = convert_float_to_float16(onnx.load(str(base["unet"] / "model.onnx")), disable_shape_infer=True)
    half = tmp_path / "half"
    half.mkdir()
    onnx.save_model(proto, str(half / "model.onnx"), save_as_external_data=True, location="model.onnx.data")
    (half / "weights.json").write_bytes((base["unet"] / "weights.json").read_bytes())
    with pytest.raises(PassError, match="not as OnnxConversion wrote them"):
        merge("unet", half, [(loras["kohya"], 1.0)], tmp_path / "out")
    (half / "weights.json").unlink()
    with pytest.raises(PassError, match="has no map from weights to parameters"):
        merge("unet", half, [(loras["kohya"], 1.0)], tmp_path / "out 2")
    (half / "weights.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(PassError, match="not readable"):
        merge("unet", half, [(loras["kohya"], 1.0)], tmp_path / "out 3")


def test_a_data_file_cut_short_is_an_error(base: dict[str, Path], loras: dict[str, Path], tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    cut.mkdir()
    for path in base["unet"].iterdir():
        (cut / path.name).write_bytes(path.read_bytes())
    data = (cut / "model.onnx.data").read_bytes()
    (cut / "model.onnx.data").write_bytes(data[: len(data) // 2])
    with pytest.raises(PassError, match="shorter than the graph requires"):
        merge("unet", cut, [(loras["kohya"], 1.0)], tmp_path / "out")


def test_weights_in_the_graph_file_are_merged_too(tmp_path: Path) -> None:
    """Those of less than 1024 bytes lie there."""
    import onnx
    from onnx import helper
    from safetensors.numpy import save_file

    model = tmp_path / "model"
    model.mkdir()
    base = np.arange(12, dtype=np.float32).reshape(3, 4)
    names = {
        name: WeightName(f"{name}.to_q.weight", (4, 3), (Transform("transpose", (1, 0)),))
        for name in ("touched", "other")
    }
    graph = helper.make_graph([], "weights", [], [], [onnx.numpy_helper.from_array(base, name) for name in names])
    onnx.save_model(helper.make_model(graph), str(model / "model.onnx"))
    write_weight_names(names, model)
    up, down = np.arange(4, dtype=np.float32).reshape(4, 1), np.ones((1, 3), np.float32)
    lora = {"unet.touched.to_q.lora_A.weight": down, "unet.touched.to_q.lora_B.weight": up}
    save_file(lora, tmp_path / "lora.safetensors")
    merge("unet", model, [(tmp_path / "lora.safetensors", 2.0)], tmp_path / "out")
    stored = initializers(tmp_path / "out")
    np.testing.assert_array_equal(stored["touched"], base + 2 * (up @ down).T)
    np.testing.assert_array_equal(stored["other"], base)
    assert not (tmp_path / "out" / "model.onnx.data").exists()


def test_norms_are_those_of_the_parameter_however_it_is_stored(tmp_path: Path) -> None:
    """A DoRA's are of the rows of a weight, which stands transposed in the graph."""
    import onnx
    from onnx import helper
    from safetensors.numpy import save_file

    model = tmp_path / "model"
    model.mkdir()
    base = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    steps = (Transform("transpose", (1, 0)), Transform("reshape", (1, 3, 4)))
    name = WeightName("touched.to_q.weight", (4, 3), steps)
    np.testing.assert_array_equal(name.undo(name.apply(base.T)), base.T)
    graph = helper.make_graph([], "weights", [], [], [onnx.numpy_helper.from_array(base[None], "touched")])
    onnx.save_model(helper.make_model(graph), str(model / "model.onnx"))
    write_weight_names({"touched": name}, model)
    norms = np.arange(1, 5, dtype=np.float32)[:, None]
    lora = {"lora_down.weight": np.ones((1, 3)), "lora_up.weight": np.ones((4, 1)), "dora_scale": norms}
    tensors = {f"lora_unet_touched_to_q.{role}": each.astype(np.float32) for role, each in lora.items()}
    save_file(tensors, tmp_path / "lora.safetensors")
    merge("unet", model, [(tmp_path / "lora.safetensors", 1.0)], tmp_path / "out")
    (stored,) = initializers(tmp_path / "out")["touched"]
    np.testing.assert_allclose(np.linalg.norm(stored, axis=0), norms[:, 0], rtol=1e-6)
    np.testing.assert_allclose(stored, (base + 1) * norms[:, 0] / np.linalg.norm(base + 1, axis=0), rtol=1e-6)


def test_memory_is_bounded_by_the_largest_weight_and_not_by_the_model(tmp_path: Path) -> None:
    """128 MiB of weights, of which a LoRA touches a quarter, in less than 16 MiB: four times one weight."""
    import onnx
    from onnx import TensorProto, helper
    from safetensors.numpy import save_file

    count, side = 32, 1024
    model = tmp_path / "model"
    model.mkdir()
    graph = helper.make_graph([], "weights", [], [])
    names, lora = {}, {}
    with (model / "model.onnx.data").open("wb") as data:
        for index in range(count):
            key = f"layers.{index}.to_q.weight"
            tensor = TensorProto(name=key, data_type=TensorProto.FLOAT, dims=[side, side])
            tensor.data_location = TensorProto.EXTERNAL
            for entry, value in (("location", "model.onnx.data"), ("offset", data.tell()), ("length", side * side * 4)):
                tensor.external_data.add(key=entry, value=str(value))
            graph.initializer.append(tensor)
            data.write(np.full((side, side), index, np.float32).tobytes())
            names[key] = WeightName(key, (side, side))
            if index % 4 == 0:
                lora[f"unet.layers.{index}.to_q.lora_A.weight"] = np.ones((1, side), np.float32)
                lora[f"unet.layers.{index}.to_q.lora_B.weight"] = np.ones((side, 1), np.float32)
    onnx.save_model(helper.make_model(graph), str(model / "model.onnx"))
    write_weight_names(names, model)
    save_file(lora, tmp_path / "lora.safetensors")
    merge("unet", model, [], tmp_path / "warm")  # imports
    tracemalloc.start()
    try:
        merge("unet", model, [(tmp_path / "lora.safetensors", 0.5)], tmp_path / "out")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * side * side * 4 < count * side * side * 4 / 2  # the exact product holds float64 parts
    merged = np.fromfile(tmp_path / "out" / "model.onnx.data", np.float32).reshape(count, -1)
    for index, values in enumerate(merged):
        assert (values == index + (0.5 if index % 4 == 0 else 0)).all()
