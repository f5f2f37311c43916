"""The patterns of a PEFT configuration, tried within a limit of time.

PEFT's names of modules are regular expressions, and Python's engine may search for ever in one of a few characters: `(a+)+b`.
Nothing ends a search but the end of its process. So patterns that are more than names are tried in a process of their
own before they are used: against the very modules that they will meet.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable

PLAIN = re.compile(r"\^?(?:[\w-]|\\?\.)*")
"""A name: each character is looked at once."""

SECONDS = 2
"""Of the processor. The 800 modules of Stable Diffusion XL by 800 plain names take a third of one."""

LONGEST = 60
"""Seconds by the clock, of a process that hardly gets a processor."""

TRIAL = f"""
import json, re, sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS}, {SECONDS}))
except ImportError:
    pass
patterns, modules = json.load(sys.stdin)
for pattern in patterns:
    found = re.compile(pattern)
    for module in modules:
        found.match(module)
"""


def end_soon(patterns: Iterable[re.Pattern[str]], modules: Iterable[str]) -> bool:
    """Whether it is known within SECONDS of the processor which of these patterns match which modules."""
    given = json.dumps([[each.pattern for each in patterns], [*modules]])
    limit = LONGEST if sys.platform != "win32" else SECONDS
    try:
        tried = subprocess.run(
            [sys.executable, "-I", "-S", "-c", TRIAL],
            input=given,
            text=True,
            encoding="utf-8",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return tried.returncode == 0
