#include "kvspan/block_copy.h"

#include <gtest/gtest.h>

#include <cstring>

#include "block_layout.h"
#include "test_tensor.h"

namespace kvspan {
namespace {

TEST(BlockLayoutTest, ContiguousBlocksAreOneRow) {
  const TensorView view = make_view(nullptr, kFloat32, {9, 16, 8, 128});
  const BlockLayout layout = make_block_layout(view, view);
  EXPECT_EQ(layout.num_outer, 1);
  EXPECT_EQ(layout.num_inner, 1);
  EXPECT_EQ(layout.row_bytes, 16 * 8 * 128 * 4);
}

TEST(BlockLayoutTest, HndPoolsAreOneRowToo) {
  const TensorView view = test::transpose(make_view(nullptr, kFloat32, {9, 8, 16, 128}), 1, 2);
  const BlockLayout layout = make_block_layout(view, view);
  EXPECT_EQ(layout.num_outer * layout.num_inner, 1);
  EXPECT_EQ(layout.row_bytes, 16 * 8 * 128 * 4);
}

TEST(BlockLayoutTest, FusedKeysAndValuesStayRows) {
  TensorView keys = make_view(nullptr, kFloat32, {9, 16, 8, 256});
  keys.shape[3] = 128;  // the first half of each row
  const BlockLayout layout = make_block_layout(keys, keys);
  EXPECT_EQ(layout.num_outer * layout.num_inner, 16 * 8);
  EXPECT_EQ(layout.row_bytes, 128 * 4);
}

// Any pair of layouts, by comparing element by element.
TEST(BlockCopyTest, EveryPairOfLayouts) {
  constexpr std::int64_t kBlocks = 4, kTokens = 3, kHeads = 2, kDim = 5;
  const auto make = [&](std::uint8_t* data, int kind) {
    const DType dtype{TypeCode::kUInt, 8};
    if (kind == 0) return make_view(data, dtype, {kBlocks, kTokens, kHeads, kDim});
    if (kind == 1) {
      return test::transpose(make_view(data, dtype, {kBlocks, kHeads, kTokens, kDim}), 1, 2);
    }
    TensorView fused = make_view(data, dtype, {kBlocks, kTokens, kHeads, 2 * kDim});
    fused.shape[3] = kDim;
    return fused;
  };
  const auto at = [](const TensorView& t, std::int64_t b, std::int64_t n, std::int64_t h,
                     std::int64_t d) -> std::uint8_t& {
    return t.as<std::uint8_t>()[b * t.strides[0] + n * t.strides[1] + h * t.strides[2] + d];
  };
  for (int src_kind = 0; src_kind < 3; ++src_kind) {
    for (int dst_kind = 0; dst_kind < 3; ++dst_kind) {
      auto src_bytes = test::make_bytes(2 * kBlocks * kTokens * kHeads * kDim, 3);
      std::vector<std::uint8_t> dst_bytes(src_bytes.size(), 0xee);
      const std::vector<std::int64_t> from{3, 1, 3}, to{0, 2, 3};
      BlockCopyArgs args;
      args.src = make(src_bytes.data(), src_kind);
      args.dst = make(dst_bytes.data(), dst_kind);
      args.src_blocks = from;
      args.dst_blocks = to;
      copy_blocks(args);
      std::int64_t num_written = 0;
      for (std::size_t m = 0; m < from.size(); ++m) {
        for (std::int64_t n = 0; n < kTokens; ++n) {
          for (std::int64_t h = 0; h < kHeads; ++h) {
            for (std::int64_t d = 0; d < kDim; ++d, ++num_written) {
              ASSERT_EQ(at(args.dst, to[m], n, h, d), at(args.src, from[m], n, h, d));
              at(args.dst, to[m], n, h, d) = 0xee;
            }
          }
        }
      }
      ASSERT_EQ(num_written, 3 * kTokens * kHeads * kDim);
      EXPECT_EQ(dst_bytes, std::vector<std::uint8_t>(dst_bytes.size(), 0xee))
          << "wrote outside of its blocks, " << src_kind << " to " << dst_kind;
    }
  }
}

TEST(BlockCopyTest, TwoAndThreeDimensions) {
  std::vector<std::int64_t> src(3 * 4 * 5), dst(src.size());
  for (std::size_t i = 0; i < src.size(); ++i) src[i] = static_cast<std::int64_t>(i);
  const std::vector<std::int64_t> from{0, 1, 2}, to{2, 0, 1};
  for (const auto& shape : {std::vector<std::int64_t>{3, 20}, std::vector<std::int64_t>{3, 4, 5}}) {
    BlockCopyArgs args;
    args.src = make_view(src.data(), kInt64, shape);
    args.dst = make_view(dst.data(), kInt64, shape);
    args.src_blocks = from;
    args.dst_blocks = to;
    std::fill(dst.begin(), dst.end(), -1);
    copy_blocks(args);
    for (int i = 0; i < 20; ++i) {
      ASSERT_EQ(dst[40 + i], src[i]);
      ASSERT_EQ(dst[i], src[20 + i]);
      ASSERT_EQ(dst[20 + i], src[40 + i]);
    }
  }
}

TEST(BlockCopyTest, ThreadsDoNotChangeTheResult) {
  constexpr std::int64_t kBlocks = 37;
  auto src = test::make_bytes(kBlocks * 64, 1);
  std::vector<std::int64_t> from(kBlocks), to(kBlocks);
  for (std::int64_t i = 0; i < kBlocks; ++i) {
    from[i] = i;
    to[i] = (i * 5) % kBlocks;
  }
  std::vector<std::uint8_t> one(src.size()), many(src.size());
  BlockCopyArgs args;
  args.src = make_view(src.data(), DType{TypeCode::kUInt, 8}, {kBlocks, 64});
  args.src_blocks = from;
  args.dst_blocks = to;
  args.dst = args.src;
  args.dst.data = one.data();
  args.num_threads = 1;
  copy_blocks(args);
  args.dst.data = many.data();
  args.num_threads = 4;
  copy_blocks(args);
  EXPECT_EQ(one, many);
  EXPECT_NE(one, src);
}

}  // namespace
}  // namespace kvspan
