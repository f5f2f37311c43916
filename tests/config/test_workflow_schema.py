"""The JSON Schema that editors use, and the workflows of this repository."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from sdflow.config import json_schema, load_workflow
from sdflow.disk.shipped import shipped_workflow, shipped_workflows
from sdflow.errors import WorkflowError
from sdflow.families import any_family, family_of_architecture
from sdflow.passes.registry import catalog
from sdflow.sources.config_recognition import configs_of
from sdflow.targets import TARGETS

from .workflow_catalog import SmallCatalog

ROOT = Path(__file__).parents[2]
COMPLETE = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "workflows").glob("*.yaml"))
BASES = shipped_workflows()
# Part of a workflow's name -> an architecture with the submodels of its model.
MODELS = {
    "flux2": "flux2-klein-4b",
    "shapes_klein": "flux2-klein-4b",
    "z_image": "z-image-turbo",
    "flux1_dev": "flux1-dev",
    "flux1": "flux1-schnell",
    "sdxl_refiner": "sdxl-refiner",
    "sdxl": "sdxl",
    "sd35": "sd35-medium",
    "sd3": "sd3-medium",
    "stable_diffusion_3": "sd35-medium",
    "stable_diffusion_xl_refiner": "sdxl-refiner",
    "stable_diffusion_xl": "sdxl",
    "sd2": "sd21",
    "sd_turbo": "sd21",
    "shapes": "sd21",
    "": "sd15",
}


def architecture_of(workflow: str) -> str:
    return next(architecture for part, architecture in MODELS.items() if part in Path(workflow).stem)


@pytest.fixture(scope="module", params=[SmallCatalog, catalog])
def schema(request: pytest.FixtureRequest) -> jsonschema.Draft202012Validator:
    schema = json_schema(request.param())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_committed_schema_is_the_one_that_the_command_writes() -> None:
    """After a change: `sdflow schema > sdflow.schema.json`."""
    written = json.dumps(json_schema(catalog()), indent=2) + "\n"
    assert (ROOT / "sdflow.schema.json").read_text() == written


@pytest.mark.parametrize("name", (*COMPLETE, *BASES))
def test_every_workflow_of_the_repository_fits_the_schema(schema: jsonschema.Draft202012Validator, name: str) -> None:
    schema.validate(yaml.safe_load((shipped_workflow(name) or ROOT / name).read_text()))


@pytest.mark.parametrize("name", COMPLETE)
def test_every_workflow_of_the_repository_is_valid_for_its_target(name: str) -> None:
    family, configs = family_of_architecture(architecture_of(name)), configs_of(architecture_of(name))
    its = [part.name for part in family.parts if part.component in configs]
    for pipeline in load_workflow(ROOT / name, catalog=catalog()).pipelines:
        assert pipeline.name.startswith(Path(name).stem)
        assert Path(name).stem.endswith(pipeline.target)
        nets = [f"{family.net.name}_{each}" for each in sorted(pipeline.controlnets)]
        wanted = [*its, family.prompter.name] if pipeline.ip_adapters else its
        assert list(pipeline.submodels) == [each for each in any_family.submodels() if each in wanted] + nets


STANDARD_OPERATORS = ("tensorrt", "nv_tensorrt_rtx", "windowsml")
"""The targets whose providers fuse by themselves, and have none of ONNX Runtime's fused operators."""

UPON_OTHERS = ("base/few_channels.yaml", "base/taesd.yaml")
"""Those that are no workflow by themselves: they lie upon a model's."""


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("model", ["sd15", "sd21", "sdxl"])
def test_the_chains_of_taesd_lie_upon_every_model(model: str, target: str, tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text(f"extends: [base/{model}.yaml, base/taesd.yaml]\ntarget: {target}\n")
    (pipeline,) = load_workflow(
        tmp_path / "w.yaml", catalog=catalog(), overrides=["components.vae=synthetic:taesd"]
    ).pipelines
    halves = [[step.pass_name for step in pipeline.submodels[name]] for name in ("vae_encoder", "vae_decoder")]
    assert halves == [["OnnxConversion", *([] if target == "cpu" else ["OnnxFloatToFloat16"])]] * 2


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [name for name in BASES if name not in UPON_OTHERS])
def test_every_base_is_valid_for_every_target(name: str, target: str) -> None:
    family = family_of_architecture(architecture_of(name))
    overrides = [f"model=synthetic:{architecture_of(name)}"]
    path = shipped_workflow(name)
    assert path is not None
    pipeline, *_ = load_workflow(path, catalog=catalog(), overrides=overrides, targets=[target]).pipelines
    passes = {name: {step.pass_name for step in chain} for name, chain in pipeline.submodels.items()}
    small = name.endswith(("_tiny.yaml", "/tiny.yaml")) or "tiny_" in name or name.startswith("base/shapes")
    float32 = target == "cpu" or (target == "webgpu" and small)  # emulated adapters have no float16
    assert ("OnnxFloatToFloat16" in passes[family.denoiser]) == (not float32)
    assert ("OrtTransformersOptimization" in passes[family.denoiser]) == (target not in STANDARD_OPERATORS)
    never = {"cpu": "OnnxFloatToFloat16", **dict.fromkeys(STANDARD_OPERATORS, "OrtTransformersOptimization")}
    assert not [name for name, found in passes.items() if never.get(target) in found]


def here(workflow: str) -> list[str]:
    """What makes a workflow's models synthetic, of the same architectures, so that planning needs no download."""
    if "tiny" in workflow or "shapes" in workflow:
        return []
    model = f"synthetic:{architecture_of(workflow)}"
    changes = {
        "controlnet": f"controlnets={{canny: '{model}'}}",
        "ip_adapter": "ip_adapters=[{file: 'synthetic:ip-adapter'}]",
        "with_lcm": "components.unet=synthetic:lcm-sdxl",
        "with_refiner": "refiner.model=synthetic:sdxl-refiner",
        "lora": "loras=[]",  # it fits the published model alone
    }
    return [f"model={model}", *(change for part, change in changes.items() if part in workflow)]


PLANNED = [(name, []) for name in COMPLETE] + [
    (name.removesuffix(".yaml"), [target]) for name in BASES if name not in UPON_OTHERS for target in TARGETS
]


def test_every_workflow_is_planned_and_every_base_for_every_target_reading_each_file_once_and_importing_nothing_heavy(
    tmp_path: Path,
) -> None:
    """What keeps `sdflow plan` quick: each YAML file is opened once for a workflow, and modules come when needed."""
    code = """if True:
        import json, sys
        from pathlib import Path
        from sdflow.config import load_workflow
        from sdflow.passes.registry import catalog
        from sdflow.build.plan import make_plan
        from sdflow.store import Cache
        opened, found = [], []
        def hook(event, arguments):
            if event == "open" and str(arguments[0]).endswith(".yaml"):
                opened.append(str(Path(arguments[0]).resolve()))
        sys.addaudithook(hook)
        cache = Cache(Path(sys.argv[1]))
        for name, targets, overrides in json.load(sys.stdin):
            opened.clear()
            workflow = load_workflow(name, catalog=catalog(), overrides=overrides, targets=targets)
            assert sorted(map(str, workflow.files)) == sorted(opened), name
            steps = [len(list(each.steps(cache))) for each in make_plan(workflow, cache).pipelines]
            found.append([name, targets, [each.target for each in workflow.pipelines], list(opened), steps])
        print(json.dumps([found, list(sys.modules)]))
    """
    wanted = json.dumps([(name, targets, here(name)) for name, targets in PLANNED])
    command = [sys.executable, "-c", code, str(tmp_path / "cache")]
    run = subprocess.run(command, cwd=ROOT, input=wanted, check=True, capture_output=True, text=True)
    found, modules = json.loads(run.stdout)
    assert [(name, targets) for name, targets, *_ in found] == PLANNED
    for name, targets, built_for, opened, steps in found:
        assert set(built_for) == set(targets or built_for), name
        assert len(opened) == len(set(opened)) >= (1 if targets else 2), name  # a file extends a base at least
        assert all(count > 6 for count in steps), (name, targets, steps)
    heavy = {"torch", "onnx", "onnxruntime", "olive", "numpy", "diffusers", "transformers", "sdflow.passes.olive_pass"}
    assert not heavy & set(modules)


def test_the_example_of_a_users_pass_is_found_from_the_folder_of_workflows(tmp_path: Path) -> None:
    for folder in ("workflows", "user_scripts"):
        (tmp_path / folder).mkdir()
    script = ROOT / "user_scripts" / "static_shapes.py"
    (tmp_path / "user_scripts" / script.name).write_text(script.read_text())
    path = tmp_path / "workflows" / "w.yaml"
    text = """target: cpu
model: synthetic:sd15
evaluate: null
submodels:
  unet:
    passes:
      - {pass: OnnxConversion}
      - {pass: 'user_scripts/static_shapes.py:StaticShapes', sizes: {batch: SIZE}}
"""
    path.write_text(text.replace("SIZE", "2"))
    (pipeline,) = load_workflow(path, catalog=catalog()).pipelines
    assert pipeline.submodels["unet"][1].options == {"sizes": {"batch": 2}}
    path.write_text(text.replace("SIZE", "two"))
    with pytest.raises(WorkflowError, match=r"w\.yaml:8:77: .*'sizes.batch' must be a valid integer, found the text"):
        load_workflow(path, catalog=catalog())


BAD: dict[str, dict[str, Any]] = {
    "unknown key": {"modle": "x"},
    "unknown target": {"target": "gpu"},
    "unknown pass": {"submodels": {"unet": {"passes": [{"pass": "Onnx"}]}}},
    "unknown option": {"submodels": {"unet": {"passes": [{"pass": "OnnxConversion", "opset": 17}]}}},
    "option of another type": {"submodels": {"unet": {"passes": [{"pass": "OnnxConversion", "target_opset": "x"}]}}},
    "option out of range": {"submodels": {"unet": {"passes": [{"pass": "OnnxConversion", "target_opset": 3}]}}},
    "expect of another type": {"submodels": {"unet": {"passes": [{"pass": "LoraMerge", "expect": {"A": "x"}}]}}},
    "step without pass": {"submodels": {"unet": {"passes": [{"target_opset": 17}]}}},
    "unknown submodel": {"submodels": {"vae": {"passes": [{"pass": "OnnxConversion"}]}}},
    "unknown option of a change": {"targets": {"cpu": {"passes": {"OnnxConversion": {"opset": 17}}}}},
    "unknown pass of a change": {"targets": {"cpu": {"passes": {"Onnx": None}}}},
    "unknown fusion": {
        "targets": {"cpu": {"passes": {"OrtTransformersOptimization": {"optimization_options": {"nhwc": True}}}}}
    },
    "inserted before a number": {"submodels": {"unet": {"passes": {"OnnxFloatToFloat16": {"insert_before": 3}}}}},
    "inserted after an unknown pass": {"targets": {"cpu": {"passes": {"SubpixelConv": {"insert_after": "Onnx"}}}}},
    "inserted at two places": {
        "targets": {
            "cpu": {"passes": {"SubpixelConv": {"insert_after": "OnnxConversion", "insert_before": "LoraMerge"}}}
        }
    },
    "own pass at two places": {
        "submodels": {"unet": {"passes": {"a.py:A": {"insert_after": "LoraMerge", "insert_before": "LoraMerge"}}}}
    },
    "a place in a list": {"submodels": {"unet": {"passes": [{"pass": "OnnxConversion", "insert_after": "LoraMerge"}]}}},
    "LoRA without file": {"loras": [{"scale": 1}]},
    "unknown axis": {"matrix": {"models": []}},
    "no count of runs": {"evaluate": {"latency": {"runs": 0}}},
}
GOOD: dict[str, dict[str, Any]] = {
    "own pass": {"submodels": {"unet": {"passes": [{"pass": "user_scripts/a.py:Mine", "any": 1}]}}},
    "own pass changed": {"targets": {"cpu": {"passes": {"user_scripts/a.py:Mine": {"any": 1}}}}},
    "step inserted": {
        "submodels": {"unet": {"passes": {"SubpixelConv": {"insert_after": "OnnxConversion", "expect": {"Resize": 0}}}}}
    },
    "own pass inserted for a target": {
        "targets": {"cpu": {"submodels": {"unet": {"passes": {"a.py:A": {"insert_before": "LoraMerge", "any": 1}}}}}}
    },
    "beside an own pass": {"targets": {"cpu": {"passes": {"SubpixelConv": {"insert_after": "a.py:A"}}}}},
    "the place of an insertion taken back": {
        "submodels": {"unet": {"passes": {"SubpixelConv": {"insert_after": "LoraMerge", "insert_before": None}}}}
    },
    "submodel off": {"submodels": {"safety_checker": False, "vae_encoder": None}},
    "step removed": {"submodels": {"unet": {"passes": {"OnnxFloatToFloat16": None}}}},
    "matrix": {"matrix": {"model": {"a": "x"}, "loras": [[], [{"file": "f"}]], "target": ["cpu", "cuda"]}},
    "nothing measured": {"evaluate": None},
    "no LoRAs": {"loras": None, "extends": ["a.yaml", "b.yaml"]},
}


@pytest.mark.parametrize("case", BAD)
def test_the_schema_refuses(schema: jsonschema.Draft202012Validator, case: str) -> None:
    assert not schema.is_valid(BAD[case])


@pytest.mark.parametrize("case", GOOD)
def test_the_schema_accepts(schema: jsonschema.Draft202012Validator, case: str) -> None:
    schema.validate(GOOD[case])


def test_the_schema_describes_every_key(schema: jsonschema.Draft202012Validator) -> None:
    def described(node: Any, where: str) -> None:
        if isinstance(node, dict):
            for key, value in node.get("properties", {}).items():
                if isinstance(value, dict) and where in ("top", "submodels", "overlay", "matrix", "lora", "evaluate"):
                    assert value.get("description"), f"{where}.{key}"

    described(schema.schema, "top")
    for name, definition in schema.schema["$defs"].items():
        described(definition, name)
