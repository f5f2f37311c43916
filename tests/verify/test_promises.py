"""What a pipeline folder promises is checked, and each promise that was broken on purpose is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto

from sdflow.artifact import Artifact
from sdflow.assemble import assemble
from sdflow.errors import UsageError
from sdflow.manifest import MANIFEST_FILE, Origin
from sdflow.onnx_model.files import place, set_external
from sdflow.sources import Checkpoint
from sdflow.targets import TARGETS
from sdflow.verify.promises import check_promises
from tests.tiny_pipeline import artifact_of
from tests.weights.conftest import Builder

Edit = Callable[[Any], object]

RENAMED = "unet: sample: there is no input of this name (there is latents); diffusers uses it: "
NAMES = "leave the names and types to OnnxConversion"
AGAIN = "build the pipeline again: sdflow run"


@pytest.fixture
def folder(tiny_artifacts: dict[str, Artifact], tiny_checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """The tiny pipeline, in files of its own."""
    out = tmp_path / "tiny"
    assemble(out, parts=tiny_artifacts, companions=tiny_checkpoint.companions, origin=Origin("tiny", "cpu"), copy=True)
    return out


def said(folder: Path, **options: Any) -> list[str]:
    return [f"{finding.level}: {finding}" for finding in check_promises(folder, **options)]


def edit_manifest(folder: Path, edit: Edit) -> None:
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    edit(manifest)
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))


def build(folder: Path, submodel: str, edit: Edit) -> None:
    """Edit a submodel's graph as if it had been built so: the manifest's digests are those of the edited files."""
    path = folder / submodel / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    edit(model)
    path.write_bytes(model.SerializeToString())
    sign(folder, submodel)


def sign(folder: Path, submodel: str) -> None:
    built = artifact_of(folder / submodel)
    files = [{"path": entry.path, "bytes": entry.size, "sha256": entry.sha256} for entry in built.files]
    edit_manifest(folder, lambda manifest: manifest["submodels"][submodel].update(artifact=built.digest, files=files))


def external(model: Any) -> list[Any]:
    return [tensor for tensor in model.graph.initializer if tensor.data_location == TensorProto.EXTERNAL]


# Good folders


def test_a_good_pipeline_keeps_every_promise(folder: Path) -> None:
    assert check_promises(folder) == []


def test_a_good_pipeline_of_links_keeps_every_promise(tiny_pipeline: Path) -> None:
    assert check_promises(tiny_pipeline, TARGETS["cpu"]) == []


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="this is no pipeline of sdflow"):
        check_promises(tmp_path)


def test_a_manifest_without_a_target_is_refused(folder: Path) -> None:
    edit_manifest(folder, lambda manifest: manifest.pop("target"))
    with pytest.raises(UsageError, match="does not say how the pipeline was built: 'target' is missing"):
        check_promises(folder)


# Inputs and outputs


def rename_input(model: Any) -> None:
    for node in model.graph.node:
        node.input[:] = ["latents" if name == "sample" else name for name in node.input]
    model.graph.input[0].name = "latents"


def swap_inputs(model: Any) -> None:
    first, second, *rest = [onnx.ValueInfoProto.FromString(info.SerializeToString()) for info in model.graph.input]
    del model.graph.input[:]
    model.graph.input.extend([second, first, *rest])


def element_type(index: int, data_type: int) -> Edit:
    return lambda model: setattr(model.graph.input[index].type.tensor_type, "elem_type", data_type)


def axis(index: int, **values: Any) -> Edit:
    def edit(model: Any) -> None:
        for key, value in values.items():
            setattr(model.graph.input[0].type.tensor_type.shape.dim[index], key, value)

    return edit


@pytest.mark.parametrize(
    ("submodel", "edit", "message"),
    [
        ("unet", rename_input, f"error: {RENAMED}{NAMES}"),
        (
            "unet",
            swap_inputs,
            "error: unet: timestep: the inputs are timestep, sample, encoder_hidden_states; "
            f"expected sample, timestep, encoder_hidden_states: {NAMES}",
        ),
        (
            "text_encoder",
            lambda model: model.graph.output.pop(),
            f"error: text_encoder: pooler_output: there is no output of this name; diffusers uses it: {NAMES}",
        ),
        (
            "text_encoder",
            element_type(0, TensorProto.INT64),
            "error: text_encoder: input_ids: the input is int64, not int32: "
            "diffusers feeds int32; set input_int32: true, or leave OnnxConversion's type",
        ),
        (
            "unet",
            element_type(1, TensorProto.INT64),
            "error: unet: timestep: the input is int64, not float32: "
            "an integer or half type cuts off the timesteps of Euler's and DPM's schedulers; keep_io_types",
        ),
        (
            "unet",
            element_type(0, TensorProto.FLOAT16),
            "warning: unet: sample: is float16 and text_encoder's last_hidden_state is float32: "
            "diffusers passes one to the other without a cast: "
            "convert both to float16, or neither; or keep_io_types: true for both",
        ),
        ("unet", axis(1, dim_value=9), f"error: unet: sample: axis 1 of the input has size 9, not 4: {AGAIN}"),
        (
            "unet",
            axis(0, dim_param="n"),
            "warning: unet: sample: axis 0 of the input is named n, not batch: sizes are fixed by these names",
        ),
    ],
    ids=["renamed", "swapped", "output missing", "ids int64", "timestep int64", "half only", "channels", "axis name"],
)
def test_inputs_and_outputs_are_those_that_diffusers_feeds_and_reads(
    folder: Path, submodel: str, edit: Edit, message: str
) -> None:
    build(folder, submodel, edit)
    assert said(folder) == [message]


def test_an_opset_that_the_runtime_does_not_load(folder: Path) -> None:
    build(folder, "unet", lambda model: setattr(model.opset_import[0], "version", 99))
    [message] = said(folder)
    assert message.startswith("error: unet: model.onnx: is of opset 99; onnxruntime 1.31")
    assert message.endswith("loads up to 26: set target_opset: 26 or less")
    assert "error: unet: model.onnx: is of opset 99; onnxruntime-directml 1.24 loads up to 25: " \
        "set target_opset: 25 or less" in said(folder, target=TARGETS["directml"])  # fmt: skip


def test_an_ir_version_that_the_runtime_does_not_load(folder: Path) -> None:
    build(folder, "unet", lambda model: setattr(model, "ir_version", 12))
    assert said(folder) == []
    assert said(folder, target=TARGETS["rocm"]) == [
        "warning: unet: model.onnx: is of IR version 12; onnxruntime-rocm 1.22.2 loads up to 10: save it with an older onnx"
    ]


# Weights


def test_a_truncated_data_file(folder: Path) -> None:
    path = folder / "unet" / "model.onnx.data"
    size = path.stat().st_size
    last = external(onnx.load(folder / "unet" / "model.onnx", load_external_data=False))[-1]
    with path.open("r+b") as stream:
        stream.truncate(size - 1)
    assert said(folder) == [
        f"error: unet: model.onnx.data: is cut off: {size - 1:,} of {size:,} bytes: {AGAIN}",
        f"error: unet: {last.name}: ends at byte {size:,} of model.onnx.data, which has {size - 1:,}: {AGAIN}",
    ]


def test_a_flipped_byte(folder: Path) -> None:
    path = folder / "unet" / "model.onnx.data"
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    assert said(folder) == [
        "error: unet: model.onnx.data: holds other bytes than were built: damaged, or weights of another model.onnx: "
        + AGAIN
    ]
    assert said(folder, digests=False) == [], "sizes alone do not tell"


@pytest.mark.parametrize("name", ["another", "main_grapn"], ids=["of another size", "of the same size"])
def test_a_stale_graph_beside_new_weights(folder: Path, name: str) -> None:
    path = folder / "vae_decoder" / "model.onnx"
    old = path.read_bytes()
    build(folder, "vae_decoder", lambda model: setattr(model.graph, "name", name))
    path.write_bytes(old)
    assert said(folder) == [
        f"error: vae_decoder: model.onnx: is not the graph that was built with these weights (model.onnx.data is): {AGAIN}"
    ]


def test_a_link_to_another_artifact(folder: Path, tiny_artifacts: dict[str, Artifact], tmp_path: Path) -> None:
    other = tmp_path / "objects" / "aa" / ("a" * 64) / "files"
    shutil.copytree(folder / "unet", other)
    shutil.rmtree(folder / "unet")
    (folder / "unet").symlink_to(other, target_is_directory=True)
    built = tiny_artifacts["unet"].digest[:12]
    assert said(folder) == [f"error: unet: links to artifact aaaaaaaaaaaa, and {built} was built: {AGAIN}"]


def test_a_manifest_whose_list_is_not_the_artifacts(folder: Path) -> None:
    edit_manifest(folder, lambda manifest: manifest["submodels"]["unet"].update(artifact="b" * 64))
    assert said(folder) == [
        f"error: unet: sdflow.json: its list of files is not that of artifact bbbbbbbbbbbb: {AGAIN}"
    ]


def test_external_data_that_nothing_uses(folder: Path) -> None:
    with (folder / "unet" / "model.onnx.data").open("ab") as stream:
        stream.write(bytes(1000))
    sign(folder, "unet")
    assert said(folder) == [f"error: unet: model.onnx.data: its last 1,000 bytes belong to no tensor: {AGAIN}"]


def test_external_data_with_a_hole(folder: Path) -> None:
    def skip(model: Any) -> None:
        tensor = external(model)[0]
        tensor.raw_data = bytes(place(tensor)[2] or 0)
        tensor.ClearField("data_location")
        del tensor.external_data[:]

    model = onnx.load(folder / "unet" / "model.onnx", load_external_data=False)
    first, second = external(model)[:2]
    build(folder, "unet", skip)
    assert said(folder) == [
        f"error: unet: model.onnx.data: {place(first)[2]:,} bytes before {second.name} belong to no tensor: {AGAIN}"
    ]


def test_external_data_that_overlaps(folder: Path) -> None:
    model = onnx.load(folder / "unet" / "model.onnx", load_external_data=False)
    *_, before, last = external(model)
    _, offset, length = place(last)

    def move(model: Any) -> None:
        set_external(external(model)[-1], "model.onnx.data", offset - 4, length or 0)

    build(folder, "unet", move)
    assert said(folder) == [
        f"error: unet: {last.name}: overlaps {before.name} in model.onnx.data, at byte {offset - 4:,}: {AGAIN}",
        f"error: unet: model.onnx.data: its last 4 bytes belong to no tensor: {AGAIN}",
    ]


def test_external_data_outside_the_folder(folder: Path) -> None:
    def outside(model: Any) -> None:
        for tensor in external(model):
            tensor.external_data[0].value = "../elsewhere.data"

    build(folder, "unet", outside)
    message = "lies outside the model's folder: no runtime loads external data from there"
    assert f"error: unet: ../elsewhere.data: {message}: {AGAIN}" in said(folder)
    assert f"error: unet: model.onnx.data: no tensor lies in it: {AGAIN}" in said(folder)


def test_a_missing_weights_file(folder: Path) -> None:
    (folder / "unet" / "model.onnx.data").unlink()
    tensors = len(external(onnx.load(folder / "unet" / "model.onnx", load_external_data=False)))
    assert said(folder) == [
        f"error: unet: model.onnx.data: is missing: {AGAIN}",
        f"error: unet: model.onnx.data: is missing: {tensors} tensors lie in it: {AGAIN}",
    ]


def test_a_structure_in_place_of_a_model(folder: Path, built: Builder) -> None:
    shutil.rmtree(folder / "text_encoder")
    shutil.copytree(built.structure("text_encoder", "cpu"), folder / "text_encoder")
    sign(folder, "text_encoder")
    found = said(folder)
    assert found
    assert all("has a recipe and no values: this is a structure, no weights were bound to it" in one for one in found)


def test_a_graph_that_is_no_graph(folder: Path) -> None:
    (folder / "unet" / "model.onnx").write_bytes(b"\xff" * 100)
    sign(folder, "unet")
    [message] = said(folder)
    assert message.startswith("error: unet: model.onnx: is no ONNX model (")


# Everything else in the folder


def test_a_missing_companion_file(folder: Path) -> None:
    (folder / "tokenizer" / "vocab.json").unlink()
    assert said(folder) == [f"error: tokenizer/vocab.json: is missing: {AGAIN}"]


def test_a_missing_component(folder: Path) -> None:
    shutil.rmtree(folder / "scheduler")
    assert said(folder) == [f"error: scheduler: model_index.json names it and there is no such folder: {AGAIN}"]


def test_a_model_index_without_the_unet(folder: Path) -> None:
    index = json.loads((folder / "model_index.json").read_text())
    del index["unet"]
    (folder / "model_index.json").write_text(json.dumps(index))
    assert said(folder) == [f"error: model_index.json: does not name unet: {AGAIN}"]


def test_a_file_that_was_left_behind(folder: Path) -> None:
    (folder / "unet" / "model.onnx_data").write_bytes(b"of an older version")
    assert said(folder) == ["error: unet: model.onnx_data: is not part of what was built: remove it"]
