"""Query which nodes TensorRT for RTX takes and what it compiles, from its own provider on a machine without a GPU.

    python benchmarks/providers/rtx_without_gpu.py PIPELINE --wheel onnxruntime_ep_nv_tensorrt_rtx_cu13-0.5.0-*linux*.whl

compiles each graph of a pipeline built for `nv_tensorrt_rtx`, and prints the number of engines, the remaining nodes,
seconds and bytes. Nothing is run: that takes a GPU.

The provider can compile ahead of time for an absent GPU (its option `nv_target_sm`), but only in Windows sandboxes and
for programs that configure ONNX Runtime's environment, which Python cannot do. A compiled bridge (gcc), which ONNX
Runtime loads as the plugin, therefore loads the provider, reports such a sandbox, and answers its queries of the
environment. The CUDA driver and NVML libraries that the provider links against are stubs that report no device. The
compilation itself is NVIDIA's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.providers.kernels_asked import QUESTIONS

PROVIDER = "NvTensorRTRTXExecutionProvider"
PACKAGE = "onnxruntime_ep_nv_tensorrt_rtx"
LIBRARY = "libonnxruntime_providers_nv_tensorrt_rtx.so"
SM = "sm89"
"""Ada, RTX 40xx. The wheel's tensorrt_rtx_provider_options.h lists the others."""

SANDBOX = "_ZZN10trt_rtx_ep22IsWin32kLockdownActiveEvE6active"
GUARD = "_ZGV" + SANDBOX.removeprefix("_Z")
"""A static variable of the provider, and what says that it was computed."""

GET_VALUE, API_SIZE = 297, 430
"""Index of GetKeyValue in OrtApi (onnxruntime_c_api.h), which only ever grows at its end; and how much of it is copied."""

BRIDGE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef const char *(*GetValue)(const void *, const char *);
typedef struct { const void *(*api)(unsigned); const char *(*version)(void); } Base;
static const Base *real;
static GetValue plain;
static void *copied[API_SIZE], *library;
static const char *value(const void *pairs, const char *key) {
  if (strstr(key, "nv_target_sm")) return SM;
  if (strstr(key, "allow_virtual_devices")) return "1";
  return plain(pairs, key);
}
static const void *api(unsigned version) {
  void **from = (void **)real->api(version);
  if (!from) return 0;
  memcpy(copied, from, sizeof copied);
  plain = (GetValue)from[GET_VALUE];
  copied[GET_VALUE] = (void *)value;
  return copied;
}
static const char *version(void) { return real->version(); }
static Base mine = {api, version};
void *CreateEpFactories(const char *name, const Base *base, const void *logger, void **made, size_t most, size_t *count) {
  struct link_map *map;
  real = base;
  library = dlopen(LIBRARY, RTLD_NOW | RTLD_GLOBAL);
  if (!library || dlinfo(library, RTLD_DI_LINKMAP, &map)) { fprintf(stderr, "%s\\n", dlerror()); exit(1); }
  *((char *)map->l_addr + GUARD) = 1;
  *((char *)map->l_addr + SANDBOX) = 1;
  return ((void *(*)(const char *, const Base *, const void *, void **, size_t, size_t *))dlsym(
      library, "CreateEpFactories"))(name, &mine, logger, made, most, count);
}
void *ReleaseEpFactory(void *made) { return ((void *(*)(void *))dlsym(library, "ReleaseEpFactory"))(made); }
"""

COMPILED = """
import os, sys
import onnx, onnxruntime

def options():
    import onnxruntime_ep_nv_tensorrt_rtx
    if not getattr(options, "registered", False):
        onnxruntime.register_execution_provider_library("NvTensorRTRTXExecutionProvider", os.environ["RTX_BRIDGE"])
        options.registered = True
    made = onnxruntime.SessionOptions()
    devices = [each for each in onnxruntime.get_ep_devices() if each.ep_vendor == "NVIDIA"]
    made.add_provider_for_devices(devices, {})
    return made

def compiled(model, made=None):
    compiler = onnxruntime.ModelCompiler(made or options(), model, embed_compiled_data_into_model=True)
    return onnx.load_from_string(compiler.compile_to_bytes())

def placed(model):
    try:
        operators = [node.op_type for node in compiled(model).graph.node]
    except Exception as error:
        return None if "INVALID_GRAPH" in str(error) or "Load model" in str(error) else "nobody"
    return "NvTensorRTRTXExecutionProvider" if operators == ["EPContext"] else "nobody"
"""

OF_EACH_TYPE = """
TYPES["bfloat16"] = 16
FIRST = ("float16", "float", "bfloat16", "int64", "int32", "bool")

def dimensions(rank):
    return [2] * rank

options()  # the library is loaded once, before the children are made

def answer(schema):
    # With constants, which some operators want, then without; each type in a child of its own.
    taken = []
    allowed = {t[7:-1] for t in schema.inputs[0].types} if len(schema.inputs) else {"float"}
    for first in [each for each in FIRST if each in allowed]:
        for sizes in (([1], [2]), ()):
            if apart(lambda: asked(schema, 17, sizes, (first,))):
                taken.append(first)
                break
    return taken

def loads(opset, ir_version):
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)
    return apart(lambda: placed(model.SerializeToString())) == PROVIDER

json.dump({
    "runtime": onnxruntime.__version__,
    "opset": max(opset for opset in range(13, 30) if loads(opset, 8)),
    "ir_version": max(version for version in range(8, 16) if loads(17, version)),
    "answers": {key: answer(schema) for key, schema in sorted(newest.items())},
}, sys.stdout)
"""

ASK = COMPILED + QUESTIONS + OF_EACH_TYPE

PIPELINE = (
    COMPILED
    + """
import json, time
from pathlib import Path

sizes = json.loads(sys.argv[3])
for name in sys.argv[2].split(","):
    made = options()
    for axis, size in sizes[name].items():
        made.add_free_dimension_override_by_name(axis, size)
    begin = time.perf_counter()
    found = compiled(name, made)
    left = [node.op_type for node in found.graph.node if node.op_type != "EPContext"]
    print(json.dumps({
        "submodel": Path(name).parent.name,
        "engines": len(found.graph.node) - len(left),
        "left": left,
        "seconds": time.perf_counter() - begin,
        "bytes": sum(len(a.s) for node in found.graph.node for a in node.attribute if a.name == "ep_cache_context"),
    }), flush=True)
"""
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", type=Path, help="folder, built for nv_tensorrt_rtx")
    parser.add_argument("--wheel", type=Path, required=True, help="onnxruntime-ep-nv-tensorrt-rtx-cu13, for Linux")
    parser.add_argument("--sm", default=SM, help="the GPUs to compile for: sm86, sm89, sm120, sm121")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for _, one in compiled_pipelines([given.pipeline], without_gpu(given.wheel, Path(folder), given.sm)):
            left = ", ".join(f"{count} {name}" for name, count in Counter(one["left"]).items()) or "nothing"
            print(
                f"{one['submodel']}: {one['engines']} engines, {one['bytes'] / 1e6:.1f} MB, {one['seconds']:.1f} s; "
                f"left over: {left}"
            )


def compiled_pipelines(pipelines: list[Path], environment: dict[str, str]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Each model of the pipelines, and what the provider made of it."""
    models = [model for pipeline in pipelines for model in sorted(pipeline.glob("*/model.onnx"))]
    sizes = {str(model): smallest_sizes(model) for model in models}
    command = [sys.executable, "-c", PIPELINE, PROVIDER, ",".join(map(str, models)), json.dumps(sizes)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    yield from zip(models, map(json.loads, done.stdout.split("\n")[: len(models)]), strict=True)


def smallest_sizes(model: Path) -> dict[str, int]:
    """A size for each axis that a graph leaves open: an image of 64 pixels, or 512 tokens."""
    import onnx

    sizes: dict[str, int] = {}
    for each in onnx.load(model, load_external_data=False).graph.input:
        for axis in each.type.tensor_type.shape.dim:
            if axis.dim_param:
                name = axis.dim_param
                sizes[name] = 2 if "batch" in name else 77 if "sequence" in name else 64 if "image" in name else 16
    return sizes


def without_gpu(wheel: Path, folder: Path, sm: str = SM) -> dict[str, str]:
    """Unpack the wheel, make what stands in for a driver, and the bridge; returns the environment in which Python finds all."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    package = folder / PACKAGE
    library = package / LIBRARY
    symbols = subprocess.run(["readelf", "-Ws", library], stdout=subprocess.PIPE, text=True, check=True).stdout
    places = {}
    for columns in (line.split() for line in symbols.splitlines()):
        if len(columns) > 7 and columns[7] in (SANDBOX, GUARD):
            places[columns[7]] = columns[1]
    if len(places) != 2:
        raise SystemExit(f"{LIBRARY} has no {SANDBOX} any more: look how it finds out that it cannot reach a driver")
    wanted = {name for file in package.glob("*.so*") for name in undefined(file)}
    stand_in(folder / "libcuda.so.1", sorted(name for name in wanted if re.match(r"cu[A-Z]", name)), 100)
    stand_in(folder / "libnvidia-ml.so.1", sorted(name for name in wanted if name.startswith("nvml")), 9)
    (folder / "bridge.c").write_text(BRIDGE)
    values = {
        "LIBRARY": json.dumps(str(library)), "SM": json.dumps(sm), "SANDBOX": f"0x{places[SANDBOX]}",
        "GUARD": f"0x{places[GUARD]}", "GET_VALUE": GET_VALUE, "API_SIZE": API_SIZE,
    }  # fmt: skip
    defines = [f"-D{name}={value}" for name, value in values.items()]
    compile_library(folder / "bridge.c", folder / "bridge.so", *defines)
    return {
        **os.environ,
        "ORT_DISABLE_TELEMETRY": "1",
        "PYTHONPATH": str(folder),
        "LD_LIBRARY_PATH": str(folder),
        "RTX_BRIDGE": str(folder / "bridge.so"),
    }


def undefined(library: Path) -> list[str]:
    listed = subprocess.run(
        ["readelf", "-W", "--dyn-syms", library], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    rows = [line.split() for line in listed.splitlines()]
    return [row[7].partition("@")[0] for row in rows if len(row) > 7 and row[6] == "UND"]


def stand_in(path: Path, functions: list[str], answer: int) -> None:
    """A library whose every function returns the same error: what a driver says where there is no device."""
    source = path.with_suffix(".c")
    source.write_text("".join(f"long {name}(void) {{ return {answer}; }}\n" for name in functions))
    compile_library(source, path, f"-Wl,-soname,{path.name}")


def compile_library(source: Path, out: Path, *options: str) -> None:
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", *options, "-o", str(out), str(source), "-ldl"], check=True)


def rtx_kernels(answers: dict[str, list[str]], pipelines: list[Path], environment: dict[str, str]) -> dict[str, Any]:
    """The rows of a table: operator -> the types of its first input that the parser takes.

    answers: of graphs of one node. pipelines: what of them is compiled into one engine adds its operators, which one node with
    inputs alone cannot ask.
    """
    from sdflow.verify.artifact.element_types import element_types

    taken = {name: set(types) for name, types in answers.items() if types}
    for model, one in compiled_pipelines(pipelines, environment):
        if one["engines"] == 1 and not one["left"]:
            import onnx

            loaded = onnx.load(model, load_external_data=False)
            opsets = {entry.domain.replace("ai.onnx", ""): entry.version for entry in loaded.opset_import}
            types = element_types(loaded.graph, opsets, {})
            for node in loaded.graph.node:
                found = types.get(node.input[0]) if node.input else None
                taken.setdefault(f"{node.domain}.{node.op_type}".lstrip("."), set()).update([found] if found else [])
    return {name: [[1, "any", {"0": " ".join(sorted(types))} if types else {}]] for name, types in taken.items()}


if __name__ == "__main__":
    begin = time.perf_counter()
    main()
    print(f"{time.perf_counter() - begin:.0f} s")
