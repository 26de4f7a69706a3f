// One rerope call for tests: poisoned destination, awkward strides, and the answer in double.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "kvspan/rerope.h"
#include "test_tensor.h"

namespace kvspan::test {

struct ReropeCase {
  DType dtype;
  bool is_neox;
  int head_dim;
  int rotary_dim;
  bool is_hnd;
  int rotary_offset = 0;
  VectorIsa isa = VectorIsa::kBaseline;
};

inline std::string name_of(const ReropeCase& c) {
  return to_string(c.dtype) + (c.is_neox ? "_neox_" : "_interleaved_") +
         std::to_string(c.rotary_dim) + "of" + std::to_string(c.head_dim) +
         (c.rotary_offset ? "_at" + std::to_string(c.rotary_offset) : "") +
         (c.is_hnd ? "_hnd_" : "_nhd_") + std::string(to_string(c.isa));
}

// Whole and partial rotary dimensions; 6 of 10 and 30 of 33 end within a vector; slices of rows
// start on and off vector bounds.
inline std::vector<ReropeCase> rerope_cases() {
  std::vector<ReropeCase> cases;
  constexpr std::tuple<int, int, int> kDims[] = {{128, 128, 0},  {256, 256, 0}, {128, 64, 0},
                                                 {256, 192, 0},  {10, 6, 0},    {33, 30, 0},
                                                 {192, 64, 128}, {40, 20, 7}};
  for (const VectorIsa isa : vector_isas()) {
    for (const DType dtype : {kFloat32, kBFloat16, kFloat16, kFloat8E4M3FN, kFloat8E5M2}) {
      for (const bool is_neox : {true, false}) {
        for (const auto& [head_dim, rotary_dim, offset] : kDims) {
          for (const bool is_hnd : {false, true}) {
            cases.push_back({dtype, is_neox, head_dim, rotary_dim, is_hnd, offset, isa});
          }
        }
      }
    }
  }
  return cases;
}

class ReropeFixture {
 public:
  static constexpr std::int64_t kNumBlocks = 6;
  static constexpr std::int64_t kBlockSize = 3;
  static constexpr std::int64_t kNumKvHeads = 2;

  explicit ReropeFixture(const ReropeCase& c)
      : case_(c),
        size_(c.dtype.size_bytes()),
        src_(kNumBlocks * kBlockSize * kNumKvHeads * c.head_dim * size_),
        dst_(src_.size(), 0xff) {  // all ones is NaN in every one of the types
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(src_.size()) / size_; ++i) {
      write(src_, i, normal(random));
    }
    for (int i = 0; i < c.rotary_dim / 2; ++i) {
      inv_freq_.push_back(std::pow(10000.0f, -2.0f * i / c.rotary_dim));
    }
  }

  // Valid while the fixture lives and until the next call.
  ReropeArgs args(VectorIsa isa) {
    layer_.k_src = view(src_);
    layer_.k_dst = view(dst_);
    layer_.inv_freq = inv_freq_;
    layer_.is_neox = case_.is_neox;
    ReropeArgs args;
    args.layers = {&layer_, 1};
    args.src_blocks = src_blocks_;
    args.dst_blocks = dst_blocks_;
    args.deltas = deltas_;
    args.rotary_offset = case_.rotary_offset;
    args.isa = isa;
    return args;
  }

  const std::vector<std::uint8_t>& dst_bytes() const { return dst_; }

  void expect_matches_reference() {
    const TensorView src = view(src_), dst = view(dst_);
    std::vector<bool> written(kNumBlocks);
    for (std::size_t m = 0; m < deltas_.size(); ++m) {
      written[dst_blocks_[m]] = true;
      for (std::int64_t token = 0; token < kBlockSize; ++token) {
        for (std::int64_t head = 0; head < kNumKvHeads; ++head) {
          const auto row = [&](const TensorView& t, std::int64_t block) {
            return block * t.strides[0] + token * t.strides[1] + head * t.strides[2];
          };
          check_row(row(src, src_blocks_[m]), row(dst, dst_blocks_[m]), deltas_[m]);
        }
      }
    }
    for (std::int64_t block = 0; block < kNumBlocks; ++block) {
      if (written[block]) continue;
      const std::int64_t block_bytes = static_cast<std::int64_t>(dst_.size()) / kNumBlocks;
      for (std::int64_t i = 0; i < block_bytes; ++i) {
        ASSERT_EQ(dst_[block * block_bytes + i], 0xff) << "block " << block << " was written";
      }
    }
  }

 private:
  TensorView view(std::vector<std::uint8_t>& bytes) const {
    if (!case_.is_hnd) {
      return make_view(bytes.data(), case_.dtype,
                       {kNumBlocks, kBlockSize, kNumKvHeads, case_.head_dim});
    }
    return transpose(
        make_view(bytes.data(), case_.dtype, {kNumBlocks, kNumKvHeads, kBlockSize, case_.head_dim}),
        1, 2);
  }

  struct Format {
    int mantissa_bits, exponent_bits;
    bool has_infinity = true;
  };

  Format format() const {
    if (case_.dtype == kBFloat16) return {7, 8};
    if (case_.dtype == kFloat16) return {10, 5};
    if (case_.dtype == kFloat8E5M2) return {2, 5};
    return {3, 4, false};
  }

  void write(std::vector<std::uint8_t>& bytes, std::int64_t i, float value) const {
    if (case_.dtype == kFloat32) {
      std::memcpy(&bytes[4 * i], &value, 4);
      return;
    }
    // A normal number within the type's range: shift the exponent's bias, cut the mantissa.
    const Format f = format();
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const int exponent =
        static_cast<int>(bits >> 23 & 0xff) - 127 + (1 << (f.exponent_bits - 1)) - 1;
    const std::uint32_t mantissa = (bits & 0x7fffff) >> (23 - f.mantissa_bits);
    const std::uint32_t sign = bits >> 31 << (f.mantissa_bits + f.exponent_bits);
    const std::uint32_t packed =
        exponent <= 0 ? 0
                      : sign | static_cast<std::uint32_t>(exponent) << f.mantissa_bits | mantissa;
    std::memcpy(&bytes[size_ * i], &packed, size_);
  }

  double read(const std::vector<std::uint8_t>& bytes, std::int64_t i) const {
    if (case_.dtype == kFloat32) {
      float value;
      std::memcpy(&value, &bytes[4 * i], 4);
      return value;
    }
    const Format f = format();
    std::uint32_t bits = 0;
    std::memcpy(&bits, &bytes[size_ * i], size_);
    const int exponent_mask = (1 << f.exponent_bits) - 1;
    const int mantissa_mask = (1 << f.mantissa_bits) - 1;
    const int exponent = bits >> f.mantissa_bits & exponent_mask;
    const int mantissa = bits & mantissa_mask;
    const double sign = bits >> (f.mantissa_bits + f.exponent_bits) ? -1.0 : 1.0;
    if (exponent == exponent_mask && (f.has_infinity || mantissa == mantissa_mask)) {
      return mantissa ? std::numeric_limits<double>::quiet_NaN()
                      : sign * std::numeric_limits<double>::infinity();
    }
    const int scale = std::max(exponent, 1) - exponent_mask / 2 - f.mantissa_bits;
    return sign * std::ldexp(mantissa + (exponent ? 1 << f.mantissa_bits : 0), scale);
  }

  void check_row(std::int64_t src, std::int64_t dst, std::int64_t delta) {
    const int half = case_.rotary_dim / 2;
    // Half a unit in the last place, relative to the value, of the storage type.
    const bool is_float32 = case_.dtype == kFloat32;
    const double storage_eps = is_float32 ? 0x1p-24 : std::ldexp(1.0, -1 - format().mantissa_bits);
    // Below the smallest normal number half a unit is the same everywhere.
    const double smallest_normal =
        is_float32 ? 0.0 : std::ldexp(1.0, 2 - (1 << (format().exponent_bits - 1)));
    for (int i = 0; i < half; ++i) {
      const int at_1 = case_.rotary_offset + (case_.is_neox ? i : 2 * i);
      const int at_2 = case_.rotary_offset + (case_.is_neox ? i + half : 2 * i + 1);
      const double x_1 = read(src_, src + at_1), x_2 = read(src_, src + at_2);
      const double angle = static_cast<double>(delta) * static_cast<double>(inv_freq_[i]);
      const double c = std::cos(angle), s = std::sin(angle);
      const double float_error = 0x1p-23 * (std::abs(x_1) + std::abs(x_2)) + 0x1p-25;
      for (const auto& [at, expected] :
           {std::pair{at_1, x_1 * c - x_2 * s}, std::pair{at_2, x_2 * c + x_1 * s}}) {
        ASSERT_NEAR(read(dst_, dst + at), expected,
                    storage_eps * std::max(std::abs(expected), smallest_normal) + float_error)
            << "dimension " << at << ", delta " << delta;
      }
    }
    const int first = delta == 0 ? 0 : case_.rotary_offset;
    const int last = delta == 0 ? 0 : case_.rotary_offset + case_.rotary_dim;
    for (const auto& [begin, end] : {std::pair{0, first}, std::pair{last, case_.head_dim}}) {
      ASSERT_EQ(std::memcmp(&src_[(src + begin) * size_], &dst_[(dst + begin) * size_],
                            (end - begin) * size_),
                0)
          << "dimensions that must not change did, delta " << delta;
    }
  }

  const ReropeCase case_;
  const std::int64_t size_;
  std::vector<std::uint8_t> src_, dst_;
  ReropeLayer layer_;
  std::vector<float> inv_freq_;
  const std::vector<std::int64_t> src_blocks_{0, 5, 2, 2, 1};
  const std::vector<std::int64_t> dst_blocks_{4, 0, 2, 5, 1};
  const std::vector<std::int64_t> deltas_{1000000, -3, 0, -1000000, 17};
};

}  // namespace kvspan::test
