"""ONNX Runtime computes on one thread, unless a test asks for more, as `OMP_NUM_THREADS` says to PyTorch.

Its own default is a thread for each core. They wait for one another by spinning: beside the tests of another process, a small
model takes twice the processor time, and twice as long.
"""

from __future__ import annotations

from typing import Any


def one_thread_by_default() -> None:
    """For this process, and those that are forked from it."""
    import onnxruntime
    from onnxruntime.capi import _pybind_state

    plain: Any = onnxruntime.SessionOptions
    if plain.__name__ == "OneThread":
        return

    class OneThread(plain):  # type: ignore[misc]
        """0 threads, which ask for ONNX Runtime's default, are one."""

        def __init__(self) -> None:
            super().__init__()
            self.intra_op_num_threads = 0

        @property
        def intra_op_num_threads(self) -> int:
            return int(plain.intra_op_num_threads.__get__(self))

        @intra_op_num_threads.setter
        def intra_op_num_threads(self, count: int) -> None:
            plain.intra_op_num_threads.__set__(self, count or 1)

    onnxruntime.SessionOptions = OneThread
    _pybind_state.get_default_session_options = OneThread  # of sessions that are made without options
