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
from sdflow.build.assemble import assemble
from sdflow.errors import UsageError
from sdflow.manifest import MANIFEST_FILE, Origin
from sdflow.onnx_model.files import data_span, set_external
from sdflow.onnx_model.stub import is_stub
from sdflow.sources import Checkpoint
from sdflow.targets import TARGETS
from sdflow.verify.artifact.promises import check_promises
from sdflow.verify.kernels import kernel_table
from tests.support.converted import artifact_of
from tests.verify.told import Told, assert_told
from tests.weights.conftest import Builder

Edit = Callable[[Any], object]

NAMES = ("OnnxConversion",)
AGAIN = ("sdflow run",)
UNET_DATA = ("unet", "model.onnx.data")


@pytest.fixture
def folder(tiny_artifacts: dict[str, Artifact], tiny_checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """The tiny pipeline, in files of its own."""
    out = tmp_path / "tiny"
    assemble(out, parts=tiny_artifacts, companions=tiny_checkpoint.companions, origin=Origin("tiny", "cpu"), copy=True)
    return out


def broken(check: str, submodel: str, node: str, *what: str, do: tuple[str, ...] = AGAIN) -> Told:
    return Told("error", check, submodel, node, what, do)


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
    with pytest.raises(UsageError, match="not an sdflow pipeline"):
        check_promises(tmp_path)


def test_a_manifest_without_a_target_is_refused(folder: Path) -> None:
    edit_manifest(folder, lambda manifest: manifest.pop("target"))
    with pytest.raises(UsageError, match=r"sdflow\.json.*target"):
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
    ("edit", "told"),
    [
        (rename_input, broken("ports", "unet", "sample", "input", "latents", do=NAMES)),
        (
            swap_inputs,
            broken(
                "ports",
                "unet",
                "timestep",
                "inputs",
                "timestep, sample, encoder_hidden_states",
                "sample, timestep, encoder_hidden_states",
                do=NAMES,
            ),
        ),
        (lambda model: model.graph.output.pop(), broken("ports", "text_encoder", "pooler_output", "output", do=NAMES)),
        (
            element_type(0, TensorProto.INT64),
            broken("ports", "text_encoder", "input_ids", "input", "int64", "int32", do=("input_int32: true",)),
        ),
        (
            element_type(1, TensorProto.INT64),
            broken("ports", "unet", "timestep", "input", "int64", "float32", do=("timesteps", "keep_io_types")),
        ),
        (
            element_type(0, TensorProto.FLOAT16),
            Told(
                "warning",
                "ports",
                "unet",
                "sample",
                ("float16", "text_encoder's last_hidden_state", "float32"),
                ("keep_io_types: true",),
            ),
        ),
        (axis(1, dim_value=9), broken("ports", "unet", "sample", "axis 1", "input", "9", "4")),
        (axis(0, dim_param="n"), Told("warning", "ports", "unet", "sample", ("axis 0", "input", "n", "batch"))),
    ],
    ids=["renamed", "swapped", "output missing", "ids int64", "timestep int64", "half only", "channels", "axis name"],
)
def test_inputs_and_outputs_are_those_that_diffusers_feeds_and_reads(folder: Path, edit: Edit, told: Told) -> None:
    build(folder, told.submodel, edit)
    assert_told(check_promises(folder), told)


def test_an_opset_that_the_runtime_does_not_load(folder: Path) -> None:
    build(folder, "unet", lambda model: setattr(model.opset_import[0], "version", 99))
    for target, version in {"cpu": "onnxruntime 1.31", "directml": "onnxruntime-directml 1.24"}.items():
        largest = kernel_table(TARGETS[target].providers[0][0]).opset
        told = broken("opset", "unet", "model.onnx", "99", str(largest), do=(f"target_opset: {largest}",))
        (finding,) = (each for each in check_promises(folder, TARGETS[target]) if each.level == "error")
        assert_told([finding], told)
        assert version in finding.what


def test_an_ir_version_that_the_runtime_does_not_load(folder: Path) -> None:
    build(folder, "unet", lambda model: setattr(model, "ir_version", 12))
    assert check_promises(folder) == []
    what = ("IR version 12", "onnxruntime-rocm 1.22.2", "10")
    told = Told("warning", "opset", "unet", "model.onnx", what, ("older onnx",))
    assert_told(check_promises(folder, TARGETS["rocm"]), told)


# Weights


def test_a_truncated_data_file(folder: Path) -> None:
    path = folder / "unet" / "model.onnx.data"
    size = path.stat().st_size
    last = external(onnx.load(folder / "unet" / "model.onnx", load_external_data=False))[-1]
    with path.open("r+b") as stream:
        stream.truncate(size - 1)
    assert_told(
        check_promises(folder),
        broken("digest", *UNET_DATA, "cut off", f"{size - 1:,}", f"{size:,}"),
        broken("external-data", "unet", last.name, "model.onnx.data", f"{size:,}", f"{size - 1:,}"),
    )


def test_a_flipped_byte(folder: Path) -> None:
    path = folder / "unet" / "model.onnx.data"
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    assert_told(check_promises(folder), broken("digest", *UNET_DATA, "other bytes", "another model.onnx"))


def test_weights_that_were_compared_are_not_read_again(folder: Path) -> None:
    """A digest of the files as they are, and not another one, stands for reading them."""
    path, built = folder / "unet" / "model.onnx.data", artifact_of(folder / "unet").digest
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    assert check_promises(folder, compared={"unet": built}) == []
    changed = {"unet": artifact_of(folder / "unet").digest, "vae_decoder": built}
    assert_told(check_promises(folder, compared=changed), broken("digest", *UNET_DATA, "other bytes"))
    (folder / "unet" / "config.json").write_text("{}")
    assert any(each.node == "config.json" for each in check_promises(folder, compared={"unet": built}))


@pytest.mark.parametrize("name", ["another", "main_grapn"], ids=["of another size", "of the same size"])
def test_a_stale_graph_beside_new_weights(folder: Path, name: str) -> None:
    path = folder / "vae_decoder" / "model.onnx"
    old = path.read_bytes()
    build(folder, "vae_decoder", lambda model: setattr(model.graph, "name", name))
    path.write_bytes(old)
    assert_told(check_promises(folder), broken("stale", "vae_decoder", "model.onnx", "graph", "model.onnx.data"))


def test_a_link_to_another_artifact(folder: Path, tiny_artifacts: dict[str, Artifact], tmp_path: Path) -> None:
    other = tmp_path / "objects" / "aa" / ("a" * 64) / "files"
    shutil.copytree(folder / "unet", other)
    shutil.rmtree(folder / "unet")
    (folder / "unet").symlink_to(other, target_is_directory=True)
    built = tiny_artifacts["unet"].digest[:12]
    assert_told(check_promises(folder), broken("stale", "unet", "", "aaaaaaaaaaaa", built))


def test_a_manifest_whose_list_is_not_the_artifacts(folder: Path) -> None:
    edit_manifest(folder, lambda manifest: manifest["submodels"]["unet"].update(artifact="b" * 64))
    assert_told(check_promises(folder), broken("digest", "unet", "sdflow.json", "files", "bbbbbbbbbbbb"))


def test_external_data_that_nothing_uses(folder: Path) -> None:
    with (folder / "unet" / "model.onnx.data").open("ab") as stream:
        stream.write(bytes(1000))
    sign(folder, "unet")
    assert_told(check_promises(folder), broken("external-data", *UNET_DATA, "last 1,000 bytes"))


def test_external_data_with_a_hole(folder: Path) -> None:
    def skip(model: Any) -> None:
        tensor = external(model)[0]
        tensor.raw_data = bytes(data_span(tensor)[2] or 0)
        tensor.ClearField("data_location")
        del tensor.external_data[:]

    model = onnx.load(folder / "unet" / "model.onnx", load_external_data=False)
    first, second = external(model)[:2]
    build(folder, "unet", skip)
    told = broken("external-data", *UNET_DATA, f"{data_span(first)[2]:,} bytes before {second.name}")
    assert_told(check_promises(folder), told)


def test_external_data_that_overlaps(folder: Path) -> None:
    model = onnx.load(folder / "unet" / "model.onnx", load_external_data=False)
    *_, before, last = external(model)
    _, offset, length = data_span(last)

    def move(model: Any) -> None:
        set_external(external(model)[-1], "model.onnx.data", offset - 4, length or 0)

    build(folder, "unet", move)
    assert_told(
        check_promises(folder),
        broken("external-data", "unet", last.name, f"overlaps {before.name}", "model.onnx.data", f"{offset - 4:,}"),
        broken("external-data", *UNET_DATA, "last 4 bytes"),
    )


def test_external_data_outside_the_folder(folder: Path) -> None:
    def outside(model: Any) -> None:
        for tensor in external(model):
            tensor.external_data[0].value = "../elsewhere.data"

    build(folder, "unet", outside)
    outside_of_it = broken("external-data", "unet", "../elsewhere.data", "outside")
    assert_told(check_promises(folder), outside_of_it, broken("external-data", *UNET_DATA, "no tensor"))


def test_a_missing_weights_file(folder: Path) -> None:
    (folder / "unet" / "model.onnx.data").unlink()
    tensors = len(external(onnx.load(folder / "unet" / "model.onnx", load_external_data=False)))
    assert_told(
        check_promises(folder),
        broken("missing", *UNET_DATA, "missing"),
        broken("external-data", *UNET_DATA, "missing", str(tensors)),
    )


def test_a_structure_in_place_of_a_model(folder: Path, built: Builder) -> None:
    shutil.rmtree(folder / "text_encoder")
    shutil.copytree(built.structure("text_encoder", "cpu"), folder / "text_encoder")
    sign(folder, "text_encoder")
    graph = onnx.load(folder / "text_encoder/model.onnx", load_external_data=False).graph
    stubs = [tensor.name for tensor in graph.initializer if is_stub(tensor)]
    assert stubs
    told = [broken("external-data", "text_encoder", name, "recipe", "structure") for name in stubs]
    assert_told(check_promises(folder), *told)


def test_a_graph_that_is_no_graph(folder: Path) -> None:
    (folder / "unet" / "model.onnx").write_bytes(b"\xff" * 100)
    sign(folder, "unet")
    assert_told(check_promises(folder), broken("digest", "unet", "model.onnx", "not an ONNX model"))


def test_a_file_that_was_left_behind(folder: Path) -> None:
    (folder / "unet" / "model.onnx_data").write_bytes(b"of an older version")
    assert_told(check_promises(folder), broken("unused", "unet", "model.onnx_data", do=("remove",)))


def test_a_config_of_wrong_types_is_no_reason_to_fail(folder: Path) -> None:
    for name, entries in (("unet", {"in_channels": "x"}), ("vae_decoder", {"latent_channels": "x"})):
        file = folder / name / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    told = [str(finding) for finding in check_promises(folder)]
    assert any("unet" in each and "config.json" in each for each in told)
