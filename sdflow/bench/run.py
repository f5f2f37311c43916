"""`sdflow bench`: load the engines, run them in turns, and compare every image with PyTorch's in float32.

All engines share one process: alternating turns make the comparison fair on a machine that gets warm or busy. It costs
memory; an engine that does not fit with the others is reported, with a remedy.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sdflow.bench.checkpoint import torch_modules
from sdflow.bench.device import Device
from sdflow.bench.draw_functions import Draw, onnxruntime_draw, torch_draw
from sdflow.bench.engines import ENGINES, Engine, choose, dtype_of, quantized_of, weight_bytes, with_approximations
from sdflow.bench.judge import References
from sdflow.bench.result import BenchResult, EngineResult, Measurement
from sdflow.bench.sweep import Settings, SweepPoint
from sdflow.bench.time_limit import TooLong, TorchState, within
from sdflow.bench.timing import Turns
from sdflow.disk.file_stamp import check_stamps, folder_stamps
from sdflow.errors import SdflowError, UsageError
from sdflow.families.shared.approximation import EXACT, Approximation
from sdflow.machine.device import cuda_device, driver_version, has_cuda
from sdflow.machine.device import device as describe_device
from sdflow.machine.packages import installed_versions, versions
from sdflow.machine.providers import onnxruntime_for
from sdflow.manifest import MANIFEST_FILE, read_manifest
from sdflow.runtime.files.folder import every_artifact, refiner_of
from sdflow.runtime.files.soundness import require_sound_pipeline
from sdflow.runtime.refiner_requirements import require_exact
from sdflow.targets import TARGETS, find_target
from sdflow.units import spell_bytes

if TYPE_CHECKING:
    import torch

REFERENCE = Engine("reference", "PyTorch, float32")
OPTIONAL_PACKAGES = ("torchao", "xformers", "triton")

Say = Callable[[str], None]


@dataclass(frozen=True)
class BenchRequest:
    """The arguments of a `sdflow bench` run.

    folder: the pipeline's. engines: names; none for the default ones of this machine. check: verify the model files
    against the digests of the build, and compare every image with PyTorch's in float32.

    fewer: approximations, each measured next to the exact engine.
    first_limit: seconds in which an engine must load, and again in which it must generate the first image of a case;
    None: no limit.
    """

    folder: Path
    cases: Sequence[SweepPoint]
    settings: Settings = field(default_factory=Settings)
    engines: Sequence[str] = ()
    check: bool = True
    first_limit: float | None = None
    fewer: Approximation = EXACT


@dataclass
class _Running:
    """An engine in the run; `result` is replaced as more is known. quantized: see `quantized_of`."""

    engine: Engine
    result: EngineResult
    draw: Draw | None = None
    before: tuple[int | None, int | None] = (None, None)
    cases: list[Measurement | None] = field(default_factory=list)
    quantized: str = ""


def bench(request: BenchRequest, say: Say) -> BenchResult:
    """Measure. Raises UsageError if the folder is not a pipeline, no engine can run, or its checkpoint is missing,
    VerificationError if a model's file differs from the build."""
    manifest = read_manifest(request.folder)
    origin = manifest.origin
    built_for = find_target(origin.target, str(request.folder / MANIFEST_FILE))
    device = here(built_for.name, request.engines)
    if request.fewer and refiner_of(request.folder) is not None:
        require_exact(request.fewer, "Measure the base alone.")
    chosen = with_approximations(choose(request.engines, built_for.name, device.kind), request.fewer)
    running: list[_Running] = []
    for choice in chosen:
        result = EngineResult(choice.engine.name, choice.engine.title, "measured")
        if choice.skipped is not None:
            result = replace(result, status="skipped", reason=choice.skipped)
        running.append(_Running(choice.engine, result))
    active = [each for each in running if each.result.status != "skipped"]
    if not active:
        reasons = "; ".join(f"{each.engine.name}: {each.skipped}" for each in chosen)
        raise UsageError(f"no engine can run here: {reasons}", where="sdflow bench", remedy="See sdflow targets.")
    if request.check and any(each.engine.target for each in active):
        require_sound_pipeline(request.folder, checker=False)
    for each in active:
        dtype, each.quantized = dtype_of(request.folder, each.engine, device), quantized_of(request.folder, each.engine)
        spelled = f"{each.quantized}, {dtype}" if each.quantized else dtype
        target = each.engine.target
        provider = onnxruntime_for(TARGETS[target])[1] if target else f"torch, {device.kind}"
        each.result = replace(each.result, dtype=spelled, provider=provider)
    accelerator = {**cuda_device(), "driver": driver_version()} if device.kind == "cuda" else {}
    with _threads(request.settings.threads):
        runner = _Runner(request, device, say)
        runner.load_references(active)
        for index, case in enumerate(request.cases):
            runner.measure(index, case, active)
    check_stamps(runner.read, "the measurement began")
    return BenchResult(
        pipeline={
            **{key: getattr(origin, key) for key in ("name", "model", "target")},
            "loras": [asdict(lora) for lora in origin.loras],
            "folder": request.folder.name,
            "artifacts": every_artifact(request.folder),
        },
        machine={**describe_device(built_for), **accelerator},
        versions={**versions(), **installed_versions(*OPTIONAL_PACKAGES)},
        settings={
            **{name: value for name, value in asdict(request.settings).items() if name != "references" or value},
            **({"approximation": request.fewer.settings()} if request.fewer else {}),
            "device": device.kind,
            "cases": [asdict(case) for case in request.cases],
        },
        cases=tuple(request.cases),
        engines=tuple(each.result for each in running),
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        notes=tuple(runner.notes),
    )


def here(built_for: str, names: Sequence[str]) -> Device:
    """The GPU, if there is one and the pipeline or a requested engine is for it."""
    targets = {built_for, *(ENGINES[name].target for name in names if name in ENGINES)} - {"", "cpu"}
    return Device("cuda" if targets and has_cuda() else "cpu")


class _Runner:
    """The state that engines of a run share."""

    def __init__(self, request: BenchRequest, device: Device, say: Say) -> None:
        self.request, self.device, self.say = request, device, say
        self.notes: list[str] = []
        self.read = folder_stamps(request.folder)
        self.modules: Mapping[str, torch.nn.Module] = {}
        self.references = References()
        self.torch_state = TorchState.now()

    def load_references(self, active: Sequence[_Running]) -> None:
        """Load PyTorch's modules and images, as far as needed."""
        if not self.request.check and all(each.engine.target for each in active):
            return
        self.say("loading the checkpoint")
        self.modules = torch_modules(self.request.folder, self.read)
        if self.request.check:
            half = any(each.result.dtype == "float16" for each in active)
            self.references.draw(self._drawn, float16=half, say=self.say)

    def _drawn(self, dtype: str) -> dict[SweepPoint, np.ndarray]:
        draw = torch_draw(self.request.folder, self.modules, REFERENCE, self.request.settings, self.device.kind, dtype)
        drawn = {case: draw(case, None) for case in self.request.cases}
        del draw
        self.device.release()
        return drawn

    def load(self, running: _Running, others: Sequence[_Running]) -> None:
        """Load an engine; its result records what is missing."""
        engine, request = running.engine, self.request
        self.say(f"loading {engine.name}")
        loaded = ", ".join(other.engine.name for other in others)
        needed = weight_bytes(request.folder, engine, self.device, self.modules)
        free = self.device.free()
        if needed > free:
            running.result = replace(
                running.result,
                status="failed",
                reason=f"its weights take {spell_bytes(needed)}, but only {spell_bytes(free)} are free"
                + (f" with {loaded} loaded: measure it alone, with --engine {engine.name}" if loaded else ""),
            )
            return
        self.device.release()
        memory = self.device.memory()
        running.before = memory.host, memory.device
        begun = time.perf_counter()
        with self._reported(running, loaded), within(request.first_limit):
            note = ""
            if engine.target:
                running.draw, note = onnxruntime_draw(request.folder, engine, request.settings)
            else:
                dtype = running.result.dtype
                running.draw = torch_draw(
                    request.folder, self.modules, engine, request.settings, self.device.kind, dtype
                )
            self.device.wait()
            running.result = replace(running.result, load_seconds=time.perf_counter() - begun, note=note)

    def measure(self, index: int, case: SweepPoint, active: Sequence[_Running]) -> None:
        """Measure one case with every available engine: first images, warm-up, then turns. In the first case engines
        are loaded right before their first image, so that the added memory is their own."""
        turns: list[tuple[_Running, Turns]] = []
        for each in active:
            each.cases.append(None)
            if index == 0:
                self.load(each, [other for other in active if other.draw is not None])
            if each.draw is None:
                continue
            self.say(f"{case}: {each.engine.name}, first image")
            own = self._turns(each, each.draw, case, turns)
            with self._reported(each, ""):
                with within(self.request.first_limit):
                    own.first()
                if index == 0:
                    self._note_memory(each)
                for _ in range(self.request.settings.warmup - 1):
                    own.warm()
                turns.append((each, own))
        for turn in range(self.request.settings.rounds):
            self.say(f"{case}: round {turn + 1} of {self.request.settings.rounds}")
            shift = turn % max(1, len(turns))
            for each, own in [*turns[shift:], *turns[:shift]]:
                if each.draw is None:
                    continue
                with self._reported(each, ""):
                    own.counted()
        for each, own in turns:
            if each.draw is not None:
                each.cases[index] = own.result(self.request.settings.warmup)
        for each in active:
            each.result = replace(each.result, cases=tuple(each.cases))

    def _turns(
        self, running: _Running, draw: Draw, case: SweepPoint, before: Sequence[tuple[_Running, Turns]]
    ) -> Turns:
        """before: engines with first images of this case, among them the one that an approximation approximates, unless
        it failed."""
        exact = next((own.drawn for each, own in before if each.engine.name == running.engine.exact), None)
        yardstick = self.references.yardstick(running.engine, running.result.dtype, running.quantized, case, exact)
        return Turns(draw, case, self.device, yardstick)

    @contextmanager
    def _reported(self, running: _Running, loaded: str) -> Iterator[None]:
        """Report an engine's failure in the result and drop the engine; the others continue."""
        interrupted = False
        try:
            yield
        except (Exception, TooLong) as error:  # noqa: BLE001  whatever a library raises: kept in full, with the cause in a line
            running.draw = None
            what = error.what if isinstance(error, SdflowError) else f"{type(error).__name__}: {error}"
            if interrupted := isinstance(error, TooLong):
                what = f"{error}; raise --first-limit"
            reason = " ".join(what.split())[:400]
            if loaded and ("memory" in reason.lower() or "alloc" in reason.lower()):
                reason += f"; {loaded} were loaded: measure it alone, with --engine {running.engine.name}"
            running.result = replace(
                running.result, status="failed", reason=reason, trace="".join(traceback.format_exception(error))
            )
            self.say(f"{running.engine.name} failed: {reason}")
            self.device.release()
        if interrupted:  # after the exception and its frames are freed
            self.torch_state.restore()

    def _note_memory(self, running: _Running) -> None:
        after = self.device.memory()
        found = [
            None if now is None or before is None else max(0, now - before)
            for now, before in zip((after.host, after.device), running.before, strict=True)
        ]
        running.result = replace(running.result, host_bytes=found[0], device_bytes=found[1])


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Limit PyTorch to this many threads."""
    import torch

    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
