"""How large images may be in the memory that is there once the pipelines are loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sdflow.machine.memory import HOST, available_bytes
from sdflow.processes.workers import limit_memory
from sdflow.runtime.memory_limit import most_pixels_of

if TYPE_CHECKING:
    from sdflow.serve.engine.loading import LoadedLane
    from sdflow.serve.jobs import Job


@dataclass(frozen=True)
class Room:
    """Pixels of an image by pipeline. own: that the model was made for. most: that one may have."""

    own: Mapping[str, int]
    most: Mapping[str, int]

    @classmethod
    def measured(cls, lanes: Sequence[LoadedLane]) -> Room:
        """Of this process as it is now. On the CPU it gets no more memory from now on than there is: a run that wants more fails,
        and none fails with it, as all would when the kernel kills the process."""
        pipelines = lanes[0].pipelines
        room = cls(
            {name: each.base.latents.image_size**2 for name, each in pipelines.items()},
            {
                name: min(
                    most_pixels_of(stage.family, stage.configs, device=stage.place.device) for stage in each.stages
                )
                for name, each in pipelines.items()
            },
        )
        for lane in lanes:
            for name, each in lane.pipelines.items():
                each.keep_sizes(room.most[name] // len(lanes))
        if all(each.base.place.device == HOST for each in pipelines.values()):
            _limit_to_what_is_there()
        return room

    def share(self, job: Job) -> float:
        """The part of the memory that an image takes; 0 of one that is no larger than the model's own: for these there is room
        at all places."""
        pixels = job.arguments.get("height", 0) * job.arguments.get("width", 0)
        own, most = self.own[job.pipeline], self.most[job.pipeline]
        return float(pixels / most) if pixels > own else 0.0


def _limit_to_what_is_there() -> None:
    import psutil

    now = getattr(psutil.Process().memory_info(), "data", None)  # Linux
    if now is not None:
        limit_memory(now + available_bytes() + psutil.swap_memory().free)
