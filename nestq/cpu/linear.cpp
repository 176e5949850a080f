// Linear layers on nested planes: what nestq/reference/linear.py specifies, bit for bit.
//
// The loops are written for the compiler to vectorize: a dot product of bytes becomes one or two
// instructions for 64 codes where the processor has them. Sums are of integers and have no order.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

// Both nibbles are stored with an offset of 8, so that the codes of a dot product are unsigned.
constexpr int kNibbleBias = 8;
constexpr int kScaleBits = 15;
constexpr int kSmallestExponent = -111;

float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// Of activation codes: the largest one, and the share of the largest magnitude it stands for.
struct Levels {
  float largest;
  float share;
};

struct Activation {
  std::vector<int8_t> codes;   // [tokens, groups * group_size]
  std::vector<int32_t> sums;   // of the codes of a group, [tokens, groups]
  std::vector<float> scale;    // [tokens]
};

// quantize_activation of one token; columns from `features` on stay zero.
float quantize_token(const float* x, int64_t features, const Levels& levels, int8_t* codes) {
  // Bits of floats without their sign are ordered as the floats are, with NaN above all others.
  int32_t largest = 0;
  for (int64_t k = 0; k < features; ++k) {
    largest = std::max(largest, static_cast<int32_t>(to_bits(x[k]) & 0x7fffffff));
  }
  const float scale = from_bits(largest) * levels.share / levels.largest;
  const float inverse = 1.0f / (scale > FLT_MIN ? scale : 1.0f);
  for (int64_t k = 0; k < features; ++k) {
    float code = std::nearbyint(x[k] * inverse);
    code = code != code ? 0.0f : code;
    codes[k] = static_cast<int8_t>(std::min(std::max(code, -levels.largest), levels.largest));
  }
  return scale;
}

Activation quantize(
    const float* x, int64_t tokens, int64_t features, int64_t groups, int64_t group_size,
    const Levels& levels) {
  const int64_t padded = groups * group_size;
  Activation result{
      std::vector<int8_t>(tokens * padded),
      std::vector<int32_t>(tokens * groups),
      std::vector<float>(tokens)};
  for (int64_t m = 0; m < tokens; ++m) {
    int8_t* codes = result.codes.data() + m * padded;
    result.scale[m] = quantize_token(x + m * features, features, levels, codes);
    for (int64_t g = 0; g < groups; ++g) {
      int32_t sum = 0;
      for (int64_t k = 0; k < group_size; ++k) sum += codes[g * group_size + k];
      result.sums[m * groups + g] = sum;
    }
  }
  return result;
}

// fixed_point_scale of one row: codes, and the unit as the result.
float fixed_point_scale(const float* scale, int64_t groups, int32_t* codes) {
  float largest = scale[0];
  bool finite = true;
  for (int64_t g = 0; g < groups; ++g) {
    largest = std::max(largest, scale[g]);
    finite &= std::isfinite(scale[g]);
  }
  if (!finite) {
    std::fill(codes, codes + groups, 0);
    return std::numeric_limits<float>::quiet_NaN();
  }
  // That of frexp. It counts up to kSmallestExponent only, which is that of normal numbers.
  int exponent = largest == 0.0f ? 0 : static_cast<int>(to_bits(largest) >> 23 & 255) - 126;
  exponent = std::max(exponent, kSmallestExponent) - kScaleBits;
  const float inverse = from_bits(static_cast<uint32_t>(127 - exponent) << 23);
  for (int64_t g = 0; g < groups; ++g) {
    const float code = std::nearbyint(scale[g] * inverse);
    codes[g] = static_cast<int32_t>(std::min(code, 32767.0f));
  }
  return from_bits(static_cast<uint32_t>(127 + exponent) << 23);
}

// Codes of a weight row as unsigned bytes: base + 8 or, of the target, composed + 8 overlap + 8.
template <int kGroup, bool kTarget>
void unpack(
    const uint8_t* __restrict base, const uint8_t* __restrict refinement, int overlap,
    int64_t groups, uint8_t* __restrict codes) {
  constexpr int kHalf = kGroup / 2;
  for (int64_t g = 0; g < groups; ++g) {
    for (int j = 0; j < kHalf; ++j) {
      const uint8_t pair = base[g * kHalf + j] ^ 0x88;  // two's complement to offset
      uint8_t low = pair & 15, high = pair >> 4;
      if (kTarget) {
        const uint8_t fine = refinement[g * kHalf + j];
        low = low * overlap + (fine & 15);
        high = high * overlap + (fine >> 4);
      }
      codes[g * kGroup + j] = low;
      codes[g * kGroup + kHalf + j] = high;
    }
  }
}

template <int kGroup>
int32_t dot(const uint8_t* __restrict weight, const int8_t* __restrict activation) {
  int32_t sum = 0;
  for (int k = 0; k < kGroup; ++k) sum += weight[k] * activation[k];
  return sum;
}

struct Weight {
  const uint8_t* base;        // [rows, groups * group_size / 2]
  const uint8_t* refinement;  // the same, or null for the draft
  const void* scale;          // [rows, groups]
  bool scale_is_bfloat16;     // else float32
  const float* bias;          // [rows], or null
  int64_t rows;
  int64_t groups;
  int overlap;

  void scales_of_row(int64_t row, float* out) const {
    const int64_t start = row * groups;
    for (int64_t g = 0; g < groups; ++g) {
      out[g] = scale_is_bfloat16
          ? from_bits(uint32_t{static_cast<const uint16_t*>(scale)[start + g]} << 16)
          : static_cast<const float*>(scale)[start + g];
    }
  }
};

template <int kGroup>
void multiply(const Activation& x, const Weight& weight, int64_t tokens, float* out, int threads) {
  const int64_t groups = weight.groups, padded = groups * kGroup;
  const bool target = weight.refinement != nullptr;
  const int offset = target ? kNibbleBias * weight.overlap + kNibbleBias : kNibbleBias;
  const float divisor = target ? static_cast<float>(weight.overlap) : 1.0f;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<uint8_t> codes(padded);
    std::vector<float> scale(groups);
    std::vector<int32_t> scale_codes(groups);
#pragma omp for schedule(static)
    for (int64_t n = 0; n < weight.rows; ++n) {
      const int64_t start = n * padded / 2;
      if (target) {
        unpack<kGroup, true>(
            weight.base + start, weight.refinement + start, weight.overlap, groups, codes.data());
      } else {
        unpack<kGroup, false>(weight.base + start, nullptr, 1, groups, codes.data());
      }
      weight.scales_of_row(n, scale.data());
      const float unit = fixed_point_scale(scale.data(), groups, scale_codes.data());
      for (int64_t m = 0; m < tokens; ++m) {
        const int8_t* activation = x.codes.data() + m * padded;
        int64_t total = 0;
        for (int64_t g = 0; g < groups; ++g) {
          const int32_t sum = dot<kGroup>(codes.data() + g * kGroup, activation + g * kGroup) -
              offset * x.sums[m * groups + g];
          total += static_cast<int64_t>(sum) * scale_codes[g];
        }
        float result = static_cast<float>(total) * (x.scale[m] / divisor * unit);
        if (weight.bias) result += weight.bias[n];
        out[m * weight.rows + n] = result;
      }
    }
  }
}

}  // namespace

// Float weights of base planes, rows of `columns`: code times scale, which is exact.
template <int kGroup>
void dequantize(const Weight& weight, int64_t columns, float* out, int threads) {
  constexpr int kHalf = kGroup / 2;
  const int64_t groups = weight.groups;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<float> scale(groups), row(groups * kGroup);
#pragma omp for schedule(static)
    for (int64_t n = 0; n < weight.rows; ++n) {
      const uint8_t* base = weight.base + n * groups * kHalf;
      weight.scales_of_row(n, scale.data());
      for (int64_t g = 0; g < groups; ++g) {
        for (int j = 0; j < kHalf; ++j) {
          const int pair = base[g * kHalf + j] ^ 0x88;  // two's complement to offset
          row[g * kGroup + j] = static_cast<float>((pair & 15) - kNibbleBias) * scale[g];
          row[g * kGroup + kHalf + j] = static_cast<float>((pair >> 4) - kNibbleBias) * scale[g];
        }
      }
      std::copy(row.begin(), row.begin() + columns, out + n * columns);
    }
  }
}

extern "C" void nestq_dequantize(
    const uint8_t* base, const void* scale, int64_t scale_is_bfloat16, int64_t rows,
    int64_t group_size, int64_t groups, int64_t columns, float* out, int64_t threads) {
  const Weight weight{
      base, nullptr, scale, scale_is_bfloat16 != 0, nullptr, rows, groups, 1};
  const int count = static_cast<int>(threads);
  if (group_size == 32) dequantize<32>(weight, columns, out, count);
  if (group_size == 64) dequantize<64>(weight, columns, out, count);
  if (group_size == 128) dequantize<128>(weight, columns, out, count);
}

extern "C" void nestq_linear(
    const float* x, int64_t tokens, int64_t features, const uint8_t* base,
    const uint8_t* refinement, const void* scale, int64_t scale_is_bfloat16, const float* bias,
    int64_t rows, int64_t group_size, int64_t groups, int64_t overlap, int64_t levels,
    double share, float* out, int64_t threads) {
  const Weight weight{
      base, refinement, scale, scale_is_bfloat16 != 0, bias, rows, groups,
      static_cast<int>(overlap)};
  const Activation activation = quantize(
      x, tokens, features, groups, group_size,
      {static_cast<float>(levels), static_cast<float>(share)});
  const int count = static_cast<int>(threads);
  if (group_size == 32) multiply<32>(activation, weight, tokens, out, count);
  if (group_size == 64) multiply<64>(activation, weight, tokens, out, count);
  if (group_size == 128) multiply<128>(activation, weight, tokens, out, count);
}
