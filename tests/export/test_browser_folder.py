"""What `sdflow export --browser` writes is complete: another program draws with it what `Pipeline` draws."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from converted import Converted
from started_python import Command

from sdflow.build.assemble import assemble
from sdflow.errors import UsageError
from sdflow.export.browser import PAGE, BrowserWanted, export_browser
from sdflow.export.compose import read_part
from sdflow.export.pieces import into_buffers, write_buffer
from sdflow.export.web_runtime import CDN, FILES, PACKAGE, VERSION, Runtime, find_runtime
from sdflow.manifest import Origin
from sdflow.onnx_model.files import data_span, is_external
from sdflow.runtime.pipeline import Pipeline
from sdflow.runtime.sessions.webgpu_attention import PROBE_SIZES, attention_probe
from sdflow.sources import PlainDigests, open_checkpoint

PROMPT, NEGATIVE, STEPS, SEED = "a horse", "blurry", 3, 5
SMALL = 1_000_000


@pytest.fixture(scope="module")
def sdxl(converted: Converted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint = open_checkpoint("synthetic:sdxl-tiny", digests=PlainDigests(), download=False)
    folder = tmp_path_factory.mktemp("sdxl") / "pipeline"
    assemble(
        folder,
        parts=converted(checkpoint, checkpoint.submodels),
        companions=checkpoint.companions,
        origin=Origin("sdxl", "cpu", family=checkpoint.family.name),
        options=checkpoint.options,
    )
    return folder


def exported(pipeline: Path, folder: Path, **more: Any) -> Path:
    export_browser(pipeline, folder, BrowserWanted(Runtime(CDN), **{"steps": STEPS, "file_bytes": SMALL, **more}))
    return folder


class Program:
    """Draws with the files of a folder as the page does; nothing of sdflow."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = json.loads((folder / "pipeline.json").read_bytes())

    def read(self, name: str) -> bytes:
        content = (self.folder / name).read_bytes()
        entry = self.index["files"][name]
        assert (len(content), hashlib.sha256(content).hexdigest()) == (entry["bytes"], entry["sha256"])
        return content

    def run(self, name: str, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = (
            onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        )  # takes longer than to run
        graph = self.index["graphs"][name]
        buffers = [b"".join(map(self.read, each["files"])) for each in graph["data"]]
        assert [len(each) for each in buffers] == [each["bytes"] for each in graph["data"]]
        options.add_external_initializers_from_files_in_memory(
            [each["path"] for each in graph["data"]], buffers, list(map(len, buffers))
        )
        model = self.read(f"{name}.onnx")
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        feeds = {each: given[each] for each in graph["inputs"]}
        return dict(zip((each.name for each in session.get_outputs()), session.run(None, feeds), strict=True))

    def schedule(self, steps: int) -> tuple[np.ndarray, np.ndarray, int]:
        table = self.index["schedule"]["tables"][str(steps)]
        runs, draws = table["runs"], table["draws"]
        numbers = np.frombuffer(self.read("schedules.bin"), "<f4", offset=table["begin"])
        width = 1 + draws + runs
        return numbers[:runs], numbers[runs:][: (runs + 1) * width].reshape(runs + 1, width), draws

    def draw(self, ids: dict[str, np.ndarray], noise: np.ndarray, scale: float, steps: int) -> np.ndarray:
        pixels = self.index["latents"]["pixels"]
        height, width = (np.int64(side * pixels) for side in noise.shape[2:])
        more = {"height": np.array(height), "width": np.array(width), "guidance_scale": np.array([scale], np.float32)}
        conditions = self.run("text", {**ids, **more})
        assert set(conditions) == set(self.index["conditions"])
        timesteps, rows, draws = self.schedule(steps)
        assert draws == 0
        terms = [noise]
        for timestep, row in zip(timesteps, rows, strict=False):
            latents = sum(factor * term for factor, term in zip(row, terms, strict=False))
            given = {"latents": np.concatenate([latents, latents]), "timestep": np.array([timestep]), **conditions}
            negative, positive = np.split(self.run("denoiser", given)["prediction"], 2)
            terms.append(negative + np.float32(scale) * (positive - negative))
        latents = sum(factor * term for factor, term in zip(rows[-1], terms, strict=True))
        return self.run("decoder", {"latents": latents})["images"]


@pytest.mark.parametrize("kind", ["tiny_pipeline", "sdxl"])
def test_another_program_draws_the_same_with_it(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder = request.getfixturevalue(kind)
    program = Program(exported(folder, tmp_path / "page"))
    ours = Pipeline.load(folder, "cpu", threads=1)
    tokenizers = {name: each for name, each in ours.companions.items() if name.startswith("tokenizer")}
    ids = {}
    for name, text in program.index["texts"].items():
        tokenizer = tokenizers[text["table"].replace("input_ids", "tokenizer")]
        options = {"padding": "max_length", "max_length": 77, "truncation": True, "return_tensors": "np"}
        ids[name] = tokenizer([NEGATIVE if text["negative"] else PROMPT], **options).input_ids.astype(np.int32)
    scale, (rows, columns) = 4.0, (8, 16)
    noise = torch.randn((1, ours.latents.channels, rows, columns), generator=torch.Generator().manual_seed(SEED))
    found = program.draw(ids, noise.numpy(), scale, STEPS)
    wanted = ours(
        PROMPT,
        negative_prompt=NEGATIVE,
        num_inference_steps=STEPS,
        guidance_scale=scale,
        height=rows * ours.latents.scale,
        width=columns * ours.latents.scale,
        latents=noise,
        output_type="np",
    ).images
    assert wanted.std() > 0.05, "an image, not a grey plane"
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)


def test_no_file_is_larger_than_wanted_and_an_older_exports_files_go(tiny_pipeline: Path, tmp_path: Path) -> None:
    folder = exported(tiny_pipeline, tmp_path / "page")
    (folder / "mine.txt").write_text("kept")
    first = {path.name for path in folder.iterdir()}
    assert {path.name for path in PAGE.iterdir()} < first
    weights = [path.stat().st_size for path in folder.glob("*.bin") if path.name != "schedules.bin"]
    assert max(weights) == SMALL
    exported(tiny_pipeline, folder, file_bytes=64 * SMALL)
    again = {path.name for path in folder.iterdir()}
    assert first - again
    assert (folder / "mine.txt").read_text() == "kept"
    assert set(json.loads((folder / "pipeline.json").read_bytes())["files"]) < again


def test_the_checker_is_a_graph_of_its_own(tiny_pipeline: Path, tmp_path: Path) -> None:
    program = Program(exported(tiny_pipeline, tmp_path / "page"))
    images = np.random.default_rng(1).random((1, 64, 96, 3), np.float32)
    found = program.run("checker", {"pixels": images})
    assert found["nsfw_content_detected"].shape == (1,)
    assert found["images"].shape == images.shape
    without = Program(exported(tiny_pipeline, tmp_path / "page", checker=False))
    assert "checker" not in without.index["graphs"]


def test_operators_that_onnx_runtime_web_lacks_are_refused(tiny_pipeline: Path, tmp_path: Path) -> None:
    changed = tmp_path / "pipeline"
    shutil.copytree(tiny_pipeline, changed, symlinks=False)
    path = changed / "unet" / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    conv = next(node for node in model.graph.node if node.op_type == "Conv")
    conv.op_type, conv.domain = "NhwcConv", "com.microsoft"
    model.opset_import.add(domain="com.microsoft", version=1)
    path.chmod(0o644)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(UsageError, match="NhwcConv, which ONNX Runtime Web lacks"):
        exported(changed, tmp_path / "page")
    assert not (tmp_path / "page").exists()


def test_a_tensor_lies_whole_in_one_buffer_and_equal_bytes_lie_there_once(tiny_pipeline: Path, tmp_path: Path) -> None:
    location = "unet/model.onnx.data"
    model = read_part(tiny_pipeline / "unet" / "model.onnx", location)
    content = (tiny_pipeline / location).read_bytes()
    wanted = {}
    for tensor in model.graph.initializer:
        if is_external(tensor):
            _, offset, length = data_span(tensor)
            wanted[tensor.name] = content[offset : offset + length]
    twice = onnx.TensorProto()
    twice.CopyFrom(next(tensor for tensor in model.graph.initializer if is_external(tensor)))
    wanted["twice"] = wanted[twice.name]
    twice.name = "twice"
    model.graph.initializer.append(twice)
    buffers = into_buffers(model, "unet", 7000, buffer=100_000)
    assert len(buffers) > 2
    joined = {}
    for each in buffers:
        digests = write_buffer(each, tiny_pipeline, lambda name: tmp_path / name)
        parts = [(tmp_path / name).read_bytes() for name in each.files]
        assert [len(part) for part in parts] == [*each.files.values()] and max(map(len, parts)) <= 7000
        assert [hashlib.sha256(part).hexdigest() for part in parts] == [*digests.values()]
        joined[each.path] = b"".join(parts)
    for tensor in model.graph.initializer:
        if tensor.name in wanted:
            path, offset, length = data_span(tensor)
            assert joined[path][offset : offset + length] == wanted[tensor.name]
    padding = 16 * len(wanted)
    assert sum(map(len, joined.values())) < sum(map(len, wanted.values())) - len(wanted["twice"]) + padding


def test_the_probe_is_attention(tmp_path: Path) -> None:
    width = PROBE_SIZES["heads"] * PROBE_SIZES["size"]
    counts = {"q": PROBE_SIZES["rows"], "k": PROBE_SIZES["keys"], "v": PROBE_SIZES["keys"]}
    given = {name: torch.randn(1, count, width) for name, count in counts.items()}
    session = onnxruntime.InferenceSession(attention_probe(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {name: value.numpy() for name, value in given.items()})
    heads = [
        value.unflatten(2, (PROBE_SIZES["heads"], PROBE_SIZES["size"])).transpose(1, 2) for value in given.values()
    ]
    wanted = torch.nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
    np.testing.assert_allclose(found, wanted.numpy(), rtol=0, atol=1e-5)


def _package(folder: Path, version: str = VERSION, without: str = "") -> Path:
    package = folder / "node_modules" / PACKAGE
    (package / "dist").mkdir(parents=True)
    (package / "package.json").write_text(json.dumps({"version": version}))
    for name in FILES:
        if name != without:
            (package / "dist" / name).write_text(name)
    return package


def test_onnx_runtime_web_comes_from_npm_or_a_cdn(tmp_path: Path, tiny_pipeline: Path) -> None:
    assert find_runtime("cdn", tmp_path).url.startswith("https://cdn.jsdelivr.net/npm/onnxruntime-web@")
    with pytest.raises(UsageError, match=r"(?s)is not in .*npm install .*onnxruntime-web@.*--ort cdn"):
        find_runtime(None, tmp_path)
    _package(tmp_path)
    found = find_runtime(None, tmp_path)
    export_browser(tiny_pipeline, tmp_path / "page", BrowserWanted(found, steps=1))
    assert all((tmp_path / "page" / name).read_text() == name for name in FILES)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: _package(folder, version="1.20.0"), "it is version 1.20.0"),
        (lambda folder: _package(folder, without=FILES[2]), f"it lacks {FILES[2]}"),
    ],
)
def test_another_version_and_an_incomplete_package_are_refused(
    make: Callable[[Path], Path], says: str, tmp_path: Path
) -> None:
    package = make(tmp_path)
    with pytest.raises(UsageError, match=says):
        find_runtime(str(package), tmp_path)


def test_the_command_says_what_it_wrote_and_which_options_do_not_belong(
    tiny_pipeline: Path, tmp_path: Path, sdflow: Command
) -> None:
    done = sdflow(
        "export", str(tiny_pipeline), "--browser", "page", "--ort", "cdn", "--no-checker", "--json", folder=tmp_path
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    index = json.loads((tmp_path / "page/pipeline.json").read_bytes())
    assert said["files"] == len(index["files"])
    assert said["bytes"] == sum(each["bytes"] for each in index["files"].values())
    assert (said["float16"], said["onnxruntime_web"]) == (False, CDN)
    for options, says in (
        (["--browser", "other", "--ort", "cdn", "--embed"], "cannot be combined with --embed"),
        (["--one-file", "other.onnx", "--ort", "cdn"], "--ort: requires --browser"),
        (["--browser", "other", "--ort", "cdn", "--one-file", "other.onnx"], "Run sdflow export twice"),
        (["--browser", "other", "--ort", "cdn", "--schedule-file", "s.json"], "Run sdflow export twice"),
        (["--browser", "other"], "npm install"),
        (["--browser", "other", "--ort", "cdn", "--file-size", "10KB"], "1MB or more"),
    ):
        done = sdflow("export", str(tiny_pipeline), *options, folder=tmp_path)
        assert done.returncode == 2
        assert says in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["page"]
