"""The numbers that decide: how far from PyTorch a result may be, and from itself.

Distances are relative L2 (`sdflow.distance`). The yardstick of a float16 artifact is what plain fp16 PyTorch loses on the
same inputs: no fixed number suits all checkpoints. Whoever changes one of those for `sdflow verify` raises
`sdflow.verify.artifact.judge.VERSION`, since another verdict may come out.
"""

from __future__ import annotations

# Of a submodel's outputs, in `sdflow verify`

FLOAT32_LIMIT = 1e-5
"""How far a float32 artifact may be from the fp32 PyTorch model in its median case, and in any one where fp16 PyTorch loses
little. Three times the worst that was measured over every family and addition and the trained sample: medians of 1e-7 to 3.2e-6,
most below 1.5e-6. With its 16 Gelus as tanh, a UNet is 5.5e-5 off."""

FLOAT32_SHARE = 1 / 100
"""The same for one case where rounding does more than usual: so much of what fp16 PyTorch loses there, whose roundings are 8,192
times as large. Twice what was measured: 4.5e-5 of a ControlNet, where fp16 PyTorch loses 9.4e-3."""

FLOAT32_AT_MOST = 1e-4
"""The same, whatever fp16 PyTorch loses. A provider's own kernels on its device are held to this alone: they choose the order of
sums and the algorithm of convolutions."""

EXACT_LIMIT = 2e-5
"""That a float16 artifact may be from it in each case by itself, once nothing is rounded
(`sdflow.verify.artifact.exact`): what the order
of float32 sums loses, 1e-7 to 6e-6. There is no allowance for float16 numbers of the graph itself: each is taken as what it was
before it was rounded (`sdflow.verify.artifact.constants`)."""

EXACT_SHARE = 1 / 50
"""The same where rounding does more than usual: so much of what fp16 PyTorch loses in that case, whose roundings are 8,192
times as large as float32's."""

EXACT_AT_MOST = 1e-4
"""The same, whatever fp16 PyTorch loses."""

FLOAT16_RATIO = 1.2
"""How many times as far from the fp32 model as plain fp16 PyTorch a float16 artifact may be, over all cases. In `sdflow
bench` the same holds for images."""

AT_MOST_UNCERTAIN = 1.25
"""How far the scatter of the cases may widen that limit, as a factor."""

ONE_CASE_RATIO = 2.0
"""The same for any one case: few numbers, so a wider margin."""

WITHOUT_YARDSTICK = 10 * 2**-11
"""Where fp16 PyTorch itself overflows: ten times the rounding of a half, what a whole network of halves may lose."""

# Of images

IMAGE_DECIBELS = {"float32": 60.0, "float16": 35.0, "bfloat16": 35.0}
"""At which a verified image passes whatever fp16 PyTorch's has: no difference that anyone sees."""

DECIBELS_BEHIND = 6.0
"""A float16 pipeline's image may have so much less than plain fp16 PyTorch's: twice the error."""

DECIBELS_ASTRAY = 30.0
"""Where plain fp16 PyTorch's image has less, rounding alone leads this trajectory astray: nothing follows from it. Where
that image has NaN there is no telling, and a float16 pipeline's must have so much itself."""

SCORE_APART = 0.02
"""How far the share of the sample's images that are right may be from PyTorch's."""

BENCH_FLOAT32 = 1e-3
"""That the image of an engine of `sdflow bench` may be from PyTorch's in float32; a float16 engine at least this."""

# Of what should be the same

SESSIONS_APART = {"float16": 6e-3, "float32": 1e-4, "quantized": 6e-3}
"""Between two sessions that compute the same. float16: each is some 1.7e-3 from float32 on an H200, in kernels of its own; a
wrong one was 0.07. quantized: which of two numbers a value is rounded to may differ, as in float16."""

KERNEL_LIMIT = 5e-4
"""That our own kernels may be from their definition: rounding to float16 once makes 2e-4 of a result."""
KERNEL_LIMIT_BFLOAT16 = 4e-3
"""The same of those in bfloat16, with three bits less of fraction: 1.7e-3."""

FLOAT8_ROWS_LIMIT = 2e-3
"""That rows of float8 may be from their definition: where another way to sum up tips a value over to its neighbour, it is 1/16
off."""
FLOAT8_ACTIVATION_LIMIT = 4e-3
"""The same of an activation in float16. A sum with a bias that it leaves as it is often lies halfway between two numbers, and
float32 rounds one of 170 to the other one: 1.7e-3; with one more error in the last place of float32, 2.6e-3."""
FLOAT8_PRODUCT_LIMIT = 4e-3
"""That a product of float8 may be from that of the same numbers in float64: Hopper sums up in less than float32, 1.5e-3
off for 5120 summands."""
