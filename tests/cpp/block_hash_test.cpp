#include "kvspan/block_hash.h"

#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <string>

#include "block_hash_fixture.h"
#include "kvspan/check.h"

namespace kvspan {
namespace {

using namespace test;

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

// A block of text behind spans, or the digest of a chain that ends with them.
Digest absorbed(const Digest& parent, const Keys& span_keys,
                const std::vector<std::uint32_t>& tokens) {
  std::string message = "kvspan/1 absorb";
  message.resize(16);
  const auto put = [&](const void* bytes, std::size_t n) {
    message.append(static_cast<const char*>(bytes), n);
  };
  const std::uint64_t count = span_keys.size();
  put(parent.data(), parent.size());
  put(&count, sizeof(count));
  for (const Digest& key : span_keys) put(key.data(), key.size());
  for (const std::uint32_t token : tokens) put(&token, sizeof(token));
  return sha256({reinterpret_cast<const std::uint8_t*>(message.data()), message.size()},
                Sha256Isa::kScalar);
}

TEST(BlockHashTest, FollowsTheDocumentedPreimages) {
  for (const bool anchored : {true, false}) {
    BlockChain chain = make_chain(2, anchored);
    const Keys keys = extend(chain, range_of_tokens(10, 9), {{2, 4}, {4, 8}});

    const Digest anchor = hash_of("kvspan/1 block", {kRoot}, {10, 11});
    const Digest span = hash_of("kvspan/1 span", {kSpanRoot, anchored ? anchor : Digest{}});
    const Digest first = hash_of("kvspan/1 block", {span}, {12, 13});
    const Digest second = hash_of("kvspan/1 block", {span}, {14, 15});
    const Digest third = hash_of("kvspan/1 block", {second}, {16, 17});
    EXPECT_EQ(keys, (Keys{anchor, first, second, third}));
    EXPECT_EQ(chain.digest(), absorbed(anchor, {first, third}, {}));
    EXPECT_EQ(chain.num_tokens(), 9);

    const Keys after = extend(chain, range_of_tokens(19, 3));
    const Digest head = absorbed(anchor, {first, third}, {18, 19});
    EXPECT_EQ(after, (Keys{head, hash_of("kvspan/1 block", {head}, {20, 21})}));
    EXPECT_EQ(chain.digest(), after.back());
  }
}

// The parent of a block that an extra range overlaps.
Digest with_extra(const Digest& parent, std::uint8_t content, std::int64_t offset,
                  std::uint32_t length) {
  const auto low = static_cast<std::uint32_t>(offset);
  const auto high = static_cast<std::uint32_t>(offset >> 32);
  return hash_of("kvspan/1 extra", {parent, filled_digest(content)}, {low, high, length, 0});
}

TEST(BlockHashTest, ExtraRangesFollowTheDocumentedPreimages) {
  BlockChain chain = make_chain(4);
  // One range over three blocks, two in one block of a span, one that is a whole block.
  const std::vector<ExtraRange> extra{{2, 9, filled_digest(7)},
                                      {13, 14, filled_digest(8)},
                                      {14, 18, filled_digest(9)},
                                      {20, 24, filled_digest(7)}};
  const Keys keys = extend(chain, range_of_tokens(0, 28), {{12, 20}}, extra);

  const Digest first = hash_of("kvspan/1 block", {with_extra(kRoot, 7, 2, 7)}, {0, 1, 2, 3});
  const Digest second = hash_of("kvspan/1 block", {with_extra(first, 7, -2, 7)}, {4, 5, 6, 7});
  const Digest third = hash_of("kvspan/1 block", {with_extra(second, 7, -6, 7)}, {8, 9, 10, 11});
  const Digest span = hash_of("kvspan/1 span", {kSpanRoot, third});
  const Digest fourth =
      hash_of("kvspan/1 block", {with_extra(with_extra(span, 8, 1, 1), 9, 2, 4)}, {12, 13, 14, 15});
  const Digest fifth = hash_of("kvspan/1 block", {with_extra(fourth, 9, -2, 4)}, {16, 17, 18, 19});
  const Digest sixth = absorbed(with_extra(third, 7, 0, 4), {fifth}, {20, 21, 22, 23});
  const Digest seventh = hash_of("kvspan/1 block", {sixth}, {24, 25, 26, 27});
  EXPECT_EQ(keys, (Keys{first, second, third, fourth, fifth, sixth, seventh}));
}

TEST(BlockHashTest, AnExtraRangeAcrossASpansEdgeEntersBothSides) {
  const auto keys_with = [](std::vector<ExtraRange> extra) {
    BlockChain chain = make_chain(4);
    return extend(chain, range_of_tokens(0, 12), {{4, 8}}, std::move(extra));
  };
  const Keys plain = keys_with({}), crossing = keys_with({{3, 5, filled_digest(7)}});
  for (std::size_t i = 0; i < plain.size(); ++i) EXPECT_NE(plain[i], crossing[i]) << i;
  EXPECT_EQ(keys_with({{3, 3, filled_digest(7)}, {4, 4, filled_digest(8)}}), plain);
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

TEST(BlockHashTest, ExtraRangesOfAnUnfinishedBlockAreKept) {
  const std::vector<ExtraRange> extra{{0, 1, filled_digest(7)}, {4, 5, filled_digest(8)}};
  BlockChain whole = make_chain();
  const Keys expected = extend(whole, range_of_tokens(0, 12), {}, extra);
  for (int cut_1 = 1; cut_1 <= 4; ++cut_1) {
    for (int cut_2 = 5; cut_2 <= 12; ++cut_2) {
      BlockChain chain = make_chain();
      Keys keys = extend(chain, range_of_tokens(0, cut_1), {}, {extra[0]});
      for (const Digest& key :
           extend(chain, range_of_tokens(cut_1, cut_2 - cut_1), {}, {extra[1]})) {
        keys.push_back(key);
      }
      for (const Digest& key : extend(chain, range_of_tokens(cut_2, 12 - cut_2))) {
        keys.push_back(key);
      }
      ASSERT_EQ(keys, expected) << "cut at " << cut_1 << " and " << cut_2;
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
  TensorView view = make_view(&every_third[35], kInt32, {12});
  view.strides[0] = -3;
  std::vector<std::uint8_t> bytes(3 * 32);
  strided.extend(view, {}, {}, bytes);
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
  const Digest x = filled_digest(7);
  EXPECT_THROW(extend(chain, tokens, {}, {{5, 8, x}}), ArgumentError);              // before
  EXPECT_THROW(extend(chain, tokens, {}, {{8, 17, x}}), ArgumentError);             // behind
  EXPECT_THROW(extend(chain, tokens, {}, {{9, 7, x}}), ArgumentError);              // reversed
  EXPECT_THROW(extend(chain, tokens, {}, {{6, 9, x}, {8, 10, x}}), ArgumentError);  // overlapping
  EXPECT_THROW(extend(chain, tokens, {}, {{9, 10, x}, {6, 7, x}}), ArgumentError);  // not sorted
  EXPECT_EQ(chain.digest(), before);
  EXPECT_EQ(chain.num_tokens(), 6);

  BlockChain untouched = make_chain();
  extend(untouched, range_of_tokens(0, 6));
  EXPECT_EQ(extend(chain, tokens, {{8, 16}}), extend(untouched, tokens, {{8, 16}}));
}

TEST(BlockHashTest, EverySizeOfBlockOnEveryPath) {
  for (const std::int64_t block_size : {1, 3, 16, 17, 64}) {
    BlockChain scalar(block_size, kRoot, kSpanRoot, true, Sha256Isa::kScalar);
    // Spans of one, two and three blocks: their chains are hashed in pairs of unequal length.
    std::vector<SpanRange> spans;
    for (const auto& [start, end] : {SpanRange{1, 2}, {2, 4}, {5, 8}, {8, 9}, {9, 12}}) {
      spans.emplace_back(start * block_size, end * block_size);
    }
    const auto tokens = range_of_tokens(7, static_cast<std::int32_t>(14 * block_size));
    const Keys expected = extend(scalar, tokens, spans);
    EXPECT_EQ(std::set<Digest>(expected.begin(), expected.end()).size(), 14u);
    for (const Sha256Isa isa : sha256_isas()) {
      BlockChain chain(block_size, kRoot, kSpanRoot, true, isa);
      EXPECT_EQ(extend(chain, tokens, spans), expected) << to_string(isa);
      EXPECT_EQ(chain.digest(), scalar.digest()) << to_string(isa);
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
