"""Fuzz untrusted inputs: sdflow must read any file or report what is wrong with it, and do nothing else.

    python benchmarks/cache/fuzz.py [--count 10000] [--only KIND ...] [--seed N] [--first N] [--seconds N] [--samples DIR]
        [--json FILE]

    header    safetensors headers and bytes: read, and inspected
    lora      names, shapes, values and metadata of LoRAs in three styles: refused, or merged as PEFT merges it
    config    config.json, model_index.json, scheduler and tokenizer of a checkpoint's folder: opened, its modules made
    workflow  YAML of workflows
    manifest  sdflow.json of a pipeline folder: read, and made into the workflow of a bake
    graph     model.onnx of a pipeline folder: read, and loaded by ONNX Runtime
    format    GGUF and quantized safetensors: refused, or dequantized to the values of gguf and PyTorch

Each kind runs in a separate process with limits on memory and time. Findings are: an exception that is not sdflow's; a
message over 4,000 characters; over 5 seconds of processor time; a file written outside its folder; a dead process; a
merge that differs from PEFT's; a weight that differs from the library's. Case N of a kind is deterministic: `--only
KIND --first N --count 1`. --seconds: start no more cases of a kind after this time. --samples: folder of the files to
mutate, created if missing, so that several fuzzers can share it. The exit status is 1 if there is a finding. Linux
only.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.cache.fuzz_formats import formats
from benchmarks.cache.fuzz_inputs import (
    as_json,
    mutated_bytes,
    mutated_graph,
    mutated_lora,
    mutated_safetensors,
    mutated_tree,
)
from sdflow.errors import SdflowError

SECONDS = 5.0
"""Of the processor, for one input."""
SILENT_SECONDS = 300.0
"""After which a process that says nothing is ended."""
MEMORY = 6 << 30
"""Bytes of address space that reading may take besides what the process has when it begins."""
LONGEST_MESSAGE = 4000
MERGED_ALIKE = 2e-5
"""Largest difference of a merged weight, as a part of the largest value of the weight."""
WHOLE = """
model: synthetic:sd15-tiny
target: [cpu, cuda]
generate: {steps: 20, guidance_scale: 7.5, scheduler: euler}
evaluate: {latency: {warmup: 1, runs: 3}, image: {steps: 2, height: 64, width: 64}}
verify: {level: quick}
"""
"""What makes a workflow of a base."""

MODULES_MADE = 0.4
"""Of the configs that are taken: that costs most."""

TOLD = 20
"""Findings of one kind that are kept word for word."""


class Hang(BaseException):
    """An input took longer than SECONDS."""


class Wrong(Exception):
    """An input was taken, and what came of it is not right."""


Case = Callable[[random.Random, Path], str]
"""Does one input in a folder; returns what became of it."""


def headers(root: Path) -> Case:
    from sdflow.inspection.contents import read_contents
    from sdflow.sources.safetensors_file import read_float_tensors, read_header, read_metadata

    contents = [(root / "loras" / name).read_bytes() for name in ("kohya.safetensors", "peft.safetensors")]

    def case(chance: random.Random, folder: Path) -> str:
        path = folder / "any.safetensors"
        path.write_bytes(mutated_safetensors(chance.choice(contents), chance))
        read_contents(path)
        read_metadata(path)
        read_float_tensors(path, sorted(read_header(path))[:3])
        return "taken"

    return case


def loras(root: Path) -> Case:
    import torch
    from safetensors.numpy import load_file, save_file

    from sdflow.errors import VerificationError
    from sdflow.families import FAMILIES
    from sdflow.sources.architectures import architecture_config
    from sdflow.sources.load import load_module
    from sdflow.sources.loras.layers import lora_delta
    from sdflow.sources.loras.lora import lora_submodels, read_lora
    from sdflow.sources.safetensors_file import read_metadata
    from sdflow.verify.reference.merged_loras import merge_lora

    family = FAMILIES["stable_diffusion"]
    config = architecture_config("sd15-tiny", "text_encoder")
    module = load_module("text_encoder", {"kind": "synthetic", "config": config, "seed": 1})
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    shapes = {"text_encoder": {name: tuple(tensor.shape) for name, tensor in weights.items()}}
    files = sorted((root / "loras").glob("*.safetensors"))
    unet = architecture_config("sd15-tiny", "unet")
    starts = [(load_file(path), read_metadata(path)) for path in files]

    def case(chance: random.Random, folder: Path) -> str:
        path = folder / "any.safetensors"
        tensors, metadata = mutated_lora(*chance.choice(starts), chance)
        save_file(tensors, path, metadata)
        lora_submodels(path)
        layers = read_lora(path, shapes)["text_encoder"]
        merged = copy.deepcopy(module)
        try:
            merge_lora(merged, "text_encoder", family, unet, path, 0.7)
        except VerificationError:
            return "taken, and PEFT does not"
        except (ValueError, KeyError, RuntimeError, TypeError, AttributeError, IndexError) as error:
            return f"taken, and PEFT fails ({type(error).__name__})"
        for name, tensor in merged.state_dict().items():
            expected = tensor.double()
            ours = weights[name].double()
            if name in layers:
                ours = ours + torch.from_numpy(lora_delta(layers[name], shapes["text_encoder"][name], 0.7)).double()
            if not bool(expected.isfinite().all()) or not bool(ours.isfinite().all()):
                continue  # refused when it is bound
            if float((ours - expected).abs().max()) > MERGED_ALIKE * max(1.0, float(expected.abs().max())):
                raise Wrong(f"{name} is not merged as PEFT merges it")
        return "taken, and merged as PEFT does"

    return case


def configs(root: Path) -> Case:
    from sdflow.sources import PlainDigests, open_checkpoint
    from sdflow.sources.load import parameter_shapes

    names = (
        "model_index.json", "unet/config.json", "vae/config.json", "text_encoder/config.json",
        "scheduler/scheduler_config.json", "tokenizer/tokenizer_config.json",
    )  # fmt: skip
    before = {name: (root / "checkpoint" / name).read_bytes() for name in names}
    part = {"unet": "unet", "vae": "vae_decoder", "text_encoder": "text_encoder"}
    whole = open_checkpoint(str(root / "checkpoint"), digests=PlainDigests(), download=False)
    # The libraries are imported before the clock runs: a case that is cut off leaves half of one.
    for submodel in part.values():
        parameter_shapes(submodel, whole.submodels[submodel].load)

    def case(chance: random.Random, folder: Path) -> str:
        if not (folder / "unet").exists():
            shutil.copytree(root / "checkpoint", folder, dirs_exist_ok=True, copy_function=os.link)
            for name in names:
                (folder / name).unlink()
        for name in names:
            if not (folder / name).exists():
                (folder / name).write_bytes(before[name])
        name = chance.choice(names)
        changed = (
            mutated_bytes(before[name], chance)
            if chance.random() < 0.2
            else as_json(mutated_tree(json.loads(before[name]), chance))
        )
        (folder / name).write_bytes(changed)
        try:
            checkpoint = open_checkpoint(str(folder), digests=PlainDigests(), download=False)
            submodel = part.get(name.partition("/")[0])
            if submodel is not None and chance.random() < MODULES_MADE:
                parameter_shapes(submodel, checkpoint.submodels[submodel].load)
        finally:
            (folder / name).unlink()
        return "taken"

    return case


def workflows(root: Path) -> Case:
    import yaml

    from sdflow.config import load_workflow
    from sdflow.disk.shipped import shipped_workflow
    from sdflow.passes.registry import catalog

    names = ("tiny_controlnet", "sd15_controlnet", "sdxl_with_refiner_tiny", "stable_diffusion_1")
    paths = [shipped_workflow(f"base/{name}.yaml") for name in names]
    texts = [path.read_text() for path in paths if path is not None]
    assert len(texts) == len(names)
    texts += [texts[-1] + WHOLE] * 3
    known = catalog()
    known.names()

    def case(chance: random.Random, folder: Path) -> str:
        text = chance.choice(texts)
        if chance.random() < 0.4:
            content = mutated_bytes(text.encode(), chance)
        else:
            tree = mutated_tree(yaml.safe_load(text), chance)
            content = (
                as_json(tree)
                if chance.random() < 0.5
                else yaml.safe_dump(tree, allow_unicode=True).encode(errors="replace")
            )
        (folder / "any.yaml").write_bytes(content)
        load_workflow(folder / "any.yaml", catalog=known)
        return "taken"

    return case


def manifests(root: Path) -> Case:
    from sdflow.manifest import MANIFEST_FILE, read_manifest
    from sdflow.run.bake import workflow_of

    before = (root / "pipeline" / MANIFEST_FILE).read_bytes()

    def case(chance: random.Random, folder: Path) -> str:
        changed = (
            mutated_bytes(before, chance)
            if chance.random() < 0.2
            else as_json(mutated_tree(json.loads(before), chance))
        )
        (folder / MANIFEST_FILE).write_bytes(changed)
        workflow_of(folder / MANIFEST_FILE, read_manifest(folder).origin, [], "baked")
        return "taken"

    return case


def graphs(root: Path) -> Case:
    from sdflow.runtime.sessions.session import create_session, read_graph
    from sdflow.targets import TARGETS

    source = root / "pipeline/text_encoder"
    before = (source / "model.onnx").read_bytes()

    def case(chance: random.Random, folder: Path) -> str:
        if not (folder / "model.onnx.data").exists():
            os.link(source / "model.onnx.data", folder / "model.onnx.data")
        (folder / "model.onnx").write_bytes(mutated_graph(before, chance))
        read_graph(folder / "model.onnx")
        create_session(folder / "model.onnx", TARGETS["cpu"])
        return "taken"

    return case


KINDS: dict[str, Callable[[Path], Case]] = {
    "header": headers, "lora": loras, "config": configs, "workflow": workflows, "manifest": manifests, "graph": graphs,
    "format": formats,
}  # fmt: skip


def prepare(root: Path) -> None:
    """What is mutated: the small Stable Diffusion as a checkpoint's folder, its text encoder built, LoRAs for it."""
    from benchmarks.cache.fuzz_samples import make_samples

    make_samples(root)


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def late(number: int, frame: FrameType | None) -> None:
        raise Hang

    signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _work(kind: str, root: Path, folder: Path, seed: int, first: int, last: int, until: float, said: Any) -> None:
    """The process of one kind: says each case before it, and what became of it. until: by the monotonic clock."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    warnings.simplefilter("ignore")
    case = KINDS[kind](root)
    tempfile.tempdir = str(folder)  # what is written for a while is seen too
    outside: list[str] = []
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        place = None
        if event == "open" and isinstance(arguments[0], str | bytes) and (arguments[2] or 0) & writing:
            place = os.fsdecode(arguments[0])
        elif event in ("os.mkdir", "os.rename", "os.remove", "os.symlink", "os.link"):
            place = os.fsdecode(arguments[1 if event in ("os.rename", "os.symlink", "os.link") else 0])
        if place is not None and not str(Path(place).absolute()).startswith((str(folder), os.devnull)):
            outside.append(f"{event} {place}")

    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    limit = int(status["VmSize"].split()[0]) * 1024 + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    sys.addaudithook(hook)
    for index in range(first, last):
        if time.monotonic() > until:
            break
        said.send(("case", index))
        became, wrong = "refused", None
        try:
            with _limited():
                became = case(random.Random(f"{seed}:{kind}:{index}"), folder)
        except SdflowError as error:
            if len(str(error)) > LONGEST_MESSAGE:
                wrong = f"a message of {len(str(error)):,} characters: {str(error)[:200]!r}"
        except Hang:
            wrong = f"more than {SECONDS:g} s"
        except BaseException as error:  # noqa: BLE001  (that is what is looked for)
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/sdflow/" in frame.filename]
            place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
            wrong = f"{type(error).__name__} at {place}: {str(error)[:200]!r}"
        if outside:
            wrong = f"wrote outside: {outside[0]}"
            outside.clear()
        said.send(("done", index, became if wrong is None else "wrong", wrong))
    said.send(("end",))


def fuzz(
    kind: str, root: Path, seed: int, first: int, count: int, seconds: float = math.inf
) -> tuple[Counter[str], list[tuple[int, str]]]:
    """`count` cases of a kind, or as many as are begun in `seconds`: what became of them, and the findings."""
    became: Counter[str] = Counter()
    findings: list[tuple[int, str]] = []
    last = first + count
    until = time.monotonic() + seconds
    context = multiprocessing.get_context("fork")
    while first < last:
        with tempfile.TemporaryDirectory(prefix="sdflow-fuzz-") as scratch:
            hear, say = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(kind, root, Path(scratch), seed, first, last, until, say))
            process.start()
            say.close()
            at = first
            while True:
                try:
                    message = hear.recv() if hear.poll(SILENT_SECONDS) else None
                except EOFError:
                    message = None
                if message is None:
                    process.kill()
                    process.join()
                    became["wrong"] += 1
                    findings.append((at, f"the process ended with {process.exitcode}"))
                    first = at + 1
                    break
                if message[0] == "case":
                    at = message[1]
                elif message[0] == "done":
                    became[message[2]] += 1
                    if message[3] is not None:
                        findings.append((message[1], message[3]))
                else:
                    process.join()
                    first = last
                    break
    return became, findings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--samples", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    told: dict[str, Any] = {}
    with contextlib.ExitStack() as made:
        root = options.samples or Path(made.enter_context(tempfile.TemporaryDirectory(prefix="sdflow-fuzz-samples-")))
        if not (root / "formats").is_dir():
            prepare(root)
        for kind in options.only:
            begun = time.perf_counter()
            became, findings = fuzz(kind, root, options.seed, options.first, options.count, options.seconds)
            seconds = time.perf_counter() - begun
            told[kind] = {"became": dict(became), "findings": findings, "seconds": round(seconds, 1)}
            how = ", ".join(f"{n:,} {what}" for what, n in became.most_common())
            print(f"{kind:9} {sum(became.values()):6,} in {seconds:6.1f} s: {how}")
            for index, wrong in findings[:TOLD]:
                print(f"    {index}: {wrong}")
            sys.stdout.flush()
    if options.json is not None:
        options.json.write_text(json.dumps(told, indent=2))
    return int(any(each["findings"] for each in told.values()))


if __name__ == "__main__":
    sys.exit(main())
