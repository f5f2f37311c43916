"""Downloads the execution providers that Windows ML offers for this machine: `python -m sdflow.machine.windows_ml`.

Windows fetches them from the Microsoft Store, some hundred megabytes each. Other commands use only providers that are
already downloaded.
"""

from __future__ import annotations

import sys
from importlib import import_module


def main() -> int:
    """Download every provider of the catalogue. Returns the exit status."""
    if sys.platform != "win32":
        print("Windows ML is on Windows only", file=sys.stderr)
        return 5
    try:
        windowsml = import_module("windowsml")
    except ImportError as error:
        print(f"the package windowsml is not installed ({error})\n  pip install 'sdflow[windowsml]'", file=sys.stderr)
        return 2
    failed = False
    with windowsml.EpCatalog() as catalogue:
        for provider in catalogue.find_all_providers():
            try:
                provider.ensure_ready()
            except OSError as error:
                print(f"{provider.name}: {error}", file=sys.stderr)
                failed = True
            else:
                print(f"{provider.name} {provider.version}: ready")
    return 5 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
