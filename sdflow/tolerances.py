"""Tolerances: how far a result may be from PyTorch's, and from another run's.

Distances are relative L2 (`sdflow.distance`). A float16 artifact is measured against the loss of plain fp16 PyTorch on
the same inputs: no fixed number suits all checkpoints. After changing a tolerance of `sdflow verify`, increase
`sdflow.verify.artifact.judge.VERSION`, since verdicts may change.
"""

from __future__ import annotations

# Outputs of submodels, in `sdflow verify`

FLOAT32_LIMIT = 1e-5
"""Limit for a float32 artifact's distance from the fp32 PyTorch model in its median case, and in every case where fp16
PyTorch loses little. Three times the worst measured over all families, additions and the trained sample: medians of
1e-7 to 3.2e-6, most below 1.5e-6. A UNet whose 16 Gelus use tanh is 5.5e-5 off."""

FLOAT32_SHARE = 1 / 100
"""Limit for a single case that rounding affects more than usual, as a share of fp16 PyTorch's loss in it; fp16 rounds
8,192 times as coarsely. Twice the largest measured: 4.5e-5 in a ControlNet, where fp16 PyTorch loses 9.4e-3."""

FLOAT32_AT_MOST = 1e-4
"""Upper bound of that limit, whatever fp16 PyTorch loses. The only limit for a provider's own kernels on its device,
which choose the order of sums and the algorithm of convolutions."""

EXACT_LIMIT = 2e-5
"""Limit for a float16 artifact in each single case once nothing is rounded (`sdflow.verify.artifact.exact`): the order
of float32 sums loses 1e-7 to 6e-6. Float16 numbers in the graph itself get no allowance: each is replaced by its value
before rounding (`sdflow.verify.artifact.constants`)."""

EXACT_SHARE = 1 / 50
"""Limit where rounding does more than usual, as a share of fp16 PyTorch's loss in that case; fp16 rounds 8,192 times as
coarsely as float32."""

EXACT_AT_MOST = 1e-4
"""Upper bound of that limit, whatever fp16 PyTorch loses."""

FLOAT16_RATIO = 1.2
"""Limit of a float16 artifact's distance from the fp32 model over all cases, as a multiple of plain fp16 PyTorch's.
`sdflow bench` applies the same ratio to images."""

AT_MOST_UNCERTAIN = 1.25
"""Maximum factor by which the scatter of the cases widens that limit."""

ONE_CASE_RATIO = 2.0
"""Limit for a single case: few numbers, so a wider margin."""

WITHOUT_YARDSTICK = 10 * 2**-11
"""Limit where fp16 PyTorch itself overflows: ten times the rounding of a half, the most that a whole fp16 network
loses."""

# Images

IMAGE_DECIBELS = {"float32": 60.0, "float16": 35.0, "bfloat16": 35.0}
"""PSNR from which a verified image passes regardless of fp16 PyTorch's: the difference is invisible."""

DECIBELS_BEHIND = 6.0
"""How far a float16 pipeline's image may fall behind plain fp16 PyTorch's: twice the error."""

DECIBELS_ASTRAY = 30.0
"""If plain fp16 PyTorch's image has less, rounding alone diverts this trajectory, and the image proves nothing. If that
image has NaN, the float16 pipeline's own must reach this."""

SCORE_APART = 0.02
"""Maximum difference from PyTorch in the share of the sample's images that are right."""

BENCH_FLOAT32 = 1e-3
"""Limit for the image of a `sdflow bench` engine, from PyTorch's in float32; a float16 engine gets at least this."""

# Results that should be equal

SESSIONS_APART = {"float16": 6e-3, "float32": 1e-4, "quantized": 6e-3}
"""Limit between two sessions that compute the same. float16: each is about 1.7e-3 from float32 on an H200, with
different kernels; a wrong one was 0.07 off. quantized: a value between two steps may round to either, as in float16."""

KERNEL_LIMIT = 5e-4
"""Limit of our kernels from their definition: a single rounding to float16 costs 2e-4 of a result."""
KERNEL_LIMIT_BFLOAT16 = 4e-3
"""The same for bfloat16, with three fraction bits fewer: 1.7e-3."""

FLOAT8_ROWS_LIMIT = 2e-3
"""Limit for float8 rows from their definition: another summation order may move a value to its neighbour, 1/16 off."""
FLOAT8_ACTIVATION_LIMIT = 4e-3
"""Limit for a float16 activation. A sum with a bias often lies halfway between two numbers, and float32 rounds one in
170 to the other one: 1.7e-3; with another error in the last place of float32, 2.6e-3."""
FLOAT8_PRODUCT_LIMIT = 4e-3
"""Limit for a float8 product from the same numbers in float64: Hopper accumulates below float32 precision, 1.5e-3 off
for 5120 summands."""

INT8_ROTATED_LIMIT = 1e-3
"""Limit for rotated int8 rows from their definition: another summation order may move a value to its neighbour."""
INT8_ROUNDINGS = 1.01
"""Limit for an int8 product, whose sums are exact, in units of its rounding to 16 bits and of float32's roundings of the
values that are added up last."""
