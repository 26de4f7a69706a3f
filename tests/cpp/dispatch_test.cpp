// The door: what it refuses, and with which words.
#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "kvspan/block_copy.h"
#include "kvspan/check.h"
#include "kvspan/device.h"
#include "kvspan/rerope.h"
#include "test_tensor.h"

namespace kvspan {
namespace {

// A call of one layer; a copy stays valid.
struct Call : ReropeArgs, ReropeLayer {
  void run() {
    layers = {static_cast<const ReropeLayer*>(this), 1};
    rerope(*this);
  }
};

class DispatchTest : public testing::Test {
 protected:
  std::vector<float> src_ = std::vector<float>(4 * 2 * 3 * 8, 1.0f);
  std::vector<float> dst_ = std::vector<float>(4 * 2 * 3 * 8, 1.0f);
  std::vector<std::int64_t> from_{0, 1}, to_{2, 3}, deltas_{5, 6};
  std::vector<float> inv_freq_{1.0f, 0.5f, 0.25f};

  Call args() {
    Call args;
    args.k_src = make_view(src_.data(), kFloat32, {4, 2, 3, 8});
    args.k_dst = make_view(dst_.data(), kFloat32, {4, 2, 3, 8});
    args.src_blocks = from_;
    args.dst_blocks = to_;
    args.deltas = deltas_;
    args.inv_freq = inv_freq_;
    return args;
  }

  template <typename Error>
  void expect_error(const char* message, const std::function<void(Call&)>& change) {
    Call changed = args();
    change(changed);
    try {
      changed.run();
      FAIL() << "expected: " << message;
    } catch (const Error& error) {
      EXPECT_STREQ(error.what(), message);
    }
  }
};

TEST_F(DispatchTest, ValidArgumentsPass) { EXPECT_NO_THROW(args().run()); }

TEST_F(DispatchTest, Shapes) {
  expect_error<ArgumentError>(
      "k_src: expected shape [num_blocks, block_size, num_kv_heads, head_dim], got [4, 48]",
      [&](Call& a) { a.k_src = make_view(src_.data(), kFloat32, {4, 48}); });
  expect_error<ArgumentError>(
      "k_dst: expected blocks of the same shape as k_src [4, 2, 3, 8], got [4, 3, 2, 8]",
      [&](Call& a) { a.k_dst = make_view(dst_.data(), kFloat32, {4, 3, 2, 8}); });
  expect_error<ArgumentError>(
      "k_src: expected a contiguous last dimension (stride 1), got stride 3", [&](Call& a) {
        a.k_src = test::transpose(make_view(src_.data(), kFloat32, {4, 2, 8, 3}), 2, 3);
      });
  expect_error<ArgumentError>(
      "k_dst: expected distinct elements, got a dimension expanded from size 1 to 3",
      [](Call& a) { a.k_dst.strides[2] = 0; });
}

TEST_F(DispatchTest, Types) {
  expect_error<TypeError>(
      "k_src: expected float32, bfloat16, float16, float8_e4m3fn or float8_e5m2, got int32",
      [](Call& a) { a.k_src.dtype = a.k_dst.dtype = kInt32; });
  expect_error<TypeError>("k_dst: expected float32 like k_src, got bfloat16",
                          [](Call& a) { a.k_dst.dtype = kBFloat16; });
}

TEST_F(DispatchTest, Moves) {
  std::vector<std::int64_t> moves;
  expect_error<ArgumentError>("src_blocks[1]: expected a block in [0, 4) of k_src, got 4",
                              [&](Call& a) { a.src_blocks = moves = {0, 4}; });
  expect_error<ArgumentError>("dst_blocks[0]: expected a block in [0, 4) of k_dst, got -1",
                              [&](Call& a) { a.dst_blocks = moves = {-1, 3}; });
  expect_error<ArgumentError>("dst_blocks: expected [2] like src_blocks, got [1]",
                              [&](Call& a) { a.dst_blocks = moves = {1}; });
  expect_error<ArgumentError>("deltas: expected [2] like src_blocks, got [3]",
                              [&](Call& a) { a.deltas = moves = {1, 2, 3}; });
  expect_error<ArgumentError>("dst_blocks: expected distinct blocks, got block 2 at both 0 and 1",
                              [&](Call& a) { a.dst_blocks = moves = {2, 2}; });
}

TEST_F(DispatchTest, MovesThatDependOnEachOtherNeedAPlan) {
  const std::vector<std::int64_t> chain{1, 2};
  Call other_tensor = args();
  other_tensor.dst_blocks = chain;
  EXPECT_NO_THROW(other_tensor.run());
  expect_error<ArgumentError>(
      "block 1 is read by move 1 and written by move 0; order the moves with plan_moves and run "
      "its batches one by one",
      [&](Call& a) {
        a.k_dst = a.k_src;
        a.dst_blocks = chain;
      });
}

TEST_F(DispatchTest, Frequencies) {
  std::vector<float> frequencies;
  expect_error<ArgumentError>(
      "inv_freq: expected at most (head_dim - rotary_offset) / 2 = 4 frequencies, got 5",
      [&](Call& a) {
        frequencies.assign(5, 1.0f);
        a.inv_freq = frequencies;
      });
  expect_error<ArgumentError>(
      "inv_freq: expected at most (head_dim - rotary_offset) / 2 = 2 frequencies, got 3",
      [](Call& a) { a.rotary_offset = 3; });
  expect_error<ArgumentError>("inv_freq[1]: expected a finite number, got inf", [&](Call& a) {
    frequencies = {1.0f, std::numeric_limits<float>::infinity()};
    a.inv_freq = frequencies;
  });
}

TEST_F(DispatchTest, WithoutFrequenciesKeysAreCopied) {
  Call call = args();
  call.inv_freq = {};
  call.run();
  EXPECT_EQ(dst_, src_);
}

TEST_F(DispatchTest, LayersAreNamedByTheirNumber) {
  const Call call = args();
  std::vector<ReropeLayer> layers{call, call};
  layers[1].k_dst.shape[0] = 3;
  ReropeArgs two_layers = call;
  two_layers.layers = layers;
  try {
    rerope(two_layers);
    FAIL() << "expected an error";
  } catch (const ArgumentError& error) {
    EXPECT_STREQ(error.what(), "k_dst[1]: expected 4 blocks like k_dst[0], got 3");
  }
}

TEST_F(DispatchTest, ReadOnlyDestination) {
  expect_error<ArgumentError>("k_dst: expected a writable tensor, got a read-only one",
                              [](Call& a) { a.k_dst.read_only = true; });
}

TEST_F(DispatchTest, Devices) {
  expect_error<ArgumentError>("k_dst: expected a tensor on cuda:1 like k_src, got cpu",
                              [](Call& a) { a.k_src.device = {DeviceType::kCuda, 1}; });
  expect_error<ArgumentError>(
      "k_src: expected a cpu or cuda tensor, got one on a device that is neither cpu nor cuda",
      [](Call& a) { a.k_src.device = a.k_dst.device = {DeviceType::kOther, 0}; });
}

TEST_F(DispatchTest, CudaTensorsWithoutCudaAreADeviceError) {
  if (cuda_device_count() > 0) {
    EXPECT_NO_THROW(require_cuda());
    return;
  }
  Call on_cuda = args();
  on_cuda.k_src.device = on_cuda.k_dst.device = {DeviceType::kCuda, 0};
  const std::string expected = built_with_cuda() ? "no CUDA device" : "built without CUDA";
  try {
    on_cuda.run();
    FAIL() << "expected: " << expected;
  } catch (const DeviceError& error) {
    EXPECT_NE(std::string(error.what()).find(expected), std::string::npos) << error.what();
  }
  BlockCopyArgs copy;
  copy.src = on_cuda.k_src;
  copy.dst = on_cuda.k_dst;
  EXPECT_THROW(copy_blocks(copy), DeviceError);
}

TEST_F(DispatchTest, NoMovesAndEmptyTensorsDoNothing) {
  Call no_moves = args();
  no_moves.src_blocks = no_moves.dst_blocks = no_moves.deltas = {};
  EXPECT_NO_THROW(no_moves.run());
  Call empty = args();
  empty.k_src = make_view(nullptr, kFloat32, {4, 0, 3, 8});
  empty.k_dst = make_view(nullptr, kFloat32, {4, 0, 3, 8});
  EXPECT_NO_THROW(empty.run());
}

TEST(BlockCopyDispatchTest, Errors) {
  std::vector<float> data(2 * 3 * 4 * 5 * 6);
  BlockCopyArgs args;
  args.src = args.dst = make_view(data.data(), kFloat32, {720});
  EXPECT_THROW(copy_blocks(args), ArgumentError);
  args.src = args.dst = make_view(data.data(), kFloat32, {2, 3, 4, 5, 6});
  EXPECT_THROW(copy_blocks(args), ArgumentError);
  args.src = args.dst = make_view(data.data(), DType{TypeCode::kOther, 128}, {2, 180});
  EXPECT_THROW(copy_blocks(args), TypeError);
}

TEST(InternalErrorTest, NamesTheCondition) {
  const bool sky_is_green = false;
  try {
    KVSPAN_ASSERT(sky_is_green);
    FAIL() << "expected an InternalError";
  } catch (const InternalError& error) {
    EXPECT_NE(std::string(error.what()).find("sky_is_green"), std::string::npos);
  }
}

}  // namespace
}  // namespace kvspan
