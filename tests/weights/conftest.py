"""Small models of every submodel, and the two ways to build them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from submodels import FAMILY

from sdflow.passes.base import PassInputs
from sdflow.passes.chain import ChainStep
from sdflow.passes.float16 import OnnxFloatToFloat16
from sdflow.passes.lora_merge import LoraMerge
from sdflow.passes.olive import SILENCE
from sdflow.passes.onnx_conversion import OnnxConversion
from sdflow.passes.ort_transformers_optimization import OrtTransformersOptimization
from sdflow.passes.worker import run_pass
from sdflow.sources.architectures import architecture_config
from sdflow.weights.faster_fusion import faster_fusion
from sdflow.weights.lora import LoraInput
from sdflow.weights.structure import hollow

os.environ.update(SILENCE)  # before anything imports olive

SMALL_UNET = {
    "_class_name": "UNet2DConditionModel",
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "block_out_channels": [32, 64],
    "layers_per_block": 1,
    "cross_attention_dim": 32,
    "attention_head_dim": 2,
    "norm_num_groups": 8,
}
OFF = {
    "cuda": (),
    "rocm": ("enable_skip_group_norm", "enable_bias_splitgelu", "enable_bias_add"),
    "directml": (
        "enable_skip_layer_norm", "enable_bias_skip_layer_norm", "enable_qordered_matmul", "enable_nhwc_conv",
        "enable_bias_splitgelu", "enable_bias_add", "group_norm_channels_last",
    ),
    "cpu": (
        "enable_packed_qkv", "enable_packed_kv", "enable_nhwc_conv", "enable_group_norm", "enable_skip_group_norm",
        "enable_bias_splitgelu", "enable_bias_add",
    ),
}  # fmt: skip
MODEL_TYPE = {"vae": "vae", "unet": "unet", "text_encoder": "clip", "safety_checker": "clip"}


def chain(submodel: str, target: str) -> list[ChainStep]:
    """The passes of a submodel for a target, as the workflows have them."""
    options = {
        "model_type": MODEL_TYPE[FAMILY.part(submodel).component],
        "optimization_options": dict.fromkeys(OFF[target], False),
    }
    steps = [ChainStep(OnnxConversion, {}), ChainStep(LoraMerge, {}), ChainStep(OrtTransformersOptimization, options)]
    if submodel not in ("unet", "text_encoder"):
        del steps[1]
    if target == "directml":
        steps.append(ChainStep(OnnxFloatToFloat16, {"force_fp16_inputs": {"GroupNorm": [0, 1, 2]}}))
    elif target != "cpu":
        steps.append(ChainStep(OnnxFloatToFloat16, {}))
    return steps


def config_of(submodel: str, unet: dict[str, Any] = SMALL_UNET) -> dict[str, Any]:
    """config.json of the small model."""
    return unet if submodel == "unet" else architecture_config("sd15-tiny", FAMILY.part(submodel).component)


def synthetic(submodel: str, seed: int = 0, unet: dict[str, Any] = SMALL_UNET) -> dict[str, Any]:
    """The small model with random weights, as `open_checkpoint` would give it."""
    return {"kind": "synthetic", "config": config_of(submodel, unet), "seed": seed}


def structure_request(
    submodel: str, step: ChainStep, model: Path | None, out: Path, unet: dict[str, Any] = SMALL_UNET
) -> dict[str, Any]:
    """The worker's request to run a pass without weights."""
    return {
        "pass": step.implementation.name,
        "folder": ".",
        "submodel": submodel,
        "model": str(model) if model else None,
        "symbolic": True,
        "family": FAMILY.name,
        "checkpoint": {} if model else hollow({"config": config_of(submodel, unet)}),
        "loras": [],
        "config": step.implementation.Config(**step.config).model_dump(mode="json"),
        "out": str(out),
    }


@dataclass(frozen=True)
class Builder:
    """Builds small models, each distinct one once, also where several processes use the folder. unet: config.json of the UNet.
    kept: expressions of shapes are kept while it fuses with weights, as they are without; that both give the same is seen where
    they are not (`test_equality.py`)."""

    root: Path
    unet: dict[str, Any] = field(default_factory=lambda: SMALL_UNET)
    kept: bool = False

    def structure(self, submodel: str, target: str) -> Path:
        """What the passes give, one after the other, when they run without weights."""
        model: Path | None = None
        names = []
        for step in chain(submodel, target):
            if step.implementation.takes_loras:
                continue
            names.append(step.implementation.name)
            out = self.root / "structure" / submodel / (target if model else "converted") / "-".join(names)
            with _to_be_made(out) as building:
                if building is not None:
                    run_pass(structure_request(submodel, step, model, building, self.unet), lambda phrase: None)
            model = out
        assert model is not None
        return model

    @property
    def _made(self) -> Path:
        return self.root / ("kept" if self.kept else "anew")

    def converted(self, submodel: str, seed: int = 0) -> Path:
        """Where `carried` converts the model to ONNX, with its weights."""
        return self._made / "converted" / submodel / str(seed)

    def carried(self, submodel: str, target: str, loras: Sequence[LoraInput] = (), seed: int = 0) -> Path:
        """What the chain's passes give when they carry the weights."""
        conversion, *rest = chain(submodel, target)
        made = self._made
        model = self.converted(submodel, seed)
        self._run(conversion, PassInputs(submodel, None, synthetic(submodel, seed, self.unet)), model)
        names = "-".join(f"{lora.path.stem}-{lora.scale}" for lora in loras) or "none"
        for index, step in enumerate(rest):
            if step.implementation is LoraMerge and not loras:
                continue
            out = made / "carried" / submodel / target / str(seed) / names / str(index)
            taken = tuple(loras) if step.implementation.takes_loras else ()
            self._run(step, PassInputs(submodel, model, {}, loras=taken), out)
            model = out
        return model

    def _run(self, step: ChainStep, inputs: PassInputs, out: Path) -> None:
        with _to_be_made(out) as building, faster_fusion() if self.kept else nullcontext():
            if building is not None:
                step.implementation().run(inputs, building, step.implementation.Config(**step.config))


@contextmanager
def _to_be_made(out: Path) -> Iterator[Path | None]:
    """A folder for what is to lie in `out`, and then does; None where it lies there already. Other processes wait."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(out.with_name(f"{out.name}.lock")):
        if out.exists():
            yield None
            return
        building = Path(tempfile.mkdtemp(prefix=f"{out.name}.", dir=out.parent))
        yield building
        building.rename(out)


def shared_builder(tmp_path_factory: pytest.TempPathFactory, *, kept: bool = False) -> Builder:
    """Of all workers of a test run."""
    root = tmp_path_factory.getbasetemp()
    return Builder((root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "small_models", kept=kept)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    return shared_builder(tmp_path_factory)


@pytest.fixture
def content() -> Callable[[Path], dict[str, bytes]]:
    """The content of a directory's files, by name."""
    return lambda path: {file.name: file.read_bytes() for file in sorted(path.iterdir())}
