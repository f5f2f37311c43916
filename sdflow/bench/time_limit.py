"""A time limit for an engine until its first image: torch.compile's max-autotune may take an hour.

An asynchronous exception may strike between entering a mode and the `with` that would leave it, or leave a suspended
generator that re-enters the mode when collected. Later code would then compute with fake tensors, so torch's per-thread
state is restored.
"""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sdflow.errors import UsageError

if TYPE_CHECKING:
    import torch

AGAIN_SECONDS = 5.0


class TooLong(BaseException):
    """Not an `Exception`: compilers that try kernels one by one swallow those."""


@contextmanager
def within(seconds: float | None) -> Iterator[None]:
    """Raise TooLong in the main thread when the time is over; at the next Python instruction, and again every 5 seconds
    if a library swallowed it. None: no limit. Raises UsageError on Windows, which has no such timer.
    """
    if seconds is None:
        yield
        return
    if not hasattr(signal, "setitimer"):
        raise UsageError("Windows has no timer for this", where="--first-limit", remedy="Leave it out.")
    over = False

    def stop(*_: Any) -> None:
        if not over:
            raise TooLong(f"it took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_SECONDS)
    try:
        yield
    finally:
        over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True)
class TorchState:
    """PyTorch's per-thread state, to be restored after an interruption.

    modes: number of entered modes, for operators and for functions. keys: of the dispatcher, included and
    excluded.
    """

    modes: tuple[int, int]
    keys: tuple[torch._C.DispatchKeySet, torch._C.DispatchKeySet]
    gradients: bool

    @classmethod
    def now(cls) -> TorchState:
        """The state of this thread."""
        import torch

        return cls(
            (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
            (torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()),
            torch.is_grad_enabled(),
        )

    def restore(self) -> None:
        """Leave modes entered since, and drop compiled code, which may be incomplete."""
        import torch

        gc.collect()  # finish suspended generators now, not during later code
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
