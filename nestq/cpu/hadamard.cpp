// The Walsh-Hadamard transform: what nestq/reference/hadamard.py specifies, bit for bit.

#include <cstdint>

// In place, for float32 [count, block]; block is a power of two.
extern "C" void nestq_hadamard(float* x, int64_t count, int64_t block, double scale) {
  const float factor = static_cast<float>(scale);
  for (int64_t row = 0; row < count; ++row) {
    float* vector = x + row * block;
    for (int64_t half = 1; half < block; half *= 2) {
      for (int64_t start = 0; start < block; start += 2 * half) {
        float* first = vector + start;
        float* second = first + half;
        for (int64_t k = 0; k < half; ++k) {
          const float sum = first[k] + second[k];
          second[k] = first[k] - second[k];
          first[k] = sum;
        }
      }
    }
    for (int64_t k = 0; k < block; ++k) vector[k] *= factor;
  }
}
