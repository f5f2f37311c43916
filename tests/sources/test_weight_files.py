"""A folder may hold a component's weights more than once. What is read is what diffusers and transformers read."""

import json
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from ip_adapter_files import save_adapter, save_encoder, tensors
from safetensors.torch import save_file

from sdflow.errors import CheckpointError
from sdflow.families import FAMILIES
from sdflow.sources import PlainDigests, load, load_module, open_checkpoint
from sdflow.sources.folder import open_component
from sdflow.sources.hub import component_files
from sdflow.sources.load import parameter_shapes
from sdflow.sources.reference import AdapterReference
from sdflow.verify.reference.torch_module import TorchModule
from sdflow.weights.tensors import open_tensors

FAMILY = FAMILIES["stable_diffusion"]
KINDS = ("single", "shards", "bin", "bin shards")
LAYOUTS = [(kind, variant) for variant in (None, "fp16") for kind in KINDS]
Tensors = Mapping[str, torch.Tensor]


def small_vae() -> Any:
    from diffusers import AutoencoderKL

    blocks = {"down_block_types": ["DownEncoderBlock2D"], "up_block_types": ["UpDecoderBlock2D"]}
    return AutoencoderKL(block_out_channels=[4], layers_per_block=1, norm_num_groups=2, **blocks)


def small_text() -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return CLIPTextModel(CLIPTextConfig(vocab_size=16, max_position_embeddings=8, projection_dim=8, **sizes))


MADE = {"vae": small_vae, "text_encoder": small_text}


def write(folder: Path, component: str, tensors: Tensors, kind: str, variant: str | None) -> None:
    """The weights as the library of the component names the files of this kind."""
    pickled = kind.startswith("bin")
    stem = "diffusion_pytorch_model" if component == "vae" else "pytorch_model" if pickled else "model"
    suffix, dotted = ".bin" if pickled else ".safetensors", f".{variant}" if variant else ""
    put = torch.save if pickled else save_file
    if not kind.endswith("shards"):
        put(dict(tensors), folder / f"{stem}{dotted}{suffix}")
        return
    names = sorted(tensors)
    shards = {f"{stem}{dotted}-0000{half + 1}-of-00002{suffix}": names[half::2] for half in (0, 1)}
    for file, own in shards.items():
        put({name: tensors[name] for name in own}, folder / file)
    weight_map = {name: file for file, own in shards.items() for name in own}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / f"{stem}{suffix}.index{dotted}.json").write_text(json.dumps(index))


def their_tensors(component: str, folder: Path) -> Tensors:
    """What `from_pretrained` loads: called plainly, or as a user goes on where that finds nothing."""
    cls = type(MADE[component]())
    for options in ({}, {"variant": "fp16"}, {"use_safetensors": False}, {"variant": "fp16", "use_safetensors": False}):
        try:
            return dict(cls.from_pretrained(folder, local_files_only=True, **options).float().state_dict())
        except OSError:
            continue
    raise AssertionError("the library reads none of these layouts")


def load_of(component: str, folder: Path) -> tuple[str, Mapping[str, Any]]:
    part = FAMILY.components[component][0]
    opened = open_component(folder, component, part, FAMILY, True)
    return part.name, opened.submodel(part, opened.config, FAMILY, opened.digests(PlainDigests()), {}).load


def our_tensors(component: str, folder: Path) -> Tensors:
    """What is bound."""
    name, load = load_of(component, folder)
    with open_tensors(name, load, shapes := parameter_shapes(name, load)) as tensors:
        return {key: torch.from_numpy(tensors.read(key).copy()).float() for key in shapes}


def equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.fixture(scope="module", params=["vae", "text_encoder"])
def component(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def copies(component: str) -> list[Tensors]:
    """As many different weights as there are layouts."""
    module = MADE[component]()
    return [{key: torch.randn(value.shape) for key, value in module.state_dict().items()} for _ in range(len(LAYOUTS))]


@pytest.fixture
def config(component: str, tmp_path: Path) -> Path:
    folder = tmp_path / "config"
    MADE[component]().save_pretrained(folder)
    return folder / "config.json"


def folders(
    component: str, copies: list[Tensors], config: Path, tmp_path: Path, counts: tuple[int, ...] = (1, 2)
) -> Iterator[tuple[str, Path]]:
    """A folder for every combination of so many ways in which weights may lie."""
    for count in counts:
        for chosen in combinations(range(len(LAYOUTS)), count):
            names = [" ".join(filter(None, LAYOUTS[index])) for index in chosen]
            folder = tmp_path / "_".join(map(str, chosen))
            folder.mkdir()
            (folder / "config.json").write_bytes(config.read_bytes())
            for index in chosen:
                write(folder, component, copies[index], *LAYOUTS[index])
            yield " and ".join(names), folder


@pytest.mark.parametrize("counts", [(1, 2), pytest.param((3,), marks=pytest.mark.slow)], ids=str)
def test_of_several_weights_those_are_bound_that_the_library_loads(
    component: str, copies: list[Tensors], config: Path, tmp_path: Path, counts: tuple[int, ...]
) -> None:
    wrong = []
    for what, folder in folders(component, copies, config, tmp_path, counts):
        if not equal(our_tensors(component, folder), their_tensors(component, folder)):
            wrong.append(what)
    assert wrong == []


def test_the_hub_is_asked_for_the_files_that_are_read(
    component: str, copies: list[Tensors], config: Path, tmp_path: Path
) -> None:
    model = FAMILY.components[component][0].model
    for what, folder in folders(component, copies, config, tmp_path):
        _, load = load_of(component, folder)
        wanted = component_files([f"x/{path.name}" for path in folder.iterdir()], "x/", model)
        read = {Path(stamp["path"]).name for stamp in load["files"]}
        fetched = {name.removeprefix("x/") for name in wanted if not name.endswith(".json")}
        assert fetched == read, what


def test_a_single_file_that_shards_replaced_is_left_to_the_library(component: str, tmp_path: Path) -> None:
    """`save_pretrained` leaves the older single file beside the index: the two libraries read it differently."""
    old, new = MADE[component](), MADE[component]()
    old.save_pretrained(tmp_path)
    (single,) = tmp_path.glob("*.safetensors")
    kept = single.read_bytes()
    new.save_pretrained(tmp_path, max_shard_size="1KB")
    assert list(tmp_path.glob("*.index.json"))
    single.write_bytes(kept)  # transformers removes it; one that a user copies there stays
    wanted = new if component == "vae" else old
    assert equal(our_tensors(component, tmp_path), wanted.state_dict())
    assert equal(their_tensors(component, tmp_path), wanted.state_dict())


def test_the_proof_reads_what_the_library_reads_whatever_was_chosen(
    component: str, copies: list[Tensors], config: Path
) -> None:
    """Were the choice of files wrong again, the reference would still be right, and the artifact differ from it."""
    folder = config.parent
    for path in folder.iterdir():
        if path != config:
            path.unlink()
    write(folder, component, copies[0], "single", None)
    name, load = load_of(component, folder)
    assert equal(TorchModule(name, load).network().module.state_dict(), copies[0])
    write(folder, component, copies[1], "shards", None)
    stale = TorchModule(name, load).network().module.state_dict()  # as if the single file had been chosen
    assert equal(stale, copies[1] if component == "vae" else copies[0])
    (folder / Path(load["files"][0]["path"]).name).unlink()
    assert equal(TorchModule(*load_of(component, folder)).network().module.state_dict(), copies[1])


@pytest.mark.parametrize("of", ["tiny_folder", "tiny_xl_folder"])
def test_the_proof_of_a_folder_starts_from_what_its_libraries_load(
    of: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a ControlNet and an IP-Adapter beside it; what builds takes no part in it."""
    from diffusers import ControlNetModel

    model = request.getfixturevalue(of)
    ControlNetModel.from_unet(UNet2DConditionModel.from_pretrained(model / "unet")).save_pretrained(tmp_path / "net")
    save_encoder(tmp_path / "image_encoder")
    adapter = save_adapter(
        tmp_path / "adapter.safetensors", tensors("sd15-tiny" if of == "tiny_folder" else "sdxl-tiny")
    )
    checkpoint = open_checkpoint(
        str(model),
        digests=PlainDigests(),
        download=False,
        nets={"mine": str(tmp_path / "net")},
        adapters=[AdapterReference(str(adapter))],
    )
    assert {"controlnet_mine", "image_encoder"} <= checkpoint.submodels.keys()
    built = {name: load_module(name, each.load).state_dict() for name, each in checkpoint.submodels.items()}
    fitted = load._fitted
    asked: list[str] = []

    def only_adapters(part: Any, how: Mapping[str, Any], *more: Any) -> Any:
        assert "folder" not in how, "read as the build reads it"
        asked.append(part.name)
        return fitted(part, how, *more)

    monkeypatch.setattr(load, "_fitted", only_adapters)
    for name, each in checkpoint.submodels.items():
        assert equal(TorchModule(name, each.load).network().module.state_dict(), built[name]), name
    assert sorted(asked) == ["image_encoder", "unet"], "the adapter's matrices and its projection lie in one file"


def test_an_index_that_no_library_reads_is_refused(component: str, copies: list[Tensors], config: Path) -> None:
    for path in config.parent.iterdir():
        if path != config:
            path.unlink()
    write(config.parent, component, copies[0], "shards", None)
    (index,) = config.parent.glob("*.index.json")
    index.write_text(json.dumps({"weight_map": json.loads(index.read_text())["weight_map"]}))
    with pytest.raises(CheckpointError, match="an index without metadata"):
        load_of(component, config.parent)


def test_what_transformers_would_read_besides_is_refused(tmp_path: Path) -> None:
    small_text().save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(CheckpointError, match="adapter"):
        load_of("text_encoder", tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "transformers_weights": "other.safetensors"}))
    with pytest.raises(CheckpointError, match="transformers_weights names 'other.safetensors'"):
        load_of("text_encoder", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "transformers_weights": "model.safetensors"}))
    assert equal(our_tensors("text_encoder", tmp_path), their_tensors("text_encoder", tmp_path))
