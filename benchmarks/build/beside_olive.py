"""Compare sdflow's builds with Olive's passes and with `cp`, in one run.

    python benchmarks/build/beside_olive.py [--scratch DIR] [--architecture sd15] [--target cuda] [--part NAME ...] [--many 20]
        [--results FILE]

Writes two checkpoints of an architecture with random float16 weights (SD1.5: 2.7 GB each, SDXL: 7 GB) and a LoRA, as
diffusers folders and a kohya file. Each measurement is a command in a separate process:

    olive   the first build with Olive's own passes, submodel after submodel, pass after pass (benchmarks/build/olive_chain.py)
    first   sdflow's first build into an empty cache: all submodels
    again   the same once more: nothing to do
    next    the next checkpoint, and `cp` of the same bytes before and after, once left to the page cache and once synced
    lora    a LoRA of rank 16 on what LoRAs change, and `cp` of those submodels
    many    20 LoRAs for two targets, by `matrix:` (only with --many N or --part many)

A part that fails or is killed is reported and skipped. Peak memory: `largest` is the part's largest process, `together`
the sampled sum of all its processes. Results go to FILE (JSON lines) as they come. The table covers all of FILE, so
parts can be run one by one. Olive's fusion of the UNet needs about 18 GB.
"""

from __future__ import annotations

import argparse
import compileall
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

SILENCE = {
    "OLIVE_DISABLE_TELEMETRY": "1", "CI": "1", "ORT_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1", "PYTHONWARNINGS": "ignore",
}  # fmt: skip
BASES = {"sd15": "sd15", "sd15-tiny": "tiny", "sdxl": "sdxl"}
"""The architectures -> their shipped workflows."""
PARTS = ("olive", "first", "again", "next", "lora", "many")
RANK = 16


def measured(command: Sequence[str], log: Path, cwd: Path) -> dict[str, Any]:
    """Run a command to its end: seconds, processor seconds, peak memory in MB, exit status."""
    environment = {**os.environ, **SILENCE, "PYTHONPATH": str(ROOT)}
    begun = time.perf_counter()
    with log.open("ab") as sink, (cwd / "out.txt").open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=sink, cwd=cwd, env=environment, preexec_fn=_killed_before_the_parent
        )
        together = _Sampled(process.pid)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return {
        "seconds": time.perf_counter() - begun,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "largest_mb": usage.ru_maxrss // 1024,
        "together_mb": together.end(),
        "status": process.returncode,
        "load": os.getloadavg()[0],
    }


def _killed_before_the_parent() -> None:
    path = Path("/proc/self/oom_score_adj")
    if path.exists():
        path.write_text("900")


class _Sampled:
    """The largest sum of the resident memory of a process and all below it, in MB."""

    def __init__(self, pid: int) -> None:
        self._most, self._done = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(pid,))
        self._thread.start()

    def _watch(self, pid: int) -> None:
        while not self._done.wait(0.2):
            resident = 0
            try:
                root = psutil.Process(pid)
                for process in (root, *root.children(recursive=True)):
                    resident += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
            self._most = max(self._most, resident)

    def end(self) -> int:
        self._done.set()
        self._thread.join()
        return self._most >> 20


def write_checkpoint(folder: Path, architecture: str, seed: int) -> None:
    """A diffusers folder of the architecture with random float16 weights, written tensor by tensor."""
    import numpy as np

    from sdflow.families import family_of_architecture
    from sdflow.sources.architectures import architecture_config, companion_folder
    from sdflow.sources.load import parameter_shapes
    from sdflow.sources.synthetic import tensors_for

    family = family_of_architecture(architecture)
    source = companion_folder(architecture, "scheduler").parent
    folder.mkdir(parents=True)
    shutil.copyfile(source / "model_index.json", folder / "model_index.json")
    for companion in family.companions:
        if not companion_folder(architecture, companion).is_dir():  # an image processor, which only some models have
            continue
        shutil.copytree(companion_folder(architecture, companion), folder / companion)
    for component, (part, *_) in family.components.items():
        out = folder / component
        out.mkdir()
        config = architecture_config(architecture, component)
        (out / "config.json").write_text(json.dumps(config))
        shapes = parameter_shapes(part.name, {"family": family.name, "config": config})
        header, end = {}, 0
        for key, shape in shapes.items():
            size = 2 * int(np.prod(shape))
            header[key] = {"dtype": "F16", "shape": list(shape), "data_offsets": [end, end + size]}
            end += size
        name = "diffusion_pytorch_model" if component in ("unet", "vae") else "model"
        with (out / f"{name}.safetensors").open("wb") as stream:
            text = json.dumps(header).encode()
            stream.write(len(text).to_bytes(8, "little") + text)
            for key, shape in shapes.items():
                values = tensors_for(part.model, {key: shape}, seed)
                stream.write(values[key].astype(np.float16).data)


def write_lora(path: Path, architecture: str, seed: int) -> None:
    """A LoRA of rank 16 on the attention of the UNet and of the text encoders, in kohya's keys."""
    import numpy as np
    from safetensors.numpy import save_file

    from sdflow.families import family_of_architecture
    from sdflow.sources.architectures import architecture_config
    from sdflow.sources.load import parameter_shapes

    random, tensors = np.random.default_rng(seed), {}
    family = family_of_architecture(architecture)
    encoders = family.text
    prefixes = {family.denoiser: "lora_unet"}
    prefixes |= dict(zip(encoders, ("lora_te",) if len(encoders) == 1 else ("lora_te1", "lora_te2"), strict=True))
    for submodel, prefix in prefixes.items():
        config = architecture_config(architecture, family.part(submodel).component)
        for key, shape in parameter_shapes(submodel, {"family": family.name, "config": config}).items():
            layer = key.removesuffix(".weight")
            if (
                layer == key
                or not layer.endswith((*(f"to_{x}" for x in "qkv"), "to_out.0", "_proj"))
                or len(shape) != 2
            ):
                continue
            full = layer if submodel == family.denoiser or layer.startswith("text_model.") else f"text_model.{layer}"
            name = f"{prefix}_{full.replace('.', '_')}"
            up, down = random.standard_normal((shape[0], RANK)), random.standard_normal((RANK, shape[1]))
            tensors[f"{name}.lora_up.weight"] = (up / 100).astype(np.float16)
            tensors[f"{name}.lora_down.weight"] = down.astype(np.float16)
            tensors[f"{name}.alpha"] = np.array(RANK, np.float16)
    save_file(tensors, path)


def _in_a_process(function: Callable[..., None], *arguments: Any) -> None:
    """So that this one stays small: what is measured is forked from it, and its size would count as theirs."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{function.__name__} ended with status {process.exitcode}")


class Bench:
    """The folder that everything happens in, and the figures so far."""

    def __init__(self, scratch: Path, architecture: str, target: str, many: int, results: Path) -> None:
        self.scratch, self.architecture, self.target = scratch, architecture, target
        self.many, self.results = many, results
        self.workflow = scratch / f"{architecture}_{target}.yaml"
        from sdflow.families import family_of_architecture

        self.family = family_of_architecture(architecture)

    def say(self, name: str, figures: dict[str, Any]) -> None:
        with self.results.open("a") as stream:
            stream.write(json.dumps({"part": name, **figures}) + "\n")
        print(f"{name:28} {_cells(figures)}", flush=True)

    def checkpoint(self, seed: int) -> Path:
        folder = self.scratch / f"checkpoint-{seed}"
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            print(f"writing {folder}", flush=True)
            _in_a_process(write_checkpoint, folder, self.architecture, seed)
            (folder / "complete").touch()
        return folder

    def lora(self, seed: int) -> Path:
        path = self.scratch / f"lora-{seed:02}.safetensors"
        if not path.exists():
            _in_a_process(write_lora, path, self.architecture, seed)
        return path

    def sdflow(self, name: str, **more: Any) -> dict[str, Any]:
        """`sdflow run` of a workflow with these keys."""
        content = {
            "extends": f"base/{BASES[self.architecture]}.yaml",
            "target": self.target,
            **more,
        }
        self.workflow.write_text(json.dumps(content))
        command = [sys.executable, "-m", "sdflow", "run", str(self.workflow), "--no-evaluate", "--no-verify", "--json"]
        figures = measured(command, self.scratch / f"{name}.log", self.scratch)
        if figures["status"] == 0:
            result = json.loads((self.scratch / "out.txt").read_text())
            steps = [step for pipeline in result["pipelines"] for step in pipeline["steps"]]
            built = [step["pass"] for step in steps if step["outcome"] == "built"]
            figures |= {"built": {each: built.count(each) for each in dict.fromkeys(built)}}
            figures |= {"bytes": sum(step["bytes"] for step in steps if step["pass"] == "BindWeights")}
        self.say(name, figures)
        return figures

    def copied(self, name: str, submodels: Sequence[str]) -> None:
        """`cp` of what the pipeline has for these submodels, twice: as cp leaves it, and with `sync`."""
        pipeline = self.scratch / "pipelines" / f"{self.architecture}_{self.target}"
        copy = self.scratch / "copy"
        for suffix, after in (("", ""), (", synced", f" && sync {copy}/*/*")):
            shutil.rmtree(copy, ignore_errors=True)
            copy.mkdir()
            sources = " ".join(str(pipeline / submodel) for submodel in submodels)
            command = ["sh", "-c", f"cp -rL {sources} {copy}{after}"]
            self.say(f"{name}{suffix}", measured(command, self.scratch / "cp.log", self.scratch))
        shutil.rmtree(copy)

    def olive(self) -> None:
        checkpoint = self.checkpoint(0)
        every = []
        for submodel in self.family.submodels:
            command = [
                sys.executable, str(ROOT / "benchmarks/build/olive_chain.py"), str(checkpoint), "--submodel", submodel,
                "--float16", "one-pass", "--scratch", str(self.scratch), "--json",
            ]  # fmt: skip
            every.append(measured(command, self.scratch / "olive.log", self.scratch))
            self.say(f"olive {submodel}", every[-1])
        self.say(
            "olive",
            {
                **{key: sum(each[key] for each in every) for key in ("seconds", "cpu_seconds")},
                **{key: max(each[key] for each in every) for key in ("largest_mb", "together_mb", "load")},
                "status": next((each["status"] for each in every if each["status"]), 0),
            },
        )

    def first(self) -> None:
        if (self.scratch / "cache").exists():
            subprocess.run([sys.executable, "-m", "sdflow", "cache", "clean", "--yes"], cwd=self.scratch, check=True,
                           env={**os.environ, **SILENCE, "PYTHONPATH": str(ROOT)})  # fmt: skip
        self.sdflow("first", model=str(self.checkpoint(0)))

    def again(self) -> None:
        self.sdflow("again", model=str(self.checkpoint(0)))

    def next(self) -> None:
        checkpoint = self.checkpoint(1)
        self.copied("cp", self.family.submodels)
        self.sdflow("next", model=str(checkpoint))
        self.copied("cp", self.family.submodels)

    def lora_part(self) -> None:
        loras = [{"file": str(self.lora(0)), "scale": 0.8}]
        self.copied("cp of what LoRAs change", self.family.with_loras)
        self.sdflow("lora", model=str(self.checkpoint(0)), loras=loras)
        self.copied("cp of what LoRAs change", self.family.with_loras)

    def many_part(self) -> None:
        loras = {f"l{seed:02}": [{"file": str(self.lora(seed)), "scale": 0.8}] for seed in range(self.many)}
        targets = [self.target, "directml" if self.target != "directml" else "cuda"]
        self.sdflow("many", model=str(self.checkpoint(0)), matrix={"loras": loras, "target": targets})


def _cells(figures: dict[str, Any]) -> str:
    status = figures["status"]
    end = "" if status == 0 else f"  KILLED by signal {-status}" if status < 0 else f"  FAILED with status {status}"
    built = ", ".join(f"{count} {name}" for name, count in figures.get("built", {}).items())
    return (
        f"{figures['seconds']:8.1f} s, CPU {figures['cpu_seconds']:7.1f} s, largest {figures['largest_mb']:6} MB, "
        f"together {figures['together_mb']:6} MB, load {figures['load']:4.1f}  {built}{end}"
    )


def table(results: Path) -> Iterator[str]:
    """The table of the issue, from the last figures of each part."""
    last: dict[str, dict[str, Any]] = {}
    copies: dict[str, list[float]] = {}
    for line in results.read_text().splitlines():
        figures = json.loads(line)
        last[figures["part"]] = figures
        if figures["part"].startswith("cp"):
            copies.setdefault(figures["part"], []).append(figures["seconds"])
    copy = {part: sum(seconds[-2:]) / len(seconds[-2:]) for part, seconds in copies.items()}

    def row(what: str, part: str, goal: Callable[[dict[str, Any]], tuple[str, bool] | None], memory: int) -> str:
        found = last.get(part)
        if found is None:
            return f"| {what} | not run | | | |"
        if found["status"]:
            return (
                f"| {what} | status {found['status']} after {found['seconds']:.1f} s | {found['largest_mb']} MB | | |"
            )
        said = goal(found)
        words = "" if said is None else f"{said[0]}: {'met' if said[1] else 'MISSED'}"
        room = "" if not memory else f"under {memory} MB: {'met' if found['largest_mb'] < memory else 'MISSED'}"
        peak = f"{found['largest_mb']} MB (together {found['together_mb']})"
        return f"| {what} | {found['seconds']:.1f} s (CPU {found['cpu_seconds']:.1f}) | {peak} | {words} | {room} |"

    def beside_olive(found: dict[str, Any]) -> tuple[str, bool] | None:
        olive = last.get("olive")
        if olive is None:
            return None
        ratio = found["seconds"] / olive["seconds"]
        partly = " (which did not finish)" if olive["status"] else ""
        return f"{ratio:.2f}x Olive's time{partly}, goal 0.35x", ratio <= 0.35

    def beside_copy(part: str, times: float, more: float) -> Callable[[dict[str, Any]], tuple[str, bool] | None]:
        def goal(found: dict[str, Any]) -> tuple[str, bool] | None:
            if part not in copy:
                return None
            limit = times * copy[part] + more
            synced = copy[f"{part}, synced"]
            return f"cp {copy[part]:.1f} s (synced {synced:.1f} s), goal {limit:.1f} s", found["seconds"] <= limit

        return goal

    yield "| | time | peak memory of a process | goal | goal, memory |\n|---|---|---|---|---|"
    yield row("Olive's passes, all submodels", "olive", lambda found: None, 0)
    yield row("first build", "first", beside_olive, 5000)
    yield row("the same again", "again", lambda found: None, 0)
    yield row("the next checkpoint", "next", beside_copy("cp", 2, 0), 2000)
    yield row("a LoRA", "lora", beside_copy("cp of what LoRAs change", 1, 5), 2000)
    yield row("LoRAs x 2 targets", "many", lambda found: None, 2000)
    if "many" in last and last["many"].get("built"):
        yield f"\nLoRAs x 2 targets ran: {last['many']['built']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--scratch", type=Path, help="where to write (SD1.5: 15 GB, SDXL: 42 GB); kept if given, else temporary"
    )
    parser.add_argument("--target", default="cuda", choices=("cuda", "rocm", "directml"))
    parser.add_argument("--architecture", default="sd15", choices=tuple(BASES), help="sd15-tiny: to try this")
    parser.add_argument("--part", action="append", choices=PARTS, help="only these; repeatable")
    parser.add_argument("--many", type=int, default=0, metavar="N", help="N LoRAs for two targets")
    parser.add_argument("--results", type=Path, help="JSON lines; in the scratch folder by default")
    arguments = parser.parse_args()
    os.environ.update(SILENCE)
    compileall.compile_dir(ROOT / "sdflow", quiet=1)  # as pip leaves a package: no command that is measured compiles it
    scratch = (arguments.scratch or Path(tempfile.mkdtemp(prefix="beside-olive-"))).absolute()
    scratch.mkdir(parents=True, exist_ok=True)
    results = (arguments.results or scratch / "results.jsonl").absolute()
    bench = Bench(scratch, arguments.architecture, arguments.target, arguments.many or 20, results)
    parts = {
        "olive": bench.olive, "first": bench.first, "again": bench.again, "next": bench.next,
        "lora": bench.lora_part, "many": bench.many_part,
    }  # fmt: skip
    chosen = arguments.part or [part for part in PARTS if part != "many" or arguments.many]
    try:
        for part in chosen:
            parts[part]()
        print("\n" + "\n".join(table(results)))
    finally:
        if arguments.scratch is None:
            shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
