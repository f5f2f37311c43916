"""The loss curve as an image, with Pillow alone."""

import math
from pathlib import Path

from PIL import Image, ImageDraw

WIDTH, HEIGHT, MARGIN = 480, 300, 44


def plot(rows: list[tuple[str, int, float]], path: Path) -> None:
    """One panel per stage: loss (logarithmic) over steps. Rows are (stage, step, loss)."""
    stages = list(dict.fromkeys(stage for stage, _, _ in rows))
    sheet = Image.new("RGB", (WIDTH * 2, HEIGHT * math.ceil(len(stages) / 2)), "white")
    for index, stage in enumerate(stages):
        points = [(step, max(loss, 1e-9)) for name, step, loss in rows if name == stage]
        sheet.paste(_panel(stage, points), (WIDTH * (index % 2), HEIGHT * (index // 2)))
    sheet.save(path)


def _panel(title: str, points: list[tuple[int, float]]) -> Image.Image:
    panel = Image.new("RGB", (WIDTH, HEIGHT), "white")
    pen = ImageDraw.Draw(panel)
    low, high = math.log10(min(y for _, y in points)), math.log10(max(y for _, y in points))
    span, last = (high - low) or 1.0, points[-1][0]

    def place(step: float, log_loss: float) -> tuple[float, float]:
        across = MARGIN + step / last * (WIDTH - MARGIN - 12)
        return across, HEIGHT - 30 - (log_loss - low) / span * (HEIGHT - 60)

    pen.line([place(0, high), place(0, low), place(last, low)], fill="black")
    for level in (low, (low + high) / 2, high):
        x, y = place(0, level)
        pen.text((2, y - 6), f"{10**level:.3g}", fill="black")
        pen.line([(x, y), place(last, level)], fill="lightgray")
    pen.text((MARGIN, 6), f"{title}: loss over {last} steps", fill="black")
    pen.line([place(step, math.log10(loss)) for step, loss in points], fill="royalblue", width=2)
    return panel
