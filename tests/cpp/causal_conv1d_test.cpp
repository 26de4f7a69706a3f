// The causal convolution: the CPU kernels of every instruction set and the CUDA kernel bodies (on
// the host) against sums in double.
#include "host_shim.h"
// The shim comes first: it stands in for <cuda_runtime.h>.
#include "causal_conv1d_kernel.cuh"
#include "gated_delta_fixture.h"

namespace kvspan {
namespace {

using test::Numbers;

struct ConvCase {
  DType dtype;
  std::int64_t num_channels, width;
  bool has_bias, silu;
  std::vector<std::int64_t> lengths;
};

class ConvFixture {
 public:
  explicit ConvFixture(const ConvCase& c) : case_(c) {
    for (const std::int64_t length : c.lengths) cu_seqlens_.push_back(cu_seqlens_.back() + length);
    const std::int64_t tokens = cu_seqlens_.back();
    const auto sequences = static_cast<std::int64_t>(c.lengths.size());
    x_ = random(tokens * c.num_channels);
    weight_ = random(c.num_channels * c.width);
    bias_ = random(c.num_channels);
    state_ = before_ = random(sequences * c.num_channels * (c.width - 1));
    out_ = Numbers(static_cast<std::size_t>(tokens * c.num_channels), c.dtype);
  }

  CausalConv1dArgs args() {
    const ConvCase& c = case_;
    const std::int64_t tokens = cu_seqlens_.back();
    CausalConv1dArgs args;
    args.x = make_view(x_.bytes.data(), c.dtype, {tokens, c.num_channels});
    args.weight = make_view(weight_.bytes.data(), c.dtype, {c.num_channels, c.width});
    if (c.has_bias) args.bias = make_view(bias_.bytes.data(), c.dtype, {c.num_channels});
    // As slots of [width - 1, num_channels].
    args.state = test::transpose(
        make_view(state_.bytes.data(), c.dtype,
                  {static_cast<std::int64_t>(c.lengths.size()), c.width - 1, c.num_channels}),
        1, 2);
    args.out = make_view(out_.bytes.data(), c.dtype, {tokens, c.num_channels});
    args.cu_seqlens = cu_seqlens_;
    args.silu = c.silu;
    return args;
  }

  void expect_matches_reference() const {
    const ConvCase& c = case_;
    for (std::size_t n = 0; n < c.lengths.size(); ++n) {
      const auto input = [&](std::int64_t token, std::int64_t channel) {
        if (token >= cu_seqlens_[n]) return x_.get(token * c.num_channels + channel);
        const std::int64_t row =
            (static_cast<std::int64_t>(n) + 1) * (c.width - 1) + token - cu_seqlens_[n];
        return before_.get(row * c.num_channels + channel);
      };
      for (std::int64_t channel = 0; channel < c.num_channels; ++channel) {
        for (std::int64_t t = cu_seqlens_[n]; t < cu_seqlens_[n + 1]; ++t) {
          double y = c.has_bias ? bias_.get(channel) : 0.0;
          for (std::int64_t w = 0; w < c.width; ++w) {
            y += weight_.get(channel * c.width + w) * input(t - c.width + 1 + w, channel);
          }
          if (c.silu) y /= 1.0 + std::exp(-y);
          ASSERT_NEAR(out_.get(t * c.num_channels + channel), y,
                      4e-6 + 1.01 * out_.half_place() * std::abs(y))
              << "token " << t << ", channel " << channel;
        }
        for (std::int64_t w = 0; w < c.width - 1; ++w) {
          const std::int64_t row = static_cast<std::int64_t>(n) * (c.width - 1) + w;
          ASSERT_EQ(state_.get(row * c.num_channels + channel),
                    input(cu_seqlens_[n + 1] - (c.width - 1) + w, channel));
        }
      }
    }
  }

 private:
  Numbers random(std::int64_t size) {
    Numbers numbers(static_cast<std::size_t>(size), case_.dtype);
    for (std::int64_t i = 0; i < size; ++i) numbers.set(i, normal_(random_));
    return numbers;
  }

  const ConvCase case_;
  std::vector<std::int64_t> cu_seqlens_{0};
  std::mt19937 random_{7};
  std::normal_distribution<float> normal_;
  Numbers x_{0, kFloat32}, weight_{0, kFloat32}, bias_{0, kFloat32}, state_{0, kFloat32},
      before_{0, kFloat32}, out_{0, kFloat32};
};

class ConvTest : public testing::TestWithParam<ConvCase> {};

TEST_P(ConvTest, MatchesTheSumWithEveryInstructionSet) {
  for (const VectorIsa isa : vector_isas()) {
    ConvFixture fixture(GetParam());
    CausalConv1dArgs args = fixture.args();
    args.isa = isa;
    args.num_threads = 2;
    causal_conv1d(args);
    fixture.expect_matches_reference();
  }
}

TEST_P(ConvTest, KernelBodiesMatchTheSum) {
  ConvFixture fixture(GetParam());
  cuda::launch_causal_conv1d(fixture.args(), cuda::HostLauncher{4});
  fixture.expect_matches_reference();
}

std::vector<ConvCase> cases() {
  std::vector<ConvCase> cases;
  for (const DType dtype : {kFloat32, kBFloat16, kFloat16}) {
    cases.push_back({dtype, 48, 4, true, true, {0, 1, 2, 5, 70}});
    cases.push_back({dtype, 37, 4, false, true, {66, 3}});
    cases.push_back({dtype, 9, 16, true, false, {40, 1}});
    cases.push_back({dtype, 16, 2, false, false, {3}});
    cases.push_back({dtype, 16, 1, true, true, {3}});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(All, ConvTest, testing::ValuesIn(cases()), [](const auto& info) {
  const ConvCase& c = info.param;
  return to_string(c.dtype) + "_" + std::to_string(c.num_channels) + "x" + std::to_string(c.width) +
         (c.has_bias ? "_bias" : "") + (c.silu ? "_silu" : "");
});

}  // namespace
}  // namespace kvspan
