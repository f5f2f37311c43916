"""Session settings that affect speed but not results: what `sdflow tune` tries and a session uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Tuning:
    """Session settings on top of the target's own. The defaults change nothing.

    provider: options of the target's execution provider. session: ONNX Runtime's session configuration entries.
    threads: CPU threads per operator; None: ONNX Runtime's default. optimization: a name of `GraphOptimizationLevel`.
    memory_arena, memory_pattern: of the CPU's allocator. cuda_graphs: whether runs are captured. own_kernels: whether
    to use `sdflow.runtime.kernels` on CUDA.
    """

    provider: Mapping[str, str] = field(default_factory=dict)
    session: Mapping[str, str] = field(default_factory=dict)
    threads: int | None = None
    optimization: str | None = None
    memory_arena: bool = True
    memory_pattern: bool = True
    cuda_graphs: bool = True
    own_kernels: bool = True

    def apply(self, options: Any, provider_options: dict[str, str], ort: Any) -> None:
        """Set these choices on ONNX Runtime's `SessionOptions` and the provider's options."""
        provider_options.update(self.provider)
        for name, value in self.session.items():
            options.add_session_config_entry(name, value)
        if self.threads is not None:
            options.intra_op_num_threads = self.threads
        if self.optimization is not None:
            options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, self.optimization)
        options.enable_cpu_mem_arena = self.memory_arena
        options.enable_mem_pattern = options.enable_mem_pattern and self.memory_pattern

    def __str__(self) -> str:
        """Differences from the target's own settings, such as `threads=2, sdpa_kernel=8`."""
        flat = {**self.provider, **self.session}
        chosen = {name: value for name, value in vars(self).items() if name not in ("provider", "session")}
        flat |= {name: value for name, value in chosen.items() if value != getattr(UNTUNED, name)}
        return (
            ", ".join(f"{name.rpartition('.')[2]}={value}" for name, value in flat.items()) or "the target's defaults"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return asdict(self)


UNTUNED = Tuning()
