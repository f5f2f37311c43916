"""A limit on the time that an engine takes until it draws: torch.compile's max-autotune may take an hour.

An exception that comes at any instruction may come between a mode's entry and the `with` that would leave it, or leave a
suspended generator that enters the mode again when it is collected. What runs afterwards would then compute with fake tensors:
so what torch keeps for a thread between calls is put back.
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
    """No `Exception`: a compiler that tries one kernel after the other goes on after those."""


@contextmanager
def within(seconds: float | None) -> Iterator[None]:
    """Raises TooLong in here, in the main thread, when the time is over; at the next Python instruction, and again every 5
    seconds where a library swallowed it. None: no limit. Raises UsageError on Windows, which has no such timer.
    """
    if seconds is None:
        yield
        return
    if not hasattr(signal, "setitimer"):
        raise UsageError("Windows has no timer that could end it", where="--first-limit", remedy="Leave it out.")
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
