"""What ComfyUI gives to custom nodes, and how it runs them: the modules that nodes import, and an executor of API-format prompts.

After ComfyUI's execution.py (`validate_inputs`, `get_input_data`, `execute`) and nodes.py (`load_custom_node`, EmptyLatentImage,
SaveImage); no package index has ComfyUI itself. It has what these nodes use, on real folders; nothing of it is ComfyUI's code.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

Prompt = dict[str, dict[str, Any]]


class EmptyLatentImage:
    RETURN_TYPES = ("LATENT",)
    FUNCTION = "generate"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        side = ("INT", {"default": 512, "min": 16, "max": 16384, "step": 8})
        return {
            "required": {"width": side, "height": side, "batch_size": ("INT", {"default": 1, "min": 1, "max": 4096})}
        }

    def generate(self, width: int, height: int, batch_size: int) -> tuple[dict[str, Any]]:
        return ({"samples": torch.zeros([batch_size, 4, height // 8, width // 8]), "downscale_ratio_spacial": 8},)


@dataclass
class Host:
    """A ComfyUI with one custom node folder. models: its folder of models. steps: what progress bars were told."""

    models: Path
    nodes: dict[str, type] = field(default_factory=dict)
    saved: list[torch.Tensor] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)
    interrupted: bool = False

    def load(self, folder: Path) -> None:
        """As `load_custom_node`: a module of the folder's name, and its mappings."""
        for name, module in self._modules().items():
            sys.modules[name] = module
        name = str(folder).replace(".", "_x_")
        spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        assert module.NODE_DISPLAY_NAME_MAPPINGS.keys() == module.NODE_CLASS_MAPPINGS.keys()
        self.nodes = {**module.NODE_CLASS_MAPPINGS, "EmptyLatentImage": EmptyLatentImage}
        for node in module.NODE_CLASS_MAPPINGS.values():
            assert isinstance(node.RETURN_TYPES, tuple) and isinstance(node.CATEGORY, str)
            assert callable(getattr(node, node.FUNCTION)) and "required" in node.INPUT_TYPES()

    def _modules(self) -> dict[str, ModuleType]:
        paths, comfy, utils, management = (
            ModuleType(name) for name in ("folder_paths", "comfy", "comfy.utils", "comfy.model_management")
        )
        registered: dict[str, list[str]] = {"loras": [str(self.models / "loras")]}

        def find(kind: str, name: str) -> str:
            found = [path for root in registered[kind] if (path := Path(root) / name).is_file()]
            if not found:
                raise FileNotFoundError(f"Model in folder '{kind}' with filename '{name}' not found.")
            return str(found[0])

        paths.models_dir = str(self.models)  # type: ignore[attr-defined]
        paths.add_model_folder_path = lambda kind, path: registered.setdefault(kind, []).append(path)  # type: ignore[attr-defined]
        paths.get_folder_paths = lambda kind: registered[kind][:]  # type: ignore[attr-defined]
        paths.get_full_path_or_raise = find  # type: ignore[attr-defined]
        paths.get_filename_list = lambda kind: sorted(  # type: ignore[attr-defined]
            path.relative_to(root).as_posix() for root in registered[kind] for path in Path(root).rglob("*.safetensors")
        )
        host = self

        class InterruptProcessingException(Exception):
            pass

        class ProgressBar:
            def __init__(self, total: int) -> None:
                self.total = total

            def update_absolute(self, value: int, total: int | None = None, preview: Any = None) -> None:
                host.steps.append((value, self.total if total is None else total))

        def throw() -> None:
            if host.interrupted:
                raise InterruptProcessingException

        utils.ProgressBar, management.throw_exception_if_processing_interrupted = ProgressBar, throw  # type: ignore[attr-defined]
        comfy.utils, comfy.model_management = utils, management  # type: ignore[attr-defined]
        return {"folder_paths": paths, "comfy": comfy, "comfy.utils": utils, "comfy.model_management": management}

    def validate(self, prompt: Prompt) -> list[str]:
        """What `validate_inputs` would report: inputs that are missing, of the wrong type, out of bounds, or not in a list."""
        problems = []
        for number, node in prompt.items():
            if node["class_type"] == "SaveImage":
                continue
            inputs = self.nodes[node["class_type"]].INPUT_TYPES()["required"]  # type: ignore[attr-defined]
            problems += [f"{number}.{name}: missing" for name in inputs.keys() - node["inputs"].keys()]
            problems += [f"{number}.{name}: unknown" for name in node["inputs"].keys() - inputs.keys()]
            for name, (kind, *options) in inputs.items():
                given, limits = node["inputs"].get(name), options[0] if options else {}
                if isinstance(given, list):
                    source, place = given
                    made = self.nodes[prompt[source]["class_type"]].RETURN_TYPES[place]  # type: ignore[attr-defined]
                    problems += [] if made == kind else [f"{number}.{name}: {made} is no {kind}"]
                elif isinstance(kind, list):
                    problems += [] if given in kind else [f"{number}.{name}: {given!r} not in list"]
                elif isinstance(given, int | float) and not limits.get("min", given) <= given <= limits.get(
                    "max", given
                ):
                    problems.append(f"{number}.{name}: {given} is out of bounds")
        return problems

    def execute(self, prompt: Prompt) -> Mapping[str, tuple[Any, ...]]:
        """The outputs of every node, each computed once, under inference mode as in ComfyUI."""
        assert self.validate(prompt) == []
        outputs: dict[str, tuple[Any, ...]] = {}
        with torch.inference_mode():
            for number in prompt:
                self._execute(prompt, number, outputs)
        return outputs

    def _execute(self, prompt: Prompt, number: str, outputs: dict[str, tuple[Any, ...]]) -> None:
        if number in outputs:
            return
        node, given = prompt[number], {}
        for name, value in node["inputs"].items():
            if isinstance(value, list):
                self._execute(prompt, value[0], outputs)
                given[name] = outputs[value[0]][value[1]]
            else:
                given[name] = value
        if node["class_type"] == "SaveImage":
            self.saved.append(given["images"])
            outputs[number] = ()
            return
        made = self.nodes[node["class_type"]]()
        outputs[number] = getattr(made, made.FUNCTION)(**given)  # type: ignore[attr-defined]
        assert len(outputs[number]) == len(made.RETURN_TYPES)  # type: ignore[attr-defined]
