"""What headers and configurations show of a model is refused by `validate` and by `plan`, before anything is built."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from original_layout import stable_diffusion_1, stable_diffusion_3, stable_diffusion_xl
from safetensors.torch import load_file, save_file
from small_lora import write_lora
from started_python import Command
from walk import tiny

from sdflow.build.model_check import input_problems
from sdflow.build.plan import make_plan
from sdflow.config import load_workflow
from sdflow.errors import CheckpointError
from sdflow.families import FAMILIES, family_of_architecture
from sdflow.passes.registry import catalog
from sdflow.sources import PlainDigests, load_pipeline, open_checkpoint
from sdflow.store import Cache

Tensors = dict[str, torch.Tensor]
BASES = {"sd15-tiny": "base/stable_diffusion_1.yaml", "sdxl-tiny": "base/stable_diffusion_xl.yaml"}
FILES = {
    "unet": "unet/diffusion_pytorch_model.safetensors",
    "vae": "vae/diffusion_pytorch_model.safetensors",
    "text_encoder": "text_encoder/model.safetensors",
}
PREFIXES = {
    "unet": "model.diffusion_model.",
    "vae": "first_stage_model.",
    "text_encoder": "cond_stage_model.transformer.",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each architecture as diffusers saves it, and in one file of the original layout."""
    root = tmp_path_factory.mktemp("models")
    for name in BASES:
        pipeline = load_pipeline(open_checkpoint(f"synthetic:{name}?seed=2", digests=PlainDigests(), download=False))
        pipeline.save_pretrained(root / name)
        parts = [pipeline.unet, pipeline.vae, pipeline.text_encoder]
        original = (
            stable_diffusion_1(*parts) if name == "sd15-tiny" else stable_diffusion_xl(*parts, pipeline.text_encoder_2)
        )
        save_file(original, root / f"{name}.safetensors")
    return root


def workflow(folder: Path, model: Path, base: str = BASES["sd15-tiny"]) -> Path:
    path = folder / f"{model.name}.yaml"
    path.write_text(f"extends: {base}\nmodel: {model}\ntarget: cpu\n")
    return path


def refusal(path: Path) -> str:
    """What both say: `plan` by raising, `validate` with the place in the workflow."""
    loaded = load_workflow(path, catalog=catalog())
    with pytest.raises(CheckpointError) as caught:
        make_plan(loaded, Cache(path.parent / "cache"))
    (problem,) = input_problems(loaded)
    assert (problem.file, problem.line) == (str(path), 2)
    assert problem.message.endswith(caught.value.what) and problem.remedy == caught.value.remedy
    assert caught.value.remedy is not None
    return caught.value.what


def int8(tensors: Tensors, key: str) -> None:
    tensors[key] = tensors[key].to(torch.int8)


def missing(tensors: Tensors, key: str) -> None:
    del tensors[key]


def misshapen(tensors: Tensors, key: str) -> None:
    tensors[key] = tensors[key][..., :-1].contiguous()


DAMAGES: Mapping[str, tuple[Callable[[Tensors, str], None], str]] = {
    "int8": (int8, "is of dtype I8: the file is quantized"),
    "missing": (missing, "missing: "),
    "misshapen": (misshapen, "of a wrong shape: "),
}


@pytest.mark.parametrize("how", ["folder", "file"])
@pytest.mark.parametrize("component", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_no_graph_can_be_filled_with_is_refused_before_any_is_made(
    damage: str, component: str, how: str, models: Path, tmp_path: Path
) -> None:
    change, told = DAMAGES[damage]
    if how == "folder":
        model = Path(shutil.copytree(models / "sd15-tiny", tmp_path / "model"))
        file, prefix = model / FILES[component], ""
    else:
        model = file = Path(shutil.copy(models / "sd15-tiny.safetensors", tmp_path / "model.safetensors"))
        prefix = PREFIXES[component]
    tensors = load_file(file)
    # The last matrix of all: nothing that tells one architecture from another.
    key = max(
        name for name, tensor in tensors.items() if name.startswith(prefix) and "norm" not in name and tensor.dim() > 1
    )
    change(tensors, key)
    save_file(tensors, file)
    assert told in (what := refusal(workflow(tmp_path, model)))
    assert damage == "missing" or key in what


def test_a_tensor_in_two_shards_is_refused(models: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(models / "sd15-tiny", tmp_path / "model"))
    tensors = load_file(model / FILES["unet"])
    (model / FILES["unet"]).unlink()
    names = sorted(tensors)
    shards = {"diffusion_pytorch_model-00001-of-00002.safetensors": names[:300],
              "diffusion_pytorch_model-00002-of-00002.safetensors": names[299:]}  # fmt: skip
    for file, own in shards.items():
        save_file({name: tensors[name] for name in own}, model / "unet" / file)
    weight_map = {name: file for file, own in shards.items() for name in own}
    index = {"metadata": {}, "weight_map": weight_map}
    (model / f"{FILES['unet']}.index.json").write_text(json.dumps(index))
    assert f"{names[299]} lies in diffusion_pytorch_model-00001-of-00002.safetensors too" in refusal(
        workflow(tmp_path, model)
    )


@pytest.mark.parametrize("suffix", ["", ".safetensors"])
@pytest.mark.parametrize(
    ("model", "base", "told"),
    [
        ("sd15-tiny", BASES["sdxl-tiny"], "has no text_encoder_2: it is of the family Stable Diffusion"),
        ("sdxl-tiny", BASES["sd15-tiny"], "no image can be drawn without text_encoder_2"),
    ],
)
def test_a_model_under_the_base_of_another_family_is_refused(
    model: str, base: str, told: str, suffix: str, models: Path, tmp_path: Path
) -> None:
    path = workflow(tmp_path, models / f"{model}{suffix}", base)
    (problem,) = input_problems(load_workflow(path, catalog=catalog()))
    assert told in problem.message and (problem.file, problem.line) == (str(path), 2)
    assert problem.remedy is not None and "Extend the workflow of that family" in problem.remedy


@pytest.mark.parametrize("architecture", [tiny(family) for family in FAMILIES.values()])
def test_an_image_needs_the_submodels_that_draw_it(architecture: str, tmp_path: Path) -> None:
    family = family_of_architecture(architecture)
    path = tmp_path / "w.yaml"
    text = f"target: cpu\nmodel: synthetic:{architecture}\n"
    text += f"submodels:\n  {family.denoiser}: {{passes: [{{pass: OnnxConversion}}]}}\n"
    path.write_text(text)
    (problem,) = input_problems(load_workflow(path, catalog=catalog()))
    others = [name for name in family.drawing if name != family.denoiser]
    assert f"no image can be drawn without {' and '.join(others)}" in problem.message
    assert (problem.file, problem.line) == (str(path), 2)
    path.write_text(text + "evaluate: {image: null}")
    assert not input_problems(load_workflow(path, catalog=catalog()))


def test_a_text_encoder_without_a_chain_is_left_out_by_name(tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    text = "extends: base/stable_diffusion_3.yaml\nmodel: synthetic:sd35-tiny\ntarget: cpu\nsubmodels: {text_encoder_3: false}\n"
    path.write_text(text)
    (problem,) = input_problems(load_workflow(path, catalog=catalog()))
    assert "reads prompts with text_encoder_3 too" in problem.message and problem.line == 2
    assert problem.remedy is not None and "components: {text_encoder_3: null}" in problem.remedy
    path.write_text(text + "components: {text_encoder_3: null}")
    assert not input_problems(load_workflow(path, catalog=catalog()))


def test_a_component_that_the_family_needs_cannot_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(
        "extends: base/sdxl.yaml\nmodel: synthetic:sdxl-tiny\ntarget: cpu\ncomponents: {text_encoder_3: null}\n"
    )
    (problem,) = input_problems(load_workflow(path, catalog=catalog()))
    assert "has no component 'text_encoder_3' that can be omitted" in problem.message and problem.line == 2


def test_a_file_without_text_encoders_says_what_it_lacks(tmp_path: Path) -> None:
    theirs = load_pipeline(open_checkpoint("synthetic:sd35-tiny", digests=PlainDigests(), download=False))
    save_file(stable_diffusion_3(theirs.transformer, theirs.vae), tmp_path / "sd3.safetensors")
    path = tmp_path / "w.yaml"
    path.write_text("extends: base/stable_diffusion_3.yaml\nmodel: sd3.safetensors\ntarget: cpu\n")
    (problem,) = input_problems(load_workflow(path, catalog=catalog()))
    assert "holds no text_encoder and no text_encoder_2, which Stable Diffusion 3 needs" in problem.message
    file = tmp_path / "sd3.safetensors"
    lines = f"components: {{vae: {file}, transformer: {file}}}"
    assert problem.remedy is not None and lines in problem.remedy
    path.write_text(f"extends: base/stable_diffusion_3.yaml\nmodel: synthetic:sd35-tiny\ntarget: cpu\n{lines}\n")
    assert not input_problems(load_workflow(path, catalog=catalog()))


@pytest.mark.parametrize("kind", ["kohya", "peft", "folder", "component"])
def test_a_lora_or_a_component_as_model_is_named(kind: str, models: Path, tmp_path: Path) -> None:
    model = tmp_path / "x.safetensors"
    told = "this is a LoRA or a related adapter: name it under `loras`"
    if kind == "kohya":
        write_lora(model)
    elif kind == "peft":
        save_file({f"unet.mid_block.attentions.0.proj_in.lora_{end}.weight": torch.zeros(4, 4) for end in "AB"}, model)
    else:
        model = tmp_path / "folder"
        model.mkdir()
        told = "this is the folder of a LoRA"
        if kind == "folder":
            write_lora(model / "pytorch_lora_weights.safetensors")
        else:
            model, told = models / "sd15-tiny/vae", "this is one component, AutoencoderKL, not a pipeline"
    assert told in refusal(workflow(tmp_path, model))


@pytest.mark.parametrize("suffix", ["", ".safetensors"])
@pytest.mark.parametrize("model", BASES)
def test_a_sound_model_is_valid(model: str, suffix: str, models: Path, tmp_path: Path) -> None:
    path = workflow(tmp_path, models / f"{model}{suffix}", BASES[model])
    loaded = load_workflow(path, catalog=catalog())
    assert input_problems(loaded) == []
    assert len(make_plan(loaded, Cache(tmp_path / "cache")).pipelines) == 1


def test_the_commands_refuse_in_words_and_build_nothing(models: Path, tmp_path: Path, sdflow: Command) -> None:
    model = Path(shutil.copy(models / "sd15-tiny.safetensors", tmp_path / "model.safetensors"))
    tensors = load_file(model)
    int8(tensors, "model.diffusion_model.out.2.weight")
    save_file(tensors, model)
    path = workflow(tmp_path, model)
    done = sdflow("validate", str(path), folder=tmp_path)
    assert done.returncode == 2 and f"{path}:2:" in done.stderr and "I8" in done.stderr
    done = sdflow("plan", str(path), "--cache", "cache", folder=tmp_path)
    assert done.returncode != 0 and "I8" in done.stderr and "Traceback" not in done.stderr
    assert not list((tmp_path / "cache").rglob("*.onnx"))


def test_looking_at_a_model_imports_no_torch(models: Path, tmp_path: Path) -> None:
    paths = [workflow(tmp_path, models / f"sd15-tiny{suffix}") for suffix in ("", ".safetensors")]
    code = """if True:
        import sys
        from pathlib import Path
        from sdflow.config import load_workflow
        from sdflow.build.model_check import input_problems
        from sdflow.passes.registry import catalog
        from sdflow.build.plan import make_plan
        from sdflow.store import Cache
        for path in sys.argv[1:]:
            loaded = load_workflow(path, catalog=catalog())
            assert input_problems(loaded) == []
            make_plan(loaded, Cache(Path(path).parent / "cache"))
        print({"torch", "onnx", "diffusers", "transformers"} & set(sys.modules))
    """
    done = subprocess.run([sys.executable, "-c", code, *map(str, paths)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr
