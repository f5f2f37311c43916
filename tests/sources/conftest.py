"""Tiny checkpoints as folders, made from the synthetic ones by diffusers' own save_pretrained."""

from pathlib import Path

import pytest

from sdflow.sources import Checkpoint, PlainDigests, load_pipeline, open_checkpoint


@pytest.fixture(scope="session")
def tiny() -> Checkpoint:
    return open_checkpoint("synthetic:sd15-tiny?seed=3", digests=PlainDigests(), download=False)


@pytest.fixture(scope="session")
def tiny_folder(tiny: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    load_pipeline(tiny).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_xl_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-xl")
    checkpoint = open_checkpoint("synthetic:sdxl-tiny?seed=3", digests=PlainDigests(), download=False)
    load_pipeline(checkpoint).save_pretrained(folder)
    return folder
