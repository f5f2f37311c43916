"""A LoRA in all three models of Stable Diffusion XL, from the workflow and by `bake`; others are refused at planning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import yaml
from safetensors.torch import save_file
from small_lora import write_lora
from small_workflows import Bench

from sdflow.config import load_workflow
from sdflow.errors import CheckpointError
from sdflow.models.ldm_names import ldm_unet_names
from sdflow.passes import registry
from sdflow.run.bake import bake
from sdflow.run.options import RunOptions
from sdflow.run.run import run_workflow
from sdflow.sources import PlainDigests, load_pipeline, open_checkpoint

pytestmark = pytest.mark.usefixtures("forked_workers")

XL = "synthetic:sdxl-tiny"
PREFIXES = {"unet": "lora_unet_", "text_encoder": "lora_te1_", "text_encoder_2": "lora_te2_"}
LAYERS = ("to_q", "to_k", "to_v", "to_out.0", "conv1", "q_proj", "k_proj", "v_proj", "out_proj", "fc1")


def pipeline_of() -> Any:
    return load_pipeline(open_checkpoint(XL, digests=PlainDigests(), download=False))


def xl_lora(path: Path) -> Path:
    """As kohya's sd-scripts write it: over the original names of the UNet."""
    pipeline, random, tensors = pipeline_of(), torch.Generator().manual_seed(5), {}
    for submodel, prefix in PREFIXES.items():
        state = getattr(pipeline, submodel).state_dict()
        names = ldm_unet_names(key.removesuffix(".weight") for key in state) if submodel == "unet" else {}
        for key, weight in state.items():
            module = key.removesuffix(".weight")
            if module == key or not module.endswith(LAYERS):
                continue
            full = names.get(module) or f"text_model.{module.removeprefix('text_model.')}"
            stem = prefix + full.replace(".", "_")
            up = (weight.shape[0], 4, *(1 for _ in weight.shape[2:]))
            tensors[f"{stem}.lora_down.weight"] = torch.randn(4, *weight.shape[1:], generator=random) * 0.1
            tensors[f"{stem}.lora_up.weight"] = torch.randn(up, generator=random) * 0.1
            tensors[f"{stem}.alpha"] = torch.tensor(2.0)
    save_file(tensors, path)
    return path


def fused_by_diffusers(lora: Path, folder: Path) -> Path:
    pipeline = pipeline_of()
    pipeline.load_lora_weights(str(lora.parent), weight_name=lora.name)
    pipeline.fuse_lora(components=list(PREFIXES), lora_scale=0.7)
    pipeline.unload_lora_weights()
    pipeline.save_pretrained(folder)
    return folder


def written(bench: Bench, name: str, **fields: Any) -> Path:
    """A workflow of the three models, without fusions: their initializers are the checkpoint's own weights."""
    chain = [{"pass": "OnnxConversion"}, {"pass": "LoraMerge"}]
    content = {
        "target": "cpu",
        "submodels": {submodel: {"passes": chain} for submodel in PREFIXES},
        "evaluate": None,
        "verify": False,
        **fields,
    }
    path = bench.folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def built(bench: Bench, name: str, **fields: Any) -> Any:
    workflow = load_workflow(written(bench, name, **fields), catalog=registry.catalog())
    options = RunOptions(out=bench.folder / "out", results=bench.folder / "results", evaluate=False)
    (result,) = run_workflow(workflow, bench.cache, options, bench.events).pipelines
    return result


def initializers(folder: Path) -> dict[str, np.ndarray]:
    proto = onnx.load(str(folder / "model.onnx"))
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}


@pytest.mark.slow
def test_run_and_bake_give_the_models_that_diffusers_fuses(bench: Bench) -> None:
    lora = xl_lora(bench.folder / "xl.safetensors")
    base = built(bench, "base", model=XL)
    ours = built(bench, "ours", model=XL, loras=[{"file": str(lora), "scale": 0.7}])
    wanted = built(bench, "wanted", model=str(fused_by_diffusers(lora, bench.folder / "fused")))
    for submodel in PREFIXES:
        before, found, expected = (initializers(each.folder / submodel) for each in (base, ours, wanted))
        assert found.keys() == expected.keys()
        changed = 0
        for name, values in expected.items():
            assert np.linalg.norm(found[name] - values) <= 1e-6 * np.linalg.norm(values), name
            changed += not np.array_equal(before[name], found[name])
        assert changed == sum(name.count("lora_down") for name in touched(lora, submodel))
    baked = bake(base.folder, [f"{lora}:0.7"], bench.folder / "baked", bench.cache, bench.events)
    for submodel in PREFIXES:
        data = [(folder / submodel / "model.onnx.data").read_bytes() for folder in (baked.folder, ours.folder)]
        assert data[0] == data[1]
    assert baked.ran == 0, "the workflow had built the same"


def touched(lora: Path, submodel: str) -> list[str]:
    from safetensors.torch import load_file

    return [name for name in load_file(lora) if name.startswith(PREFIXES[submodel])]


@pytest.mark.parametrize(("model", "other"), [(XL, "1.x"), ("synthetic:sd15-tiny", "XL")])
def test_a_lora_of_another_family_is_refused_at_planning(model: str, other: str, bench: Bench) -> None:
    """The LoRA for Stable Diffusion XL fits 1.x in all but the text encoder that it does not have."""
    path = bench.folder / "other.safetensors"
    if other == "XL":
        down = {"lora_te2_text_model_encoder_layers_0_mlp_fc1.lora_down.weight": torch.zeros(4, 40)}
        save_file(down | {"lora_te2_text_model_encoder_layers_0_mlp_fc1.lora_up.weight": torch.zeros(8, 4)}, path)
    else:
        write_lora(path)
    workflow = written(bench, "refused", model=model, loras=[{"file": str(path)}])
    with pytest.raises(CheckpointError, match=rf"is a LoRA for .*Stable Diffusion {other}.*, but {model} is"):
        bench.plan(workflow)
