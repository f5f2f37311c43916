"""Cache keys do not change by moving code: what everybody has built stays in use."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import pytest

from sdflow.families import ARCHITECTURES, part_of
from sdflow.sources.checkpoint import config_digest
from sdflow.sources.synthetic import open_synthetic
from sdflow.targets import TARGETS
from tests.support.pinned_keys import contents_now, differences, digests, pinned_contents


@pytest.fixture(scope="module")
def now(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return contents_now(tmp_path_factory.mktemp("keys"))


def test_no_key_has_changed(now: dict[str, dict[str, Any]]) -> None:
    pinned = pinned_contents()
    changed = list(differences(pinned, now))
    assert not changed, (
        "keys have changed, and everybody's artifacts of these steps would be built again. If that is meant, raise the "
        "version of what gives other bytes, and run `python -m tests.support.pinned_keys`:\n" + "\n".join(changed)
    )
    assert digests(now) == digests(pinned), "equal values, another JSON"


def test_every_target_and_kind_of_step_is_pinned(now: dict[str, dict[str, Any]]) -> None:
    for target in TARGETS:
        plain, merged = now[f"tiny, {target}"], now[f"tiny, {target} with LoRAs"]
        assert plain["unet/0"] == merged["unet/0"], "the structure knows of no LoRA"
        last = max(name for name in plain if name.startswith("unet/"))
        assert (plain[last]["inputs"]["loras"], len(merged[last]["inputs"]["loras"])) == ([], 2)
        assert plain["Verify, full"] != plain["Verify, quick"]
    passes = {content["pass"]["name"] for found in now.values() for content in found.values()}
    assert {"OnnxConversion", "LoraMerge", "OrtTransformersOptimization", "ConvBiasFusion", "SeparateQkv"} | {
        "ActivationScaling", "SubpixelConv", "OnnxFloatToFloat16", "BindWeights", "Mine", "OnnxPeepholeOptimizer",
        "VerifyReference", "Verify",
    } == passes  # fmt: skip


def test_what_changed_is_told_by_its_place(now: dict[str, dict[str, Any]]) -> None:
    other = copy.deepcopy(now)
    other["tiny, cpu"]["unet/0"]["config"]["target_opset"] = 16
    del other["shapes"]["unet/0"]["salt"]
    assert list(differences(now, other)) == [
        "/shapes/unet/0/salt: a salt -> nothing",
        "/tiny, cpu/unet/0/config/target_opset: 17 -> 16",
    ]


def test_models_that_share_a_key_are_traced_alike() -> None:
    """FLUX.1's CLIP has the class and the config of Stable Diffusion 1.5's, and other operators for its pooled embedding."""
    found = defaultdict(set)
    for architecture in ARCHITECTURES:
        for name, submodel in open_synthetic(f"synthetic:{architecture}", architecture, 0).submodels.items():
            part = part_of(submodel.load, name)
            key = part.kind, config_digest(submodel.load["config"]), part.model.traced_as
            found[key].add(type(part.model))
    assert {model.__name__ for models in found.values() for model in models} >= {"ClipText", "PooledClipText"}
    assert [models for models in found.values() if len(models) > 1] == []
