// The noise that torch.randn makes on a CPU: the Mersenne Twister, and Box and Muller on 16 numbers at a time. So a seed draws
// what it draws in Python. After PyTorch's MT19937RNGEngine.h and DistributionTemplates.h (normal_fill).

const LENGTH = 624, MIDDLE = 397;

/** What gives one random number of 32 bits after the other, as `torch.Generator().manual_seed(seed)`. */
function twister(seed) {
  const state = new Uint32Array(LENGTH);
  state[0] = seed;
  for (let i = 1; i < LENGTH; i++) state[i] = Math.imul(1812433253, state[i - 1] ^ (state[i - 1] >>> 30)) + i;
  let next = LENGTH;
  const renew = () => {
    for (let i = 0; i < LENGTH; i++) {
      const mixed = (state[i] & 0x80000000) | (state[(i + 1) % LENGTH] & 0x7fffffff);
      state[i] = state[(i + MIDDLE) % LENGTH] ^ (mixed >>> 1) ^ (mixed & 1 ? 0x9908b0df : 0);
    }
    next = 0;
  };
  return () => {
    if (next === LENGTH) renew();
    let value = state[next++];
    value ^= value >>> 11;
    value ^= (value << 7) & 0x9d2c5680;
    value ^= (value << 15) & 0xefc60000;
    return (value ^ (value >>> 18)) >>> 0;
  };
}

/** What makes arrays of standard normal numbers from a seed (0 to 2^32 - 1), each of at least 16. */
export function normals(seed) {
  const random = twister(seed);
  const uniform = () => (random() & 0xffffff) / 0x1000000;
  const turn = (values, begin) => {
    for (let i = begin; i < begin + 8; i++) {
      const radius = Math.sqrt(-2 * Math.log(1 - values[i])), angle = 2 * Math.PI * values[i + 8];
      values[i] = radius * Math.cos(angle);
      values[i + 8] = radius * Math.sin(angle);
    }
  };
  return (count) => {
    const values = Float32Array.from({ length: count }, uniform);
    for (let begin = 0; begin + 16 <= count; begin += 16) turn(values, begin);
    if (count % 16) {
      for (let i = count - 16; i < count; i++) values[i] = uniform();
      turn(values, count - 16);
    }
    return values;
  };
}
