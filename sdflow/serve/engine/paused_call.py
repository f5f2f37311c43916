"""A function that stops where it asks for something, and goes on when it is answered: a coroutine for code that is none.

A pipeline's call is one function from the prompt to the image. Run so, many of them stand at their next step at once, and
one run of the denoiser answers them all. Only one thread runs at any time: whoever goes on with a call waits until it asks
again or ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")
Result = TypeVar("Result")


_idle: list[_Thread] = []
"""Threads whose function has ended. CUDA's and ONNX Runtime's libraries make things for every thread that uses them, so few
threads are used again and again."""


class _Thread:
    """Runs one function after another, in the same thread."""

    def __init__(self) -> None:
        self._functions: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._run, name="call", daemon=True).start()

    @staticmethod
    def start(function: Callable[[], None]) -> None:
        """Run it in a thread that is idle, else in a new one."""
        try:
            thread = _idle.pop()
        except IndexError:
            thread = _Thread()
        thread._functions.put(function)

    def _run(self) -> None:
        while True:
            self._functions.get()()
            _idle.append(self)


class CallEnded(BaseException):
    """Raised in the function where it asks, when nobody wants its result any more. No Exception: nothing catches it."""


class PausedCall(Generic[Asked, Answer, Result]):
    """`function(ask)` in a thread of its own while it runs; it has not begun. One `begin`, then `answer` for as long as `asked`
    is not None; then `result()`, or `end()` at any time."""

    def __init__(self, function: Callable[[Callable[[Asked], Answer]], Result]) -> None:
        self.asked: Asked | None = None
        self._result: list[Result] = []
        self._error: BaseException | None = None
        self._answers: SimpleQueue[list[Answer]] = SimpleQueue()
        self._stops: SimpleQueue[None] = SimpleQueue()  # a Semaphore is Python, and takes ten times as long
        self._function = function

    def begin(self) -> None:
        """Run to where it first asks, or to its end."""
        _Thread.start(self._run)
        self._stops.get()

    def answer(self, value: Answer) -> None:
        """Go on with this to where it asks again, or to its end."""
        self._go_on([value])

    def end(self) -> None:
        """Give up: the function's `finally` and `with` blocks run, and nothing else. Nothing happens where it has ended."""
        if self.asked is not None:
            self._go_on([])

    def result(self) -> Result:
        """What the function returned. Raises what it raised; CallEnded when it was given up."""
        if self._error is not None:
            raise self._error
        return self._result[0]

    def _go_on(self, answer: list[Answer]) -> None:
        self.asked = None
        self._answers.put(answer)
        self._stops.get()

    def _run(self) -> None:
        try:
            self._result.append(self._function(self._ask))
        except BaseException as error:  # noqa: BLE001  (this is where the thread would end; `result` raises it)
            self._error = error
        finally:
            self._stops.put(None)

    def _ask(self, question: Asked) -> Answer:
        self.asked = question
        self._stops.put(None)
        given = self._answers.get()
        if not given:
            raise CallEnded
        return given[0]
