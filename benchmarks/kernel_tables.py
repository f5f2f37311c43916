"""Writes the kernel tables of `sdflow/verify/kernels/` that ONNX Runtime itself can tell: CPU, CUDA, ROCm.

    python benchmarks/kernel_tables.py cpu
    python benchmarks/kernel_tables.py cuda --wheel onnxruntime_gpu-1.31.1-cp311-cp311-manylinux_2_28_x86_64.whl
    python benchmarks/kernel_tables.py rocm --wheel onnxruntime_rocm-1.22.2.post3-cp312-*.whl --python /usr/bin/python3.12

A provider's list of kernels is made when the provider is, and that asks for the GPU's libraries. No GPU is needed to
list kernels: for a wheel, empty libraries are compiled in which every function that the provider's library wants
returns 0, "success", and ONNX Runtime is asked from a process that finds those. Needs gcc, readelf, and a Python that
fits the wheel and has numpy and onnx. No kernel is run.

The tables of DirectML (Windows only), MIGraphX and TensorRT (which take whole graphs, not nodes) are written by hand
from the sources that they name.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

KERNELS = Path(__file__).parents[1] / "sdflow" / "verify" / "kernels"
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider", "rocm": "ROCMExecutionProvider"}
DOMAINS = ("", "com.microsoft")
OURS = re.compile(r"lib(dl|rt|pthread|stdc\+\+|m|gcc_s|c|onnxruntime\w*)\.so|ld-")
OPEN = 2**31 - 1  # ONNX Runtime's "and all later versions"

# A session allocates and copies before it is ready: the CPU's memory does for that (benchmarks/placement_without_gpu.py).
MEMORY = {
    "cudaMalloc": "(void **p, unsigned long n) { *p = malloc(n); return 0; }",
    "cudaMallocAsync": "(void **p, unsigned long n, void *s) { *p = malloc(n); return 0; }",
    "cudaMallocHost": "(void **p, unsigned long n) { *p = malloc(n); return 0; }",
    "cudaHostAlloc": "(void **p, unsigned long n, unsigned f) { *p = malloc(n); return 0; }",
    "cudaMemGetInfo": "(unsigned long *f, unsigned long *t) { *f = *t = 1ul << 37; return 0; }",
    "cudaMemcpy": "(void *d, const void *s, unsigned long n, int k) { memcpy(d, s, n); return 0; }",
    "cudaMemcpyAsync": "(void *d, const void *s, unsigned long n, int k, void *q) { memcpy(d, s, n); return 0; }",
}
INCLUDES = "extern void *malloc(unsigned long); extern void *memcpy(void *, const void *, unsigned long);\n"

ASK = """
import json, sys
import onnx, onnxruntime
from onnx import TensorProto, helper
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_opkernel_def

def takes(opset, ir_version):
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    except Exception as error:
        return False
    return True

onnxruntime.set_default_logger_severity(4)
kernels = [
    [kernel.domain, kernel.op_name, *kernel.version_range, {k: list(v) for k, v in kernel.type_constraints.items()}]
    for kernel in get_all_opkernel_def()
    if kernel.provider == sys.argv[1]
]
json.dump({
    "runtime": onnxruntime.__version__,
    "opset": max(opset for opset in range(13, 40) if takes(opset, 8)),
    "ir_version": max(version for version in range(4, 30) if takes(17, version)),
    "kernels": kernels,
}, sys.stdout)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=sorted(PROVIDERS))
    parser.add_argument("--wheel", type=Path, help="the provider's wheel; for cpu, the installed ONNX Runtime")
    parser.add_argument("--python", default=sys.executable, help="an interpreter that fits the wheel")
    given = parser.parse_args()
    provider = PROVIDERS[given.target]
    if given.wheel is None:
        answer, package = ask(given.python, provider, {}), "onnxruntime"
    else:
        package = given.wheel.name.split("-")[0].replace("_", "-")
        with tempfile.TemporaryDirectory() as folder:
            answer = ask(given.python, provider, unpacked(given.wheel, Path(folder)))
    table = {
        "provider": provider,
        "version": f"{package} {answer['runtime']}",
        "source": "get_all_opkernel_def() of that package, by benchmarks/kernel_tables.py",
        "opset": answer["opset"],
        "ir_version": answer["ir_version"],
    }
    write_table(KERNELS / f"{given.target}.json", table, answer["kernels"])


def unpacked(wheel: Path, folder: Path) -> dict[str, str]:
    """Unpack an ONNX Runtime wheel beside libraries for it; returns the environment in which Python finds both."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    libraries = folder / "empty"
    libraries.mkdir()
    write_empty_libraries(sorted((folder / "onnxruntime" / "capi").glob("*providers_*.so")), libraries)
    return {"PYTHONPATH": str(folder), "LD_LIBRARY_PATH": str(libraries)}


def ask(python: str, provider: str, environment: dict[str, str]) -> Any:
    quiet = {"ORT_DISABLE_TELEMETRY": "1", "CI": "1"}
    done = subprocess.run(
        [python, "-c", ASK, provider], env={**os.environ, **quiet, **environment}, stdout=subprocess.PIPE, check=True
    )
    return json.loads(done.stdout)


def write_empty_libraries(providers: list[Path], out: Path) -> None:
    """Libraries with every symbol, at its version, that the providers' libraries want and nobody here has."""
    wanted: dict[str, str] = {}
    missing: dict[str, None] = {}
    for provider in providers:
        dynamic = readelf("-d", provider)
        missing.update(dict.fromkeys(name for name in re.findall(r"\[(lib[^\]]+)\]", dynamic) if not OURS.match(name)))
        for columns in (line.split() for line in readelf("--dyn-syms", provider).splitlines()):
            if len(columns) >= 8 and columns[6] == "UND":
                name, _, symbol_version = columns[7].partition("@")
                if not re.match(r"_Z|_ITM|__cxa|__gmon|Provider_", name) and not re.match("GLIBC|GCC_", symbol_version):
                    wanted[name] = symbol_version.lstrip("@")
    source, versions = out / "empty.c", out / "empty.map"
    functions = [f"long {name}{MEMORY.get(name, '(void) { return 0; }')}\n" for name in wanted]
    source.write_text(INCLUDES + "".join(functions))
    by_version: dict[str, list[str]] = {}
    for name, symbol_version in wanted.items():
        by_version.setdefault(symbol_version, []).append(name)
    nodes = [f"{key} {{ global: {'; '.join(names)}; }};\n" for key, names in by_version.items() if key]
    versions.write_text("".join(nodes))
    script = [f"-Wl,--version-script,{versions}"] if nodes else []
    for name in missing:
        options = ["-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{name}", *script]
        subprocess.run(["gcc", *options, "-o", str(out / name), str(source)], check=True)


def readelf(option: str, file: Path) -> str:
    return subprocess.run(["readelf", "-W", option, str(file)], stdout=subprocess.PIPE, text=True, check=True).stdout


def write_table(path: Path, about: dict[str, Any], kernels: list[Any]) -> None:
    """One operator a line: its kernels as [first version, last version or null, {constraint: "type type ..."}]."""
    operators: dict[str, dict[tuple[int, int], list[dict[str, set[str]]]]] = {}
    for domain, name, first, last, constraints in kernels:
        if domain in DOMAINS:
            types = {key: {plain(value) for value in values} for key, values in constraints.items()}
            operators.setdefault(f"{domain}.{name}".lstrip("."), {}).setdefault((first, last), []).append(types)
    lines = []
    for operator, versions in sorted(operators.items()):
        rows = [
            [first, None if last == OPEN else last, {key: " ".join(sorted(value)) for key, value in types.items()}]
            for (first, last), alternatives in sorted(versions.items())
            for types in merged(alternatives)
        ]
        lines.append(f"  {json.dumps(operator)}: {json.dumps(rows)}")
    head = json.dumps(about, indent=1)[:-2]
    path.write_text(head + ',\n "kernels": {\n' + ",\n".join(lines) + "\n }\n}\n")


def merged(alternatives: list[dict[str, set[str]]]) -> list[dict[str, set[str]]]:
    """Kernels that differ in one constraint only, as one with both its sets: the same kernels in fewer lines."""
    done: list[dict[str, set[str]]] = []
    for types in alternatives:
        for other in done:
            differing = [key for key in types if types[key] != other.get(key)]
            if types.keys() == other.keys() and len(differing) <= 1:
                for key in differing:
                    other[key] |= types[key]
                break
        else:
            done.append(types)
    return done


def plain(name: str) -> str:
    """tensor(float16) -> float16; sequences and optionals stay as they are."""
    return name.removeprefix("tensor(").removesuffix(")") if name.startswith("tensor(") else name


if __name__ == "__main__":
    main()
