// Writing into a nested KV cache: what nestq/reference/kv.py specifies, bit for bit.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int kOverlap = 16;

float divide_by_scale(float x, float scale) { return scale > 0.0f ? x / scale : 0.0f; }

// The nearest integer in [low, high]; NaN, of a vector that is not finite, becomes 0.
int nearest_code(float x, float low, float high) {
  const float rounded = std::nearbyint(x);
  return rounded != rounded ? 0 : static_cast<int>(std::min(std::max(rounded, low), high));
}

float largest_magnitude(const float* x, int64_t count) {
  // Bits of floats without their sign are ordered as the floats are, with NaN above all others.
  int32_t largest = 0;
  for (int64_t k = 0; k < count; ++k) {
    int32_t bits;
    std::memcpy(&bits, x + k, sizeof(bits));
    largest = std::max(largest, bits & 0x7fffffff);
  }
  float value;
  std::memcpy(&value, &largest, sizeof(value));
  return value;
}

struct Code {
  uint8_t base;        // two's complement nibble
  uint8_t refinement;  // with an offset of 8
};

Code quantize(float x, float scale) {
  const int base = nearest_code(divide_by_scale(x, scale), -8.0f, 7.0f);
  const float residual = x - static_cast<float>(base) * scale;
  const float low = base == -8 ? 0.0f : -8.0f;  // the composed code stays in 8 bits
  const int fine = nearest_code(divide_by_scale(residual, scale) * kOverlap, low, 7.0f);
  return {static_cast<uint8_t>(base & 15), static_cast<uint8_t>(fine + 8)};
}

}  // namespace

extern "C" void nestq_kv_append(
    const float* states, const int64_t* positions, int64_t batch, int64_t heads, int64_t count,
    int64_t head_dim, int64_t capacity, uint8_t* base, uint8_t* refinement, float* scale) {
  const int64_t half = head_dim / 2;
  for (int64_t row = 0; row < batch * heads; ++row) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t position = positions[row / heads * count + i];
      if (position < 0) continue;  // a pad
      const float* x = states + (row * count + i) * head_dim;
      const int64_t slot = row * capacity + position;
      const float step = largest_magnitude(x, head_dim) / 7.0f;
      scale[slot] = step;
      for (int64_t j = 0; j < half; ++j) {
        const Code low = quantize(x[j], step), high = quantize(x[half + j], step);
        base[slot * half + j] = low.base | high.base << 4;
        refinement[slot * half + j] = low.refinement | high.refinement << 4;
      }
    }
  }
}
