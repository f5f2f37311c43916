"""What torch keeps for a thread between calls, put back after a call that was interrupted.

An exception that comes at any instruction may come between a mode's entry and the `with` that would leave it, or leave a
suspended generator that enters the mode again when it is collected. What runs afterwards would then compute with fake tensors.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TorchState:
    """modes: how many are entered, that see operators and that see functions. keys: of the dispatcher, included and excluded."""

    modes: tuple[int, int]
    keys: tuple[torch._C.DispatchKeySet, torch._C.DispatchKeySet]
    gradients: bool

    @classmethod
    def now(cls) -> TorchState:
        """Of this thread."""
        import torch

        return cls(
            (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
            (torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()),
            torch.is_grad_enabled(),
        )

    def restore(self) -> None:
        """Leave what was entered since and not left, and forget what was compiled: it may be half made."""
        import torch

        gc.collect()  # suspended generators run to their ends now, not in the middle of what follows
        operators, functions = self.modes
        while torch._C._len_torch_dispatch_stack() > operators:
            torch._C._pop_torch_dispatch_stack(None)
        while torch._C._len_torch_function_stack() > functions:
            torch._C._pop_torch_function_stack()
        found = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        change = torch._C._dispatch_tls_set_dispatch_key_included, torch._C._dispatch_tls_set_dispatch_key_excluded
        for kept, now, put in zip(self.keys, found, change, strict=True):
            for key in torch._C.DispatchKey.__members__.values():
                if kept.has(key) != now.has(key):
                    put(key, kept.has(key))
        torch.set_grad_enabled(self.gradients)
        torch._dynamo.reset()
