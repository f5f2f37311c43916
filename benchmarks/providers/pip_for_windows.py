"""Resolve requirements with pip as on Windows, on any system, without installing anything.

    python benchmarks/providers/pip_for_windows.py ".[directml]" -c constraints.txt [--report FILE]

`pip install --platform win_amd64 --dry-run` takes Windows wheels but evaluates markers such as `sys_platform` for this
system: on Linux it requires torch's Linux dependencies, and fails. Here pip's own markers are those of Windows. It
downloads what it resolves, some 200 MB, and accepts only wheels.
"""

from __future__ import annotations

import sys

from pip._internal.cli.main import main
from pip._vendor.packaging import markers

WINDOWS = {
    "os_name": "nt",
    "sys_platform": "win32",
    "platform_system": "Windows",
    "platform_machine": "AMD64",
    "platform_release": "10",
    "platform_version": "10.0.22631",
}
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def run() -> int:
    own = markers.default_environment
    markers.default_environment = lambda: {**own(), **WINDOWS}
    options = ["--platform", "win_amd64", "--python-version", PYTHON, "--only-binary=:all:", "--target", "nowhere"]
    return main(["install", "--dry-run", "--no-cache-dir", *options, *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(run())
