"""Few-step models and LoRAs, recognized by their published names, with their settings.

A UNet's weights do not reveal distillation, and LoRAs have no config. The settings are those of the model cards:
https://huggingface.co/stabilityai/sd-turbo, .../stabilityai/sdxl-turbo,
.../stabilityai/stable-diffusion-3.5-large-turbo, .../latent-consistency, .../ByteDance/SDXL-Lightning,
.../ByteDance/Hyper-SD, .../h1t/TCD-SDXL-LoRA.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class FewSteps:
    """Settings of a few-step model or LoRA. what: its name. scheduler: of `SCHEDULERS`; None: the checkpoint's own.
    strength: for images; None: the family's."""

    what: str
    steps: int
    guidance_scale: float
    scheduler: str | None = None
    eta: float = 0.0
    strength: float | None = None

    def with_its_own_scheduler(self) -> FewSteps:
        """Return the settings for a model that includes the right scheduler."""
        return replace(self, scheduler=None)

    def changes(self) -> dict[str, Any]:
        """Return the changed defaults of a call, and the scheduler, by name; eta only if nonzero."""
        found: dict[str, Any] = {"steps": self.steps, "guidance_scale": self.guidance_scale}
        if self.eta:
            found["eta"] = self.eta
        if self.strength is not None:
            found["strength"] = self.strength
        if self.scheduler is not None:
            found["scheduler"] = self.scheduler
        return found


def spelled(changes: Mapping[str, Any]) -> str:
    """Describe settings (`sdflow.manifest.form.Said`) for display."""
    steps, guidance = changes.get("steps"), changes.get("guidance_scale")
    words = [] if steps is None else [f"{steps} step{'s' if steps > 1 else ''}"]
    if guidance is not None:
        words.append(f"guidance {guidance:g}" if guidance > 1 else "no guidance")
    words += [f"{name} {changes[name]:g}" for name in ("strength", "eta") if name in changes]
    words += [f"scheduler {changes['scheduler']}"] if "scheduler" in changes else []
    return ", ".join(words)


CONSISTENT = FewSteps("a latent consistency model", 4, 8.0, "lcm")
"""Any denoiser that takes the guidance as an input: https://arxiv.org/abs/2310.04378."""

_Row = tuple[re.Pattern[str], Callable[[re.Match[str]], FewSteps]]


def _hyper_sd(match: re.Match[str]) -> FewSteps:
    steps = int(match[1])
    if match[2]:
        return FewSteps("Hyper-SD with guidance", steps, 5.0, "ddim_trailing")
    if steps == 1:
        return FewSteps("Hyper-SD", 1, 0.0, "tcd", eta=1.0)
    return FewSteps("Hyper-SD", steps, 0.0, "ddim_trailing")


def _lightning(match: re.Match[str]) -> FewSteps:
    return FewSteps("SDXL-Lightning", int(match[1]), 0.0, "euler_trailing")


# Patterns match lower-case names with "-" in place of "_", "." and " ".
_LIGHTNING: _Row = (re.compile(r"\bsdxl-lightning-([248])-?steps?\b"), _lightning)
_LORAS: tuple[_Row, ...] = (
    (re.compile(r"\bhyper-sd(?:xl|15)-(\d+)-?steps?(-cfg)?-lora\b"), _hyper_sd),
    _LIGHTNING,
    (re.compile(r"\blcm-(?:[\w-]*-)?lora\b"), lambda match: FewSteps("LCM-LoRA", 4, 1.0, "lcm")),
    (re.compile(r"\btcd-(?:[\w-]*-)?lora\b"), lambda match: FewSteps("TCD", 4, 0.0, "tcd", eta=0.3)),
)
_TURBO = "SD-Turbo", "SDXL-Turbo"
_LARGE_TURBO = FewSteps("Stable Diffusion 3.5 Large Turbo", 4, 0.0)
_MODELS: tuple[_Row, ...] = (
    (re.compile(r"\bsd-turbo\b"), lambda match: FewSteps(_TURBO[0], 1, 0.0, "euler_trailing", strength=0.5)),
    (re.compile(r"\b(?:sd|stable-diffusion-)-?3-?5-large-turbo\b"), lambda match: _LARGE_TURBO),
    (re.compile(r"\bsd-?xl-turbo\b"), lambda match: FewSteps(_TURBO[1], 1, 0.0, "euler_a_trailing", strength=0.5)),
    _LIGHTNING,
)
_ARCHITECTURES = {"sd-turbo": _TURBO[0], "sd-turbo-tiny": _TURBO[0]} | dict.fromkeys(
    ("sdxl-turbo", "sdxl-turbo-tiny"), _TURBO[1]
)


def known_lora(names: Iterable[str]) -> FewSteps | None:
    """Return the settings of the first name that is a known few-step LoRA."""
    return _first(names, _LORAS)


def known_model(names: Iterable[str]) -> FewSteps | None:
    """Return the settings of the first name that is a known few-step model."""
    return _first(names, _MODELS)


def of_this_name(architectures: Iterable[str], name: str) -> list[str]:
    """Return the shipped architectures, among those of equal shapes, that a file of this name may have: distilled
    models are only recognizable by name."""
    architectures, known = list(architectures), known_model([name])
    named = [each for each in architectures if known is not None and _ARCHITECTURES.get(each) == known.what]
    return named or [each for each in architectures if each not in _ARCHITECTURES]


def _first(names: Iterable[str], rows: tuple[_Row, ...]) -> FewSteps | None:
    for name in names:
        plain = re.sub(r"[_. ]+", "-", name.lower())
        for pattern, made in rows:
            if match := pattern.search(plain):
                return made(match)
    return None
