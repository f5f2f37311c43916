"""Denoisers for drawings that share runs, by size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from sdflow.errors import PassError
from sdflow.families.shared.references import REFERENCE_TOKENS
from sdflow.families.shared.request import Conditions
from sdflow.runtime.denoiser.denoiser import Denoiser
from sdflow.runtime.denoiser.denoisers import DenoiserRequest, DenoiserSource, token_sizes
from sdflow.runtime.pipeline import Pipeline
from sdflow.serve.engine.cuts import Cuts
from sdflow.serve.engine.shared_steps import SharedDenoiser, SharedSteps, common_inputs

SIZES_KEPT = 4

Key = tuple[tuple[tuple[str, int], ...], tuple[tuple[int, int], ...]]
"""Axis sizes by name, and (rows, columns) of each reference image."""


class SharedDenoisers(DenoiserSource):
    """Replaces a pipeline's denoisers for drawings of one image. Shared steps are created by size on demand, and the
    last few are kept. Images share steps only if their reference images have the same sizes.

    room: maximum latent pixels (rows times columns) of all that are kept, because each holds memory. why_alone: why
    images of any size run alone; None if they can share runs.
    """

    def __init__(self, pipeline: Pipeline, cuts: Cuts) -> None:
        self._cuts, self._own = cuts, pipeline.denoisers
        self._model = pipeline.submodels[pipeline.family.denoiser]
        self._referencing = pipeline.referencing
        self._tokens = pipeline.family.token_sizes(pipeline.configs)
        self._made: dict[Key, SharedSteps] = {}
        self._alone: set[Key] = set()
        self.room = math.inf
        self.why_alone: str | None = None
        if pipeline.nets:
            self.why_alone = "its ControlNets run once per image"
        elif common := common_inputs(self._model):
            self.why_alone = f"all images of a batch would share {common[0]}"

    def get(self, request: DenoiserRequest) -> Denoiser:
        images, _, rows, columns = request.shape
        assert images == 1 and not request.fewer, "each drawing of a server has one image and no approximation"
        if request.skipped:  # the runs with skipped layers cannot be shared
            return self._own.get(request)
        steps = self.of(rows, columns, request.conditions, request.axes, request.references)
        return self._own.get(request) if steps is None else SharedDenoiser(steps, request.rows)

    def unload(self) -> None:
        self._own.unload()

    def of(
        self,
        rows: int,
        columns: int,
        conditions: Conditions | None = None,
        axes: Mapping[str, int] = MappingProxyType({}),
        references: tuple[tuple[int, int], ...] = (),
    ) -> SharedSteps | None:
        """Return the shared steps for latents of this size, or None if each image runs alone. axes: sizes of the
        denoiser's other axes. references: (rows, columns) of reference latents."""
        model = self._referencing if references else self._model
        if self.why_alone is not None or model is None:
            return None
        sizes: dict[str, int] = {
            **(self._tokens if conditions is None else token_sizes(self._model, conditions)),
            "latent_height": rows,
            "latent_width": columns,
            **axes,
            **({REFERENCE_TOKENS: sum(high * wide for high, wide in references)} if references else {}),
        }
        key = tuple(sizes.items()), references
        if key in self._alone:
            return None
        made = self._made.pop(key, None)
        if made is None:
            try:
                made = SharedSteps(model, sizes, self._cuts)
            except PassError as error:
                if not self._made:  # the first has the model's own size
                    self.why_alone = str(error)
                self._alone.add(key)
                return None
        self._made[key] = made
        while len(self._made) > SIZES_KEPT or (len(self._made) > 1 and self._pixels > self.room):
            self._made.pop(next(iter(self._made)))
        return made

    def catch_up(self, busy: Callable[[], bool]) -> bool:
        """Create the batch sizes that images lacked; see `SharedSteps.catch_up`."""
        return all(steps.catch_up(busy) for steps in self._made.values())

    def forget_large(self, most: int) -> None:
        """Drop sizes with more latent pixels than this."""
        self._made = {key: made for key, made in self._made.items() if _latents(key) <= most}

    @property
    def _pixels(self) -> int:
        return sum(map(_latents, self._made))


def _latents(key: Key) -> int:
    """Return the latent pixels that a step reads, including reference images."""
    sizes = dict(key[0])
    return sizes["latent_height"] * sizes["latent_width"] + sizes.get(REFERENCE_TOKENS, 0)
