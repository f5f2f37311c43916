"""A plot as inline SVG: the distance of an artifact and of plain fp16 PyTorch, step by step."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sdflow.verify.result import CaseDistance

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 720, 260, 70, 40, 16


def plot_steps(steps: Sequence[CaseDistance], ratio: float | None) -> str:
    """Distances on a logarithmic axis over the steps. ratio: also a line at so many times fp16 PyTorch's distance."""
    lines = {
        "artifact": ("#0b57d0", [case.distance for case in steps]),
        "fp16 PyTorch": ("#8a8a8a", [case.yardstick for case in steps]),
    }
    if ratio is not None:
        lines[f"{ratio:g} times fp16 PyTorch"] = ("#b00020", [ratio * case.yardstick for case in steps])
    values = [value for _, line in lines.values() for value in line if 0 < value < math.inf]
    if not values:
        return "<p>There is no finite distance to plot.</p>"
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)

    def point(index: int, value: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - 20) * index / max(1, len(steps) - 1)
        return x, TOP + (HEIGHT - TOP - BOTTOM) * (high - math.log10(value)) / (high - low)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" font-size="12" font-family="sans-serif">']
    for power in range(low, high + 1):
        _, y = point(0, 10.0**power)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">1e{power}</text>')
    for index, case in enumerate(steps):
        x, _ = point(index, 10.0**low)
        label = f"{case.timestep:g}" if case.timestep is not None else str(index + 1)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{label}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">timestep</text>')
    for number, (name, (colour, line)) in enumerate(lines.items()):
        points = [point(index, value) for index, value in enumerate(line) if 0 < value < math.inf]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = ' stroke-dasharray="5 4"' if number == 2 else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points if number < 2]
        parts.append(f'<text x="{LEFT + 10 + 170 * number}" y="{TOP - 3}" fill="{colour}">{name}</text>')
    return "".join(parts) + "</svg>"
