"""LoHa, LoKr, DoRA and Tucker decompositions merge as LyCORIS and PEFT, which make the files here, merge them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from sdflow.errors import CheckpointError
from sdflow.inspection import inspect
from sdflow.sources import Checkpoint, load_module, lora_submodels, read_lora
from sdflow.sources.loras import adapter_modules
from sdflow.sources.loras.layers import HadamardLayer, KroneckerLayer
from sdflow.verify.reference.merged_loras import merge_lora
from sdflow.weights import dora
from sdflow.weights.lora import merged_weight

State = dict[str, torch.Tensor]

LINEAR = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
WIDE = "mid_block.attentions.0.transformer_blocks.0.ff.net.2"
CONVOLUTION = "mid_block.resnets.0.conv1"
SINGLE = "mid_block.attentions.0.proj_in"
MODULES = (LINEAR, WIDE, CONVOLUTION, SINGLE)
RANK = 2
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoHa": ("LohaModule", {}),
    "LoHa, Tucker": ("LohaModule", {"use_tucker": True}),
    "LoKr": ("LokrModule", {"factor": 8}),
    "LoKr, small factor": ("LokrModule", {"factor": 4, "unbalanced_factorization": True}),
    "LoKr, both": ("LokrModule", {"factor": 8, "decompose_both": True}),
    "LoKr, Tucker": ("LokrModule", {"factor": 8, "use_tucker": True}),
    "LoKr, whole": ("LokrModule", {"factor": 8, "full_matrix": True}),
    "LoKr, rank-stabilized": ("LokrModule", {"factor": 8, "rs_lora": True}),
    "LoRA": ("LoConModule", {}),
    "LoRA, Tucker": ("LoConModule", {"use_tucker": True}),
}
NORMS: dict[str, dict[str, Any]] = {
    "": {},
    "DoRA of rows": {"weight_decompose": True, "wd_on_out": True},
    "DoRA of columns": {"weight_decompose": True, "wd_on_out": False},
}


@pytest.fixture(scope="module")
def unet(tiny: Checkpoint) -> Any:
    return load_module("unet", tiny.submodels["unet"].load)


@pytest.fixture(scope="module")
def state(unet: Any) -> State:
    return {name: tensor.clone() for name, tensor in unet.state_dict().items()}


def adapters(unet: Any, kind: str, norms: str, alpha: float) -> dict[str, Any]:
    """LyCORIS' modules, random, by the name of what they are for."""
    from lycoris import modules

    found = {}
    torch.manual_seed(0)
    for name in MODULES:
        cls, options = KINDS[kind]
        module = getattr(getattr(modules, cls.removesuffix("Module").lower()), cls)(
            name, unet.get_submodule(name), 1.0, RANK, alpha, **options, **NORMS[norms]
        )
        for key, parameter in module.named_parameters():
            if key == "dora_scale":
                parameter.data *= 1 + 0.2 * torch.rand_like(parameter)
            else:
                parameter.data = torch.randn_like(parameter) * 0.3
        found[name] = module
    return found


def saved(found: dict[str, Any], path: Path, prefix: str = "lora_unet_") -> Path:
    tensors = {
        f"{prefix}{name.replace('.', '_')}.{key}": tensor.detach().clone().contiguous()
        for name, module in found.items()
        for key, tensor in module.state_dict().items()
    }
    save_file(tensors, path)
    return path


def ours(path: Path, state: State, *scales: float, submodel: str = "unet", family: str = "stable_diffusion") -> State:
    shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}
    layers = read_lora(path, {submodel: shapes}, family)[submodel]
    changed = {}
    for key, layer in layers.items():
        changed[key] = torch.from_numpy(
            merged_weight(state[key].numpy(), [(layer, scale) for scale in scales or (1.0,)])
        )
    return {**state, **changed}


def reference(tiny: Checkpoint, path: Path, scale: float) -> tuple[State, int]:
    """As verification merges it."""
    module = load_module("unet", tiny.submodels["unet"].load)
    layers = merge_lora(module, "unet", tiny.family, tiny.submodels["unet"].load["config"], path, scale)
    return module.state_dict(), layers


def assert_same(found: State, wanted: State, before: State, changed: int) -> None:
    """Equal within float32 rounding, and as many weights are others than before."""
    for key, tensor in found.items():
        assert torch.linalg.vector_norm(tensor - wanted[key]) <= 2e-6 * torch.linalg.vector_norm(tensor), key
    assert sum(not torch.equal(tensor, before[key]) for key, tensor in found.items()) == changed


@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_lycoris_draws_as_it_was_trained(
    kind: str, norms: str, tiny: Checkpoint, unet: Any, state: State, tmp_path: Path
) -> None:
    """With alpha other than the rank, by the forward of its training: its own merge multiplies LoHa and LoKr by alpha / rank
    twice. Verification's reference gives the same."""
    made = adapters(unet, kind, norms, alpha=3.0)
    path = saved(made, tmp_path / "x.safetensors")
    found = ours(path, state)
    for name, module in made.items():
        weight = state[f"{name}.weight"]
        size = (2, 5, weight.shape[1]) if weight.dim() == 2 else (2, weight.shape[1], 6, 6)
        inputs = torch.randn(size)
        with torch.no_grad():
            wanted = module(inputs)
            layer = unet.get_submodule(name)
            drawn = torch.func.functional_call(
                layer,
                {"weight": found[f"{name}.weight"], "bias": layer.bias}
                if layer.bias is not None
                else {"weight": found[f"{name}.weight"]},
                (inputs,),
            )
        assert torch.linalg.vector_norm(drawn - wanted) <= 5e-6 * torch.linalg.vector_norm(wanted), name
    merged, layers = reference(tiny, path, 0.6)
    assert layers == len(MODULES)
    assert_same(ours(path, state, 0.6), merged, state, layers)


@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "LoKr, rank-stabilized"])
def test_a_file_of_lycoris_merges_as_lycoris_merges_it(
    kind: str, norms: str, unet: Any, state: State, tmp_path: Path
) -> None:
    made = adapters(unet, kind, norms, alpha=RANK)
    found = ours(saved(made, tmp_path / "x.safetensors", "lycoris_"), state)
    wanted = dict(state)
    for name, module in made.items():
        with torch.no_grad():
            wanted[f"{name}.weight"] = module.get_merged_weight(1.0, state[f"{name}.weight"].shape)[0]
    assert_same(found, wanted, state, len(made))


TARGETS = r"mid_block\..*(to_q|ff\.net\.2|proj_in|resnets\.0\.conv1)"


def peft_config(kind: str) -> Any:
    from peft import LoHaConfig, LoKrConfig, LoraConfig

    shared: dict[str, Any] = {"r": RANK, "target_modules": TARGETS}
    patterns = {"rank_pattern": {"to_q": 3}, "alpha_pattern": {"conv1": 5.0}}
    return {
        "LoHa": lambda: LoHaConfig(**shared, **patterns, alpha=3, init_weights=False),
        "LoHa, Tucker": lambda: LoHaConfig(**shared, alpha=3, init_weights=False, use_effective_conv2d=True),
        "LoKr": lambda: LoKrConfig(**shared, **patterns, alpha=3, init_weights=False, decompose_factor=8),
        "LoKr, both and Tucker": lambda: LoKrConfig(
            **shared, alpha=3, init_weights=False, decompose_factor=8, decompose_both=True, use_effective_conv2d=True
        ),
        "LoKr, whole": lambda: LoKrConfig(**shared | {"r": 64}, alpha=96, init_weights=False),
        "DoRA": lambda: LoraConfig(**shared, **patterns, lora_alpha=3, init_lora_weights=False, use_dora=True),
        "DoRA, rank-stabilized": lambda: LoraConfig(
            **shared, lora_alpha=3, init_lora_weights=False, use_dora=True, use_rslora=True
        ),
    }[kind]()


PEFT_KINDS = ("LoHa", "LoHa, Tucker", "LoKr", "LoKr, both and Tucker", "LoKr, whole", "DoRA", "DoRA, rank-stabilized")


def by_peft(tiny: Checkpoint, kind: str, folder: Path, *scales: float) -> list[State]:
    """A file that PEFT's save_pretrained wrote, and the weights as PEFT merges it at these scales."""
    from peft import PeftModel, get_peft_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    torch.manual_seed(1)
    wrapped = get_peft_model(load_module("unet", tiny.submodels["unet"].load), peft_config(kind))
    for name, parameter in wrapped.named_parameters():
        if "magnitude" in name:
            parameter.data *= 1 + 0.2 * torch.rand_like(parameter)
        elif "lora_" in name or "hada_" in name or "lokr_" in name:
            parameter.data = torch.randn_like(parameter) * 0.3
    wrapped.save_pretrained(folder)
    found = []
    for scale in scales:
        again = PeftModel.from_pretrained(load_module("unet", tiny.submodels["unet"].load), str(folder))
        for layer in again.modules():
            if isinstance(layer, BaseTunerLayer):
                layer.scale_layer(scale)
        found.append(again.merge_and_unload(safe_merge=True).state_dict())
    return found


@pytest.mark.parametrize("kind", PEFT_KINDS)
def test_a_file_of_peft_merges_as_peft_merges_it(kind: str, tiny: Checkpoint, state: State, tmp_path: Path) -> None:
    path, scale = tmp_path / "adapter_model.safetensors", 0.6
    (wanted,) = by_peft(tiny, kind, tmp_path, scale)
    changed = sum(not torch.equal(tensor, state[key]) for key, tensor in wanted.items())
    assert changed >= 4
    assert_same(ours(path, state, scale), wanted, state, changed)
    merged, layers = reference(tiny, path, scale)
    assert layers == changed
    assert_same(merged, wanted, state, changed)


def test_a_lora_after_a_dora_is_not_one_before_it(tiny: Checkpoint, state: State, tmp_path: Path) -> None:
    """Each merges into what those before it left, as PEFT does with one file after the other."""
    (tmp_path / "dora").mkdir(), (tmp_path / "loha").mkdir()
    by_peft(tiny, "DoRA", tmp_path / "dora")
    by_peft(tiny, "LoHa", tmp_path / "loha")
    paths = [tmp_path / name / "adapter_model.safetensors" for name in ("dora", "loha")]
    shapes = {"unet": {key: tuple(tensor.shape) for key, tensor in state.items()}}
    layers = [read_lora(path, shapes)["unet"] for path in paths]
    results = []
    for order in ((0, 1), (1, 0)):
        module = load_module("unet", tiny.submodels["unet"].load)
        for index in order:
            merge_lora(module, "unet", tiny.family, tiny.submodels["unet"].load["config"], paths[index], 0.7)
        key = f"{CONVOLUTION}.weight"
        found = merged_weight(state[key].numpy(), [(layers[index][key], 0.7) for index in order])
        wanted = module.state_dict()[key]
        assert torch.linalg.vector_norm(torch.from_numpy(found) - wanted) <= 2e-6 * torch.linalg.vector_norm(wanted)
        results.append(wanted)
    assert torch.linalg.vector_norm(results[0] - results[1]) > 1e-2 * torch.linalg.vector_norm(results[0])


def transposed_left(self: KroneckerLayer, scale: float) -> Any:
    return whole_kron(replace(self, left=self.left.T.copy()), scale)


def scaled_twice(self: HadamardLayer, scale: float) -> Any:
    return whole_hadamard(self, scale * self.scale)


whole_kron, whole_hadamard = KroneckerLayer.product, HadamardLayer.product
FAULTS: dict[str, tuple[str, str, Callable[[pytest.MonkeyPatch], None]]] = {
    "alpha / rank twice": ("LoHa", "", lambda patch: patch.setattr(HadamardLayer, "product", scaled_twice)),
    "the first factor transposed": ("LoKr", "", lambda patch: patch.setattr(KroneckerLayer, "product", transposed_left)),
    "the core transposed": (
        "LoRA, Tucker",
        "",
        lambda patch: patch.setattr(
            adapter_modules, "times_core", lambda core, down: times_core(core.transpose(1, 0, 2).copy(), down)
        ),
    ),
    "norms left as they are": (
        "LoRA", "DoRA of rows", lambda patch: patch.setattr(dora, "_set_norms", lambda values, magnitude: None)
    ),
    "norms of the weight alone": (
        "LoRA",
        "DoRA of columns",
        lambda patch: patch.setattr(dora, "norms", lambda rows: norms(rows) * 1.001),
    ),
}  # fmt: skip
times_core, norms = adapter_modules.times_core, dora.norms


@pytest.mark.parametrize("fault", FAULTS)
def test_the_reference_finds_a_planted_fault(
    fault: str, tiny: Checkpoint, unet: Any, state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shares no code with what it proves."""
    kind, norm, plant = FAULTS[fault]
    path = saved(adapters(unet, kind, norm, alpha=3.0), tmp_path / "x.safetensors")
    wanted = reference(tiny, path, 0.7)[0]
    assert_same(ours(path, state, 0.7), wanted, state, len(MODULES))
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="mid_block"):
        assert_same(ours(path, state, 0.7), reference(tiny, path, 0.7)[0], state, len(MODULES))


# What is wrong with a file is said with the tensor


@pytest.fixture(scope="module")
def files(unet: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, State]:
    folder = tmp_path_factory.mktemp("kinds")
    return {
        kind: load_file(saved(adapters(unet, kind, "DoRA of rows", 3.0), folder / "x.safetensors")) for kind in KINDS
    }


@st.composite
def damages(draw: st.DrawFn) -> tuple[str, int, str]:
    kind = draw(st.sampled_from([*KINDS]))
    return kind, draw(st.integers(0, 30)), draw(st.sampled_from(["missing", "taller", "wider", "nan", "deeper"]))


@settings(max_examples=30, deadline=None)
@given(damages())
def test_a_damaged_tensor_is_named(
    files: dict[str, State], state: State, tmp_path_factory: pytest.TempPathFactory, damage: tuple[str, int, str]
) -> None:
    kind, number, what = damage
    tensors = dict(files[kind])
    factors = [name for name in tensors if not name.endswith((".alpha", ".dora_scale"))]
    name = factors[number % len(factors)]
    tensor = tensors.pop(name)
    if what != "missing":
        tensors[name] = {
            "taller": lambda: torch.cat([tensor, tensor[:1]]),
            "wider": lambda: torch.cat([tensor, tensor[:, :1]], 1),
            "nan": lambda: tensor.masked_fill(torch.arange(tensor.numel()).reshape(tensor.shape) == 0, torch.nan),
            "deeper": lambda: torch.stack([tensor, tensor], -1),
        }[what]().contiguous()
    path = tmp_path_factory.mktemp("damaged") / "x.safetensors"
    save_file(tensors, path)
    with pytest.raises(CheckpointError) as caught:
        ours(path, state)
    stem = name.rpartition(".lora_")[0] or name.rpartition(".")[0]
    assert stem in caught.value.what
    if what == "missing":
        role = name.removesuffix(".weight").rpartition(".")[2].removeprefix("lora_")
        assert (
            f"{role} tensor" in caught.value.what or "the other of hada_t1 and hada_t2 is missing" in caught.value.what
        )
    assert str(path) in str(caught.value.where)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dora_scale": torch.ones(3, 1)}, r"dora_scale: \[3, 1\], expected \[64, 1\] or \[1, 64\]"),
        ({"dora_scale": torch.full((64, 1), torch.inf)}, "dora_scale: not all of its values are finite"),
        ({"hada_w1_a": torch.ones(64, 2)}, "one module has tensors of LoHa and LoKr"),
        ({"lokr_w1": torch.ones(7, 7)}, "lokr_w1: 7 x 7, which does not divide a weight of 64 x 64"),
        ({"lokr_w1_a": torch.ones(8, 2)}, "lokr_w1_a is for the same factor"),
        ({"diff_b": torch.ones(64)}, "diff_b: there is no .*to_q.bias"),
        ({"alpha": torch.ones(2)}, "alpha: several values, expected a number"),
    ],
    ids=["norms", "infinite", "two kinds", "left", "twice", "bias", "alphas"],
)
def test_what_does_not_belong_together_is_named(
    change: State, message: str, files: dict[str, State], state: State, tmp_path: Path
) -> None:
    stem = f"lora_unet_{LINEAR.replace('.', '_')}"
    tensors = files["LoKr"] | {f"{stem}.{role}": tensor for role, tensor in change.items()}
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=message):
        ours(tmp_path / "x.safetensors", state)


def test_a_configuration_of_another_kind_is_named(tiny: Checkpoint, state: State, tmp_path: Path) -> None:
    by_peft(tiny, "DoRA", tmp_path)
    path, config = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    said = json.loads(config.read_text())
    config.write_text(json.dumps({"peft_type": "LOHA", "r": RANK}))
    with pytest.raises(CheckpointError, match="of a LoRA, but PEFT's configuration has LoHa"):
        ours(path, state)
    config.write_text(json.dumps(said))
    save_file({name: each for name, each in load_file(path).items() if "magnitude" not in name}, path)
    with pytest.raises(
        CheckpointError, match="its lora_magnitude_vector is missing, but its configuration has use_dora"
    ):
        ours(path, state)


@pytest.mark.parametrize("kind", ["LoHa", "LoKr", "LoKr, whole", "LoRA, Tucker"])
def test_inspect_names_the_kind_and_the_rank(kind: str, files: dict[str, State], tmp_path: Path) -> None:
    save_file(files[kind], tmp_path / "x.safetensors")
    assert lora_submodels(tmp_path / "x.safetensors") == ("unet",)
    (found,) = inspect(tmp_path / "x.safetensors")
    named = {"LoHa": "LoHa and DoRA", "LoKr": "LoKr and DoRA", "LoKr, whole": "LoKr and DoRA"}
    assert found.details["algorithm"] == named.get(kind, "DoRA and LoCon with a Tucker decomposition")
    assert found.details.get("rank") == (None if kind == "LoKr, whole" else str(RANK))
    assert found.details["layers"] == {"unet": len(MODULES)}
    assert found.workflow is not None
