"""pip as it resolves on Windows, run on any system: it installs nothing.

    python benchmarks/providers/pip_for_windows.py ".[directml]" -c constraints.txt [--report FILE]

`pip install --platform win_amd64 --dry-run` takes wheels of Windows but decides by this system what is wanted (`sys_platform` in
a requirement's marker): on Linux it asks for what torch wants there, and fails. Here pip's own markers are those of Windows. It
downloads what it resolves, some 200 MB, and takes wheels alone.
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
