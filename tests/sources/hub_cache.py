"""A local cache of the hub, as huggingface_hub lays it out."""

from __future__ import annotations

from pathlib import Path

COMMIT = "a" * 40


def cached_repository(home: Path, name: str) -> Path:
    """The folder of OWNER/NAME, whose branch `main` is at COMMIT; what is in it goes into its `snapshots/COMMIT`."""
    repository = home / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(COMMIT)
    return repository
