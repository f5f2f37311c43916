"""BindWeights: fill a graph that was built without weights from a checkpoint, with LoRAs merged.

Workflows do not name it: sdflow appends it to chains whose passes ran without weights (`sdflow.build.chain`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from sdflow.artifact import Facts
from sdflow.errors import PassError
from sdflow.passes.base import BINDS, Pass, PassConfig, PassInputs

SECONDS_BETWEEN_PHASES = 0.3


class BindWeightsConfig(PassConfig):
    """No options: the graph's recipes determine everything."""


class BindWeights(Pass[BindWeightsConfig]):
    """Computes each weight from its recipe, the checkpoint and the LoRAs.

    The model is streamed; peak memory is a few of the largest tensors. Facts, besides the graph's: `at_limit`, as in
    OnnxFloatToFloat16; with LoRAs, `loras` (number of weights that each one touched, in order) and `touched`.
    """

    name: ClassVar[str] = "BindWeights"
    version: ClassVar[int] = 3
    uses: ClassVar[tuple[str, ...]] = ("numpy", "onnx", "onnxruntime")  # onnxruntime rounds to float16
    imports = BINDS
    takes_loras: ClassVar[bool] = True
    Config: ClassVar[type[PassConfig]] = BindWeightsConfig

    def run(self, inputs: PassInputs, out: Path, config: BindWeightsConfig) -> Facts:
        """Raises CheckpointError if the checkpoint or a LoRA does not fit the architecture, and PassError if a recipe
        is damaged or the disk is full."""
        from sdflow.weights.bind import BindRequest, bind

        if inputs.model is None:
            raise PassError("needs a graph without weights", where=self.name)
        return bind(
            BindRequest(
                inputs.submodel,
                inputs.model,
                inputs.checkpoint,
                inputs.loras,
                inputs.base,
                base_sha256=inputs.base_sha256,
                base_sums=inputs.base_sums,
                progress=_in_words(inputs.progress),
                hashed=inputs.hashed,
                summed=inputs.summed,
            ),
            out,
        )


def _in_words(say: Callable[[str], None]) -> Callable[[int, int], None]:
    """Return a callback that reports "weights: 1.2 of 1.72 GB, 850 MB/s", rate-limited."""
    begun = time.perf_counter()
    said = begun - SECONDS_BETWEEN_PHASES

    def progress(done: int, total: int) -> None:
        nonlocal said
        now = time.perf_counter()
        if now - said < SECONDS_BETWEEN_PHASES and done < total:
            return
        said = now
        say(f"weights: {done / 1e9:.2f} of {total / 1e9:.2f} GB, {done / 1e6 / max(now - begun, 1e-3):,.0f} MB/s")

    return progress
