"""Where checkpoints and LoRAs come from. Opening one imports no torch; loading modules does."""

from sdflow.sources.checkpoint import (
    Checkpoint,
    CheckpointNotLocal,
    FileDigests,
    PlainDigests,
    SubmodelCheckpoint,
)
from sdflow.sources.load import load_module, load_pipeline, submodel_config
from sdflow.sources.opening import open_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointNotLocal",
    "FileDigests",
    "PlainDigests",
    "SubmodelCheckpoint",
    "load_module",
    "load_pipeline",
    "open_checkpoint",
    "submodel_config",
]
