"""peft's configuration in a LoRA file's header: files that peft and diffusers wrote add what peft's own layers add."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sdflow.errors import CheckpointError
from sdflow.sources import Checkpoint, load_module, load_pipeline
from sdflow.sources.loras.layers import lora_delta
from sdflow.sources.loras.lora import read_lora
from sdflow.sources.loras.peft_metadata import METADATA_KEY, read_peft_configs

Shapes = dict[str, dict[str, tuple[int, ...]]]
Fields = dict[str, Any]

FILE = "pytorch_lora_weights.safetensors"
SUBMODELS = ("unet", "text_encoder")
# Some layers of each kind: peft takes a while for each.
TARGETS = {
    "unet": r"(down_blocks\.0|mid_block)\..*(to_[kv]|to_out\.0|conv1|proj_in)|time_embedding\.linear_1",
    "text_encoder": r".*(q_proj|out_proj|fc1)",
}
TO_K = "mid_block.attentions.0.transformer_blocks.0.attn1.to_k"
Q_PROJ = "encoder.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def shapes(tiny: Checkpoint) -> Shapes:
    return {
        name: {key: tuple(t.shape) for key, t in load_module(name, tiny.submodels[name].load).state_dict().items()}
        for name in SUBMODELS
    }


def written_by_peft(tiny: Checkpoint, folder: Path, unet: Fields, text_encoder: Fields) -> Any:
    """Write folder / FILE with random factors, through peft and diffusers. The pipeline that was saved."""
    from peft import LoraConfig, get_peft_model_state_dict

    pipeline = load_pipeline(tiny)
    saved: Fields = {}
    torch.manual_seed(5)
    for name, fields in (("unet", unet), ("text_encoder", text_encoder)):
        config = LoraConfig(
            **{"r": 4, "lora_alpha": 12, "target_modules": TARGETS[name], "init_lora_weights": False} | fields
        )
        module = getattr(pipeline, name)
        module.add_adapter(config)
        saved[f"{name}_lora_layers"] = get_peft_model_state_dict(module, adapter_name="default")
        saved[f"{name}_lora_adapter_metadata"] = config.to_dict()
    pipeline.save_lora_weights(folder, **saved)
    return pipeline


def assert_adds_what_peft_adds(file: Path, shapes: Shapes, pipeline: Any) -> dict[str, set[float]]:
    """Compare every layer with peft's. The scales of each submodel."""
    from peft.tuners.lora import LoraLayer

    ours = read_lora(file, shapes)
    for submodel, layers in ours.items():
        modules = getattr(pipeline, submodel).named_modules()
        theirs = {f"{name}.weight": module for name, module in modules if isinstance(module, LoraLayer)}
        assert layers.keys() == theirs.keys()
        for key, module in theirs.items():
            expected = module.get_delta_weight(module.active_adapters[0]).detach()
            delta = torch.from_numpy(lora_delta(layers[key], shapes[submodel][key], 1.0))
            assert torch.linalg.vector_norm(delta - expected) <= 1e-6 * torch.linalg.vector_norm(expected), key
    return {submodel: {layer.scale for layer in layers.values()} for submodel, layers in ours.items()}


@pytest.mark.parametrize(
    ("unet", "text_encoder", "scales"),
    [
        (
            {"alpha_pattern": {r".*attn2.*": 2, r"mid_block\..*conv1": 5.5, r"attn[12]\.to_k": 8}},
            {"alpha_pattern": {r".*layers\.1.*": 3, "fc1": 20}},
            ({3.0, 0.5, 1.375, 2.0}, {3.0, 0.75, 5.0}),
        ),
        (
            {"alpha_pattern": {"^time_embedding.linear_1": 1, f"^{TO_K}": 2, "^attn1.to_v": 7, "to_out.0": 4}},
            {"alpha_pattern": {f"^{Q_PROJ}": 5, "^layers.0.mlp.fc1": 7}, "lora_alpha": 4},
            ({3.0, 0.25, 0.5, 1.0}, {1.0, 1.25}),
        ),
        (
            {"rank_pattern": {"conv1": 2, r"mid_block\..*": 6}, "alpha_pattern": {"to_[kv]": 9}, "use_rslora": True},
            {"rank_pattern": {"q_proj|fc1": 9}, "use_rslora": True},
            (
                {12 / 2, 9 / 2, 12 / math.sqrt(6), 9 / math.sqrt(6), 12 / math.sqrt(2)},
                {12 / 2, 12 / 3},
            ),
        ),
        ({"rank_pattern": {".*attn1.*": 8}}, {"r": 3, "lora_alpha": 1}, ({1.5, 3.0}, {1 / 3})),
    ],
    ids=["expressions", "anchored and ends", "rslora and ranks", "ranks alone"],
)
def test_adds_what_peft_adds(
    unet: Fields,
    text_encoder: Fields,
    scales: tuple[set[float], set[float]],
    tiny: Checkpoint,
    shapes: Shapes,
    tmp_path: Path,
) -> None:
    trained = written_by_peft(tiny, tmp_path, unet, text_encoder)
    found = assert_adds_what_peft_adds(tmp_path / FILE, shapes, trained)
    assert found == {"unet": scales[0], "text_encoder": scales[1]}


def test_the_order_of_patterns_is_the_files(tiny: Checkpoint, shapes: Shapes, tmp_path: Path) -> None:
    """diffusers sorts the patterns as it writes. What reads the file back takes the first of that order."""
    overlapping = {"to_k": 2, ".*attn2.*": 3, "attn1.to_k": 5, ".*": 7}
    written_by_peft(tiny, tmp_path, {"alpha_pattern": overlapping}, {"alpha_pattern": {"q_proj": 1, "[fq].*": 8}})
    pipeline = load_pipeline(tiny)
    pipeline.load_lora_weights(str(tmp_path), weight_name=FILE)
    scales = assert_adds_what_peft_adds(tmp_path / FILE, shapes, pipeline)
    assert scales == {"unet": {7 / 4}, "text_encoder": {3.0, 2.0}}


FRAGMENTS = st.sampled_from([
    "to_k", "to_q", "to_out", r"to_out\.0", "to_[qkv]", "attn1", "attn[12]", "attn2", ".*", r"\.", ".", r"\d+", "0", "1",
    "mid_block", "down_blocks", "(mid|up)_blocks?", "resnets", "conv1", "conv", "transformer_blocks", "ff.net", ".*net",
    "self_attn", "q_proj", ".*_proj", "encoder", "layers", "mlp", "fc[12]", "text_model", "|", "$",
])  # fmt: skip
PATTERNS = st.builds(
    lambda start, parts, between: start + between.join(parts),
    st.sampled_from(["", "^", "(?:)"]),
    st.lists(FRAGMENTS, max_size=4),
    st.sampled_from(["", ".", r"\.", ".*"]),
)


@given(data=st.data())
def test_chooses_the_alpha_that_peft_chooses(
    data: st.DataObject, shapes: Shapes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from peft.utils.other import get_pattern_key

    submodel = data.draw(st.sampled_from(SUBMODELS))
    modules = [key.removesuffix(".weight") for key in shapes[submodel] if key.endswith(".weight")]
    pattern = st.one_of(PATTERNS, st.sampled_from(modules), st.sampled_from(modules).map(lambda name: f"^{name}"))
    patterns = data.draw(st.lists(pattern, min_size=1, max_size=4, unique=True))
    alphas = {pattern: place + 1.5 for place, pattern in enumerate(patterns)}
    file = tmp_path_factory.getbasetemp() / "patterns.safetensors"
    fields = {f"{submodel}.lora_alpha": 99, f"{submodel}.alpha_pattern": alphas}
    save_file({}, file, {METADATA_KEY: json.dumps(fields)})
    config = read_peft_configs(file, SUBMODELS)[submodel]
    for module in modules:
        assert config.alpha(module) == alphas.get(get_pattern_key(alphas.keys(), module), 99), module


def a_file(folder: Path, fields: Fields, *, text_model: str = "") -> Path:
    """A layer of rank 4 in each submodel, and this configuration."""
    tensors = {}
    for module in (f"unet.{TO_K}", f"text_encoder.{text_model}{Q_PROJ}"):
        width = 64 if module.startswith("unet.") else 32
        tensors |= {f"{module}.lora_A.weight": torch.ones(4, width), f"{module}.lora_B.weight": torch.ones(width, 4)}
    save_file(tensors, folder / FILE, {METADATA_KEY: fields if isinstance(fields, str) else json.dumps(fields)})
    return folder / FILE


def scales(file: Path, shapes: Shapes) -> list[float]:
    return [layer.scale for layers in read_lora(file, shapes).values() for layer in layers.values()]


def test_a_text_encoder_keeps_the_name_that_peft_saw(shapes: Shapes, tmp_path: Path) -> None:
    """Before transformers 5 it was text_model.encoder...; a file from there says so in its tensors' names."""
    old = {"text_encoder.r": 4, "text_encoder.alpha_pattern": {rf"^text_model\.{Q_PROJ}": 2}}
    assert scales(a_file(tmp_path, old, text_model="text_model."), shapes) == [1.0, 0.5]
    assert scales(a_file(tmp_path, old), shapes) == [1.0, 2.0]
    new = {"text_encoder.r": 4, "text_encoder.alpha_pattern": {f"^{Q_PROJ}": 2}}
    assert scales(a_file(tmp_path, new), shapes) == [1.0, 0.5]


@pytest.mark.parametrize("plain", ["gaussian", "eva", True, None])
def test_fields_that_change_no_weight_are_accepted(plain: Any, shapes: Shapes, tmp_path: Path) -> None:
    fields = {"r": 4, "lora_alpha": 2, "init_lora_weights": plain, "fan_in_fan_out": True, "layers_to_transform": [0]}
    file = a_file(tmp_path, {f"unet.{field}": value for field, value in fields.items()})
    assert scales(file, shapes) == [0.5, 1.0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("[", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "is not a JSON object"),
        ({"unet.lora_alpha": "x"}, r"unet\.lora_alpha that is not a finite number"),
        ({"unet.lora_alpha": True}, r"unet\.lora_alpha that is not a finite number"),
        ({"unet.lora_alpha": 10**400}, r"unet\.lora_alpha that is not a finite number"),
        ({"unet.lora_alpha": math.nan}, r"unet\.lora_alpha that is not a finite number"),
        ({"unet.alpha_pattern": ["to_k"]}, r"unet\.alpha_pattern that is not a JSON object"),
        ({"unet.alpha_pattern": {"to_k": None}}, r"unet\.alpha_pattern\['to_k'\] that is not a finite number"),
        ({"unet.alpha_pattern": {"to_(k": 1}}, r"unet\.alpha_pattern\['to_\(k'\] that is not a valid regular"),
        ({"unet.alpha_pattern": {"a{9999999999999}": 1}}, "not a valid regular expression"),
        ({"unet.alpha_pattern": {"(" * 50_000: 1}}, "not a valid regular expression"),
        ({"text_encoder.rank_pattern": {"*": 4}}, r"text_encoder\.rank_pattern\['\*'\] that is not a valid regular"),
        ({"text_encoder.rank_pattern": {"q_proj": 4.5}}, r"text_encoder\.rank_pattern\['q_proj'\] that is not a whole"),
        ({"unet.r": 0}, r"unet\.r that is not a whole number above 0"),
        ({"unet.use_rslora": "no"}, r"unet\.use_rslora that is neither"),
        ({"unet.use_dora": 1}, r"unet\.use_dora that is neither"),
        ({"unet.r": 4, "unet.use_dora": True}, "its lora_magnitude_vector is missing"),
        ({"unet.bias": "all"}, r'unet\.bias = "all" is not supported'),
        ({"unet.lora_bias": True}, r"unet\.lora_bias = true is not supported"),
        ({"unet.modules_to_save": ["conv_in"]}, r"unet\.modules_to_save"),
        ({"unet.layer_replication": [[0, 1]]}, r"unet\.layer_replication"),
        ({"text_encoder.init_lora_weights": "pissa_niter_4"}, r"text_encoder\.init_lora_weights"),
        ({"text_encoder.kasa_config": {}}, r"text_encoder\.kasa_config"),
        ({"unet.peft_type": "OFT"}, r"unet\.peft_type"),
        ({"unet.peft_type": "LOHA"}, "of a LoRA, but PEFT's configuration has LoHa"),
        ({"unet.peft_type": "LOKR", "unet.use_dora": True}, r"unet\.use_dora = true is not supported"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    fields: Fields, message: str, shapes: Shapes, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read_lora(a_file(tmp_path, fields), shapes)
    assert str(tmp_path) in str(caught.value)


def test_a_pattern_that_is_searched_without_an_end_is_refused(shapes: Shapes, tmp_path: Path) -> None:
    file = a_file(tmp_path, {"unet.r": 4, "unet.alpha_pattern": {"(([a-z0-9_.]+)+)+!": 3}})
    with pytest.raises(CheckpointError, match=r"take more than 2 s to match: '\(\(\[a-z0-9_\.\]\+\)\+\)\+!'"):
        read_lora(file, shapes)


@pytest.mark.parametrize("ranks", [{"r": 5}, {"r": 4, "rank_pattern": {".*attn1.*": 5}}])
def test_a_rank_that_the_tensors_do_not_have_is_refused(
    ranks: Fields, tiny: Checkpoint, shapes: Shapes, tmp_path: Path
) -> None:
    """As diffusers does: it builds the layer by the configuration, and the tensors do not fit."""
    fields = {f"unet.{field}": value for field, value in ranks.items()} | {"unet.target_modules": ["to_k"]}
    file = a_file(tmp_path, fields)
    with pytest.raises(CheckpointError, match=rf"unet\.{TO_K}\.lora_A\.weight: 4, not 5"):
        read_lora(file, shapes)
    with pytest.raises(RuntimeError, match="size mismatch"):
        load_pipeline(tiny).load_lora_weights(str(tmp_path), weight_name=FILE)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "OFT"}, r"OFT is not supported \(peft_type in its lora_adapter_metadata\)"),
        ({"use_qalora": True}, "use_qalora = true is not supported"),
        ({"init_lora_weights": "pissa"}, 'init_lora_weights = "pissa" is not supported'),
        ({"modules_to_save": ["conv_out"]}, "modules_to_save"),
        ({"lora_alpha": "x"}, "a lora_alpha that is not a finite number"),
        ({"r": 5}, "4, not 5"),
    ],
)
def test_the_header_of_save_lora_adapter_has_no_submodel_in_front(
    fields: Fields, message: str, tiny: Checkpoint, shapes: Shapes, tmp_path: Path
) -> None:
    from peft import LoraConfig

    unet = load_module("unet", tiny.submodels["unet"].load)
    unet.add_adapter(LoraConfig(r=4, lora_alpha=12, target_modules=[TO_K], init_lora_weights=False))
    unet.save_lora_adapter(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    assert scales(file, shapes) == [3.0]
    with safe_open(file, "pt") as opened:
        said = json.loads(opened.metadata()[METADATA_KEY])
    save_file(load_file(file), file, {METADATA_KEY: json.dumps(said | fields)})
    with pytest.raises(CheckpointError, match=message):
        read_lora(file, shapes)


def test_a_header_that_does_not_say_its_submodel_is_refused(shapes: Shapes, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"does not name its submodel: lora_alpha, r"):
        read_lora(a_file(tmp_path, {"r": 4, "lora_alpha": 2}), shapes)
    with pytest.raises(CheckpointError, match=r"does not name its submodel: prior\.r"):
        read_lora(a_file(tmp_path, {"prior.r": 4}), shapes)
