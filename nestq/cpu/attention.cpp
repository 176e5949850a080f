// Attention over a nested KV cache: what nestq/reference/attention.py specifies, bit for bit, in two
// parts, between which PyTorch computes the exponential function.
//
// Products run on integers held in double, whose sums below 2^53 are exact in any order.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr int kOverlap = 16;
constexpr int64_t kKeyBlock = 1024;
// Values that are unpacked at once, to stay in the cache: divides a block.
constexpr int64_t kKeyTile = 32;
constexpr double kQuerySteps = 68719476736.0;   // 2^36
constexpr double kWeightSteps = 34359738368.0;  // 2^35

// Vectors are padded with zeros to whole lanes.
constexpr int64_t kLanes = 8;
typedef double Lanes __attribute__((vector_size(kLanes * sizeof(double))));
// Sums that are in flight at once, because an addition waits for the one before.
constexpr int64_t kSums = 4;

Lanes load(const double* x) {
  Lanes lanes;
  std::memcpy(&lanes, x, sizeof(lanes));
  return lanes;
}

int64_t whole_lanes(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

double divisor(double x) { return x == 0.0 ? 1.0 : x; }

// NaN is the largest of all.
double largest_of(const double* x, int64_t count) {
  double largest = -std::numeric_limits<double>::infinity();
  int has_nan = 0;
#pragma omp simd reduction(max : largest) reduction(| : has_nan)
  for (int64_t d = 0; d < count; ++d) {
    largest = x[d] > largest ? x[d] : largest;
    has_nan |= x[d] != x[d];
  }
  return has_nan ? std::numeric_limits<double>::quiet_NaN() : largest;
}

// Nibbles of the base are two's complement; their highest bit flipped, they have an offset of 8.
// One loop a nibble: compilers vectorize that better.
void unpack_base(const uint8_t* __restrict base, int64_t half, double* __restrict codes) {
  constexpr int kOffset = 8 * kOverlap;
  for (int64_t j = 0; j < half; ++j) codes[j] = ((base[j] ^ 8) & 15) * kOverlap - kOffset;
  for (int64_t j = 0; j < half; ++j) codes[half + j] = (base[j] >> 4 ^ 8) * kOverlap - kOffset;
}

void unpack_both(
    const uint8_t* __restrict base, const uint8_t* __restrict refinement, int64_t half,
    double* __restrict codes) {
  constexpr int kOffset = 8 * kOverlap + 8;
  for (int64_t j = 0; j < half; ++j) {
    codes[j] = ((base[j] ^ 8) & 15) * kOverlap + (refinement[j] & 15) - kOffset;
  }
  for (int64_t j = 0; j < half; ++j) {
    codes[half + j] = (base[j] >> 4 ^ 8) * kOverlap + (refinement[j] >> 4) - kOffset;
  }
}

// Keys or values of one head, and who sees them.
struct Entries {
  const uint8_t* base;        // [capacity, head_dim / 2]
  const uint8_t* refinement;  // the same, or null
  const float* scale;         // [capacity]
  int64_t head_dim;
  int64_t recent;

  // Codes of a slot in steps of s / 16: as old queries see them, and as recent ones do.
  void unpack(int64_t slot, double* old_codes, double* recent_codes) const {
    const int64_t half = head_dim / 2;
    if (!refinement || recent > 0) unpack_base(base + slot * half, half, old_codes);
    if (!refinement) {
      std::copy(old_codes, old_codes + head_dim, recent_codes);
      return;
    }
    unpack_both(base + slot * half, refinement + slot * half, half, recent_codes);
    if (recent == 0) std::copy(recent_codes, recent_codes + head_dim, old_codes);
  }

  const double* seen_by(int64_t distance, const double* old_codes, const double* recent_codes) const {
    return distance >= recent ? old_codes : recent_codes;
  }
};

struct Shape {
  int64_t batch, kv_heads, rows, tokens, head_dim, capacity, used, window, recent, sink, local;

  Entries entries(
      int64_t head, const uint8_t* base, const uint8_t* refinement, const float* scale) const {
    const int64_t bytes = head * capacity * (head_dim / 2);
    return {
        base + bytes, refinement ? refinement + bytes : nullptr, scale + head * capacity, head_dim,
        recent};
  }

  // Positions of rows, query heads and tokens, of head `head` of the cache of all of the batch.
  std::vector<int64_t> of_rows(const int64_t* positions, int64_t head) const {
    std::vector<int64_t> result(rows);
    for (int64_t r = 0; r < rows; ++r) result[r] = positions[head / kv_heads * tokens + r % tokens];
    return result;
  }

  bool visible(int64_t position, int64_t slot) const {
    const int64_t distance = position - slot;
    return distance >= 0 && (window == 0 || distance < window) &&
           (local == 0 || distance < local || slot < sink);
  }

  // Slots from sink to the result are seen by no row.
  int64_t end_of_hole(const std::vector<int64_t>& positions) const {
    if (local == 0) return 0;
    return *std::min_element(positions.begin(), positions.end()) - local + 1;
  }
};

// Exact sum of `count` products, whole lanes.
double dot(const double* one, const double* other, int64_t count) {
  Lanes sums[kSums] = {};
  int64_t d = 0;
  for (; d + kSums * kLanes <= count; d += kSums * kLanes) {
    for (int64_t i = 0; i < kSums; ++i) {
      sums[i] += load(one + d + i * kLanes) * load(other + d + i * kLanes);
    }
  }
  for (; d < count; d += kLanes) sums[0] += load(one + d) * load(other + d);
  const Lanes sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

// Adds to `kCount` lanes of `sum` the exact sum over keys of weights times values.
template <int64_t kCount>
void add_products(
    const double* weights, const double* const* values, int64_t keys, int64_t start, double* sum) {
  Lanes sums[kCount];
  std::memcpy(sums, sum + start, sizeof(sums));
  for (int64_t j = 0; j < keys; ++j) {
    for (int64_t i = 0; i < kCount; ++i) {
      sums[i] += weights[j] * load(values[j] + start + i * kLanes);
    }
  }
  std::memcpy(sum + start, sums, sizeof(sums));
}

// Integers in [-steps, steps] for a vector whose largest magnitude is given.
void fixed_point(const double* x, double largest, double steps, int64_t count, double* codes) {
  for (int64_t d = 0; d < count; ++d) codes[d] = std::nearbyint(x[d] / divisor(largest) * steps);
}

void scores_of_head(
    const Shape& shape, int64_t head, const double* query, const int64_t* positions,
    const Entries& keys, double scaling, double* scores) {
  const int64_t dim = shape.head_dim, padded = whole_lanes(dim), rows = shape.rows;
  const int64_t used = shape.used;
  const std::vector<int64_t> position = shape.of_rows(positions, head);
  std::vector<double> codes(rows * padded), factor(rows), magnitudes(dim);
  std::vector<double> old_key(padded), recent_key(padded);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t d = 0; d < dim; ++d) magnitudes[d] = std::fabs(query[r * dim + d]);
    const double largest = largest_of(magnitudes.data(), dim);
    fixed_point(query + r * dim, largest, kQuerySteps, dim, codes.data() + r * padded);
    factor[r] = largest * (scaling / (kOverlap * kQuerySteps));
  }
  const int64_t end_of_hole = shape.end_of_hole(position);
  for (int64_t j = 0; j < used; ++j) {
    const bool in_hole = j >= shape.sink && j < end_of_hole;
    if (!in_hole) keys.unpack(j, old_key.data(), recent_key.data());
    for (int64_t r = 0; r < rows; ++r) {
      double score = -std::numeric_limits<double>::infinity();
      if (shape.visible(position[r], j)) {
        const double* key = keys.seen_by(position[r] - j, old_key.data(), recent_key.data());
        score = dot(codes.data() + r * padded, key, padded) * factor[r] * keys.scale[j];
      }
      scores[r * used + j] = score;
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    const double peak = largest_of(scores + r * used, used);
    if (std::isinf(peak) && peak < 0) continue;  // nothing is visible
    for (int64_t j = 0; j < used; ++j) scores[r * used + j] -= peak;
  }
}

// Fixed-point codes of a row's weights times the scales of values, in place of the weights.
struct Softmax {
  double total;    // of the weights
  double largest;  // of the weights times scales
};

Softmax scale_weights(
    const Shape& shape, int64_t position, const float* scale, double* weights) {
  double total = 0.0;
  for (int64_t start = 0; start < shape.used; start += kKeyBlock) {
    const int64_t end = std::min(start + kKeyBlock, shape.used);
    double sum = 0.0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = start; j < end; ++j) sum += std::nearbyint(weights[j] * kWeightSteps);
    total += sum;
  }
  // The value's scale varies along the sum, so it goes into the weight before that is rounded.
  for (int64_t j = 0; j < shape.used; ++j) {
    weights[j] = shape.visible(position, j) ? weights[j] * scale[j] : 0.0;
  }
  const double largest = largest_of(weights, shape.used);
  fixed_point(weights, largest, kWeightSteps, shape.used, weights);
  return {total, largest};
}

void sums_of_head(
    const Shape& shape, int64_t head, double* weights, const int64_t* positions,
    const Entries& values, double* out) {
  const int64_t dim = shape.head_dim, padded = whole_lanes(dim), rows = shape.rows;
  const int64_t used = shape.used;
  const std::vector<int64_t> position = shape.of_rows(positions, head);
  std::vector<Softmax> softmax(rows);
  for (int64_t r = 0; r < rows; ++r) {
    softmax[r] = scale_weights(shape, position[r], values.scale, weights + r * used);
  }
  std::vector<double> old_values(kKeyTile * padded), recent_values(kKeyTile * padded);
  std::vector<double> block(rows * padded);
  const double* seen[kKeyTile];
  std::fill(out, out + rows * dim, 0.0);
  const int64_t end_of_hole = shape.end_of_hole(position);
  for (int64_t start = 0; start < used; start += kKeyTile) {
    const int64_t count = std::min(kKeyTile, used - start);
    const bool in_hole = start >= shape.sink && start + count <= end_of_hole;
    for (int64_t j = 0; j < count && !in_hole; ++j) {
      values.unpack(start + j, &old_values[j * padded], &recent_values[j * padded]);
    }
    for (int64_t r = 0; r < rows && !in_hole; ++r) {
      for (int64_t j = 0; j < count; ++j) {
        seen[j] = values.seen_by(
            position[r] - start - j, &old_values[j * padded], &recent_values[j * padded]);
      }
      const double* row = weights + r * used + start;
      double* sums = block.data() + r * padded;
      int64_t d = 0;
      for (; d + kSums * kLanes <= padded; d += kSums * kLanes) {
        add_products<kSums>(row, seen, count, d, sums);
      }
      for (; d < padded; d += kLanes) add_products<1>(row, seen, count, d, sums);
    }
    if ((start + count) % kKeyBlock && start + count < used) continue;
    // The sums of a block are exact; those of blocks are added in order.
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t d = 0; d < dim; ++d) out[r * dim + d] += block[r * padded + d];
    }
    std::fill(block.begin(), block.end(), 0.0);
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t d = 0; d < dim; ++d) {
      double& sum = out[r * dim + d];
      sum = sum / divisor(softmax[r].total) * (softmax[r].largest / kOverlap);
    }
  }
}

}  // namespace

// Scores minus the largest of their row, [batch, kv_heads, rows, used]; rows are query heads of one
// head of the cache, times tokens.
extern "C" void nestq_attention_scores(
    int64_t batch, int64_t kv_heads, int64_t rows, int64_t tokens, int64_t head_dim,
    int64_t capacity, int64_t used, int64_t window, int64_t recent, int64_t sink, int64_t local,
    const int64_t* positions, const uint8_t* base, const uint8_t* refinement, const float* scale,
    const double* query, double scaling, double* scores, int64_t threads) {
  const Shape shape{
      batch, kv_heads, rows, tokens, head_dim, capacity, used, window, recent, sink, local};
#pragma omp parallel for num_threads(static_cast<int>(threads)) if (threads > 1) schedule(static)
  for (int64_t head = 0; head < batch * kv_heads; ++head) {
    scores_of_head(
        shape, head, query + head * rows * head_dim, positions,
        shape.entries(head, base, refinement, scale), scaling, scores + head * rows * used);
  }
}

// Values summed by weights, the exponential functions of the scores, which are overwritten.
extern "C" void nestq_attention_sums(
    int64_t batch, int64_t kv_heads, int64_t rows, int64_t tokens, int64_t head_dim,
    int64_t capacity, int64_t used, int64_t window, int64_t recent, int64_t sink, int64_t local,
    const int64_t* positions, const uint8_t* base, const uint8_t* refinement, const float* scale,
    double* weights, double* out, int64_t threads) {
  const Shape shape{
      batch, kv_heads, rows, tokens, head_dim, capacity, used, window, recent, sink, local};
#pragma omp parallel for num_threads(static_cast<int>(threads)) if (threads > 1) schedule(static)
  for (int64_t head = 0; head < batch * kv_heads; ++head) {
    sums_of_head(
        shape, head, weights + head * rows * used, positions,
        shape.entries(head, base, refinement, scale), out + head * rows * head_dim);
  }
}
