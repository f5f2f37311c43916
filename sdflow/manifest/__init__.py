"""`sdflow.json`, the manifest in every pipeline folder: its content, writing and reading."""

from sdflow.manifest.content import (
    NOT_SAID,
    REFINER,
    Chain,
    FinishedPass,
    Manifest,
    MergedLora,
    Origin,
    Part,
    Quantization,
    WrittenPass,
)
from sdflow.manifest.file import MANIFEST_FILE, NewerManifest, as_bytes, as_json, from_json, read_manifest

__all__ = [
    "MANIFEST_FILE",
    "NOT_SAID",
    "REFINER",
    "Chain",
    "FinishedPass",
    "Manifest",
    "MergedLora",
    "NewerManifest",
    "Origin",
    "Part",
    "Quantization",
    "WrittenPass",
    "as_bytes",
    "as_json",
    "from_json",
    "read_manifest",
]
