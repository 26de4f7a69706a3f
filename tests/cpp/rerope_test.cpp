// The CPU rerope on every instruction set of this machine against a reference in double.
#include "kvspan/rerope.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <tuple>

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
    rotate_one_block(test::make_view(in.data(), dtype, {1, 1, 1024, 128}),
                     test::make_view(out.data(), dtype, {1, 1, 1024, 128}), inv_freq);
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

// A frequency whose cosine, as a float, ends in the given bits: a tie when rounded to a 16-bit
// type.
float frequency_with_cosine_bits(std::uint32_t mask, std::uint32_t wanted) {
  for (float frequency = 0.5f; frequency < 1.5f; frequency = std::nextafter(frequency, 2.0f)) {
    const auto cosine = static_cast<float>(std::cos(static_cast<double>(frequency)));
    std::uint32_t bits;
    std::memcpy(&bits, &cosine, 4);
    if ((bits & mask) == wanted) return frequency;
  }
  ADD_FAILURE() << "no such cosine";
  return 0.0f;
}

TEST_P(ConversionTest, TiesRoundToEven) {
  // The lowest kept bit and the dropped ones: even and odd, exactly half way.
  for (const auto& [dtype, dropped_bits, one] :
       {std::tuple{kBFloat16, 16, 0x3f80}, std::tuple{kFloat16, 13, 0x3c00}}) {
    const std::uint32_t mask = (2u << dropped_bits) - 1;
    for (const std::uint32_t lowest_kept : {0u, 1u}) {
      const std::uint32_t wanted = lowest_kept << dropped_bits | 1u << (dropped_bits - 1);
      const std::vector<float> inv_freq{frequency_with_cosine_bits(mask, wanted)};
      std::vector<std::uint16_t> in{static_cast<std::uint16_t>(one), 0}, out(2);
      // 1 * cosine, 1 * sine
      rotate_one_block(test::make_view(in.data(), dtype, {1, 1, 1, 2}),
                       test::make_view(out.data(), dtype, {1, 1, 1, 2}), inv_freq);
      EXPECT_EQ(out[0] & 1, 0) << to_string(dtype) << ", lowest kept bit " << lowest_kept;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(AllIsas, ConversionTest, testing::ValuesIn(vector_isas()),
                         [](const auto& info) { return std::string(to_string(info.param)); });

}  // namespace
}  // namespace kvspan
