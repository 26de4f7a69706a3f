// The CPU rerope on every instruction set of this machine against a reference in double.
#include "kvspan/rerope.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "rerope_fixture.h"
#include "test_tensor.h"

namespace kvspan {
namespace {

using test::ReropeCase;

class ReropeTest : public testing::TestWithParam<ReropeCase> {};

TEST_P(ReropeTest, MatchesTheReference) {
  const ReropeCase& param = GetParam();
  test::ReropeFixture fixture(param);
  cpu::rerope(fixture.args(param.isa));
  fixture.expect_matches_reference();
}

TEST_P(ReropeTest, EveryIsaGivesTheBaselinesBits) {
  const ReropeCase& param = GetParam();
  test::ReropeFixture fixture(param), baseline(param);
  cpu::rerope(fixture.args(param.isa));
  cpu::rerope(baseline.args(VectorIsa::kBaseline));
  EXPECT_EQ(fixture.dst_bytes(), baseline.dst_bytes());
}

INSTANTIATE_TEST_SUITE_P(All, ReropeTest, testing::ValuesIn(test::rerope_cases()),
                         [](const auto& info) { return test::name_of(info.param); });

class ConversionTest : public testing::TestWithParam<VectorIsa> {
 protected:
  void rotate_one_block(const TensorView& src, const TensorView& dst,
                        std::span<const float> inv_freq) {
    const std::vector<std::int64_t> block{0}, delta{1};
    ReropeLayer layer;
    layer.k_src = src;
    layer.k_dst = dst;
    layer.inv_freq = inv_freq;
    ReropeArgs args;
    args.layers = {&layer, 1};
    args.src_blocks = args.dst_blocks = block;
    args.deltas = delta;
    args.isa = GetParam();
    cpu::rerope(args);
  }

  // Every 16-bit pattern through a rotation by nothing (frequency 0 has cosine 1 and sine 0).
  std::vector<std::uint16_t> round_trip(DType dtype) {
    const std::int64_t num_patterns = 65536;
    std::vector<std::uint16_t> in(2 * num_patterns), out(2 * num_patterns);
    for (std::int64_t i = 0; i < num_patterns; ++i) {
      in[i / 64 * 128 + i % 64] = static_cast<std::uint16_t>(i);
    }
    const std::vector<float> inv_freq(64, 0.0f);
    rotate_one_block(make_view(in.data(), dtype, {1, 1, 1024, 128}),
                     make_view(out.data(), dtype, {1, 1, 1024, 128}), inv_freq);
    std::vector<std::uint16_t> patterns(num_patterns);
    for (std::int64_t i = 0; i < num_patterns; ++i) patterns[i] = out[i / 64 * 128 + i % 64];
    return patterns;
  }
};

TEST_P(ConversionTest, EveryBFloat16RoundTrips) {
  const auto patterns = round_trip(kBFloat16);
  for (std::uint32_t i = 0; i < 65536; ++i) {
    const bool is_nan = (i & 0x7fff) > 0x7f80;
    ASSERT_EQ(patterns[i], is_nan ? i | 0x40 : i) << "bits " << i;
  }
}

TEST_P(ConversionTest, EveryFloat16RoundTrips) {
  const auto patterns = round_trip(kFloat16);
  for (std::uint32_t i = 0; i < 65536; ++i) {
    const bool is_nan = (i & 0x7fff) > 0x7c00;
    ASSERT_EQ(patterns[i], is_nan ? i | 0x200 : i) << "bits " << i;
  }
}

TEST_P(ConversionTest, EveryFloat8RoundTrips) {
  const std::vector<float> inv_freq(64, 0.0f);
  for (const DType dtype : {kFloat8E4M3FN, kFloat8E5M2}) {
    std::vector<std::uint8_t> in(512), out(512);
    for (std::uint32_t i = 0; i < 256; ++i)
      in[i / 64 * 128 + i % 64] = static_cast<std::uint8_t>(i);
    rotate_one_block(make_view(in.data(), dtype, {1, 1, 4, 128}),
                     make_view(out.data(), dtype, {1, 1, 4, 128}), inv_freq);
    for (std::uint32_t i = 0; i < 256; ++i) {
      const std::uint32_t magnitude = i & 0x7f;
      const std::uint32_t infinity = dtype == kFloat8E5M2 ? 0x7c : 0x7f;
      const std::uint32_t largest = (i & 0x80) | 0x7b;  // what an infinity becomes
      const std::uint32_t nan = 0x7f;
      const bool is_infinity = dtype == kFloat8E5M2 && magnitude == infinity;
      const bool is_nan = !is_infinity && magnitude >= infinity;
      ASSERT_EQ(out[i / 64 * 128 + i % 64], is_nan        ? nan
                                            : is_infinity ? largest
                                                          : i)
          << to_string(dtype) << ", bits " << i;
    }
  }
}

// The code nearest to a number, the even one of two, by search among all codes; NaN becomes 0x7f.
class Float8Codes {
 public:
  Float8Codes(int mantissa_bits, int bias, std::size_t num_finite) {
    for (std::size_t code = 0; code < num_finite; ++code) {
      const auto exponent = static_cast<int>(code >> mantissa_bits);
      const double mantissa = std::ldexp(code & ((1u << mantissa_bits) - 1), -mantissa_bits);
      values_.push_back(exponent > 0 ? std::ldexp(1 + mantissa, exponent - bias)
                                     : std::ldexp(mantissa, 1 - bias));
    }
  }

  float value(std::uint32_t code) const {
    const std::uint32_t magnitude = code & 0x7f;
    const bool is_infinity = magnitude == values_.size() && magnitude < 0x7f;
    const double value = magnitude < values_.size() ? values_[magnitude]
                         : is_infinity              ? std::numeric_limits<double>::infinity()
                                                    : std::nan("");
    return static_cast<float>(code & 0x80 ? -value : value);
  }

  std::uint32_t nearest(float v) const {
    if (std::isnan(v)) return 0x7f;
    const double magnitude = std::abs(static_cast<double>(v));
    const auto above = std::lower_bound(values_.begin(), values_.end(), magnitude);
    auto code = static_cast<std::uint32_t>(above - values_.begin());
    if (above == values_.end()) {
      --code;
    } else if (code > 0) {
      const double middle = (values_[code - 1] + values_[code]) / 2;  // exact
      if (magnitude < middle || (magnitude == middle && code % 2 == 1)) --code;
    }
    return code | (std::signbit(v) ? 0x80 : 0);
  }

 private:
  std::vector<double> values_;  // by code, finite, without sign
};

TEST_P(ConversionTest, EveryPairOfFloat8RoundsOnce) {
  constexpr std::int64_t kHalf = 64, kRows = 65536 / kHalf;
  struct Type {
    DType dtype;
    Float8Codes codes;
  };
  // Angles of all sizes: products from subnormal numbers to those beyond the range, cosines that
  // make ties (0.5 and 0.75, as near as a frequency comes), and sines that vanish beside them.
  const std::vector<float> angles{0.0f, 1e-6f,     1e-3f, 0.04f,     0.3f, 0.722734f, 0.785f,
                                  1.0f, 1.047198f, 1.57f, 1.570796f, 2.5f, 3.1415927f};
  for (const Type& type : {Type{kFloat8E4M3FN, {3, 7, 127}}, Type{kFloat8E5M2, {2, 15, 124}}}) {
    std::vector<std::uint8_t> in(65536 * 2), out(65536 * 2);
    const auto first = [](std::int64_t pair) { return pair / kHalf * 2 * kHalf + pair % kHalf; };
    for (std::int64_t pair = 0; pair < 65536; ++pair) {
      in[first(pair)] = static_cast<std::uint8_t>(pair >> 8);
      in[first(pair) + kHalf] = static_cast<std::uint8_t>(pair);
    }
    for (const float angle : angles) {
      const std::vector<float> inv_freq(kHalf, angle);
      rotate_one_block(make_view(in.data(), type.dtype, {1, 1, kRows, 2 * kHalf}),
                       make_view(out.data(), type.dtype, {1, 1, kRows, 2 * kHalf}), inv_freq);
      const auto c = static_cast<float>(std::cos(static_cast<double>(angle)));
      const auto s = static_cast<float>(std::sin(static_cast<double>(angle)));
      for (std::int64_t pair = 0; pair < 65536; ++pair) {
        const auto a_code = static_cast<std::uint32_t>(pair >> 8);
        const auto b_code = static_cast<std::uint32_t>(pair & 0xff);
        const float a = type.codes.value(a_code), b = type.codes.value(b_code);
        ASSERT_EQ(out[first(pair)], type.codes.nearest(a * c - b * s))
            << to_string(type.dtype) << ' ' << a << ", " << b << " by " << angle;
        ASSERT_EQ(out[first(pair) + kHalf], type.codes.nearest(b * c + a * s))
            << to_string(type.dtype) << ' ' << a << ", " << b << " by " << angle;
      }
    }
  }
}

// A frequency whose cosine, as a float, is the given number. Between 0.54 and 1 cosines of
// neighbouring floats lie closer together than floats do.
float frequency_of_cosine(double cosine) {
  const auto frequency = static_cast<float>(std::acos(cosine));
  EXPECT_EQ(static_cast<float>(std::cos(static_cast<double>(frequency))), cosine);
  return frequency;
}

TEST_P(ConversionTest, TiesRoundToEven) {
  struct Type {
    DType dtype;
    int mantissa_bits;
    std::uint16_t one, three_quarters;
  };
  for (const Type& type : {Type{kBFloat16, 7, 0x3f80, 0x3f40}, Type{kFloat16, 10, 0x3c00, 0x3a00},
                           Type{kFloat8E4M3FN, 3, 0x38, 0x34}, Type{kFloat8E5M2, 2, 0x3c, 0x3a}}) {
    const double ulp = std::ldexp(1.0, -1 - type.mantissa_bits);  // from 0.5 to 1
    // Half way above 3/4, whose last bit is 0, and half way above its successor.
    for (const auto& [above, expected] : {std::pair{0.5, 0}, std::pair{1.5, 2}}) {
      const std::vector<float> inv_freq{frequency_of_cosine(0.75 + above * ulp)};
      const std::int64_t size = type.dtype.size_bytes();
      std::vector<std::uint8_t> in(2 * size), out(2 * size);
      std::memcpy(in.data(), &type.one, size);
      // 1 * cosine, 1 * sine
      rotate_one_block(make_view(in.data(), type.dtype, {1, 1, 1, 2}),
                       make_view(out.data(), type.dtype, {1, 1, 1, 2}), inv_freq);
      std::uint16_t bits = 0;
      std::memcpy(&bits, out.data(), size);
      EXPECT_EQ(bits, type.three_quarters + expected) << to_string(type.dtype);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(AllIsas, ConversionTest, testing::ValuesIn(vector_isas()),
                         [](const auto& info) { return std::string(to_string(info.param)); });

}  // namespace
}  // namespace kvspan
