#include "kvspan/block_hash.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <set>
#include <string>

#include "kvspan/check.h"
#include "test_tensor.h"

namespace kvspan {
namespace {

using Keys = std::vector<Digest>;

const Digest kRoot = [] {
  Digest digest;
  digest.fill(1);
  return digest;
}();
const Digest kSpanRoot = [] {
  Digest digest;
  digest.fill(2);
  return digest;
}();

std::vector<std::int32_t> range_of_tokens(std::int32_t first, std::int32_t count) {
  std::vector<std::int32_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

template <typename Token>
Keys extend(BlockChain& chain, std::vector<Token> tokens, std::vector<SpanRange> spans = {}) {
  const auto size = static_cast<std::int64_t>(tokens.size());
  std::vector<std::uint8_t> bytes(chain.num_new_blocks(size) * 32);
  chain.extend(test::make_view(tokens.data(), DType{TypeCode::kInt, sizeof(Token) * 8}, {size}),
               spans, bytes);
  Keys keys(bytes.size() / 32);
  if (!bytes.empty()) std::memcpy(keys.data(), bytes.data(), bytes.size());
  return keys;
}

BlockChain make_chain(std::int64_t block_size = 4, bool anchored = true) {
  return BlockChain(block_size, kRoot, kSpanRoot, anchored);
}

// The header's preimages, written out naively.
Digest hash_of(const std::string& tag, std::vector<Digest> digests,
               const std::vector<std::uint32_t>& tokens = {}) {
  std::string preimage = tag;
  preimage.resize(16, '\0');
  for (const Digest& digest : digests) preimage.append(digest.begin(), digest.end());
  for (const std::uint32_t token : tokens) {
    for (int byte = 0; byte < 4; ++byte) preimage += static_cast<char>(token >> (8 * byte));
  }
  return sha256({reinterpret_cast<const std::uint8_t*>(preimage.data()), preimage.size()},
                Sha256Isa::kScalar);
}

TEST(BlockHashTest, FollowsTheDocumentedPreimages) {
  for (const bool anchored : {true, false}) {
    BlockChain chain = make_chain(2, anchored);
    const Keys keys = extend(chain, range_of_tokens(10, 9), {{2, 4}, {4, 8}});

    const Digest anchor = hash_of("kvspan/1 block", {kRoot}, {10, 11});
    const Digest span = hash_of("kvspan/1 span", {kSpanRoot, anchored ? anchor : Digest{}});
    const Digest first = hash_of("kvspan/1 block", {span}, {12, 13});
    const Digest outer = hash_of("kvspan/1 absorb", {anchor, first});
    const Digest second = hash_of("kvspan/1 block", {span}, {14, 15});
    const Digest third = hash_of("kvspan/1 block", {second}, {16, 17});
    EXPECT_EQ(keys, (Keys{anchor, first, second, third}));
    EXPECT_EQ(chain.digest(), hash_of("kvspan/1 absorb", {outer, third}));
    EXPECT_EQ(chain.num_tokens(), 9);
  }
}

TEST(BlockHashTest, SplittingCallsChangesNothing) {
  const std::vector<SpanRange> spans{{4, 12}, {16, 20}};
  const auto tokens = range_of_tokens(0, 27);
  BlockChain whole = make_chain();
  const Keys expected = extend(whole, tokens, spans);
  for (int cut_1 = 0; cut_1 <= 4; ++cut_1) {
    for (int cut_2 = 12; cut_2 <= 16; ++cut_2) {
      BlockChain chain = make_chain();
      const auto part = [&](int begin, int end) {
        return std::vector(tokens.begin() + begin, tokens.begin() + end);
      };
      Keys keys = extend(chain, part(0, cut_1));
      for (const Digest& key : extend(chain, part(cut_1, cut_2), {{4, 12}})) keys.push_back(key);
      for (const Digest& key : extend(chain, part(cut_2, 27), {{16, 20}})) keys.push_back(key);
      ASSERT_EQ(keys, expected) << "cut at " << cut_1 << " and " << cut_2;
      ASSERT_EQ(chain.digest(), whole.digest());
    }
  }
}

TEST(BlockHashTest, TokenTypesAndStridesGiveTheSameKeys) {
  const auto tokens = range_of_tokens(5, 12);
  BlockChain narrow = make_chain(), wide = make_chain(), strided = make_chain();
  const Keys keys = extend(narrow, tokens);
  EXPECT_EQ(extend(wide, std::vector<std::int64_t>(tokens.begin(), tokens.end())), keys);

  std::vector<std::int32_t> every_third(36);
  for (int i = 0; i < 12; ++i) every_third[35 - 3 * i] = tokens[i];
  TensorView view = test::make_view(&every_third[35], kInt32, {12});
  view.strides[0] = -3;
  std::vector<std::uint8_t> bytes(3 * 32);
  strided.extend(view, {}, bytes);
  EXPECT_EQ(std::memcmp(bytes.data(), keys.data(), bytes.size()), 0);
}

TEST(BlockHashTest, IdsUpTo32BitsAreAccepted) {
  BlockChain chain = make_chain(1);
  EXPECT_EQ(extend(chain, std::vector<std::int64_t>{4294967295}).at(0),
            hash_of("kvspan/1 block", {kRoot}, {4294967295}));
}

TEST(BlockHashTest, ErrorsLeaveTheChainAsItWas) {
  BlockChain chain = make_chain();
  extend(chain, range_of_tokens(0, 6));
  const Digest before = chain.digest();
  const auto tokens = range_of_tokens(6, 10);
  EXPECT_THROW(extend(chain, std::vector<std::int32_t>{1, 2, -1}), ArgumentError);
  EXPECT_THROW(extend(chain, std::vector<std::int64_t>{1, 4294967296}), ArgumentError);
  EXPECT_THROW(extend(chain, tokens, {{4, 8}}), ArgumentError);             // before these tokens
  EXPECT_THROW(extend(chain, tokens, {{8, 20}}), ArgumentError);            // behind them
  EXPECT_THROW(extend(chain, tokens, {{8, 14}}), ArgumentError);            // not aligned
  EXPECT_THROW(extend(chain, tokens, {{12, 8}}), ArgumentError);            // reversed
  EXPECT_THROW(extend(chain, tokens, {{8, 16}, {12, 16}}), ArgumentError);  // overlapping
  EXPECT_THROW(extend(chain, tokens, {{12, 16}, {8, 12}}), ArgumentError);  // not sorted
  EXPECT_EQ(chain.digest(), before);
  EXPECT_EQ(chain.num_tokens(), 6);

  BlockChain untouched = make_chain();
  extend(untouched, range_of_tokens(0, 6));
  EXPECT_EQ(extend(chain, tokens, {{8, 16}}), extend(untouched, tokens, {{8, 16}}));
}

TEST(BlockHashTest, EverySizeOfBlockOnEveryPath) {
  for (const std::int64_t block_size : {1, 3, 16, 17, 64}) {
    BlockChain scalar(block_size, kRoot, kSpanRoot, true, Sha256Isa::kScalar);
    const auto tokens = range_of_tokens(7, static_cast<std::int32_t>(5 * block_size));
    const Keys expected = extend(scalar, tokens, {{block_size, 3 * block_size}});
    EXPECT_EQ(std::set<Digest>(expected.begin(), expected.end()).size(), 5u);
    for (const Sha256Isa isa : sha256_isas()) {
      BlockChain chain(block_size, kRoot, kSpanRoot, true, isa);
      EXPECT_EQ(extend(chain, tokens, {{block_size, 3 * block_size}}), expected) << to_string(isa);
    }
  }
}

TEST(BlockHashTest, RefusesBadBlockSizes) {
  EXPECT_THROW(make_chain(0), ArgumentError);
  EXPECT_THROW(make_chain(-4), ArgumentError);
  EXPECT_THROW(make_chain(std::int64_t{1} << 40), ArgumentError);
}

}  // namespace
}  // namespace kvspan
