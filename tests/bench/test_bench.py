"""`sdflow bench`: engines side by side, every image checked, and what it writes."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_lora import write_lora
from started_python import Command
from until import until

from sdflow.bench.checkpoint import torch_modules
from sdflow.bench.compare import compare
from sdflow.bench.device import Device
from sdflow.bench.engines import ENGINES, choose
from sdflow.bench.files import COLUMNS, THEIR_COLUMNS, to_markdown
from sdflow.bench.judge import distance
from sdflow.bench.result import BenchResult
from sdflow.bench.run import BenchRequest, bench
from sdflow.bench.sweep import Settings, SweepPoint
from sdflow.bench.time_limit import TorchState
from sdflow.digest import digest_file
from sdflow.errors import UsageError, VerificationError
from sdflow.families.shared.approximation import Approximation, Reuse

ROOT = Path(__file__).parents[2]
QUICK = Settings(rounds=2, threads=1)
CASE = SweepPoint(1, 64, 64, 2)

# Of onnxruntime 1.31, transformers/models/stable_diffusion/benchmark.py.
ONNXRUNTIME_COLUMNS = """
model_name directory engine version provider disable_safety_checker height width steps batch_size batch_count num_prompts
average_latency median_latency first_run_memory_MB second_run_memory_MB enable_cuda_graph
"""


@pytest.fixture(scope="module")
def measured(
    built: Path, sdflow: Command, tmp_path_factory: pytest.TempPathFactory
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The command with a sweep, from the shell, and the folder of its files."""
    out = tmp_path_factory.mktemp("out")
    arguments = ["--batch", "1,2", "--size", "64", "--steps", "2", "--rounds", "2", "--threads", "1"]
    engines = ["-e", "ort-cpu", "-e", "torch-sdpa", "-e", "torch-eager", "-e", "torch-xformers"]
    return sdflow("bench", str(built), *arguments, *engines, "--out", "report", folder=out), out / "report"


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_engines_draw_what_pytorch_draws_and_say_how_long_it_took(
    measured: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    done, out = measured
    assert done.returncode == 0, done.stderr
    result = json.loads((out / "bench.json").read_text())
    assert (result["format_version"], result["kind"]) == (1, "bench")
    assert [(case["batch"], case["height"], case["steps"]) for case in result["cases"]] == [(1, 64, 2), (2, 64, 2)]
    engines = {engine["name"]: engine for engine in result["engines"]}
    for name in ("ort-cpu", "torch-sdpa", "torch-eager"):
        engine = engines[name]
        assert engine["status"] == "measured"
        assert engine["load_seconds"] > 0
        for case, found in zip(result["cases"], engine["cases"], strict=True):
            assert found["verdict"] == "right"
            assert found["check"]["distance"] < found["check"]["tolerance"] == 1e-3
            image, stages = found["image"], found["stages"]
            assert image["min_ms"] <= image["median_ms"] <= image["p90_ms"] <= image["p99_ms"]
            assert found["images_per_second"] == pytest.approx(1000 * case["batch"] / image["median_ms"])
            # PNDM, the sample's scheduler, runs the UNet once more than there are steps.
            assert (stages["text"]["runs"], stages["step"]["runs"], stages["decoder"]["runs"]) == (2, 2 * 3, 2)
            total = stages["text"]["mean_ms"] + 3 * stages["step"]["mean_ms"] + stages["decoder"]["mean_ms"]
            assert total == pytest.approx(image["mean_ms"], rel=0.02)
            assert found["memory"]["host"] > 50e6
            assert found["memory"]["device"] is None, "there is no other device than the CPU"
    assert engines["torch-xformers"]["reason"] == "needs xformers and a CUDA device"
    assert engines["torch-sdpa"]["cases"][0]["ratio"] == 1
    # The engines differ, so somebody's arithmetic was measured, not one engine three times.
    assert len({engines[name]["cases"][0]["check"]["distance"] for name in ("ort-cpu", "torch-eager")}) == 2


def test_the_table_on_the_console_has_every_engine_and_why_one_was_skipped(
    measured: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    done, _ = measured
    for case in ("1 x 64x64, 2 steps", "2 x 64x64, 2 steps"):
        assert f"{case}, fastest first\n" in done.stdout
    assert done.stdout.count("right\n") == 6
    heads = [line.split() for line in done.stdout.splitlines() if line.startswith("  engine ")]
    assert heads == [["engine", "type", "median", "ms", "of", "fastest", "images/s", "memory", "MB", "image"]] * 2
    rows = [line.split() for line in done.stdout.splitlines() if line.endswith("right")]
    for case in (rows[:3], rows[3:]):
        times = [float(row[2]) for row in case]
        assert times == sorted(times) and case[0][3] == "1.00x"
        for row in case:
            assert float(row[3].removesuffix("x")) == pytest.approx(float(row[2]) / times[0], abs=0.006)
    assert "█" not in done.stdout, "bars are for terminals"
    assert "torch-xformers: skipped: needs xformers and a CUDA device" in done.stdout
    assert "1.00e-03: fixed, for float32" in done.stdout
    assert "There are modules" not in done.stderr


def test_the_csv_begins_with_the_columns_of_onnxruntimes_benchmark(
    measured: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    _, out = measured
    assert list(THEIR_COLUMNS) == ONNXRUNTIME_COLUMNS.split()
    rows = rows_of(out / "bench.csv")
    assert list(rows[0]) == list(COLUMNS)
    assert [(row["engine"], row["batch_size"]) for row in rows if row["status"] == "measured"] == [
        (engine, batch) for engine in ("ort-cpu", "torch-sdpa", "torch-eager") for batch in "12"
    ]
    for row in rows:
        if row["status"] == "measured":
            assert float(row["median_latency"]) == pytest.approx(
                float(row["batch_size"]) / float(row["images_per_second"]), rel=1e-3
            )
            assert float(row["first_run_memory_MB"]) > 50
            assert row["verdict"] == "right"
        else:
            assert (row["status"], row["reason"]) == ("skipped", "needs xformers and a CUDA device")


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href") and value]


def test_the_page_needs_nothing_else_and_has_a_plot_for_each_case_and_the_sweep(
    measured: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    _, out = measured
    page = Page((out / "bench.html").read_text())
    assert page.links == []
    assert page.tags.count("svg") == 3
    assert "script" not in page.tags
    text = (out / "bench.html").read_text()
    assert (
        '<meta name="viewport"' in text and "is the fastest, " in text and '<th class="number">median ms</th>' in text
    )
    assert sorted(path.name for path in out.iterdir()) == ["bench.csv", "bench.html", "bench.json", "bench.md"]


# What fails


def other_weights(built: Path, folder: Path, submodel: str) -> Path:
    """The pipeline with one submodel's weights scaled by 1.3 in their file."""
    shutil.copytree(built, folder)
    path = folder / submodel / "model.onnx.data"
    path.chmod(0o644)
    values = np.fromfile(path, np.float32)
    (values * np.float32(1.3)).tofile(path)
    return as_built(folder)


def as_built(folder: Path) -> Path:
    """Its manifest says that its files are what was built."""
    path = folder / "sdflow.json"
    manifest = json.loads(path.read_text())
    for name, part in manifest["submodels"].items():
        for entry in part["files"]:
            file = folder / name / entry["path"]
            entry.update(sha256=digest_file(file), bytes=file.stat().st_size)
    path.write_text(json.dumps(manifest))
    return folder


def run(folder: Path, engines: Sequence[str], **options: Any) -> BenchResult:
    return bench(BenchRequest(folder, [CASE], QUICK, engines, **options), lambda text: None)


def test_a_fast_engine_that_draws_something_else_is_wrong_in_every_output(
    built: Path, tmp_path: Path, sdflow: Command
) -> None:
    folder = other_weights(built, tmp_path / "wrong", "unet")
    quick = ["--size", "64", "--steps", "2", "--rounds", "1", "--threads", "1", "--out", "out"]
    done = sdflow("bench", str(folder), "-e", "ort-cpu", "-e", "torch-sdpa", *quick, folder=tmp_path)
    assert done.returncode == 4, done.stderr
    assert "not the image that PyTorch generates in float32" in done.stderr
    assert done.stdout.endswith("WRONG images: ort-cpu (1 x 64x64, 2 steps)\n")
    files = {path.suffix: path.read_text() for path in (tmp_path / "out").iterdir()}
    assert json.loads(files[".json"])["engines"][0]["cases"][0]["verdict"] == "WRONG"
    assert [row["verdict"] for row in rows_of(tmp_path / "out/bench.csv")] == ["WRONG", "right"]
    assert "WRONG images:** ort-cpu" in files[".md"]
    assert '<tr class="wrong"><td>ort-cpu</td>' in files[".html"]
    assert " ms WRONG</text>" in files[".html"]


def test_an_engine_that_fails_is_reported_and_the_others_go_on(built: Path, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(built, folder)
    model = folder / "text_encoder/model.onnx"
    model.chmod(0o644)
    model.write_bytes(model.read_bytes()[:1000])
    broken, other = run(as_built(folder), ["ort-cpu", "torch-sdpa"]).engines
    assert (broken.status, other.status) == ("failed", "measured")
    assert "is not an ONNX model" in str(broken.reason)
    assert "Traceback" in str(broken.trace)
    assert broken.cases == (None,)
    assert other.cases[0] is not None
    assert other.cases[0].verdict == "right"


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["."], "not an sdflow pipeline"),
        ([], "no pipeline is named"),
        (["PIPELINE", "-e", "torch-sdap"], "torch-sdap; did you mean torch-sdpa?"),
        (["PIPELINE", "-e", "torch-xformers"], "torch-xformers: needs xformers and a CUDA device"),
        (["PIPELINE", "--batch", "1,x"], "--batch: '1,x' is not a list of whole numbers"),
        (["PIPELINE", "--scheduler", "eulr"], "did you mean 'euler'"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    built: Path, tmp_path: Path, sdflow: Command, arguments: list[str], what: str
) -> None:
    words = [str(built) if each == "PIPELINE" else each for each in arguments]
    done = sdflow("bench", *words, folder=tmp_path)
    assert done.returncode == 2, done.stderr
    assert what in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


# The table of engines


def test_each_engine_says_what_it_lacks_or_why_it_is_not_there_by_default() -> None:
    skipped = {each.engine.name: each.skipped for each in choose([], "cpu", "cpu")}
    assert skipped["ort-cpu"] is skipped["torch-eager"] is skipped["torch-sdpa"] is None
    assert skipped["torch-xformers"] == "needs xformers and a CUDA device"
    assert skipped["torch-compile"] == "compiles for minutes on a CPU"
    assert "was built without CUDAExecutionProvider" in str(skipped["ort-cuda"])
    assert skipped.keys() == ENGINES.keys()
    (asked,) = choose(["torch-compile"], "cpu", "cpu")
    assert asked.skipped is None, "who names it gets it"
    on_cuda = {each.engine.name: each.skipped for each in choose([], "cuda", "cuda")}
    assert on_cuda["torch-compile"] is None
    assert on_cuda["ort-cpu"] == "the pipeline was built for cuda"


def test_distance_tells_equal_other_and_no_numbers_apart() -> None:
    image = np.random.default_rng(0).random((1, 8, 8, 3), np.float32)
    assert distance(image, image) == (0.0, None)
    relative, psnr = distance(image * 1.01, image)
    assert relative == pytest.approx(0.01, rel=1e-3)
    assert psnr == pytest.approx(-10 * np.log10(np.mean((0.01 * image) ** 2)), rel=1e-3)
    assert distance(np.full_like(image, np.nan), image) == (np.inf, 0.0)


def test_memory_at_its_peak_is_seen_though_it_is_given_back() -> None:
    device = Device("cpu")
    before = device.memory().host
    assert before is not None
    with device.peak_memory() as peak:
        block = np.ones(200_000_000, np.uint8)
        block[::4096] += 1
        until(lambda: (peak[0].host or 0) - before > 150e6)
        del block
    assert peak[0].host is not None
    assert peak[0].host - before > 150e6


# The checkpoint


def test_pytorch_has_the_loras_of_the_pipeline_as_diffusers_merges_them(
    built: Path, tiny_checkpoint: Any, tmp_path: Path
) -> None:
    from sdflow.sources import load_pipeline

    lora = write_lora(tmp_path / "lora.safetensors")
    folder = with_lora(built, tmp_path / "lora", lora, 0.5)
    found = torch_modules(folder)
    pipeline: Any = load_pipeline(tiny_checkpoint)
    before = {name: value.clone() for name, value in pipeline.unet.state_dict().items()}
    pipeline.load_lora_weights(str(lora))
    pipeline.fuse_lora(lora_scale=0.5)
    pipeline.unload_lora_weights()
    changed = 0
    for name, value in pipeline.unet.state_dict().items():
        assert np.allclose(found["unet"].state_dict()[name], value, atol=1e-5), name
        changed += not np.allclose(value, before[name], atol=1e-3)
    assert changed > 5
    # diffusers drops q_proj of this LoRA's text encoder (it says UNEXPECTED); what it takes is the same.
    text = found["text_encoder"].state_dict()
    for name, value in pipeline.text_encoder.state_dict().items():
        assert "q_proj" in name or np.allclose(text[name], value, atol=1e-5), name


def with_lora(built: Path, folder: Path, lora: Path, scale: float) -> Path:
    shutil.copytree(built, folder)
    path = folder / "sdflow.json"
    manifest = json.loads(path.read_text())
    entry = {"reference": str(lora), "weight_name": None, "sha256": digest_file(lora), "scale": scale}
    path.write_text(json.dumps({**manifest, "loras": [entry]}))
    return folder


def test_a_checkpoint_or_lora_that_has_changed_since_is_refused(built: Path, tmp_path: Path) -> None:
    lora = write_lora(tmp_path / "lora.safetensors")
    folder = with_lora(built, tmp_path / "lora", lora, 1.0)
    write_lora(lora, seed=1)
    with pytest.raises(UsageError, match=r"lora\.safetensors differs from the one"):
        torch_modules(folder)
    manifest = json.loads((folder / "sdflow.json").read_text())
    (folder / "sdflow.json").write_text(json.dumps({**manifest, "model": "synthetic:sd15-tiny?seed=1"}))
    with pytest.raises(UsageError, match=r"synthetic:sd15-tiny\?seed=1 differs from the one"):
        torch_modules(folder)


# Two runs


def test_runs_of_unlike_machines_versions_or_settings_are_compared_only_by_force(
    measured: tuple[subprocess.CompletedProcess[str], Path], tmp_path: Path, sdflow: Command
) -> None:
    before = measured[1] / "bench.json"
    result = json.loads(before.read_text())
    result["engines"][0]["cases"][1]["image"]["median_ms"] *= 2
    same = tmp_path / "same.json"
    same.write_text(json.dumps(result))
    rows = {(row.engine, row.case): row.ratio for row in compare(before, same).rows}
    assert len(rows) == 6
    assert rows.pop(("ort-cpu", "2 x 64x64, 2 steps")) == pytest.approx(2)
    assert set(rows.values()) == {1.0}
    result["machine"]["processor"] = "another"
    result["versions"]["onnxruntime"] = "1.0"
    result["settings"]["guidance_scale"] = 1.0
    other = tmp_path / "other.json"
    other.write_text(json.dumps(result))
    done = sdflow("bench", "--compare", str(before), str(other), folder=tmp_path)
    assert done.returncode == 2
    for line in ("machine.processor: ", "versions.onnxruntime: ", "settings.guidance_scale: 7.5 / 1.0"):
        assert line in done.stderr
    forced = sdflow("bench", "--compare", str(before), str(other), "--force", folder=tmp_path)
    assert forced.returncode == 0, forced.stderr
    assert "FORCED: the runs differ in machine or settings" in forced.stdout
    assert "machine.processor: " in forced.stdout
    (tmp_path / "bad.json").write_text('{"kind": "bench"}')
    with pytest.raises(UsageError, match=r"not a result of `sdflow bench`"):
        compare(before, tmp_path / "bad.json")


@pytest.mark.parametrize("part", ["unet", "text_encoder"])
def test_a_damaged_folder_is_not_measured(built: Path, tmp_path: Path, part: str) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(built, folder)
    path = folder / part / "model.onnx.data"
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x01
    path.write_bytes(content)
    with pytest.raises(
        VerificationError, match=f"{part}/model.onnx.data: its content differs from what was built\n.*--no-check"
    ):
        run(folder, ["ort-cpu"])
    (engine,) = run(folder, ["ort-cpu"], check=False).engines
    assert engine.status == "measured"


def test_settings_without_check_need_no_checkpoint(built: Path, tmp_path: Path) -> None:
    folder = tmp_path / "moved"
    shutil.copytree(built, folder)
    manifest = json.loads((folder / "sdflow.json").read_text())
    (folder / "sdflow.json").write_text(json.dumps({**manifest, "model": str(tmp_path / "gone.safetensors")}))
    request = BenchRequest(folder, [replace(CASE, steps=1)], replace(QUICK, rounds=1), ["ort-cpu"], check=False)
    (engine,) = bench(request, lambda text: None).engines
    assert engine.cases[0] is not None
    assert engine.cases[0].verdict == "not checked"


def test_an_engine_that_does_not_come_up_in_time_is_given_up_and_the_others_are_measured(
    built: Path, measured: tuple[object, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.compile takes longer than eight seconds where it finds nothing compiled, and where the other engine takes long too,
    more than five times as long; what it swallows is raised again."""
    engines = json.loads((measured[1] / "bench.json").read_text())["engines"]
    (before,) = (each for each in engines if each["name"] == "torch-sdpa")
    limit = max(8.0, 5 * before["load_seconds"], 5 * before["cases"][0]["first_ms"] / 1000)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    request = BenchRequest(built, [CASE], QUICK, ["torch-sdpa", "torch-compile"], check=False, first_limit=limit)
    begun = time.monotonic()
    found = {engine.name: engine for engine in bench(request, lambda line: None).engines}
    assert found["torch-compile"].status == "failed"
    reason = found["torch-compile"].reason or ""
    assert all(word in reason for word in (f"longer than {limit:g} s", "--first-limit")), reason
    assert found["torch-sdpa"].status == "measured"
    assert time.monotonic() - begun < 15 * limit


def test_what_an_interrupted_compiler_left_of_torch_is_put_back() -> None:
    """It is interrupted at any instruction: among them those between a mode's entry and the `with` that would leave it."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.overrides import BaseTorchFunctionMode

    before = TorchState.now()
    try:
        BaseTorchFunctionMode().__enter__()
        FakeTensorMode().__enter__()
        torch._C._dispatch_tls_set_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality, True)
        torch.set_grad_enabled(not before.gradients)
        with pytest.raises(RuntimeError, match="not supported for tensor subclasses"):
            torch.ones(2).numpy()
    finally:
        before.restore()
    assert TorchState.now() == before and torch.ones(2, requires_grad=True).mul(2).sum().requires_grad
    assert torch.ones(2).numpy().tolist() == [1, 1]


def test_an_approximation_is_measured_beside_the_exact_engine_and_never_called_right(built: Path) -> None:
    fewer = Approximation(Reuse())
    result = bench(BenchRequest(built, [replace(CASE, steps=4)], QUICK, ["ort-cpu"], fewer=fewer), print)
    exact, near = ((engine.name, engine.cases[0]) for engine in result.engines)
    assert (exact[0], near[0]) == ("ort-cpu", "ort-cpu-approximation")
    assert exact[1] is not None and near[1] is not None and exact[1].check is not None and near[1].check is not None
    assert (exact[1].verdict, near[1].verdict, near[1].approximates) == ("right", "approximation", "ort-cpu")
    assert near[1].check.distance > 10 * exact[1].check.distance, "its distance is that to the exact image"
    assert near[1].check.psnr is not None and 20 < near[1].check.psnr < 100
    assert "every=2,from=0,to=1,layers=1" in result.engines[1].title
    assert not result.wrong
    assert "approximation" in to_markdown(result) and "1.00e-03: fixed, for float32" in to_markdown(result)
    json.dumps(result.to_json(), allow_nan=False)
