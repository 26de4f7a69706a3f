// The gated delta rule: the CPU kernels of every instruction set and the CUDA kernel body (on the
// host, without tensor cores) against the recurrence in double.
#include "host_shim.h"
// The shim comes first: it stands in for <cuda_runtime.h>.
#include "gated_delta_fixture.h"
#include "gated_delta_launch.cuh"

namespace kvspan {
namespace {

using test::GatedDeltaCase;
using test::GatedDeltaFixture;

std::vector<GatedDeltaCase> cases() {
  std::vector<GatedDeltaCase> cases;
  for (const std::int64_t length : {1, 2, 63, 64, 65, 129}) cases.push_back({.lengths = {length}});
  for (const DType dtype : {kFloat32, kBFloat16, kFloat16}) {
    for (const bool is_vk : {false, true}) {
      cases.push_back({dtype, 1, 3, 20, 37, {65, 0, 1, 66, 3}, is_vk});
      cases.push_back({dtype, 2, 4, 32, 128, {70}, is_vk, false});
      cases.push_back({dtype, 1, 1, 5, 1, {67}, is_vk, true, false});
    }
  }
  cases.push_back({kBFloat16, 1, 5, 8, 8, {3, 64}});
  return cases;
}

class GatedDeltaTest : public testing::TestWithParam<GatedDeltaCase> {};

TEST_P(GatedDeltaTest, MatchesTheRecurrenceWithEveryInstructionSet) {
  for (const VectorIsa isa : vector_isas()) {
    GatedDeltaFixture whole(GetParam()), state_only(GetParam());
    GatedDeltaArgs args = whole.args(true), state_args = state_only.args(false);
    args.isa = state_args.isa = isa;
    args.num_threads = 1;
    state_args.num_threads = 3;
    gated_delta(args);
    gated_delta(state_args);
    whole.expect_matches_reference(true);
    EXPECT_EQ(whole.state_bytes(), state_only.state_bytes()) << to_string(isa);
  }
}

// Without the size of shared memory.
struct ShimLauncher {
  template <typename Args>
  void operator()(void (*kernel)(Args), unsigned grid_x, unsigned grid_y, int shared_bytes,
                  const Args& args) const {
    ASSERT_LE(shared_bytes, 163 * 1024) << "of the smallest device";
    cuda::HostLauncher{num_threads}(kernel, grid_x, grid_y, args);
  }
  unsigned num_threads;
};

TEST_P(GatedDeltaTest, KernelBodyMatchesTheRecurrence) {
  GatedDeltaFixture whole(GetParam()), state_only(GetParam());
  cuda::launch_gated_delta(whole.args(true), ShimLauncher{4});
  cuda::launch_gated_delta(state_only.args(false), ShimLauncher{3});
  whole.expect_matches_reference(true);
  EXPECT_EQ(whole.state_bytes(), state_only.state_bytes());
}

INSTANTIATE_TEST_SUITE_P(All, GatedDeltaTest, testing::ValuesIn(cases()),
                         [](const auto& info) { return test::name_of(info.param); });

TEST(GatedDeltaKernelTest, MoreSequencesThanOneLaunchHolds) {
  GatedDeltaCase many{.num_value_heads = 1, .key_dim = 4, .value_dim = 4, .lengths = {}};
  many.lengths.assign(cuda::kSequencesPerLaunch + 3, 1);
  GatedDeltaFixture fixture(many);
  cuda::launch_gated_delta(fixture.args(true), ShimLauncher{2});
  fixture.expect_matches_reference(true);
}

TEST(GatedDeltaKernelTest, SharedMemoryOfTheLargestKeysFits) {
  EXPECT_LE(cuda::gated_delta_shared_floats(cuda::kMaxKeyDim, true) * sizeof(float), 163 * 1024u);
  EXPECT_LE(cuda::gated_delta_shared_floats(cuda::kMaxKeyDim, false) * sizeof(float),
            113 * 1024u);  // two of an H100's
}

TEST(GatedDeltaTest, RefusesLargeKeysOnCudaBeforeAskingForADevice) {
  GatedDeltaFixture fixture({.key_dim = cuda::kMaxKeyDim + 1, .value_dim = 4, .lengths = {1}});
  GatedDeltaArgs args = fixture.args(true);
  for (TensorView* tensor : {&args.q, &args.k, &args.v, &args.g, &args.beta, &args.initial_state,
                             &args.out, &args.final_state}) {
    tensor->device = {DeviceType::kCuda, 0};
  }
  try {
    gated_delta(args);
    FAIL() << "expected an error";
  } catch (const ArgumentError& error) {
    EXPECT_STREQ(error.what(), "k: expected a key_dim of at most 128 on cuda, got 129");
  }
}

}  // namespace
}  // namespace kvspan
