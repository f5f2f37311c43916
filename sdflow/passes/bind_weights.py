"""BindWeights: puts a checkpoint's weights, with LoRAs merged, into a graph that was built without them.

No workflow names it: sdflow puts it at the end of a chain whose passes ran without weights (`sdflow.build.chain`).
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
    """No options: everything was decided by the passes that made the graph."""


class BindWeights(Pass[BindWeightsConfig]):
    """Fills a graph that was built without weights: each weight by its recipe, from the checkpoint and the LoRAs.

    Memory: some of the largest tensors; the model is streamed. Facts, besides those of the graph: `at_limit`, as
    OnnxFloatToFloat16 counts; with LoRAs `loras`, the weights that each touched, in order, and `touched`.
    """

    name: ClassVar[str] = "BindWeights"
    version: ClassVar[int] = 3
    uses: ClassVar[tuple[str, ...]] = ("numpy", "onnx", "onnxruntime")  # onnxruntime rounds to float16
    imports = BINDS
    takes_loras: ClassVar[bool] = True
    Config: ClassVar[type[PassConfig]] = BindWeightsConfig

    def run(self, inputs: PassInputs, out: Path, config: BindWeightsConfig) -> Facts:
        """Raises CheckpointError when the checkpoint or a LoRA does not fit the architecture, PassError for a graph
        whose recipes are damaged or a disk without room for the result."""
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
    """ "weights: 1.2 of 1.72 GB, 850 MB/s", a few times a second at most."""
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
