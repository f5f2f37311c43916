// The GELU that has erf, no more exact than a result in float16 needs.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// b / (1 + exp(-l)), where l is the logit of the normal distribution's function at b, by a polynomial. It is off by 4.4e-5 at most,
// and by less than half of what rounding b and the result to float16 makes, as two kernels do.
static __device__ __forceinline__ float quick_gelu(float b) {
    const float t = b * b;
    const float q = -2.300819f + t * (-0.10707531f + t * (0.0010118302f + t * (1.2650216e-05f + t * -5.1396794e-07f)));
    return b * reciprocal(1.0f + power_of_two(b * q));  // q: -l / (b ln 2)
}

#endif
