"""Reference results of the transformer operators in numpy: cases, random inputs, and results by definition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

NO_NORM, LAYER_NORM, RMS_NORM = range(3)
"""Values of the attribute `norm`."""
BFLOAT16 = "Bfloat16"
"""Suffix of bfloat16 operators' names."""
EPSILON, BRANCH_EPSILON = 1e-6, 1e-5

RESIDUAL_INPUTS = (
    *("x", "branch", "branch_bias", "branch_gamma", "gate", "branch2", "branch2_bias", "gate2", "gamma", "beta"),
    *("scale", "shift", "scale2", "shift2"),
)
"""Inputs of GatedResidual, ModulatedNorm and GatedResidualNorm, in order."""
PER_IMAGE = ("gate", "gate2", "scale", "shift", "scale2", "shift2")
"""Inputs with one row per image; attributes of the same names hold their offset in a longer row."""
SCALES = "_scales"
"""Suffix of the name of an output with another one's row scales."""
ACTIVATION_INPUTS = ("a", "b", "a_bias", "b_bias", "before")
"""Inputs of SiluGated and TanhGelu, in order."""


@dataclass(frozen=True)
class ResidualCase:
    """A residual sum, a modulated norm, or both.

    shape: of x. inputs: names of the optional inputs present. norm: `NO_NORM`, `LAYER_NORM` or `RMS_NORM`. plus_one: as
    the attribute. kept: whether the sum is also output. bfloat16: instead of float16. shared: whether all images share
    per-image rows. parts: per-image inputs are parts of one longer row. float8: y and y2 are rows of E4M3 with scales.
    """

    shape: tuple[int, ...]
    inputs: str
    norm: int = LAYER_NORM
    plus_one: int = 0
    kept: bool = True
    bfloat16: bool = False
    shared: bool = False
    parts: bool = False
    float8: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the optional inputs."""
        return tuple(self.inputs.split())

    @property
    def operator(self) -> str:
        """Name of the operator for this case."""
        plain = "GatedResidualNorm" if self.kept else "ModulatedNorm"
        plain = plain if self.norm or not self.kept else "GatedResidual"
        return "Float8" * self.float8 + plain + BFLOAT16 * self.bfloat16

    @property
    def outputs(self) -> tuple[str, ...]:
        """The operator's outputs, in order."""
        if self.results == ("sum",):
            return self.results
        given = [(name, f"{name}{SCALES}") if self.float8 and name != "sum" else (name,) for name in self.results]
        return tuple(name for names in given for name in names)

    @property
    def results(self) -> tuple[str, ...]:
        """The computed values, in order."""
        if self.kept and not self.norm:
            return ("sum",)
        second = ("y2",) if "scale2" in self.names else ()
        return ("y", *(("sum",) if self.kept else ()), *second)

    @property
    def attributes(self) -> dict[str, Any]:
        """The operator's attributes."""
        given: dict[str, Any] = {"norm": self.norm, "plus_one": self.plus_one}
        given |= {"epsilon": EPSILON, "branch_epsilon": BRANCH_EPSILON}
        row = [name for name in PER_IMAGE if name in self.names] if self.parts else []
        return given | {name: row.index(name) * self.shape[-1] if name in row else 0 for name in PER_IMAGE}


RESIDUALS = (
    ResidualCase((2, 5, 1536), "branch branch_bias gate"),  # norm only, no modulation
    ResidualCase((2, 333, 1536), "branch branch_bias gate scale shift", plus_one=1, parts=True),
    ResidualCase((2, 70, 1536), "scale shift scale2 shift2", kept=False, plus_one=3, parts=True),
    ResidualCase(
        (2, 70, 1536), "branch branch_bias gate branch2 branch2_bias gate2 scale shift", plus_one=1, parts=True
    ),
    ResidualCase((2, 9, 1536), "branch branch_bias gate scale shift scale2 shift2", plus_one=3, parts=True),
    ResidualCase((1, 512, 3072), "branch gate scale shift", bfloat16=True),
    ResidualCase((1, 512, 3072), "branch gate", NO_NORM, bfloat16=True),
    ResidualCase((1, 65, 3072), "scale shift", NO_NORM, kept=False),
    ResidualCase((1, 260, 3840), "branch branch_gamma gate gamma scale", RMS_NORM, bfloat16=True),
    ResidualCase((1, 64, 3840), "gamma scale", RMS_NORM, kept=False, bfloat16=True),
    ResidualCase((3, 7, 3840), "branch branch_bias branch_gamma gate", NO_NORM, shared=True),
    ResidualCase((2, 3, 12288), "gamma beta shift", kept=False, bfloat16=True),
    ResidualCase((3, 2, 2, 520), "branch gamma beta scale", shared=True),
    ResidualCase((4, 8), "branch gate scale", RMS_NORM, plus_one=1),
)
FLOAT8_RESIDUALS = (
    ResidualCase((2, 333, 1536), "branch branch_bias gate scale shift", plus_one=1, parts=True, float8=True),
    ResidualCase((2, 70, 1536), "scale shift scale2 shift2", kept=False, plus_one=3, parts=True, float8=True),
    ResidualCase((2, 40, 1536), "branch branch_bias gate scale shift scale2 shift2", plus_one=3, float8=True),
    ResidualCase((1, 512, 3072), "branch gate scale shift", bfloat16=True, float8=True),
    ResidualCase((1, 260, 3840), "branch branch_gamma gate gamma scale", RMS_NORM, bfloat16=True, float8=True),
    ResidualCase((1, 64, 3840), "gamma scale", RMS_NORM, kept=False, bfloat16=True, float8=True),
)
"""Cases for GPUs with float8."""


@dataclass(frozen=True)
class ActivationCase:
    """rows: the axes before the last one. channels: of the result. gate: "" for a GELU, "own" if b is another product,
    "halves" if a and b are halves of one row. behind: channels of that row before a. before: channels at the start of
    the result that come from another value. float8: the result is rows of E4M3 with scales.
    """

    rows: tuple[int, ...]
    channels: int
    gate: str = ""
    biases: bool = False
    behind: int = 0
    before: int = 0
    bfloat16: bool = False
    float8: bool = False

    @property
    def operator(self) -> str:
        """Name of the operator for this case."""
        return "Float8" * self.float8 + ("SiluGated" if self.gate else "TanhGelu") + BFLOAT16 * self.bfloat16

    @property
    def outputs(self) -> tuple[str, ...]:
        """The operator's outputs, in order."""
        return ("y", f"y{SCALES}") if self.float8 else ("y",)

    @property
    def attributes(self) -> dict[str, int]:
        """The operator's attributes."""
        b = self.behind + self.channels if self.gate == "halves" else 0
        return {"channels": self.channels, "a": self.behind, "b": b}


ACTIVATIONS = (
    ActivationCase((2, 333), 6144, biases=True),
    ActivationCase((3,), 16),
    ActivationCase((1, 40), 6144, biases=True, bfloat16=True),
    ActivationCase((1, 300), 9216, "halves", bfloat16=True),
    ActivationCase((1, 300), 9216, "halves", behind=9216, before=3072, bfloat16=True),
    ActivationCase((1, 70), 10240, "own", bfloat16=True),
    ActivationCase((2, 2, 30), 2560, "own", biases=True),
    ActivationCase((700,), 40, "halves", biases=True, before=8),
)
FLOAT8_ACTIVATIONS = (
    ActivationCase((2, 333), 6144, biases=True, float8=True),
    ActivationCase((1, 300), 9216, "halves", bfloat16=True, float8=True),
    ActivationCase((1, 300), 9216, "halves", behind=9216, before=3072, bfloat16=True, float8=True),
    ActivationCase((1, 70), 10240, "own", bfloat16=True, float8=True),
    ActivationCase((1, 40), 12288, before=3072, bfloat16=True, float8=True),
)
"""Cases for GPUs with float8."""


@dataclass(frozen=True)
class Feeds:
    """inputs: an operator's, by name. values: what it reads from them, if they are parts of a longer row."""

    inputs: Mapping[str, np.ndarray]
    values: Mapping[str, np.ndarray]


def _type(bfloat16: bool) -> Any:
    import ml_dtypes
    import numpy as np

    return ml_dtypes.bfloat16 if bfloat16 else np.float16


def residual_feeds(case: ResidualCase) -> Feeds:
    """Return random inputs; with `parts`, per-image inputs are parts of one row."""
    import numpy as np

    random, channels = np.random.default_rng(4), case.shape[-1]
    images = 1 if case.shared or len(case.shape) == 2 else case.shape[0]

    def values(shape: tuple[int, ...]) -> np.ndarray:
        spread, mean = random.uniform(0.5, 2, shape[-1]), random.normal(size=shape[-1])
        made: np.ndarray = (random.normal(size=shape) * spread + mean).astype(_type(case.bfloat16))
        return made

    found = {"x": values(case.shape)}
    for name in case.names:
        if name in PER_IMAGE:
            found[name] = values((images, channels))
        else:
            found[name] = values(case.shape if name in ("branch", "branch2") else (channels,))
    inputs = dict(found)
    if case.parts:
        names = [name for name in PER_IMAGE if name in case.names]
        row = np.concatenate([found[name] for name in names], axis=-1)
        inputs |= dict.fromkeys(names, row)
    return Feeds(inputs, found)


def residual_expected(case: ResidualCase, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the results in the case's shape by definition, in float64."""
    import numpy as np

    has = {name: value.astype(np.float64) for name, value in values.items()}

    def by_image(name: str, otherwise: float) -> Any:
        if name not in has:
            return otherwise
        middle = (1,) * (len(case.shape) - 2)
        return has[name].reshape(has[name].shape[0], *middle, -1)

    total = has["x"]
    for number in ("", "2"):
        if f"branch{number}" not in has:
            continue
        branch = has[f"branch{number}"] + has.get(f"branch{number}_bias", 0)
        if f"branch{number}_gamma" in has:
            branch = _rms(branch, BRANCH_EPSILON) * has[f"branch{number}_gamma"]
        total = total + branch * by_image(f"gate{number}", 1)
    normal = total
    if case.norm == LAYER_NORM:
        mean, variance = (measure(total, axis=-1, keepdims=True) for measure in (np.mean, np.var))
        normal = (total - mean) / np.sqrt(variance + EPSILON)
    elif case.norm == RMS_NORM:
        normal = _rms(total, EPSILON)
    normal = normal * has.get("gamma", 1) + has.get("beta", 0)
    results = {"sum": total}
    for bit, number in enumerate(("", "2")):
        more = case.plus_one >> bit & 1
        scale = by_image(f"scale{number}", 1 - more) + more
        results[f"y{number}"] = normal * scale + by_image(f"shift{number}", 0)
    return {name: results[name] for name in case.results}


def _rms(value: np.ndarray, epsilon: float) -> np.ndarray:
    import numpy as np

    result: np.ndarray = value / np.sqrt(np.mean(value * value, axis=-1, keepdims=True) + epsilon)
    return result


def activation_feeds(case: ActivationCase) -> dict[str, np.ndarray]:
    """Return random inputs, (*rows, channels); with gate "halves", a also contains b and is both inputs."""
    import numpy as np

    random = np.random.default_rng(5)
    width = case.behind + case.channels * (2 if case.gate == "halves" else 1)

    def values(*shape: int) -> np.ndarray:
        made: np.ndarray = (random.normal(size=shape) * 2).astype(_type(case.bfloat16))
        return made

    found = {"a": values(*case.rows, width)}
    if case.gate:
        found["b"] = found["a"] if case.gate == "halves" else values(*case.rows, case.channels)
    if case.biases:
        found |= {name: values(case.channels) for name in (("a_bias", "b_bias") if case.gate else ("a_bias",))}
    if case.before:
        found["before"] = values(*case.rows, case.before)
    return found


def activation_expected(case: ActivationCase, feeds: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the result, (*rows, before + channels), by definition, in float64."""
    import numpy as np

    has = {name: value.astype(np.float64) for name, value in feeds.items()}
    first = case.attributes
    a = has["a"][..., first["a"] :][..., : case.channels] + has.get("a_bias", 0)
    if case.gate:
        b = has["b"][..., first["b"] :][..., : case.channels] + has.get("b_bias", 0)
        y = a / (1 + np.exp(-a)) * b
    else:
        y = a * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (a + 0.044715 * a**3)))
    result: np.ndarray = np.concatenate([has["before"], y], axis=-1) if "before" in has else y
    return result
