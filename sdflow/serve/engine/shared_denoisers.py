"""Denoisers for the drawings of a server: those of one size share each run (`sdflow.serve.engine.shared_steps`)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sdflow.errors import PassError
from sdflow.families.shared.request import Conditions
from sdflow.models.base import Role
from sdflow.runtime.denoiser.denoiser import Denoiser
from sdflow.runtime.denoiser.denoisers import DenoiserRequest, DenoiserSource, token_sizes
from sdflow.runtime.pipeline import Pipeline
from sdflow.serve.engine.cuts import Cuts
from sdflow.serve.engine.shared_steps import SharedDenoiser, SharedSteps

SIZES_KEPT = 4


class SharedDenoisers(DenoiserSource):
    """In place of a pipeline's own, for drawings of one image: shared steps by size, made when first wanted; the last are kept.

    room: rows times columns of all that are kept, as each holds memory; None: any. why_alone: why images of no size are drawn
    together; None where they are.
    """

    def __init__(self, pipeline: Pipeline, cuts: Cuts) -> None:
        self._cuts, self._own = cuts, pipeline.denoisers
        self._model = pipeline.submodels[pipeline.family.denoiser]
        self._tokens = pipeline.family.token_sizes(pipeline.configs)
        self._made: dict[tuple[tuple[str, int], ...], SharedSteps] = {}
        self._alone: set[tuple[tuple[str, int], ...]] = set()
        self.room: int | None = None
        ports = self._model.part.ports(self._model.config).inputs
        common = [port.name for port in ports if port.axes[0] != "batch" and port.role is not Role.TIMESTEP]
        self.why_alone: str | None = None
        if pipeline.nets:
            self.why_alone = "its ControlNets are run for each image by itself"
        elif common:
            self.why_alone = f"all images of a run would share {common[0]}"

    def get(self, request: DenoiserRequest) -> Denoiser:
        images, _, rows, columns = request.shape
        assert images == 1 and not request.fewer, "a server draws exact images, each by itself"
        if request.skipped or request.references:  # its further runs, or its graph, are shared with none
            return self._own.get(request)
        steps = self.of(rows, columns, request.conditions, request.axes)
        return self._own.get(request) if steps is None else SharedDenoiser(steps, request.rows)

    def unload(self) -> None:
        self._own.unload()

    def of(
        self,
        rows: int,
        columns: int,
        conditions: Conditions | None = None,
        axes: Mapping[str, int] = MappingProxyType({}),
    ) -> SharedSteps | None:
        """For latents of so many rows and columns; None where each image is drawn by itself. axes: the sizes of the denoiser's
        further axes."""
        if self.why_alone is not None:
            return None
        sizes: dict[str, int] = {
            **(self._tokens if conditions is None else token_sizes(self._model, conditions)),
            "latent_height": rows,
            "latent_width": columns,
            **axes,
        }
        key = tuple(sizes.items())
        if key in self._alone:
            return None
        if key not in self._made:
            try:
                made = SharedSteps(self._model, sizes, self._cuts)
            except PassError as error:
                if not self._made:  # the first is of the model's own size
                    self.why_alone = str(error)
                self._alone.add(key)
                return None
            self._made[key] = made
            while len(self._made) > SIZES_KEPT or (len(self._made) > 1 and not self._fits()):
                self._made.pop(next(iter(self._made)))
        self._made[key] = self._made.pop(key)
        return self._made[key]

    def _fits(self) -> bool:
        sizes = [dict(key) for key in self._made]
        return self.room is None or sum(each["latent_height"] * each["latent_width"] for each in sizes) <= self.room
