"""The reference is what diffusers computes, and its fp16 is that of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdflow.distance import relative_l2
from sdflow.models.base import Model
from sdflow.models.ports import Port, Ports
from sdflow.sources import Checkpoint
from sdflow.verify.reference.cases import Case, Cases
from sdflow.verify.reference.forwards import Network, run_cases
from sdflow.verify.reference.half import quick_halves
from sdflow.verify.reference.torch_module import LoraMerge, TorchModule
from tests.verify.sample_artifacts import ROOT

LORAS = ROOT / "samples/loras"


def _layers() -> dict[str, tuple[Any, tuple[int, ...]]]:
    import torch

    torch.manual_seed(0)
    return {
        "linear": (torch.nn.Linear(64, 48), (3, 5, 64)),
        "group norm": (torch.nn.GroupNorm(8, 32), (2, 32, 6, 6)),
        "layer norm": (torch.nn.LayerNorm(64), (3, 5, 64)),
        "convolution without bias": (torch.nn.Conv2d(8, 16, 3, bias=False), (2, 8, 9, 9)),
        "silu": (torch.nn.SiLU(), (4, 64)),
        "gelu": (torch.nn.GELU(), (4, 64)),
        "softmax": (torch.nn.Softmax(-1), (4, 64)),
    }


@pytest.mark.parametrize("name", list(_layers()))
def test_quick_halves_round_as_torchs_own_half_kernels_do(name: str) -> None:
    import torch

    layer, shape = _layers()[name]
    layer = layer.half()
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).half()
    with torch.no_grad():
        slow = layer(values)
    with quick_halves():
        quick = layer(values)
    assert quick.dtype == torch.float16
    # The order of a float32 sum may move a value over a rounding boundary: one unit in the last place, rarely.
    assert relative_l2(quick.numpy(), slow.numpy()) < 5e-5


def test_attention_in_quick_halves_is_rounded_once() -> None:
    import torch

    q, k, v = torch.randn(3, 2, 4, 16, 8, generator=torch.Generator().manual_seed(1)).half()
    exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    with quick_halves():
        half = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert half.dtype == torch.float16
    assert relative_l2(half.numpy(), exact.numpy()) == pytest.approx(
        relative_l2(exact.half().numpy(), exact.numpy()), rel=0.02
    )


def test_attention_in_quick_halves_is_what_it_is_whichever_kernel_torch_chooses() -> None:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = torch.randn(3, 2, 4, 16, 8, generator=torch.Generator().manual_seed(1)).half()
    found = []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(backend), quick_halves():
            found.append(torch.nn.functional.scaled_dot_product_attention(q, k, v).numpy())
        with sdpa_kernel(backend), torch.no_grad():
            found.append(torch.nn.functional.scaled_dot_product_attention(q, k, v).numpy())
    quick, _, other, _ = found
    assert relative_l2(quick, other) < 5e-5
    assert relative_l2(found[1], found[3]) > 1e-4, "torch's own two differ by roundings"


def test_a_linear_layer_in_quick_halves_rounds_once_however_its_input_lies() -> None:
    import torch

    layer = torch.nn.Linear(64, 48).half()
    values = torch.randn(3, 64, 5, generator=torch.Generator().manual_seed(1)).half().transpose(1, 2)
    with quick_halves():
        found = layer(values)
    wide = torch.nn.functional.linear(values.float(), layer.weight.float(), layer.bias.float())
    assert torch.equal(found, wide.half())


def test_an_operator_that_writes_into_its_operand_is_rounded_too() -> None:
    import torch

    values = torch.randn(64, generator=torch.Generator().manual_seed(1)).half()
    expected = torch.nn.functional.silu(values.float()).half()
    with quick_halves():
        assert torch.equal(torch.nn.functional.silu(values, inplace=True), expected)
    assert torch.equal(values, expected)


def test_attention_and_linear_layers_take_their_operands_by_name() -> None:
    import torch
    from torch.nn import functional

    q, k, v = torch.randn(3, 2, 4, 16, 8, generator=torch.Generator().manual_seed(1)).half()
    with quick_halves():
        assert torch.equal(
            functional.scaled_dot_product_attention(query=q, key=k, value=v),
            functional.scaled_dot_product_attention(q, k, v),
        )
        assert torch.equal(functional.linear(input=q, weight=k[0, 0]), functional.linear(q, k[0, 0]))


@pytest.mark.parametrize("name", ["sum", "mean", "cumsum", "prod"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_a_type_that_is_asked_for_is_the_results(name: str, dtype: str) -> None:
    import torch

    values = torch.rand(3, 40, generator=torch.Generator().manual_seed(1)).half() + 0.5
    dim, asked = (1,), getattr(torch, dtype)
    with quick_halves():
        found = getattr(torch, name)(values, *dim, dtype=asked)
    exact = getattr(torch, name)(values.float(), *dim, dtype=torch.float32 if asked is torch.float16 else asked)
    assert found.dtype == asked
    assert torch.equal(found, exact.to(asked))


def test_an_operand_of_a_wider_type_gives_a_wider_result() -> None:
    import torch

    values = torch.rand(8, generator=torch.Generator().manual_seed(1)).half()
    wide = torch.rand(8, generator=torch.Generator().manual_seed(2))
    with quick_halves():
        assert torch.equal(torch.pow(values, wide), torch.pow(values.float(), wide))
        assert torch.pow(values, wide[0]).dtype == torch.float16  # a number alone widens nothing


@pytest.mark.parametrize("shape", [(3, 4), (0,)])
def test_what_is_to_take_the_result_takes_it_rounded(shape: tuple[int, ...]) -> None:
    import torch

    left, right = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1)).half()
    out = torch.full(shape, 7.0, dtype=torch.float16)
    with quick_halves():
        returned = torch.mm(left[:3], right, out=out)
    assert returned is out
    assert torch.equal(out, (left[:3].float() @ right.float()).half())


def test_a_convolutions_bias_is_added_to_the_rounded_result() -> None:
    import torch

    layer = torch.nn.Conv2d(8, 16, 3).half()
    values = torch.randn(1, 8, 9, 9, generator=torch.Generator().manual_seed(1)).half()
    with quick_halves():
        found = layer(values)
    wide = torch.nn.functional.conv2d(values.float(), layer.weight.float())
    expected = wide.half() + layer.bias.reshape(1, -1, 1, 1)
    assert torch.equal(found, expected)


def test_overflow_stays_overflow() -> None:
    import torch

    layer = torch.nn.Linear(4, 1, bias=False).half()
    torch.nn.init.constant_(layer.weight, 200.0)
    with quick_halves():
        assert torch.isinf(layer(torch.full((1, 4), 200.0).half())).all()


def test_modules_that_are_given_compute_what_modules_in_half_precision_do() -> None:
    """Their weights are widened once; what comes out must be the same to the last bit."""
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(8, 16, 3), torch.nn.GroupNorm(4, 16), torch.nn.Flatten(), torch.nn.Linear(16 * 49, 32)]
    module = torch.nn.Sequential(*layers, torch.nn.LayerNorm(32)).half()
    values = torch.randn(2, 8, 9, 9, generator=torch.Generator().manual_seed(1)).half()
    with quick_halves():
        expected = module(values)
    with quick_halves(module):
        found = [module(values) for _ in range(2)]
    assert all(torch.equal(each, expected) for each in found)


def test_cases_of_one_shape_run_together_and_give_what_each_gives_alone(sample_checkpoint: Checkpoint) -> None:
    load = sample_checkpoint.submodels["unet"].load
    module = TorchModule("unet", load).network().module
    unet = Network.of(sample_checkpoint.family.part("unet"), load["config"], module)
    random = np.random.default_rng(0)
    width = module.config["cross_attention_dim"]

    def inputs(batch: int, columns: int, timestep: float) -> dict[str, np.ndarray]:
        return {
            "sample": random.standard_normal((batch, 4, 8, columns), dtype=np.float32),
            "timestep": np.array([timestep], np.float32),
            "encoder_hidden_states": random.standard_normal((batch, 77, width), dtype=np.float32),
        }

    feeds = [inputs(2, 8, 901), inputs(1, 16, 501), inputs(1, 8, 0.5), inputs(2, 8, 1)]
    cases = Cases()
    for feed in feeds:
        cases.add(Case("a case", "trajectory"), feed)
    batches: list[int] = []
    hook = module.register_forward_pre_hook(lambda _, arguments: batches.append(len(arguments[0])))
    run_cases(cases, "float32", unet)
    hook.remove()
    assert sorted(batches) == [1, 5]
    for index, feed in enumerate(feeds):
        alone = Cases()
        alone.add(Case("alone", "trajectory"), feed)
        run_cases(alone, "float32", unet)
        found, expected = (each.get(i, "float32")["out_sample"] for each, i in ((cases, index), (alone, 0)))
        assert relative_l2(found, expected) < 1e-5


def test_what_is_large_runs_in_several_batches() -> None:
    cases = Cases()
    for _ in range(5):
        cases.add(Case("large", "shape"), {"latent_sample": np.zeros((1, 4, 64, 64), np.float32)})
    batches: list[int] = []

    class PlusOne(Model):
        def reference(self, module: Any, inputs: Any) -> dict[str, Any]:
            batches.append(len(inputs["latent_sample"]))
            return {"sample": module(inputs["latent_sample"])}

    port = Port("latent_sample", "float32", ("batch", 4, "latent_height", "latent_width"))
    plus_one: Any = lambda latents: latents + 1  # noqa: E731
    run_cases(cases, "float32", Network(plus_one, PlusOne(), Ports((port,), ())))
    assert batches == [2, 2, 1]
    assert all((cases.get(index, "float32")["sample"] == 1).all() for index, _ in cases)


@pytest.mark.parametrize("name", ["stripes", "outline"])
def test_the_lora_merged_is_the_one_that_diffusers_merges(name: str, sample_checkpoint: Checkpoint) -> None:
    from sdflow.sources import load_pipeline

    path = LORAS / f"{name}.safetensors"
    pipeline = load_pipeline(sample_checkpoint)
    pipeline.load_lora_weights(str(LORAS), weight_name=path.name)
    pipeline.fuse_lora(lora_scale=0.7)
    pipeline.unload_lora_weights()
    touched = 0
    for submodel in ("text_encoder", "unet"):
        load = sample_checkpoint.submodels[submodel].load
        denoiser = sample_checkpoint.submodels["unet"].load["config"]
        plain = TorchModule(submodel, load, (), denoiser).network().module.state_dict()
        ours = TorchModule(submodel, load, [LoraMerge(path, 0.7)], denoiser).network().module.state_dict()
        for key, theirs in getattr(pipeline, submodel).state_dict().items():
            np.testing.assert_allclose(ours[key].numpy(), theirs.numpy(), rtol=0, atol=2e-6)
            touched += not np.array_equal(ours[key].numpy(), plain[key].numpy())
    assert touched > 50


def test_the_trajectory_is_that_of_diffusers(sample_cases: dict[str, Any]) -> None:
    cases = [case for case in sample_cases["unet"].cases if case.group == "trajectory"]
    assert len(cases) >= 2
    times = [case.timestep for case in cases]
    assert times == sorted(times, reverse=True)
    text = sample_cases["unet"].get(0, "inputs")["encoder_hidden_states"]
    assert len(text) == 2, "the empty prompt's half and the prompt's"
    alone = sample_cases["text_encoder"].get(0, "float32")["last_hidden_state"]
    np.testing.assert_allclose(text[1], alone[0], atol=1e-5)


def test_edges_shapes_and_batches_are_covered(sample_cases: dict[str, Any]) -> None:
    unet = sample_cases["unet"]
    assert {case.timestep for case in unet.cases if case.group == "edge timestep"} == {999.0, 700.3, 0.5}
    shapes = {unet.get(index, "inputs")["sample"].shape for index, _ in unet}
    assert {shape[0] for shape in shapes} == {1, 2}
    assert any(shape[2] != shape[3] for shape in shapes)


def test_every_case_has_both_references_and_they_differ_by_rounding(sample_cases: dict[str, Any]) -> None:
    for submodel, cases in sample_cases.items():
        for index, case in cases:
            exact, half = cases.get(index, "float32"), cases.get(index, "float16")
            assert exact.keys() == half.keys()
            for name in exact:
                assert 1e-5 < relative_l2(half[name], exact[name]) < 2e-2, (submodel, case.name, name)


def test_cases_come_back_from_the_disk_as_they_were(tmp_path: Path, sample_cases: dict[str, Any]) -> None:
    from sdflow.verify.reference.cases import read_cases, write_cases

    write_cases(tmp_path, sample_cases, {"more": 1})
    again = read_cases(tmp_path, "unet")
    assert again.cases == sample_cases["unet"].cases
    assert again.arrays.keys() == sample_cases["unet"].arrays.keys()
    assert all(np.array_equal(again.arrays[key], value) for key, value in sample_cases["unet"].arrays.items())
