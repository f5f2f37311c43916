"""`sdflow inspect` names what people have on their disks, from headers alone; nothing that it reads ends in a traceback."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from diffusers import AutoencoderTiny, ControlNetModel, UNet2DConditionModel
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ip_adapter_files import tensors
from original_layout import vae_tensors
from safetensors.torch import save_file
from started_python import Command

from sdflow.bench.engines import ENGINES, quantized_of
from sdflow.build.plan import Plan, make_plan
from sdflow.config import load_workflow
from sdflow.errors import SdflowError
from sdflow.families import ARCHITECTURES, family_of_architecture
from sdflow.inspection import Description, inspect
from sdflow.inspection.lines import title_of
from sdflow.manifest import MANIFEST_FILE
from sdflow.passes.registry import catalog
from sdflow.report.inspect import print_inspection
from sdflow.serve.http.served_model import read_served
from sdflow.sources import PlainDigests, load_pipeline, open_checkpoint
from sdflow.sources.config_recognition import configs_of
from sdflow.store import Cache

ROOT = Path(__file__).parents[2]
FULL = [name for name in ARCHITECTURES if "tiny" not in name and family_of_architecture(name).name != "flux2"]
"""Architectures whose checkpoints come as single files; of FLUX.2 only the transformer does."""
Shapes = Mapping[str, tuple[int, ...]]


def write_header(path: Path, shapes: Shapes, metadata: Mapping[str, str] | None = None, dtype: str = "F16") -> Path:
    """A safetensors file of any size whose values are a hole in the disk: zeros that take no room."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + prod(shape) * {"F16": 2, "F32": 4}[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return path


def only(path: Path) -> Description:
    (finding,) = inspect(path)
    return finding


def fingerprint(architecture: str) -> dict[str, tuple[int, ...]]:
    family, configs = family_of_architecture(architecture), configs_of(architecture)
    told = family.fingerprint({part.component: configs[part.component] for part in family.parts if part.layouts})
    others = {part.layouts[0].prefix for part in family.parts if part.layouts and not part.optional}
    others -= {prefix for prefix in others if any(name.startswith(prefix) for name in told)}
    beside = {f"{prefix}position_ids": (1, 77) for prefix in others}  # of parts that tell nothing
    return {name: shape for name, shape in told.items() if shape is not None} | beside


def pipelines_of(text: str, folder: Path) -> Any:
    (folder / "w.yaml").write_text(text)
    return load_workflow(folder / "w.yaml", catalog=catalog()).pipelines


# Checkpoints


@pytest.mark.parametrize("architecture", FULL)
def test_a_checkpoint_in_one_file_is_named_with_lines_that_are_a_workflow(architecture: str, tmp_path: Path) -> None:
    file = write_header(tmp_path / "model.safetensors", fingerprint(architecture))
    found = only(file)
    assert (found.kind, found.precision, found.missing) == ("checkpoint", "float16", ())
    assert found.of == (title_of(architecture),)
    assert found.workflow is not None
    (pipeline,) = pipelines_of(found.workflow, tmp_path)
    assert pipeline.model == str(file)


def read_so_far() -> int:
    """The bytes that this process has read."""
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])  # type: ignore[index]


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="only Linux counts what a process reads")
def test_of_a_file_of_7_gb_the_header_alone_is_read(tmp_path: Path) -> None:
    shapes = {**fingerprint("sdxl"), "model.diffusion_model.filler": (3_500_000_000,)}
    file = write_header(tmp_path / "model.safetensors", shapes)
    assert file.stat().st_size > 7e9
    begun = read_so_far()
    assert only(file).of == ("Stable Diffusion XL",)
    assert read_so_far() - begun < 100e6


def test_what_a_checkpoint_lacks_is_told_and_no_workflow_is_made_of_it(tmp_path: Path) -> None:
    shapes = {name: shape for name, shape in fingerprint("sd15").items() if not name.startswith("first_stage_model.")}
    found = only(write_header(tmp_path / "model.safetensors", shapes))
    assert (found.kind, found.missing, found.workflow) == ("checkpoint", ("vae",), None)


def test_a_checkpoint_that_says_how_it_predicts_is_told_apart_from_its_equal(tmp_path: Path) -> None:
    metadata = {"modelspec.prediction_type": "epsilon"}
    found = only(write_header(tmp_path / "model.safetensors", fingerprint("sd21"), metadata))
    assert found.architecture == "sd21-base"
    assert only(write_header(tmp_path / "other.safetensors", fingerprint("sd21"))).architecture == "sd21"


def test_mixed_precision_is_told_by_its_share(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(30, dtype=torch.float16), "b": torch.zeros(70)}, tmp_path / "x.safetensors")
    assert only(tmp_path / "x.safetensors").precision == "float32 (70 %), float16 (30 %)"


# Folders


@pytest.fixture(scope="module", params=["sd15-tiny", "sdxl-tiny"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    """A folder as diffusers saves it, of a shipped architecture."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    checkpoint = open_checkpoint(f"synthetic:{request.param}", digests=PlainDigests(), download=False)
    pipeline = load_pipeline(checkpoint)
    pipeline.save_pretrained(folder)
    return request.param, folder, pipeline


def test_a_folder_of_diffusers_is_named_and_its_parts_too(saved: tuple[str, Path, Any], tmp_path: Path) -> None:
    architecture, folder, _ = saved
    found = only(folder)
    assert (found.kind, found.architecture, found.missing) == ("pipeline folder", architecture, ())
    assert (found.of, found.precision) == ((title_of(architecture),), "float32")
    assert found.workflow is not None
    assert pipelines_of(found.workflow, tmp_path)[0].model == str(folder)
    if (folder / "safety_checker").is_dir():
        assert only(folder / "safety_checker").kind == "safety checker"
    kinds = {"vae": "vae", "unet": "unet", "text_encoder": "text encoder"}
    for component, kind in kinds.items():
        inner = only(folder / component)
        assert inner.kind == kind
        if component == "unet":
            assert title_of(architecture) in inner.of
        (file,) = (folder / component).glob("*.safetensors")
        alone = only(file)
        assert alone.kind.startswith(kind), alone
        assert title_of(architecture) in alone.of


def test_a_vae_or_a_unet_comes_with_lines_that_take_it(saved: tuple[str, Path, Any], tmp_path: Path) -> None:
    _, folder, pipeline = saved
    save_file({name: each.contiguous() for name, each in vae_tensors(pipeline.vae).items()}, tmp_path / "v.safetensors")
    for path in (folder / "vae", tmp_path / "v.safetensors"):
        found = only(path)
        assert found.kind == "vae"
        assert found.workflow is not None
        assert yaml.safe_load(found.workflow)["components"] == {"vae": str(path)}
    for path in (folder / "unet", *(folder / "unet").glob("*.safetensors")):
        found = only(path)
        assert found.workflow is not None
        assert yaml.safe_load(found.workflow)["components"] == {"unet": str(path)}


def test_a_refiner_of_diffusers_is_no_xl_that_lacks_a_text_encoder(tmp_path: Path) -> None:
    checkpoint = open_checkpoint("synthetic:sdxl-refiner-tiny", digests=PlainDigests(), download=False)
    load_pipeline(checkpoint).save_pretrained(tmp_path / "refiner")
    index = json.loads((tmp_path / "refiner/model_index.json").read_text())
    assert index["text_encoder"] == [None, None]
    found = only(tmp_path / "refiner")
    assert (found.architecture, found.missing, found.notes) == ("sdxl-refiner-tiny", (), ())
    assert found.of == ("Stable Diffusion XL refiner",) and found.workflow is not None
    (pipeline,) = plan_of(found.workflow, tmp_path).pipelines
    assert {chain.submodel for chain in pipeline.chains} == set(checkpoint.submodels)


@pytest.mark.parametrize(
    "sizes", [{}, {"encoder_block_out_channels": (16,) * 4, "decoder_block_out_channels": (16,) * 4}]
)
def test_a_folder_with_autoencoder_tiny_is_known(sizes: dict[str, Any], tmp_path: Path) -> None:
    """Alone, and in a pipeline: there it comes with its own chains."""
    AutoencoderTiny(**sizes).save_pretrained(tmp_path / "tiny")
    alone = only(tmp_path / "tiny")
    assert (alone.kind, alone.architecture) == ("vae", None if sizes else "taesd")
    checkpoint = open_checkpoint(
        "synthetic:sd15-tiny", digests=PlainDigests(), download=False, components={"vae": str(tmp_path / "tiny")}
    )
    load_pipeline(checkpoint).save_pretrained(tmp_path / "model")
    found = only(tmp_path / "model")
    assert (found.kind, found.architecture, found.missing) == ("pipeline folder", "sd15-tiny", ())
    assert found.details["vae"] == "AutoencoderTiny" and found.workflow is not None
    bases = ["base/stable_diffusion_1.yaml", "base/taesd.yaml"]
    assert yaml.safe_load(found.workflow)["extends"] == (bases[0] if sizes else bases)
    assert found.notes == (("Its vae is an AutoencoderTiny of other sizes than shipped.",) if sizes else ())
    (pipeline,) = plan_of(found.workflow, tmp_path).pipelines
    assert {chain.submodel for chain in pipeline.chains} == set(checkpoint.submodels)


def plan_of(lines: str, folder: Path) -> Plan:
    (folder / "workflow.yaml").write_text(lines)
    return make_plan(load_workflow(folder / "workflow.yaml", catalog=catalog()), Cache(folder / "cache"))


def test_what_a_folder_lacks_is_told(saved: tuple[str, Path, Any], tmp_path: Path) -> None:
    _, folder, _ = saved
    copy = tmp_path / "model"
    copy.mkdir()
    for each in folder.iterdir():
        if each.name not in ("unet", "tokenizer"):
            (copy / each.name).symlink_to(each)
    found = only(copy)
    assert found.missing == ("unet", "tokenizer")
    assert found.workflow is None


def test_a_pipeline_of_another_kind_is_unknown_with_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "PixArtSigmaPipeline"}')
    found = only(tmp_path)
    assert found.kind == "unknown"
    assert "PixArtSigmaPipeline" in found.notes[0] and "StableDiffusionPipeline" in found.notes[0]


def test_of_a_folder_of_files_each_is_named_and_a_damaged_one_hides_none(tmp_path: Path) -> None:
    write_header(tmp_path / "a.safetensors", fingerprint("sd15"))
    (tmp_path / "b.safetensors").write_bytes(b"nothing")
    save_file({"emb_params": torch.ones(2, 768)}, tmp_path / "c.safetensors")
    assert [found.kind for found in inspect(tmp_path)] == ["checkpoint", "unknown", "embedding"]


def test_a_pipeline_that_was_built_is_named(tiny_pipeline: Path) -> None:
    found = only(tiny_pipeline)
    assert (found.kind, found.details["target"], found.missing) == ("built pipeline", "cpu", ())
    assert "quantized" not in found.details


def test_of_a_pipeline_that_was_built_it_is_said_what_is_quantized(tiny_pipeline: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_pipeline, tmp_path / "small", symlinks=True)
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    told = {"to": "int8", "by": "QuantizeInt8", "limit": 0.02, "layers": 3, "kept": []}
    manifest["submodels"]["unet"] |= {"steps": [], "quantized": told}
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    assert only(folder).details["quantized"] == "unet to int8"
    served: Any = read_served(folder, check=False).to_json()["sdflow"]
    assert served["quantized"] == {"unet": "int8"}
    assert quantized_of(folder, ENGINES["ort-cpu"]) == "int8 in unet"
    assert quantized_of(folder, ENGINES["torch-sdpa"]) == "", "PyTorch's weights are as they were"


# LoRAs and others

ATTENTION = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k"
XL_ATTENTION = "lora_unet_input_blocks_4_1_transformer_blocks_0_attn2_to_k"


def lora(stem: str, width: int, rank: int = 16, alpha: float | None = None, out: int = 320) -> dict[str, torch.Tensor]:
    found = {f"{stem}.lora_down.weight": torch.zeros(rank, width), f"{stem}.lora_up.weight": torch.zeros(out, rank)}
    return found if alpha is None else {**found, f"{stem}.alpha": torch.tensor(alpha)}


@pytest.mark.parametrize(
    ("stem", "width", "title"),
    [
        (ATTENTION, 768, "Stable Diffusion 1.x"),
        (ATTENTION, 1024, "Stable Diffusion 2.x"),
        (XL_ATTENTION, 2048, "Stable Diffusion XL"),
    ],
)
def test_a_lora_is_named_with_what_its_training_tells(stem: str, width: int, title: str, tmp_path: Path) -> None:
    metadata = {
        "ss_base_model_version": "sd_v1",
        "ss_network_module": "networks.lora",
        "ss_sd_model_name": "anything.safetensors",
        "ss_tag_frequency": json.dumps({"10_sks": {"sks dog": 12, "grass": 3}, "5_more": {"grass": 4}}),
        "modelspec.trigger_phrase": "sks dog",
    }
    file = tmp_path / "dog.safetensors"
    save_file(lora(stem, width, alpha=8.0), file, metadata)
    found = only(file)
    assert (found.kind, found.of, found.precision) == ("LoRA", (title,), "float32")
    assert found.details == {
        "algorithm": "LoRA",
        "rank": "16",
        "alpha": "8",
        "layers": {"unet": 1},
        "training base": "sd_v1",
        "base model": "anything.safetensors",
        "program": "networks.lora",
        "trigger words": "sks dog",
        "most frequent tags": {"sks dog": 12, "grass": 7},
    }
    assert found.workflow is not None
    (pipeline,) = pipelines_of(found.workflow, tmp_path)
    assert pipeline.loras[0].reference == str(file)


@pytest.mark.parametrize(
    ("name", "metadata", "told"),
    [
        ("lcm-lora-sdv1-5", {}, "4 steps, no guidance, scheduler lcm (LCM-LoRA)"),
        ("sdxl_lightning_4step_lora", {}, "4 steps, no guidance, scheduler euler_trailing (SDXL-Lightning)"),
        ("renamed", {"modelspec.title": "LCM LoRA"}, "4 steps, no guidance, scheduler lcm (LCM-LoRA)"),
        ("lcm-lora-sdxl/pytorch_lora_weights", {}, "4 steps, no guidance, scheduler lcm (LCM-LoRA)"),
        ("other", {}, None),
    ],
)
def test_a_lora_for_few_steps_is_told_with_what_it_changes(
    name: str, metadata: dict[str, str], told: str | None, tmp_path: Path
) -> None:
    file = tmp_path / f"{name}.safetensors"
    file.parent.mkdir(exist_ok=True)
    save_file(lora(ATTENTION, 768), file, metadata)
    assert only(file).details.get("draws with") == told
    checkpoint = write_header(tmp_path / "sd_xl_turbo_1.0.safetensors", fingerprint("sdxl"))
    assert only(checkpoint).details["draws with"].startswith("1 step, no guidance")


def test_several_ranks_are_told_with_the_usual_one(tmp_path: Path) -> None:
    tensors = lora(ATTENTION, 768, 8) | lora(f"{ATTENTION[:-1]}v", 768, 8) | lora(f"{ATTENTION[:-1]}q", 320, 4)
    save_file(tensors, tmp_path / "x.safetensors")
    assert only(tmp_path / "x.safetensors").details["rank"] == "8 in most layers, 4 to 8"


@pytest.mark.parametrize(
    ("algorithm", "tensors"),
    {
        "LoHa": {
            "hada_w1_a": (320, 4),
            "hada_w1_b": (4, 768),
            "hada_w2_a": (320, 4),
            "hada_w2_b": (4, 768),
            "alpha": (),
        },
        "LoKr": {"lokr_w1": (16, 16), "lokr_w2_a": (20, 4), "lokr_w2_b": (4, 48), "alpha": ()},
        "DoRA": {"lora_down.weight": (4, 768), "lora_up.weight": (320, 4), "dora_scale": (1, 768), "alpha": ()},
        "full difference": {"diff": (320, 768)},
    }.items(),
)
def test_relatives_of_lora_are_named(algorithm: str, tensors: dict[str, tuple[int, ...]], tmp_path: Path) -> None:
    found = only(
        write_header(tmp_path / "x.safetensors", {f"{ATTENTION}.{name}": each for name, each in tensors.items()})
    )
    assert (found.kind, found.details["algorithm"], found.details["layers"]) == ("LoRA", algorithm, {"unet": 1})
    assert found.workflow is not None
    assert not [note for note in found.notes if "does not merge" in note]
    assert found.of == ("Stable Diffusion 1.x",)
    if algorithm != "full difference":
        assert found.details["rank"] == "4"


def test_a_lora_of_convolutions_is_named_so(tmp_path: Path) -> None:
    stem = "lora_unet_down_blocks_0_resnets_0_conv1"
    shapes = {f"{stem}.lora_down.weight": (4, 320, 3, 3), f"{stem}.lora_up.weight": (320, 4, 1, 1)}
    assert "LoCon" in only(write_header(tmp_path / "x.safetensors", shapes)).details["algorithm"]


@pytest.mark.parametrize(
    ("shapes", "title"),
    [
        ({"emb_params": (3, 768)}, "Stable Diffusion 1.x"),
        ({"<cat-toy>": (1024,)}, "Stable Diffusion 2.x"),
        ({"clip_l": (3, 768), "clip_g": (3, 1280)}, "Stable Diffusion XL"),
    ],
)
def test_an_embedding_is_named_with_the_command_that_takes_it(shapes: Shapes, title: str, tmp_path: Path) -> None:
    found = only(write_header(tmp_path / "bad-hands.safetensors", shapes))
    assert (found.kind, found.of) == ("embedding", (title,))
    assert found.command is not None and "--embedding" in found.command


@pytest.mark.parametrize(
    ("shapes", "kind"),
    [
        ({"x": (2, 2)}, "unknown"),
        ({"layer.weight": (64, 320)}, "unknown"),
        ({"*": (1, 768)}, "embedding"),
        ({"emb_params": (2, 2)}, "embedding"),
    ],
)
def test_a_matrix_is_an_embedding_only_by_its_name_or_where_a_text_encoder_reads_its_width(
    shapes: Shapes, kind: str, tmp_path: Path
) -> None:
    assert only(write_header(tmp_path / "x.safetensors", shapes)).kind == kind


def test_a_pickled_embedding_and_checkpoint_are_named_too(tmp_path: Path) -> None:
    torch.save({"string_to_param": {"*": torch.ones(2, 768)}, "name": "x"}, tmp_path / "x.pt")
    assert only(tmp_path / "x.pt").kind == "embedding"
    tensors = {name: torch.zeros(shape, dtype=torch.float16) for name, shape in fingerprint("sd15-tiny").items()}
    torch.save({"state_dict": tensors, "global_step": 7}, tmp_path / "model.ckpt")
    found = only(tmp_path / "model.ckpt")
    assert (found.kind, found.precision, found.architecture) == ("checkpoint", "float16", "sd15-tiny")
    assert found.workflow is not None and "allow_pickle: true" in found.workflow


@pytest.mark.parametrize(
    ("name", "kind"),
    {
        "controlnet_cond_embedding.conv_in.weight": "ControlNet",
        "control_model.input_blocks.0.0.weight": "ControlNet",
        "ip_adapter.1.to_k_ip.weight": "IP-Adapter",
        "double_blocks.0.img_attn.qkv.weight": "denoiser of Flux",
        "double_stream_modulation_img.lin.weight": "denoiser of FLUX.2",
        "joint_blocks.0.x_block.attn.qkv.weight": "denoiser of Stable Diffusion 3",
        "cap_pad_token": "denoiser of Z-Image",
    }.items(),
)
def test_other_networks_are_named(name: str, kind: str, tmp_path: Path) -> None:
    assert only(write_header(tmp_path / "x.safetensors", {name: (320, 768)})).kind == kind


@pytest.mark.parametrize(("plus", "tokens"), [(False, 4), (True, 6)])
def test_an_ip_adapter_is_told_with_its_kind_and_lines_that_are_valid(plus: bool, tokens: int, tmp_path: Path) -> None:
    shapes = {
        f"{part}.{name}": tuple(value.shape)
        for part, found in tensors("sd15-tiny", plus=plus).items()
        for name, value in found.items()
    }
    shapes |= {name: (320, 768) for name in shapes if name.endswith("_ip.weight")}
    found = only(write_header(tmp_path / "adapter.safetensors", shapes))
    assert (found.kind, found.of) == ("IP-Adapter", ("Stable Diffusion 1.x",))
    assert found.details["tokens of an image"] == tokens
    assert found.workflow is not None
    (tmp_path / "w.yaml").write_text(found.workflow)
    (pipeline,) = load_workflow(tmp_path / "w.yaml", catalog=catalog()).pipelines
    assert pipeline.ip_adapters[0].file == str(tmp_path / "adapter.safetensors")


def test_an_ip_adapter_that_is_not_supported_is_told_with_the_reason(tmp_path: Path) -> None:
    shapes = {
        "image_proj.proj.0.weight": (8, 8),
        "image_proj.norm.weight": (768,),
        "ip_adapter.1.to_k_ip.weight": (320, 768),
    }
    found = only(write_header(tmp_path / "x.safetensors", shapes))
    assert found.workflow is None and "FaceID" in found.notes[0]


def test_a_network_beside_the_denoiser_is_for_models_that_read_text_of_its_width(tmp_path: Path) -> None:
    shapes = {"controlnet_cond_embedding.conv_in.weight": (16, 3, 3, 3), "mid_block.attn2.to_k.weight": (1280, 2048)}
    found = only(write_header(tmp_path / "x.safetensors", shapes))
    assert found.of == ("Stable Diffusion XL",)
    assert found.workflow is not None
    assert yaml.safe_load(found.workflow)["controlnets"] == {"mine": found.path}


def test_an_unknown_file_is_said_to_be_unknown_with_the_nearest(tmp_path: Path) -> None:
    shapes = {**fingerprint("sd15"), "model.diffusion_model.input_blocks.0.0.weight": (320, 7, 3, 3)}
    found = only(write_header(tmp_path / "x.safetensors", {"something": (3, 4), "other": (2, 2, 2)}))
    assert (found.kind, found.workflow) == ("unknown", None)
    assert "not a supported architecture" in found.notes[0]
    near = only(write_header(tmp_path / "y.safetensors", shapes))
    assert near.kind != "checkpoint" or near.missing


# Damage

NAMES = st.sampled_from([
    *fingerprint("sd15"), f"{ATTENTION}.lora_down.weight", f"{ATTENTION}.alpha", f"{ATTENTION}.hada_w1_b", "emb_params", "clip_l",
    f"{ATTENTION}.lokr_w2", "control_model.x", "conv_in.weight", "global_step", "x", "",
])  # fmt: skip
SHAPES = st.lists(st.integers(0, 4), max_size=5).map(tuple)
KEYS = ("ss_tag_frequency", "ss_base_model_version", "modelspec.architecture", "modelspec.prediction_type", "other")
VALUES = st.one_of(
    st.text(max_size=8), st.sampled_from(["[]", "{}", '{"a": {"b": "c"}}', '{"a": 1}', "[" * 2000, "None"])
)
MANY = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@MANY
@given(st.dictionaries(NAMES, SHAPES, max_size=8), st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4))
def test_whatever_a_header_says_there_is_an_answer(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], metadata: dict[str, str]
) -> None:
    found = only(write_header(tmp_path / "x.safetensors", shapes, metadata))
    assert found.kind
    json.dumps(found.to_json())


@MANY
@given(st.binary(max_size=200), st.sampled_from([".safetensors", ".pt", ".bin", ".ckpt"]))
def test_damaged_files_are_refused_in_words(tmp_path: Path, content: bytes, suffix: str) -> None:
    (tmp_path / f"x{suffix}").write_bytes(content)
    with pytest.raises(SdflowError):
        inspect(tmp_path / f"x{suffix}")


@MANY
@given(
    st.sampled_from(["model_index.json", "config.json", "sdflow.json"]),
    st.one_of(
        st.binary(max_size=40),
        st.sampled_from([
            b'{"_class_name": 3}', b'{"_class_name": "StableDiffusionPipeline", "safety_checker": 3}', b"[]",
            b'{"_class_name": "AutoencoderKL", "block_out_channels": 3}', b'{"architectures": 3}', b'{"_class_name": []}',
            b'{"architectures": [[]]}', b'{"_class_name": "StableDiffusionPipeline", "safety_checker": []}',
        ]),
    ),
)  # fmt: skip
def test_damaged_folders_have_an_answer_or_are_refused_in_words(tmp_path: Path, name: str, content: bytes) -> None:
    for other in ("model_index.json", "config.json", "sdflow.json"):
        (tmp_path / other).unlink(missing_ok=True)
    (tmp_path / name).write_bytes(content)
    try:
        findings = inspect(tmp_path)
    except SdflowError:
        return
    assert all(each.kind for each in findings)


def test_what_a_file_says_of_itself_is_no_command_to_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {"ss_output_name": "\x1b]0;title\x07", "ss_base_model_version": "\x1b[2J"}
    save_file(lora(ATTENTION, 768), tmp_path / "a.safetensors", said)
    print_inspection(inspect(tmp_path / "a.safetensors"))
    told = capsys.readouterr().out
    assert "\\x1b[2J" in told
    assert {each for each in told if not each.isprintable()} == {"\n"}


def test_the_command_prints_lines_or_json_and_refuses_in_words(tmp_path: Path, sdflow: Command) -> None:
    save_file(lora(ATTENTION, 768, alpha=8.0), tmp_path / "dog.safetensors", {"modelspec.trigger_phrase": "sks dog"})

    def inspected(*arguments: str) -> subprocess.CompletedProcess[str]:
        return sdflow("inspect", *arguments, folder=tmp_path)

    plain = inspected("dog.safetensors")
    assert plain.returncode == 0, plain.stderr
    assert "trigger words  sks dog" in plain.stdout
    assert "extends: base/sd15.yaml" in plain.stdout
    told = json.loads(inspected("dog.safetensors", "--json").stdout)
    assert (told["format_version"], told["kind"], told["findings"][0]["kind"]) == (1, "inspect", "LoRA")
    for missing in ("no.safetensors", "."):
        refused = inspected(missing if missing != "." else str(ROOT / "docs"))
        assert refused.returncode == 2
        assert "Traceback" not in refused.stderr


def test_a_folder_of_a_controlnet_is_named_with_lines_that_take_it(tmp_path: Path) -> None:
    unet = UNet2DConditionModel.from_config(configs_of("sdxl-tiny")["unet"])
    ControlNetModel.from_unet(unet).save_pretrained(tmp_path)
    found = only(tmp_path)
    assert (found.kind, found.of) == ("controlnet", ("Stable Diffusion XL",))
    assert found.workflow is not None
    assert yaml.safe_load(found.workflow)["controlnets"] == {"mine": str(tmp_path)}
    (file,) = tmp_path.glob("*.safetensors")
    assert only(file).kind == "ControlNet"
