"""The environment of `faults.py`: workflows of the small model, a cache, pipelines, and the checks after each fault."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil
import yaml
from safetensors.numpy import save_file

from sdflow.artifact import Action, Artifact
from sdflow.config import load_workflow
from sdflow.digest import digest_file
from sdflow.disk.atomic_write import UNFINISHED
from sdflow.errors import InputChanged, SdflowError
from sdflow.passes import registry
from sdflow.run.run import RunOptions, run_workflow
from sdflow.store import Cache

ROOT = Path(__file__).parents[2]
LORAS = 3


class Silent:
    """A listener that hears nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments, **options: None


class Place:
    """A place with workflows, a cache and pipelines, what went wrong there, and what a fresh cache gives."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder, self.chance = folder, chance
        self.cache, self.out, self.temporary = folder / "cache", folder / "pipelines", folder / "tmp"
        self.temporary.mkdir(parents=True)
        tempfile.tempdir = os.environ["TMPDIR"] = str(self.temporary)
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.operations = 400
        for number in range(LORAS):
            self.write_lora(number)
            self.write_workflow(number)
        self.expected: dict[int, dict[str, str]] = {}

    def write_lora(self, number: int, content: int | None = None) -> None:
        """LoRA `number`, with its own content or another's; put in its place in one step."""
        values = np.random.default_rng(number if content is None else content)
        layer = "lora_te_text_model_encoder_layers_0_mlp_fc1"
        made = self.folder / f"lora-{number}.new"
        tensors = {
            f"{layer}.lora_up.weight": values.standard_normal((128, 2)).astype(np.float32),
            f"{layer}.lora_down.weight": values.standard_normal((2, 32)).astype(np.float32),
        }
        save_file(tensors, made)
        made.replace(self.folder / f"lora-{number}.safetensors")

    def workflow(self, number: int) -> Path:
        return self.folder / f"tiny-{number}.yaml"

    def write_workflow(self, number: int) -> None:
        content = {
            "extends": str(ROOT / "workflows/tiny_cpu.yaml"),
            "loras": [{"file": str(self.folder / f"lora-{number}.safetensors"), "scale": 0.5}],
            "submodels": dict.fromkeys(("vae_encoder", "vae_decoder", "safety_checker", "unet")),
            "evaluate": {"image": None, "latency": None},
            "verify": False,
        }
        self.workflow(number).write_text(yaml.safe_dump(content))

    def run(self, number: int, *, cache: Path | None = None, out: Path | None = None, copy: bool = False) -> None:
        loaded = load_workflow(self.workflow(number), catalog=registry.catalog())
        options = RunOptions(out or self.out, self.folder / "results", copy=copy, verify=False, evaluate=False)
        run_workflow(loaded, Cache(cache or self.cache), options, Silent())  # type: ignore[arg-type]

    def artifacts(self, number: int, out: Path) -> dict[str, str]:
        manifest = json.loads((out / f"tiny-{number}/sdflow.json").read_text())
        return {name: part["artifact"] for name, part in manifest["submodels"].items()}

    def forget_some(self) -> None:
        """So that there is something to build: weights bound before are, mostly, to be bound again."""
        cache = Cache(self.cache)
        for entry in cache.entries():
            if entry.pass_name == "BindWeights" and self.chance.random() < 0.8:
                (self.cache / "v1/actions" / entry.action[:2] / f"{entry.action}.json").unlink(missing_ok=True)
        if self.chance.random() < 0.03:
            shutil.rmtree(self.out, ignore_errors=True)
            cache.gc(0)

    # Looking

    def bad(self, what: str) -> None:
        self.counts["bad"] += 1
        self.problems.append(f"bad: {what}")

    def look(self) -> None:
        """What is wrong, and what is left after a collection."""
        cache = Cache(self.cache)
        cache.gc()
        if damaged := cache.verify().damaged:
            self.bad(f"damaged: {damaged}")
        quarantine = list((self.cache / "v1/quarantine").glob("*"))
        if quarantine and not self.lossy:
            self.bad(f"in quarantine: {[path.name for path in quarantine]}")
        for path in quarantine:
            shutil.rmtree(path)
        for folder in self.out.glob("[!.]*") if self.out.exists() else ():
            self.look_at(folder)
        places = [self.temporary, *(self.cache / "v1" / name for name in ("staging", "leases", "trash"))]
        hidden = list(self.out.glob(".*")) if self.out.exists() else []
        left = [path for place in places if place.exists() for path in place.iterdir()] + hidden
        left = [
            path for path in left if not path.name.endswith((UNFINISHED, ".making"))
        ]  # the young stay for the moment
        if left:
            self.counts["left"] += len(left)
            self.problems.append(f"left: {[path.name for path in left]}")
            for path in left:
                shutil.rmtree(path, ignore_errors=True)

    lossy = False

    def look_at(self, folder: Path) -> None:
        try:
            manifest = json.loads((folder / "sdflow.json").read_text())
            for name, part in manifest["submodels"].items():
                for file in part["files"]:
                    if digest_file(folder / name / file["path"]) != file["sha256"]:
                        self.bad(f"{folder.name}/{name}/{file['path']} has another content")
            json.loads((folder / "scheduler/scheduler_config.json").read_text())
        except (OSError, ValueError, KeyError) as error:
            self.bad(f"the pipeline {folder.name} is not whole: {type(error).__name__}: {error}")

    def compare(self, number: int) -> None:
        """An undisturbed run gives what a fresh cache gave."""
        status = self.ended(self.start(lambda: self.run(number)))
        if status != 0:
            self.bad(f"an undisturbed run ended with {status}: {self.said()}")
        elif self.artifacts(number, self.out) != self.expected[number]:
            self.bad(f"other digests than a fresh cache's for LoRA {number}")

    # Processes

    def start(self, body: Callable[[], object]) -> int:
        """A process that runs `body`: 0 done, 3 an error of sdflow's, 4 a changed input, 1 anything else."""
        process = os.fork()
        if process:
            return process
        code = 1
        try:
            sink = os.open(self.folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(sink, 1), os.dup2(sink, 2)
            body()
            code = 0
        except InputChanged:
            code = 4
        except SdflowError as error:
            os.write(2, str(error).encode())
            code = 3
        except BaseException:  # noqa: BLE001  (what it is stands in the log)
            import traceback

            with suppress(OSError):
                traceback.print_exc()
        finally:
            os._exit(code)

    def said(self) -> str:
        return (self.folder / "log.txt").read_text(errors="replace")[-600:]

    def ended(self, process: int) -> int:
        """Its exit status; minus the signal's number. Its workers must be gone within seconds."""
        _, status = os.waitpid(process, 0)
        return os.waitstatus_to_exitcode(status)

    def kill(self, process: int) -> None:
        with suppress(psutil.NoSuchProcess):
            workers = psutil.Process(process).children(recursive=True)
            os.kill(process, signal.SIGKILL)
            self.ended(process)
            self.counts["kills"] += 1
            self.gone(workers)

    def gone(self, workers: list[psutil.Process]) -> None:
        _, alive = psutil.wait_procs(workers, timeout=10)
        if alive:
            self.counts["left"] += len(alive)
            self.problems.append(f"left: processes {[process.pid for process in alive]}")

    @contextmanager
    def at(self, name: str) -> Iterator[None]:
        """Look at another cache and its pipelines."""
        before = self.cache, self.out
        self.cache, self.out = self.folder / name / "cache", self.folder / name / "pipelines"
        try:
            yield
        finally:
            self.cache, self.out = before


def small_build(store: Cache, name: str, *, forget: bool) -> Artifact:
    """A made-up artifact whose content follows from its name."""
    step = {"name": "Small", "version": 1}
    action = Action({"format": 1, "pass": step, "submodel": name, "config": {}, "inputs": {}, "uses": {}, "salt": ""})
    if forget:
        store.forget(action)
    record = store.lookup(action)
    if record is None:
        with store.staging(action) as staging:
            for file in ("model.onnx", "model.onnx.data", "config.json"):
                (staging.files / file).write_bytes(f"{name} {file} ".encode() * 500)
            record = staging.publish({}, {})
    return record.artifact
