"""How a stage is trained: its optimizer, the moving average of its parameters, the log of its losses."""

import copy
import csv
import math
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from curve import plot
from torch import Tensor, nn


class Log:
    """The loss of every stage, printed now and then and kept for the curve."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[tuple[str, int, float]] = []
        if path.exists():
            with path.open() as file:
                self.rows = [(r["stage"], int(r["step"]), float(r["loss"])) for r in csv.DictReader(file)]

    def stage(self, name: str, losses: Iterator[Tensor], every: int = 25) -> None:
        """Run a stage's steps, keeping the mean loss of each `every` steps."""
        self.rows = [row for row in self.rows if row[0] != name]
        start, step = time.monotonic(), 0
        while since := list(islice(losses, every)):
            step += len(since)
            mean = torch.stack(since).mean().item()
            if not math.isfinite(mean):
                raise SystemExit(f"{name}: the loss is {mean} at step {step}: lower its learning_rate")
            self.rows.append((name, step, mean))
            if step % (20 * every) == 0 or step == every:
                print(f"{name} step {step} loss {mean:.5f} {time.monotonic() - start:.0f} s", flush=True)
        with self.path.open("w", newline="") as file:
            csv.writer(file).writerows([("stage", "step", "loss"), *self.rows])
        plot(self.rows, self.path.with_suffix(".png"))


def mixed_precision(device: torch.device) -> torch.autocast:
    """bfloat16 where the device is fast at it."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


class Ema:
    """An exponential moving average of modules' parameters, short-sighted at first."""

    def __init__(self, modules: list[nn.Module], decay: float) -> None:
        self.live = [p for m in modules for p in m.parameters()]
        self.modules = [copy.deepcopy(m) for m in modules]
        self.kept = [p for m in self.modules for p in m.parameters()]
        self.decay, self.count = decay, 0

    @torch.no_grad()
    def update(self) -> None:
        """Take the live parameters in."""
        self.count += 1
        decay = min(self.decay, (1 + self.count) / (10 + self.count))
        torch._foreach_lerp_(self.kept, self.live, 1.0 - decay)


def optimizer_steps(parameters: list[Tensor], steps: int, rate: float, losses: Iterator[Tensor]) -> Iterator[Tensor]:
    """AdamW with a short warm-up and a cosine to zero; yields each step's loss, detached."""
    fused = parameters[0].is_cuda
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01, betas=(0.9, 0.99), fused=fused)
    warm_up = max(1, min(200, steps // 10))
    for step in range(steps):
        factor = min((step + 1) / warm_up, 0.5 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = rate * factor
        loss = next(losses)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss.detach()
