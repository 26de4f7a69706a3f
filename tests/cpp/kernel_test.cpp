// The bodies of the CUDA kernels, run on the host (cuda/host_shim.h), against the CPU kernels.
#include "host_shim.h"
// The shim comes first: it stands in for <cuda_runtime.h>.
#include "block_copy_kernel.cuh"
#include "rerope_fixture.h"
#include "rerope_launch.cuh"

namespace kvspan {
namespace {

using test::ReropeCase;

class ReropeKernelTest : public testing::TestWithParam<ReropeCase> {};

TEST_P(ReropeKernelTest, GivesTheBitsOfTheCpu) {
  test::ReropeFixture on_shim(GetParam()), on_cpu(GetParam());
  cuda::launch_rerope(on_shim.args(VectorIsa::kBaseline), cuda::HostLauncher{});
  cpu::rerope(on_cpu.args(VectorIsa::kBaseline));
  on_shim.expect_matches_reference();
  EXPECT_EQ(on_shim.dst_bytes(), on_cpu.dst_bytes());
}

std::vector<ReropeCase> baseline_cases() {
  std::vector<ReropeCase> cases;
  for (const ReropeCase& c : test::rerope_cases()) {
    if (c.isa == VectorIsa::kBaseline) cases.push_back(c);
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(All, ReropeKernelTest, testing::ValuesIn(baseline_cases()),
                         [](const auto& info) { return test::name_of(info.param); });

TEST(ReropeKernelTest, UsesWideAccessesOnlyWhereAligned) {
  const ReropeCase aligned{kBFloat16, true, 128, 64, false};
  test::ReropeFixture fixture(aligned);
  const ReropeLayer layer = fixture.args(VectorIsa::kBaseline).layers[0];
  EXPECT_TRUE(cuda::can_vectorize_rerope(layer, 0));
  EXPECT_TRUE(cuda::can_vectorize_rerope(layer, 16));
  EXPECT_FALSE(cuda::can_vectorize_rerope(layer, 4));
  ReropeLayer shifted = layer;
  shifted.k_dst.data = layer.k_dst.as<char>() + 2;
  EXPECT_FALSE(cuda::can_vectorize_rerope(shifted, 0));
  ReropeLayer odd_stride = layer;
  odd_stride.k_src.strides[1] += 1;
  EXPECT_FALSE(cuda::can_vectorize_rerope(odd_stride, 0));
  ReropeLayer short_half = layer;
  short_half.inv_freq = layer.inv_freq.first(30);
  EXPECT_FALSE(cuda::can_vectorize_rerope(short_half, 0));
  short_half.is_neox = false;
  EXPECT_FALSE(cuda::can_vectorize_rerope(short_half, 0));
  short_half.inv_freq = layer.inv_freq.first(28);
  EXPECT_TRUE(cuda::can_vectorize_rerope(short_half, 0));
}

TEST(ReropeKernelTest, MoreMovesThanOneLaunchHolds) {
  const std::int64_t num_blocks = 2 * cuda::kReropeMovesPerLaunch + 5;
  std::vector<float> src(num_blocks * 8), on_shim(src.size()), on_cpu(src.size());
  for (std::size_t i = 0; i < src.size(); ++i) src[i] = static_cast<float>(i % 97) - 48;
  std::vector<std::int64_t> blocks(num_blocks), reversed(num_blocks), deltas(num_blocks);
  for (std::int64_t i = 0; i < num_blocks; ++i) {
    blocks[i] = i;
    reversed[i] = num_blocks - 1 - i;
    deltas[i] = i - 50;
  }
  const std::vector<float> inv_freq{1.0f, 0.25f};
  ReropeLayer layer;
  layer.k_src = make_view(src.data(), kFloat32, {num_blocks, 2, 1, 4});
  layer.k_dst = make_view(on_shim.data(), kFloat32, {num_blocks, 2, 1, 4});
  layer.inv_freq = inv_freq;
  ReropeArgs args;
  args.layers = {&layer, 1};
  args.src_blocks = blocks;
  args.dst_blocks = reversed;
  args.deltas = deltas;
  cuda::launch_rerope(args, cuda::HostLauncher{4});
  layer.k_dst = make_view(on_cpu.data(), kFloat32, {num_blocks, 2, 1, 4});
  args.isa = VectorIsa::kBaseline;
  cpu::rerope(args);
  EXPECT_EQ(on_shim, on_cpu);
}

// Rows of every width, and so every size of access.
TEST(BlockCopyKernelTest, GivesTheBytesOfTheCpu) {
  for (const int row_bytes : {1, 2, 4, 8, 16, 24, 96}) {
    for (const bool is_hnd : {false, true}) {
      const DType dtype{TypeCode::kUInt, 8};
      auto src = test::make_bytes(5 * 3 * 2 * row_bytes, row_bytes);
      std::vector<std::uint8_t> on_shim(src.size(), 0xee), on_cpu(src.size(), 0xee);
      const std::vector<std::int64_t> from{4, 0, 0}, to{1, 2, 4};
      BlockCopyArgs args;
      args.src = make_view(src.data(), dtype, {5, 3, 2, row_bytes});
      args.src_blocks = from;
      args.dst_blocks = to;
      const auto dst_view = [&](std::vector<std::uint8_t>& dst) {
        return is_hnd ? test::transpose(make_view(dst.data(), dtype, {5, 2, 3, row_bytes}), 1, 2)
                      : make_view(dst.data(), dtype, {5, 3, 2, row_bytes});
      };
      args.dst = dst_view(on_shim);
      cuda::launch_block_copy(args, cuda::HostLauncher{8});
      args.dst = dst_view(on_cpu);
      cpu::copy_blocks(args);
      EXPECT_EQ(on_shim, on_cpu) << row_bytes << (is_hnd ? " hnd" : " nhd");
    }
  }
}

// Blocks onto themselves take no launch, and launches are filled across them.
TEST(BlockCopyKernelTest, ManyMovesWithinOnePool) {
  const std::int64_t num_moves = cuda::kCopyMovesPerLaunch + 40;
  auto on_shim = test::make_bytes(2 * num_moves * 16, 3), on_cpu = on_shim;
  std::vector<std::int64_t> from(num_moves), to(num_moves);
  for (std::int64_t i = 0; i < num_moves; ++i) {
    from[i] = i;
    to[i] = i % 3 == 0 ? i : num_moves + i;
  }
  BlockCopyArgs args;
  args.src_blocks = from;
  args.dst_blocks = to;
  int launches = 0;
  const auto count = [&](void (*kernel)(cuda::BlockCopyKernelArgs), unsigned grid_x,
                         unsigned grid_y, const cuda::BlockCopyKernelArgs& kernel_args) {
    ++launches;
    cuda::HostLauncher{2}(kernel, grid_x, grid_y, kernel_args);
  };
  args.src = args.dst = make_view(on_shim.data(), kInt32, {2 * num_moves, 1, 1, 4});
  cuda::launch_block_copy(args, count);
  args.src = args.dst = make_view(on_cpu.data(), kInt32, {2 * num_moves, 1, 1, 4});
  cpu::copy_blocks(args);
  EXPECT_EQ(on_shim, on_cpu);
  EXPECT_EQ(launches, 1);
  args.dst_blocks = from;
  cuda::launch_block_copy(args, count);
  EXPECT_EQ(launches, 1);
}

TEST(DivisorTest, DividesAllNumbersBelowTheLimit) {
  constexpr std::uint32_t kMost = (1u << 31) - 1;
  for (std::uint32_t by : {1u, 2u, 3u, 5u, 7u, 8u, 24u, 641u, 3072u, 65535u, 65537u, 1u << 30,
                           (1u << 30) + 1, kMost - 1, kMost}) {
    const cuda::Divisor divisor(by);
    for (std::uint64_t around : {std::uint64_t{0}, std::uint64_t{by}, std::uint64_t{by} * 12345,
                                 kMost / by * std::uint64_t{by}, std::uint64_t{kMost}}) {
      for (int off = -2; off <= 2; ++off) {
        const std::uint64_t n = around + static_cast<std::uint64_t>(off);
        if (n > kMost) continue;
        const auto number = static_cast<std::uint32_t>(n);
        const std::uint32_t quotient = divisor.quotient(number);
        ASSERT_EQ(quotient, number / by) << number << " / " << by;
        ASSERT_EQ(divisor.remainder(number, quotient), number % by);
      }
    }
  }
}

}  // namespace
}  // namespace kvspan
