"""The proof: structure and bind give, byte for byte, what the chain's passes give when they carry the weights.

Every submodel and every target, without LoRAs, with one and with several. At full size:
`python benchmarks/build/structure_and_weights.py --carried`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, load
from safetensors.numpy import save_file
from sampled import sampled

from sdflow.sources.architectures import architecture_config
from sdflow.weights.bind import BindRequest, bind
from sdflow.weights.lora import LoraInput
from tests.weights.conftest import OFF, Builder, config_of, synthetic

Content = Callable[[Path], dict[str, bytes]]

SLOW = pytest.mark.slow
IN = {"cuda": "unet", "directml": "vae_decoder", "rocm": "text_encoder", "cpu": "unet"}
"""The submodel that a target is seen with by default; of `cuda`, all are."""
CASES = [
    pytest.param(submodel, target, marks=() if target == "cuda" or submodel == IN[target] else SLOW)
    for submodel in ("unet", "text_encoder", "vae_encoder", "vae_decoder", "safety_checker")
    for target in OFF
]


@pytest.mark.parametrize(("submodel", "target"), CASES)
def test_bind_gives_the_bytes_of_the_passes_that_carry_weights(
    submodel: str, target: str, built: Builder, tmp_path: Path, content: Content
) -> None:
    facts = bind(BindRequest(submodel, built.structure(submodel, target), synthetic(submodel)), tmp_path)
    assert content(tmp_path) == content(built.carried(submodel, target))
    assert facts["bytes"] == sum(len(file) for name, file in content(tmp_path).items() if name.startswith("model.onnx"))


def test_one_structure_serves_another_checkpoint(built: Builder, tmp_path: Path, content: Content) -> None:
    structure = built.structure("text_encoder", "cuda")
    before = content(structure)
    bind(BindRequest("text_encoder", structure, synthetic("text_encoder", seed=1)), tmp_path)
    assert content(tmp_path) == content(built.carried("text_encoder", "cuda", seed=1))
    assert content(structure) == before


@pytest.mark.parametrize("target", ["cuda", pytest.param("directml", marks=SLOW)])
def test_the_unet_of_stable_diffusion_xl_too(target: str, tmp_path: Path, content: Content) -> None:
    unet = architecture_config("sdxl-tiny", "unet")
    small = Builder(tmp_path / "built", unet, kept=True)
    structure, out = small.structure("unet", target), tmp_path / "out"
    out.mkdir()
    bind(BindRequest("unet", structure, synthetic("unet", unet=unet)), out)
    assert content(out) == content(small.carried("unet", target))
    inputs = {item.name: item.type.tensor_type.elem_type for item in load(out / "model.onnx").graph.input}
    float16, float32 = TensorProto.FLOAT16, TensorProto.FLOAT
    assert inputs == {
        "sample": float16, "timestep": float32, "encoder_hidden_states": float16, "text_embeds": float16,
        "time_ids": float32,
    }  # fmt: skip


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory) -> list[LoraInput]:
    """Two LoRAs for UNet and text encoder, in kohya's key style, that touch some of the same weights."""
    from sdflow.sources.load import parameter_shapes

    folder = tmp_path_factory.mktemp("loras")
    found = []
    for index, scale in ((0, 0.8), (1, -0.5)):
        random = np.random.default_rng(index)
        tensors = {}
        for submodel, prefix in (("unet", "lora_unet"), ("text_encoder", "lora_te")):
            for key, shape in parameter_shapes(submodel, {"config": config_of(submodel)}).items():
                wanted = ("to_q", "to_v", "ff.net.2", "self_attn.q_proj", "mlp.fc1")[index:]
                if not key.endswith(".weight") or not any(part in key for part in wanted):
                    continue
                key = key if submodel == "unet" or key.startswith("text_model.") else f"text_model.{key}"
                name = f"{prefix}_{key.removesuffix('.weight').replace('.', '_')}"
                tensors[f"{name}.lora_up.weight"] = random.standard_normal((shape[0], 2)).astype(np.float32)
                tensors[f"{name}.lora_down.weight"] = random.standard_normal((2, shape[1])).astype(np.float32)
                tensors[f"{name}.alpha"] = np.array(2.0, np.float32)
        save_file(tensors, folder / f"{index}.safetensors")
        found.append(LoraInput(folder / f"{index}.safetensors", scale))
    return found


@pytest.mark.parametrize(
    ("submodel", "count"), sampled([("unet", 2), ("text_encoder", 1), ("unet", 1), ("text_encoder", 2)])
)
def test_loras_are_merged_as_loramerge_merges_them(
    submodel: str, count: int, loras: list[LoraInput], built: Builder, tmp_path: Path, content: Content
) -> None:
    structure, load, taken = built.structure(submodel, "cuda"), synthetic(submodel), loras[:count]
    expected = content(built.carried(submodel, "cuda", taken))
    assert expected != content(built.carried(submodel, "cuda"))
    for name in ("plain", "anew", "from base"):
        (tmp_path / name).mkdir()
    bind(BindRequest(submodel, structure, load), tmp_path / "plain")
    facts = bind(BindRequest(submodel, structure, load, taken), tmp_path / "anew")
    assert content(tmp_path / "anew") == expected
    assert len(facts["loras"]) == count
    assert 0 < facts["touched"] <= sum(facts["loras"])
    base = tmp_path / "plain"
    bind(BindRequest(submodel, structure, load, taken, base=base), tmp_path / "from base")
    assert content(tmp_path / "from base") == expected


def test_a_base_with_other_loras_serves_too(
    loras: list[LoraInput], built: Builder, tmp_path: Path, content: Content
) -> None:
    structure, load = built.structure("text_encoder", "cuda"), synthetic("text_encoder")
    base, out = tmp_path / "base", tmp_path / "out"
    base.mkdir()
    out.mkdir()
    bind(BindRequest("text_encoder", structure, load, loras[:1]), base)
    bind(BindRequest("text_encoder", structure, load, loras[1:], base=base, base_loras=loras[:1]), out)
    assert content(out) == content(built.carried("text_encoder", "cuda", loras[1:]))
