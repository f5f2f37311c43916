"""For tests/processes/test_worker_server.py: a package that remembers the home directory when it is imported."""

from pathlib import Path

HOME = Path.home()
