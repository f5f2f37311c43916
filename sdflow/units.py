"""Numbers with units, formatted and parsed the same way everywhere."""

from __future__ import annotations

import re

from sdflow.errors import UsageError

SIZE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def spell_seconds(value: float) -> str:
    """Format seconds: 0.42 s, 12.3 s, 2 min 05 s."""
    if value < 10:
        return f"{value:.2f} s"
    if value < 120:
        return f"{value:.1f} s"
    return f"{int(value // 60)} min {int(value % 60):02d} s"


def spell_milliseconds(value: float) -> str:
    """Format milliseconds with three significant digits."""
    return f"{value:.3g} ms" if value < 1000 else f"{value:,.0f} ms"


def spell_bytes(value: float) -> str:
    """Format bytes in decimal units: 384 kB, 12.5 MB, 1.72 GB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"


def parse_size(text: str, where: str = "--max-size") -> int:
    """Parse "20GB", "500 MB", "1.5TB" or a plain number into bytes. Raises UsageError at the option `where`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = match.group(2).upper() if match else None
    if match is None or unit not in SIZE_UNITS:
        raise UsageError(f"{text!r} is not a size", where=where, remedy="Write it like 20GB or 500MB")
    return int(float(match.group(1)) * SIZE_UNITS[unit])


AGE_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def parse_age(text: str) -> float:
    """Parse "30d", "12 h" or "90m" into seconds. Raises UsageError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhdw])\s*", text)
    if match is None:
        raise UsageError(f"{text!r} is not an age", where="--older-than", remedy="write it like 30d or 12h")
    return float(match.group(1)) * AGE_UNITS[match.group(2)]
