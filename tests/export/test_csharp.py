"""The C# program of docs/one_file_csharp.md, compiled by Roslyn against Microsoft's sources of Microsoft.ML.OnnxRuntime, and run.

NuGet need not be reached: the compiler's assemblies, those sources and .NET's runtime come in packages of npm and PyPI.
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from shell import ROOT

from sdflow.export.one_file import Wanted, export_one_file
from sdflow.runtime.pipeline import Pipeline

MODULES = Path(os.environ.get("NODE_PATH", ROOT / "node_modules"))
ROSLYN = MODULES / "@autorest/csharp"
BINDING = MODULES / "com.github.asus4.onnxruntime"
PACKAGES = ("dotnetcore2", "pythonnet", "psycopg2")
ICU = ctypes.util.find_library("icuuc")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the packages are Linux's"),
    pytest.mark.skipif(
        not (ROSLYN / "Microsoft.CodeAnalysis.CSharp.dll").is_file() or not (BINDING / "Runtime").is_dir(),
        reason="npm install @autorest/csharp@3.0.0-beta.20220327.2 com.github.asus4.onnxruntime@0.4.9, NODE_PATH",
    ),
    pytest.mark.skipif(ICU is None, reason=".NET needs ICU: apt-get install libicu72, or as the system calls it"),
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in PACKAGES),
        reason="pip install dotnetcore2==3.1.23 pythonnet psycopg2-binary==2.9.9",
    ),
]
PAGE = ROOT / "docs/one_file_csharp.md"
COMPILER = Path(__file__).parents[1] / "csharp_compiler.py"
PROMPT, NEGATIVE = "It's the 3rd one, isn't it?  (really!)", "Ça va? éèê ß 日本語 の 絵 🐎 ½ Ⅷ 𝒜b!'s"
TELLS = """
foreach (var feed in feeds) {
    var bytes = feed.Value is Tensor<int> ids
        ? System.Runtime.InteropServices.MemoryMarshal.AsBytes<int>(ids.ToArray())
        : System.Runtime.InteropServices.MemoryMarshal.AsBytes<float>(feed.AsTensor<float>().ToArray());
    File.WriteAllBytes($"{output}.{feed.Name}", bytes.ToArray());
}
"""


def package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


@pytest.fixture(scope="module")
def dotnet(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folder of .NET, and the environment that it runs in: of its age, it takes OpenSSL 1.1, which psycopg2's package has,
    and asks for an ICU of its time where no version is named."""
    libraries = package("psycopg2").parent / "psycopg2_binary.libs"
    folder = tmp_path_factory.mktemp("openssl")
    for name in ("libssl", "libcrypto"):
        (there,) = libraries.glob(f"{name}-*.so.1.1")
        (folder / f"{name}.so.1.1").symlink_to(there)
    there = package("dotnetcore2") / "bin"
    (there / "dotnet").chmod(0o755)
    assert ICU is not None
    more = {"LD_LIBRARY_PATH": f"{folder}:{libraries}", "CLR_ICU_VERSION_OVERRIDE": ICU.rpartition(".so.")[2]}
    return there, {**os.environ, **more}


def compiled(dotnet: tuple[Path, dict[str, str]], out: Path, *given: object) -> None:
    folder, environment = dotnet
    command = [sys.executable, COMPILER, ROSLYN, folder, out, *given]
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def program(dotnet: tuple[Path, dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of the page, which besides writes what it feeds."""
    folder = tmp_path_factory.mktemp("program")
    library, source = folder / "Microsoft.ML.OnnxRuntime.dll", folder / "Program.cs"
    sources = [path for path in sorted((BINDING / "Runtime").rglob("*.cs")) if path.parent.name != "Training"]
    compiled(dotnet, library, *sources)
    (text,) = re.findall(r"^```csharp\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S)
    source.write_text(text + TELLS, encoding="utf-8")
    compiled(dotnet, folder / "Program.dll", "--with", library, source)
    shutil.copy(BINDING / "Plugins/Linux/x64/libonnxruntime.so", folder)
    return folder / "Program.dll"


def run(program: Path, dotnet: tuple[Path, dict[str, str]], graph: Path, out: Path) -> np.ndarray:
    """The image that it writes: 8 bits, (height, width, 3)."""
    folder, environment = dotnet
    command = [folder / "dotnet", program, graph, PROMPT, out, "3", NEGATIVE]
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    head, pixels = out.read_bytes().split(b" 255\n", 1)
    width, height = map(int, head.removeprefix(b"P6 ").split())
    return np.frombuffer(pixels, np.uint8).reshape(height, width, 3).astype(np.int16)


def fed(out: Path, name: str, kind: type[np.generic], *shape: int) -> np.ndarray:
    return np.frombuffer(Path(f"{out}.{name}").read_bytes(), kind).reshape(shape)


def test_the_program_draws_what_the_pipeline_draws(
    program: Path, dotnet: tuple[Path, dict[str, str]], tiny_pipeline: Path, tmp_path: Path
) -> None:
    from transformers import CLIPTokenizer

    graph, out = tmp_path / "tiny.onnx", tmp_path / "out.ppm"
    export_one_file(tiny_pipeline, graph, Wanted(steps=2))
    found = run(program, dotnet, graph, out)
    tokenizer = CLIPTokenizer.from_pretrained(tiny_pipeline / "tokenizer")
    for name, given in (("input_ids", PROMPT), ("negative_input_ids", NEGATIVE)):
        assert fed(out, name, np.int32, -1).tolist() == tokenizer(given, padding="max_length", max_length=77).input_ids
    pipeline = Pipeline.load(tiny_pipeline, "cpu", threads=1)
    size = pipeline.latents
    noise = fed(out, "latents", np.float32, 1, size.channels, size.size, size.size)
    assert abs(noise.mean()) < 0.2
    assert abs(noise.std() - 1) < 0.2
    wanted = pipeline(PROMPT, negative_prompt=NEGATIVE, num_inference_steps=2, latents=noise.copy()).images[0]
    assert abs(found - np.asarray(wanted, np.int16)).max() <= 1, "a rounding apart at most"


def test_the_program_draws_the_noises_of_a_scheduler(
    program: Path, dotnet: tuple[Path, dict[str, str]], tiny_pipeline: Path, tmp_path: Path
) -> None:
    import onnxruntime

    graph, out = tmp_path / "tiny.onnx", tmp_path / "out.ppm"
    draws = export_one_file(tiny_pipeline, graph, Wanted(scheduler="euler_a", steps=3)).schedule.draws
    found = run(program, dotnet, graph, out)
    latents = fed(out, "latents", np.float32, 1, 4, 16, 16)
    noises = fed(out, "noises", np.float32, draws, 1, 4, 16, 16)
    assert draws > 1
    assert not np.array_equal(noises[0], noises[1])
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    feeds = {name: fed(out, name, np.int32, 1, 77) for name in ("input_ids", "negative_input_ids")}
    feeds |= {"latents": latents, "noises": noises, "guidance_scale": fed(out, "guidance_scale", np.float32, 1)}
    (image,) = session.run(["images"], feeds)[0]
    assert abs(found - np.rint(image * 255)).max() <= 1, "a rounding apart at most"
