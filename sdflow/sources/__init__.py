"""Open checkpoints and LoRAs. Opening imports no torch; loading modules does."""

from sdflow.sources.checkpoint import (
    Checkpoint,
    CheckpointNotLocal,
    FileDigests,
    PlainDigests,
    SubmodelCheckpoint,
    stamps_of,
)
from sdflow.sources.few_steps import few_steps
from sdflow.sources.load import load_module, load_pipeline, submodel_config
from sdflow.sources.loras.layers import LoraLayer, lora_delta
from sdflow.sources.loras.lora import find_lora, lora_digest, lora_submodels, read_lora, require_made_for
from sdflow.sources.opening import open_checkpoint, reopen_checkpoint, require_same_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointNotLocal",
    "FileDigests",
    "LoraLayer",
    "PlainDigests",
    "SubmodelCheckpoint",
    "few_steps",
    "find_lora",
    "load_module",
    "load_pipeline",
    "lora_delta",
    "lora_digest",
    "lora_submodels",
    "open_checkpoint",
    "read_lora",
    "reopen_checkpoint",
    "require_made_for",
    "require_same_checkpoint",
    "stamps_of",
    "submodel_config",
]
