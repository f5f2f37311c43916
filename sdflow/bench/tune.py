"""`sdflow tune`: try options one by one, each measured against the best so far on this machine.

An option is kept if images are at least 2 % faster, in alternation with the best so far and in three quarters of the
turns, and every submodel computes what it did untuned. On an H200, `sdpa_kernel=1` was fast and silently wrong: 0.069
off.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.bench.device import Device
from sdflow.bench.engines import Engine, dtype_of, quantized_of
from sdflow.bench.latency import percentile
from sdflow.bench.sweep import Settings, SweepPoint, call_options, latents
from sdflow.bench.timing import SETTLE_SECONDS
from sdflow.distance import relative_l2
from sdflow.errors import SdflowError, UsageError
from sdflow.families.shared.request import Request
from sdflow.machine.device import cores
from sdflow.machine.onnx_runtime import import_onnxruntime, onnxruntime_errors
from sdflow.manifest import MANIFEST_FILE, REFINER, read_manifest
from sdflow.runtime.denoiser.denoiser import DenoiserInputs
from sdflow.runtime.ensemble import Ensemble
from sdflow.runtime.files.folder import folder_defaults
from sdflow.runtime.files.recorded_tuning import record_tuning
from sdflow.runtime.pipeline import Pipeline
from sdflow.runtime.sessions.tuning import UNTUNED, Tuning
from sdflow.targets import Target, find_target
from sdflow.tolerances import SESSIONS_APART

if TYPE_CHECKING:
    import torch

GAIN = 0.98
"""Maximum relative time of a kept candidate."""

Say = Callable[[str], None]
Change = Callable[[Tuning], Tuning]


@dataclass(frozen=True)
class Candidate:
    """An option with one value to try, as a change of the current choice."""

    option: str
    value: str
    change: Change


@dataclass(frozen=True)
class Trial:
    """A tried candidate. ratio: its time relative to the best so far; None if it did not run. distance: of the submodel
    that differs most from the untuned one. verdict: taken, no gain, unsteady (faster in the median, but not in enough
    turns), WRONG or failed. reason: for the last three."""

    option: str
    value: str
    verdict: str
    ratio: float | None = None
    distance: float | None = None
    reason: str | None = None


UNSTEADY = "faster in the median, but not in three quarters of the turns: close other programs, or give --rounds 15"


def verdict_of(ratios: Sequence[float]) -> str:
    """The verdict on a candidate from its times relative to the best so far, turn by turn. It must be faster in the
    median and in three quarters of the turns; otherwise it may be chance."""
    if statistics.median(ratios) > GAIN:
        return "no gain"
    return "taken" if percentile(list(ratios), 75) < 1 else "unsteady"


@dataclass(frozen=True)
class TuneResult:
    """The result of `sdflow tune`.

    tuning: the chosen options. ratio: time relative to the untuned pipeline. file: where the tuning is stored.
    """

    target: str
    tuning: Tuning
    described: str
    trials: tuple[Trial, ...]
    ratio: float
    tolerance: float
    file: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def candidates(target: Target, cores: int) -> list[Candidate]:
    """The options that matter on a target, most effective first.

    https://onnxruntime.ai/docs/execution-providers/CUDA-ExecutionProvider.html,
    https://onnxruntime.ai/docs/performance/tune-performance/threading.html
    """
    if target.name in ("cuda", "tensorrt"):
        cuda = target.name == "cuda"
        options = [
            ("cudnn_conv_algo_search", ("EXHAUSTIVE",)),
            ("sdpa_kernel", ("1", "2", "8", "16")),  # flash, memory efficient, cuDNN, plain
            ("fuse_conv_bias", ("0",)),
            ("cudnn_conv_use_max_workspace", ("0",)),
            ("arena_extend_strategy", ("kNextPowerOfTwo",)),
        ]
        found = [_entry("provider", name, value) for name, values in options for value in values] if cuda else []
        return [*found, *([_off("own_kernels")] if cuda else []), _off("cuda_graphs")]
    if target.name != "cpu":
        return []
    threads = sorted({1, max(1, cores // 2), cores, 2 * cores} - {0})
    return [
        *(_field("threads", count) for count in threads),
        _entry("session", "session.intra_op.allow_spinning", "0"),
        _entry("session", "session.force_spinning_stop", "0"),
        *(_field("optimization", level) for level in ("ORT_ENABLE_EXTENDED", "ORT_ENABLE_BASIC")),
        _off("memory_arena"),
        _off("memory_pattern"),
        _entry("session", "session.set_denormal_as_zero", "1"),
    ]


def _entry(field: str, name: str, value: str) -> Candidate:
    """An entry of a `Tuning` field that is a map."""
    return _of(name, value, lambda tuning: {field: {**getattr(tuning, field), name: value}})


def _field(name: str, value: Any) -> Candidate:
    return _of(name, str(value), lambda tuning: {name: value})


def _off(name: str) -> Candidate:
    return _of(name, "off", lambda tuning: {name: False})


def _of(option: str, value: str, changed: Callable[[Tuning], dict[str, Any]]) -> Candidate:
    return Candidate(option, value, lambda tuning: replace(tuning, **changed(tuning)))


def tune(
    folder: Path,
    say: Say,
    *,
    target: str | None = None,
    case: SweepPoint | None = None,
    rounds: int = 5,
    only: Sequence[str] = (),
    tried: Sequence[Candidate] | None = None,
) -> TuneResult:
    """Try the candidates and store the choice for this device and these versions.

    case: the images to generate; default: one image of the model's native size in 4 steps. only: names of options to
    try.
    tried: replaces `candidates`.
    Raises UsageError if the folder is not a pipeline, an option is unknown, or its target has no options;
    TargetUnavailableError if its provider is missing.
    """
    built_for = read_manifest(folder).origin.target
    wanted = find_target(target, "--target") if target else find_target(built_for, str(folder / MANIFEST_FILE))
    options = candidates(wanted, cores() or 1) if tried is None else tried
    known = list(dict.fromkeys(each.option for each in options))
    if unknown := [name for name in only if name not in known]:
        raise UsageError(f"no option is named {unknown[0]}", where=wanted.name, remedy=f"Known: {', '.join(known)}.")
    options = [each for each in options if not only or each.option in only]
    if not options:
        raise UsageError(
            f"there is nothing to tune for {wanted.title}",
            where=wanted.name,
            remedy="Use another --target, or skip this.",
        )
    tuner = _Tuner(folder, wanted, case, rounds)
    say("loading the pipeline as it is")
    best, chosen = tuner.load(UNTUNED), UNTUNED
    expected = tuner.outputs(best)
    trials: list[Trial] = []
    for each in options:
        say(f"trying {each.option}={each.value}")
        trial, pipeline = tuner.attempt(each, chosen, best, expected)
        trials.append(trial)
        if pipeline is not None:
            best, chosen = pipeline, each.change(chosen)
        say(f"  {trial.verdict}" + ("" if trial.ratio is None else f", {trial.ratio:.3f} of the time"))
    ratio = 1.0
    if chosen != UNTUNED:
        say("comparing with the pipeline as it is")
        ratio = statistics.median(tuner.ratios(best, tuner.load(UNTUNED)))
        if ratio > GAIN:
            say(f"no overall gain ({ratio:.3f} of the time): nothing was chosen")
            chosen, ratio = UNTUNED, 1.0
    evidence = {
        "trials": [asdict(trial) for trial in trials],
        "ratio": ratio,
        "case": asdict(tuner.case),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    file = record_tuning(folder, wanted, chosen, evidence)
    return TuneResult(wanted.name, chosen, str(chosen), tuple(trials), ratio, tuner.tolerance, str(file))


def _parts(pipeline: Pipeline | Ensemble) -> dict[str, Pipeline]:
    """Prefix of submodel names -> pipeline."""
    if isinstance(pipeline, Ensemble):
        return {"": pipeline.base, f"{REFINER}/": pipeline.refiner}
    return {"": pipeline}


class _Tuner:
    """Loads, measures and checks pipelines of one folder on one target."""

    def __init__(self, folder: Path, target: Target, case: SweepPoint | None, rounds: int) -> None:
        self.folder, self.target, self.rounds = folder, target, rounds
        self.device = Device("cuda" if target.session.needs_cuda else "cpu")
        engine = Engine("", "", target=target.name)
        dtype = "quantized" if quantized_of(folder, engine) else dtype_of(folder, engine, self.device)
        self.tolerance = SESSIONS_APART[dtype]
        self.settings = Settings(guidance_scale=folder_defaults(folder)["text"].guidance_scale)
        self._case = case

    @property
    def case(self) -> SweepPoint:
        assert self._case is not None, "set when the first pipeline is loaded"
        return self._case

    def load(self, tuning: Tuning) -> Pipeline | Ensemble:
        """Load the pipeline with its refiner, if any: they are tuned together."""
        pipeline = Ensemble.of_folder(self.folder, self.target, checker=False, tuning=tuning)
        if self._case is None:
            own = _parts(pipeline)[""].latents.image_size
            self._case = SweepPoint(1, own, own, 4)
        self.draw(pipeline)
        return pipeline

    def draw(self, pipeline: Pipeline | Ensemble) -> float:
        """Seconds for the case's images."""
        case, settings = self.case, self.settings
        if self.device.kind == "cpu":
            time.sleep(SETTLE_SECONDS)
        self.device.wait()
        begun = time.perf_counter()
        pipeline(
            **call_options(pipeline, case, settings),
            latents=latents(case, settings.seed, _parts(pipeline)[""].latents),
            output_type="np",
        )
        self.device.wait()
        return time.perf_counter() - begun

    def ratios(self, one: Pipeline | Ensemble, other: Pipeline | Ensemble) -> list[float]:
        """Time of the first relative to the second, in each round."""
        for pipeline in (one, other):
            self.draw(pipeline)
        found = []
        for turn in range(self.rounds):
            if turn % 2:
                second, first = self.draw(other), self.draw(one)
            else:
                first, second = self.draw(one), self.draw(other)
            found.append(first / second)
        return found

    def outputs(self, pipeline: Pipeline | Ensemble) -> dict[str, torch.Tensor]:
        """`_outputs` of the pipeline and its refiner."""
        parts = _parts(pipeline)
        return {f"{name}{of}": each for name, part in parts.items() for of, each in self._outputs(part).items()}

    def _outputs(self, pipeline: Pipeline) -> dict[str, torch.Tensor]:
        """Each submodel's results for the case, at the first, a middle and the last timestep; float32, on the host."""
        import torch

        case, settings = self.case, self.settings
        with pipeline.place.current(), torch.no_grad():
            noise = latents(case, settings.seed, pipeline.latents).to(pipeline.place.device)
            width = pipeline.family.guidance_width(pipeline.configs)
            prompts = [settings.prompt] * case.batch
            denoised = pipeline.configs[pipeline.family.denoiser]
            weight = pipeline.family.guidance_weight(settings.guidance_scale)
            request = Request(prompts, None, weight, case.height, case.width, width, denoiser=denoised)
            context = torch.cat([noise[:, :1], noise], dim=1) if pipeline.task == "inpaint" else None
            channels = noise.shape[1] + (0 if context is None else context.shape[1])
            shape = (case.batch, channels, noise.shape[2], noise.shape[3])
            guided = pipeline.family.guided(pipeline.configs, settings.guidance_scale)
            conditions = pipeline.condition(request)
            known = {"conditions": conditions} if pipeline.family.texts_vary else {}
            denoiser = pipeline.denoiser(shape, case.batch * (2 if guided else 1), **known)
            schedule = pipeline.schedule(case.steps, noise.shape, guidance_scale=weight if guided else None)
            inputs = DenoiserInputs(conditions.inputs, schedule, context)
            found = {f"text, {name}": value.float().cpu().clone() for name, value in conditions.inputs.items()}
            for index in sorted({0, schedule.runs // 2, schedule.runs - 1}):
                found[f"denoiser, step {index}"] = denoiser.run(inputs, noise, index).float().cpu().clone()
            found["decoder"] = pipeline.decode(noise).float().cpu().clone()
        return found

    def attempt(
        self, candidate: Candidate, chosen: Tuning, best: Pipeline | Ensemble, expected: Mapping[str, torch.Tensor]
    ) -> tuple[Trial, Pipeline | Ensemble | None]:
        """Try a candidate. Returns the pipeline with it, if it is kept."""
        about, tuning = (candidate.option, candidate.value), candidate.change(chosen)
        errors: tuple[type[Exception], ...] = (SdflowError, *onnxruntime_errors(import_onnxruntime(self.target)))
        try:
            pipeline = self.load(tuning)
            found = self.outputs(pipeline)
            apart = {name: relative_l2(found[name].numpy(), expected[name].numpy()) for name in expected}
            worst = max(apart, key=lambda name: apart[name])
            if not (distance := apart[worst]) <= self.tolerance:
                reason = f"{worst} differs by {distance:.1e}, more than {self.tolerance:.0e}"
                return Trial(*about, "WRONG", distance=distance, reason=reason), None
            ratios = self.ratios(pipeline, best)
        except errors as error:
            what = error.what if isinstance(error, SdflowError) else str(error)
            return Trial(*about, "failed", reason=" ".join(what.split())[:300]), None
        verdict = verdict_of(ratios)
        why = UNSTEADY if verdict == "unsteady" else None
        trial = Trial(*about, verdict, statistics.median(ratios), distance, why)
        return trial, pipeline if verdict == "taken" else None
