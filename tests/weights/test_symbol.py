"""A symbol writes down what moves values, as numpy does it, and refuses whatever looks at them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sdflow.errors import WeightValueRead
from sdflow.weights.evaluate import evaluate
from sdflow.weights.recipe import Param
from sdflow.weights.symbol import Symbol

VALUES = np.arange(24, dtype=np.float32).reshape(2, 3, 4)

MOVES: dict[str, Callable[[Any], Any]] = {
    "transpose": lambda a: a.transpose(0, 2, 1),
    "transpose of a tuple": lambda a: a.transpose((2, 0, 1)),
    "negative axes": lambda a: a.transpose(-1, 0, 1),
    "T": lambda a: a.T,
    "numpy.transpose": lambda a: np.transpose(a, (1, 0, 2)),
    "reshape": lambda a: a.reshape(4, 6),
    "reshape with a gap": lambda a: a.reshape((3, -1)),
    "numpy.reshape": lambda a: np.reshape(a, (6, 4)),
    "flatten": lambda a: a.flatten(),
    "squeeze": lambda a: a.reshape(1, 2, 1, 12).squeeze(),
    "expand_dims": lambda a: np.expand_dims(a, -1),
    "concatenate": lambda a: np.concatenate((a, a), axis=1),
    "concatenate with real values": lambda a: np.concatenate((a, np.zeros((2, 3, 1), np.float32)), axis=-1),
    "stack": lambda a: np.stack((a, a, a), axis=1),
    "dstack": lambda a: np.dstack([a.reshape(4, 2, 3), a.reshape(4, 2, 3)]).reshape(4, 12),
    "dstack of matrices": lambda a: np.dstack([a.reshape(6, 4), a.reshape(6, 4)]),
    "packed q, k, v": lambda a: np.dstack([w.reshape(6, 2, 2) for w in (a, a, a)]).reshape(6, 12),
    "astype of its own type": lambda a: a.astype(np.float32),
}
LOOKS: dict[str, Callable[[Any], Any]] = {
    "np.array": lambda a: np.array(a),
    "np.asarray": lambda a: np.asarray(a, np.float32),
    "np.any": lambda a: np.any(a),
    "np.allclose": lambda a: np.allclose(a, a),
    "np.array_equal": lambda a: np.array_equal(a, a),
    "np.where": lambda a: np.where(a, 1, 0),
    "ufunc": lambda a: np.abs(a),
    "addition": lambda a: a + 1,
    "addition to an array": lambda a: VALUES + a,
    "comparison": lambda a: a == 0,
    "truth": lambda a: bool(a),
    "item": lambda a: a.item(),
    "index": lambda a: a[0],
    "iteration": lambda a: list(a),
    "float": lambda a: float(a),
    "bytes": lambda a: a.tobytes(),
    "sum": lambda a: a.sum(),
    "abs": lambda a: abs(a),
    "max": lambda a: a.max(),
    "another type": lambda a: a.astype(np.float64),
    "view": lambda a: a.view(np.uint32),
    "buffer": lambda a: np.frombuffer(a, np.uint8),
}


@pytest.mark.parametrize("name", MOVES)
def test_what_moves_values_is_written_down(name: str) -> None:
    symbol = Symbol(Param("w", VALUES.shape), [])
    moved, expected = MOVES[name](symbol), MOVES[name](VALUES)
    assert type(moved) is Symbol
    assert (moved.shape, moved.dtype, moved.ndim, moved.size) == (
        expected.shape, expected.dtype, expected.ndim, expected.size,
    )  # fmt: skip
    np.testing.assert_array_equal(evaluate(moved.recipe, lambda key: VALUES), expected)


@pytest.mark.parametrize("name", LOOKS)
def test_what_looks_at_values_is_refused(name: str) -> None:
    reads: list[WeightValueRead] = []
    with pytest.raises((WeightValueRead, TypeError)) as refused:
        LOOKS[name](Symbol(Param("conv.weight", VALUES.shape), reads))
    if name != "buffer":  # Python itself finds that there is none
        assert refused.value is reads[0]
        assert "conv.weight" in str(reads[0])
        assert "test_symbol.py" in str(reads[0].where)


def test_shapes_that_do_not_fit_raise_as_in_numpy() -> None:
    symbol = Symbol(Param("w", VALUES.shape), [])
    for wrong in (
        lambda: symbol.reshape(5, 5),
        lambda: symbol.transpose(0, 0, 1),
        lambda: symbol.squeeze(0),
        lambda: np.concatenate((symbol, np.zeros((2, 2, 2), np.float32))),
    ):
        with pytest.raises(ValueError, match=r"."):
            wrong()


def test_a_fusion_that_asks_for_an_array_gets_yes_for_an_answer() -> None:
    assert isinstance(Symbol(Param("w", (3,)), []), np.ndarray)
