"""Write the kernel tables of `sdflow/verify/kernels/` from the providers' own binaries, without their hardware.

    python benchmarks/providers/kernel_tables.py cpu
    python benchmarks/providers/kernel_tables.py cuda --wheel onnxruntime_gpu-1.31.1-cp311-cp311-manylinux_2_28_x86_64.whl
    python benchmarks/providers/kernel_tables.py rocm --wheel onnxruntime_rocm-1.22.2.post3-cp312-*.whl --python python3.12
    python benchmarks/providers/kernel_tables.py migraphx --wheel onnxruntime_migraphx-1.27.1-cp312-*.whl --python python3.12
    python benchmarks/providers/kernel_tables.py directml --wheel onnxruntime_directml-1.24.4-cp311-cp311-win_amd64.whl
    python benchmarks/providers/kernel_tables.py tensorrt --document operators.md
    python benchmarks/providers/kernel_tables.py nv_tensorrt_rtx --wheel *nv_tensorrt_rtx_cu13*linux*.whl --graphs PIPELINE
    python benchmarks/providers/kernel_tables.py openvino --wheel onnxruntime_openvino-1.24.1-cp311-*linux*.whl
    python benchmarks/providers/kernel_tables.py qnn --wheel onnxruntime_qnn-2.7.0-cp311-cp311-win_amd64.whl
    python benchmarks/providers/kernel_tables.py vitisai
    python benchmarks/providers/kernel_tables.py webgpu

Download a wheel for another system with pip: `pip download --no-deps --only-binary=:all: --platform win_amd64
--python-version 3.11 onnxruntime-directml`.

CPU, CUDA, ROCm: a provider creates its kernel list when it is created, which loads the GPU's libraries but needs no
GPU. For a wheel, stub libraries are compiled in which every function that the provider imports returns 0 ("success"),
and ONNX Runtime is queried in a process that finds them. This needs gcc, readelf, and a Python that fits the wheel and
has numpy and onnx. No kernel is run. MIGraphX is queried node by node (`kernels_asked.py`), DirectML's array is read
from its library (`kernels_in_dll.py`), and TensorRT's operators from its parser's document (`kernels_in_document.py`),
because it is not on the package index. TensorRT for RTX is queried by compiling ahead of time without a GPU
(`rtx_without_gpu.py`), OpenVINO node by node on the CPU, which it supports, and QNN's operators are names in its
library (`kernels_named.py`). No package contains VitisAI's provider, so its table says that nothing is known. WebGPU, a
plugin of the installed ONNX Runtime, is queried by node, version and type (`kernels_placed.py`).
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
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.providers.kernels_asked import ASK as ASK_EACH
from benchmarks.providers.kernels_asked import migraphx_kernels
from benchmarks.providers.kernels_in_dll import directml_kernels
from benchmarks.providers.kernels_in_document import tensorrt_kernels
from benchmarks.providers.kernels_named import qnn_kernels
from benchmarks.providers.kernels_placed import ASK as ASK_PLACED
from benchmarks.providers.kernels_placed import placed_rows
from benchmarks.providers.rtx_without_gpu import ASK as ASK_RTX
from benchmarks.providers.rtx_without_gpu import rtx_kernels, without_gpu
from sdflow.targets import TARGETS

KERNELS = Path(__file__).parents[2] / "sdflow" / "verify" / "kernels"
PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "rocm": "ROCMExecutionProvider",
    "migraphx": "MIGraphXExecutionProvider",
    "directml": "DmlExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "nv_tensorrt_rtx": "NvTensorRTRTXExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
    "qnn": "QNNExecutionProvider",
    "vitisai": "VitisAIExecutionProvider",
    "webgpu": "WebGpuExecutionProvider",
}
DOMAINS = ("", "com.microsoft")
OURS = re.compile(r"lib(dl|rt|pthread|stdc\+\+|m|gcc_s|c|onnxruntime\w*)\.so|ld-")
OPEN = 2**31 - 1  # ONNX Runtime's "and all later versions"

# A session allocates and copies before it is ready: the CPU's memory does for that (benchmarks/verify/placement_without_gpu.py).
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

TAKES = """
import json, sys
import onnx, onnxruntime
from onnx import TensorProto, helper

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
loads = {
    "runtime": onnxruntime.__version__,
    "opset": max(opset for opset in range(13, 40) if takes(opset, 8)),
    "ir_version": max(version for version in range(4, 30) if takes(17, version)),
}
"""

LOADS = TAKES + "json.dump(loads, sys.stdout)"
"""What a package's ONNX Runtime loads, of one that crashes when it lists its kernels."""

ASK = (
    TAKES
    + """
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_opkernel_def

kernels = [
    [kernel.domain, kernel.op_name, *kernel.version_range, {k: list(v) for k, v in kernel.type_constraints.items()}]
    for kernel in get_all_opkernel_def()
    if kernel.provider == sys.argv[1]
]
json.dump({**loads, "kernels": kernels}, sys.stdout)
"""
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=sorted(PROVIDERS))
    parser.add_argument("--wheel", type=Path, help="the provider's wheel; for cpu, the installed ONNX Runtime")
    parser.add_argument("--document", type=Path, help="for tensorrt: docs/operators.md of onnx-tensorrt")
    parser.add_argument(
        "--graphs",
        type=Path,
        nargs="*",
        default=[],
        help="for nv_tensorrt_rtx: pipelines built for it, to compile as well",
    )
    parser.add_argument(
        "--graphs-only", action="store_true", help="for nv_tensorrt_rtx: ask no operator besides (minutes less)"
    )
    parser.add_argument("--python", default=sys.executable, help="an interpreter that fits the wheel")
    parser.add_argument("--out", type=Path, default=KERNELS, help="the folder of the tables")
    given = parser.parse_args()
    out = given.out / f"{given.target}.json"
    if given.target == "tensorrt":
        if given.document is None:
            parser.error("tensorrt needs --document")
        write_tensorrt(out, given.document)
    elif given.target == "vitisai":
        write_unknown(out)
    elif given.target == "webgpu":
        write_webgpu(out)
    elif given.wheel is None and given.target != "cpu":
        parser.error(f"{given.target} needs --wheel")
    elif given.target == "directml":
        write_directml(out, given.wheel)
    elif given.target == "migraphx":
        write_migraphx(out, given.wheel, given.python)
    elif given.target == "nv_tensorrt_rtx":
        write_rtx(out, given.wheel, given.python, given.graphs, graphs_only=given.graphs_only)
    elif given.target == "openvino":
        write_openvino(out, given.wheel, given.python)
    elif given.target == "qnn":
        write_qnn(out, given.wheel)
    else:
        write_listed(out, given.target, given.wheel, given.python)


def write_listed(out: Path, target: str, wheel: Path | None, python: str) -> None:
    """The table of a provider that lists its kernels."""
    provider = PROVIDERS[target]
    if wheel is None:
        answer, package = ask(python, ASK, provider, {}), "onnxruntime"
    else:
        package = wheel.name.split("-")[0].replace("_", "-")
        with tempfile.TemporaryDirectory() as folder:
            answer = ask(python, ASK, provider, unpacked(wheel, Path(folder)))
    table = {
        "provider": provider,
        "version": f"{package} {answer['runtime']}",
        "source": "get_all_opkernel_def() of that package, by kernel_tables.py",
        "opset": answer["opset"],
        "ir_version": answer["ir_version"],
    }
    write_table(out, table, answer["kernels"])


def write_directml(out: Path, wheel: Path) -> None:
    """The table of DirectML. What registers elsewhere in ONNX Runtime, and so is not in the array, stays `unknown`."""
    old = json.loads((KERNELS / "directml.json").read_text(encoding="utf-8"))
    kernels = [row for row in directml_kernels(wheel) if not row[1].startswith("Memcpy")]
    there = {f"{domain}.{name}".lstrip(".") for domain, name, *_ in kernels}
    table = {
        "provider": PROVIDERS["directml"],
        "version": f"onnxruntime-directml {wheel.name.split('-')[1]}",
        "source": "operatorRegistrationInformationTable of that wheel's library, by kernel_tables.py; unknown: "
        "github.com/microsoft/onnxruntime docs/OperatorKernels.md at 001d12d2623fd411ce0f83d05abb5e82304a3389, less what "
        "the library tells; opset and ir_version: tried with onnxruntime 1.24.4",
        "opset": old["opset"],
        "ir_version": old["ir_version"],
        "unknown": " ".join(name for name in old["unknown"].split() if name not in there),
    }
    write_table(out, table, kernels)


def write_migraphx(out: Path, wheel: Path, python: str) -> None:
    from onnx import defs

    provider = PROVIDERS["migraphx"]
    with tempfile.TemporaryDirectory() as folder:
        environment = unpacked(wheel, Path(folder))
        answer = ask(python, ASK_EACH, provider, environment)
        loads = ask(python, ASK, provider, environment)
    standard = {schema.name for schema in defs.get_all_schemas() if schema.domain == ""}
    table = {
        "provider": provider,
        "version": f"onnxruntime-migraphx {answer['runtime']}",
        "source": "each operator in a graph of one node given to that wheel's provider, by kernel_tables.py; what "
        "no such graph can ask: mgx_supported_ops of onnxruntime/core/providers/migraphx/migraphx_execution_provider.cc. "
        "MIGraphX looks at names, not at versions; it takes the shapes that Reshape and the like are given as constants "
        "only; which attributes it refuses when it compiles is not known",
        "opset": loads["opset"],
        "ir_version": loads["ir_version"],
        "types": {"all": " ".join(sorted(answer["types"]))},
    }
    rows = {name: [[1, "any", {"*": "all"}]] for name in migraphx_kernels(answer["answers"], standard)}
    write_rows(out, table, rows)


def write_tensorrt(out: Path, document: Path) -> None:
    """The table of TensorRT. ir_version is ONNX Runtime's own, which loads the graph first."""
    release, opset, rows = tensorrt_kernels(document.read_text(encoding="utf-8"))
    old = json.loads((KERNELS / "tensorrt.json").read_text(encoding="utf-8"))
    table = {
        "provider": PROVIDERS["tensorrt"],
        "version": f"TensorRT {release}",
        "source": f"github.com/onnx/onnx-tensorrt docs/operators.md for TensorRT {release}, by kernel_tables.py; "
        "double is cast to float there; the restrictions in its last column are not in this table, but see conditions.json",
        "opset": opset,
        "ir_version": old["ir_version"],
    }
    write_rows(out, table, rows)


def write_rtx(out: Path, wheel: Path, python: str, pipelines: list[Path], *, graphs_only: bool) -> None:
    """The table of TensorRT for RTX. graphs_only: of the pipelines' operators alone; what was not asked stays `unknown`."""
    from onnx import defs

    provider = PROVIDERS["nv_tensorrt_rtx"]
    with tempfile.TemporaryDirectory() as folder:
        environment = without_gpu(wheel, Path(folder))
        question = ASK_RTX.replace("sorted(newest.items())", "()") if graphs_only else ASK_RTX
        answer = ask(python, question, provider, environment)
        rows = rtx_kernels(answer["answers"], pipelines, environment)
    asked = (
        f"the operators of {', '.join(sorted(each.name for each in pipelines))}, each of whose graphs that wheel's provider "
        f"compiled into one engine for an RTX 40xx with onnxruntime {answer['runtime']}, by kernel_tables.py"
    )
    table = {
        "provider": provider,
        "version": f"onnxruntime-ep-nv-tensorrt-rtx {wheel.name.split('-')[1]}",
        "source": f"{asked}; unknown: those that were not asked"
        if graphs_only
        else f"each operator in a graph of one node, in its form of opset 17, and {asked}; types: of the first input",
        "opset": answer["opset"],
        "ir_version": answer["ir_version"],
    }
    if graphs_only:
        standard = {schema.name for schema in defs.get_all_schemas() if schema.domain == ""}
        table["unknown"] = " ".join(sorted(standard - set(rows)))
        rows = {name: [[1, "any", {}]] for name in rows}
    write_rows(out, table, rows)


def write_openvino(out: Path, wheel: Path, python: str) -> None:
    """The table of OpenVINO on a CPU. What it does not take in a graph of one node, such as Conv with weights that are inputs, is
    unknown: in larger graphs it takes it."""
    from onnx import defs

    provider = PROVIDERS["openvino"]
    with tempfile.TemporaryDirectory() as folder:
        environment = unpacked(wheel, Path(folder), {"LD_LIBRARY_PATH": ""})
        answer = ask(python, ASK_EACH, provider, environment)
        loads = ask(python, LOADS, provider, environment)
    taken = [name for name, each in answer["answers"].items() if each]
    standard = {schema.name for schema in defs.get_all_schemas() if schema.domain == ""}
    table = {
        "provider": provider,
        "version": f"onnxruntime-openvino {answer['runtime']}",
        "source": "each operator in a graph of one node given to that wheel's provider on a CPU, by kernel_tables.py; asked "
        "in its form of opset 17; what OpenVINO takes on its GPUs and NPUs may differ; unknown: those that it does not take in "
        "a graph by themselves",
        "opset": loads["opset"],
        "ir_version": loads["ir_version"],
        "types": {"all": " ".join(sorted(answer["types"]))},
        "unknown": " ".join(sorted(standard - set(taken))),
    }
    write_rows(out, table, {name: [[1, "any", {"*": "all"}]] for name in taken})


def write_qnn(out: Path, wheel: Path) -> None:
    from onnx import defs

    named = qnn_kernels(wheel)
    standard = {schema.name for schema in defs.get_all_schemas() if schema.domain == ""}
    table = {
        "provider": PROVIDERS["qnn"],
        "version": f"onnxruntime-qnn {wheel.name.split('-')[1]}",
        "source": "names of operators in that wheel's library, by kernel_tables.py; unknown: those that are not found there, "
        "though the provider may have them; which types, ranks and attributes each takes depends on the backend (HTP, GPU, CPU)",
        "opset": defs.onnx_opset_version(),
        "ir_version": json.loads((KERNELS / "cpu.json").read_text(encoding="utf-8"))["ir_version"],
        "unknown": " ".join(sorted(standard - set(named))),
    }
    write_rows(out, table, {name: [[1, "any", {}]] for name in named})


def write_unknown(out: Path) -> None:
    """The table of a provider that is in no package: every operator is one that it may take."""
    from onnx import defs

    names = sorted({schema.name for schema in defs.get_all_schemas() if schema.domain == ""})
    table = {
        "provider": PROVIDERS["vitisai"],
        "version": "Windows ML's catalogue",
        "source": "none: the provider is in no package of the index, and its operators depend on the NPU",
        "opset": defs.onnx_opset_version(),
        "ir_version": json.loads((KERNELS / "cpu.json").read_text(encoding="utf-8"))["ir_version"],
        "unknown": " ".join(names),
    }
    write_rows(out, table, {})


def write_webgpu(out: Path) -> None:
    """The table of WebGPU's plugin, as it is installed beside ONNX Runtime."""
    provider = PROVIDERS["webgpu"]
    options = dict(TARGETS["webgpu"].session.options[provider])
    about = [provider, "onnxruntime_ep_webgpu", json.dumps(options)]
    rows, unknown = placed_rows(ask(sys.executable, ASK_PLACED, about, {}))
    loads = ask(sys.executable, ASK, "CPUExecutionProvider", {})
    table = {
        "provider": provider,
        "version": f"onnxruntime-ep-webgpu {version('onnxruntime-ep-webgpu')}",
        "source": f"each operator, version and type in a graph of one node given to that plugin, with {options}, in onnxruntime "
        f"{loads['runtime']}, by kernel_tables.py; unknown: no such graph makes a session; opset and ir_version are that ONNX "
        "Runtime's",
        "opset": loads["opset"],
        "ir_version": loads["ir_version"],
        "unknown": unknown,
    }
    write_rows(out, table, rows)


def unpacked(wheel: Path, folder: Path, environment: dict[str, str] | None = None) -> dict[str, str]:
    """Unpack an ONNX Runtime wheel beside libraries for it; returns the environment in which Python finds both.

    environment: of a provider that brings all its libraries, in place of empty ones.
    """
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    if environment is not None:
        return {"PYTHONPATH": str(folder), **environment}
    libraries = folder / "empty"
    libraries.mkdir()
    write_empty_libraries(sorted((folder / "onnxruntime" / "capi").glob("*providers_*.so")), libraries)
    return {"PYTHONPATH": str(folder), "LD_LIBRARY_PATH": str(libraries)}


def ask(python: str, question: str, about: str | list[str], environment: dict[str, str]) -> Any:
    quiet = {"ORT_DISABLE_TELEMETRY": "1", "CI": "1"}
    done = subprocess.run(
        [python, "-c", question, *([about] if isinstance(about, str) else about)],
        env={**os.environ, **quiet, **environment},
        stdout=subprocess.PIPE,
        check=True,
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
    rows = {
        operator: [
            [first, None if last == OPEN else last, {key: " ".join(sorted(value)) for key, value in types.items()}]
            for (first, last), alternatives in sorted(versions.items())
            for types in merged(alternatives)
        ]
        for operator, versions in operators.items()
    }
    write_rows(path, about, rows)


def write_rows(path: Path, about: dict[str, Any], rows: dict[str, Any]) -> None:
    lines = [f"  {json.dumps(operator)}: {json.dumps(each)}" for operator, each in sorted(rows.items())]
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
