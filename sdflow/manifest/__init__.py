"""`sdflow.json`, which lies in every pipeline folder: what it says, and how it is written and read."""

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
