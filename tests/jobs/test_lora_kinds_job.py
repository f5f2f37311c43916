"""LoHa, LoKr, DoRA, and a full difference of a bias in one pipeline, baked from the shell, verified, and drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from drawing_jobs import SMALL
from safetensors.numpy import save_file
from shell import ROOT, Shell

from sdflow.sources.architectures import architecture_config
from sdflow.sources.load import parameter_shapes

pytestmark = pytest.mark.slow


def written(path: Path) -> Path:
    """For attention a LoHa and the DoRA of a LoRA, for a convolution the DoRA of a LoKr, and for its bias a difference."""
    random, tensors = np.random.default_rng(0), dict[str, np.ndarray]()
    shapes = parameter_shapes("unet", {"config": architecture_config("sd15-tiny", "unet")})

    def values(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape) * 0.1).astype(np.float32)

    for key, shape in shapes.items():
        stem = f"lora_unet_{key.removesuffix('.weight').replace('.', '_')}"
        found: dict[str, np.ndarray] = {}
        if key.endswith("attn1.to_q.weight"):
            found = {f"hada_w{each}_a": values(shape[0], 2) for each in "12"}
            found |= {f"hada_w{each}_b": values(2, shape[1]) for each in "12"} | {"alpha": np.array(1, np.float32)}
        elif key.endswith("attn2.to_v.weight"):
            norms = np.ones((shape[0], 1), np.float32)
            found = {
                "lora_up.weight": values(shape[0], 2),
                "lora_down.weight": values(2, shape[1]),
                "dora_scale": norms,
            }
        elif key.endswith("conv1.weight"):
            found = {"lokr_w1": values(4, 4), "lokr_w2_a": values(shape[0] // 4, 2)}
            found |= {"lokr_w2_b": values(2, shape[1] // 4 * 9), "diff_b": values(shape[0])}
            found["dora_scale"] = 2 * np.ones((1, shape[1], 1, 1), np.float32)
        tensors |= {f"{stem}.{role}": each for role, each in found.items()}
    save_file(tensors, path)
    return path


def test_they_are_baked_verified_and_drawn(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    shell.json("run", str(ROOT / "workflows/tiny_cpu.yaml"), "--no-evaluate", "--no-verify")
    lora = written(tmp_path / "kinds.safetensors")
    inspected = shell.run("inspect", str(lora))
    assert all(kind in inspected.stdout for kind in ("DoRA", "LoKr", "LoHa", "full difference")), inspected.stdout
    done = shell.run(
        "bake", "--base", "pipelines/tiny_cpu", "--lora", f"{lora}:0.7", "--out", "pipelines/kinds", "--verify"
    )
    assert done.returncode == 0, done.stderr
    for name in ("tiny_cpu", "kinds"):
        images = shell.run(
            "generate", f"pipelines/{name}", "--prompt", "an otter", "--seed", "1", *SMALL, "--out", name
        )
        assert images.returncode == 0, images.stderr
    plain, changed = ((tmp_path / name / "001-1.png").read_bytes() for name in ("tiny_cpu", "kinds"))
    assert plain != changed
    long = shell.run(
        *("generate", "pipelines/kinds", "--prompt", " ".join(["otter"] * 200), "--seed", "1", *SMALL, "--out", "long")
    )
    assert "reads 77: the rest is ignored" in long.stdout
