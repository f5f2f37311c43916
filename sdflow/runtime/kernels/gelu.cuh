// gelu(b) = b * (erf(b / sqrt(2)) + 1) / 2. CUDA's erff takes most of such a kernel's instructions. This is Abramowitz and
// Stegun's 7.1.26, off by 1.5e-7 at most, of erfc, so that nothing is lost where b is far below zero.
static __device__ __forceinline__ float gelu(float b) {
    const float x = fabsf(b) * 0.70710678118f, t = __fdividef(1.0f, 1.0f + 0.3275911f * x);
    const float series = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    const float tail = 0.5f * series * __expf(-x * x);
    return b * (b < 0 ? tail : 1.0f - tail);
}
