// Keys from a weak hash: tokens are compared, so a collision shares nothing (field case 14).
#include "kvspan/token_store.h"

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <thread>

#include "block_hash_fixture.h"
#include "kvspan/check.h"

namespace kvspan {
namespace {

using namespace test;

// Every message collides with every other, for as many seeds as there are messages.
Digest128 constant_hash(std::span<const std::uint8_t>, std::uint64_t seed) {
  Digest128 digest{};
  std::memcpy(digest.data(), &seed, sizeof(seed));
  return digest;
}

// A good hash cut to four bits, so that collisions are common but not the rule.
Digest128 four_bit_hash(std::span<const std::uint8_t> message, std::uint64_t seed) {
  std::vector<std::uint8_t> seeded(message.begin(), message.end());
  seeded.push_back(static_cast<std::uint8_t>(seed));
  seeded.push_back(static_cast<std::uint8_t>(seed >> 8));
  Digest128 digest{};
  digest[0] = sha256(seeded)[0] & 15;
  digest[1] = static_cast<std::uint8_t>(seed);
  digest[2] = static_cast<std::uint8_t>(seed >> 8);
  return digest;
}

BlockChain store_chain(const std::shared_ptr<TokenStore>& store, const Digest& root = kRoot,
                       bool anchored = true) {
  return BlockChain(4, root, kSpanRoot, anchored, Sha256Isa::kAuto, store);
}

TEST(TokenStoreTest, CollidingBlocksGetKeysOfTheirOwn) {
  const auto store = std::make_shared<TokenStore>(constant_hash);
  BlockChain one = store_chain(store), other = store_chain(store), again = store_chain(store);
  const auto tokens = range_of_tokens(0, 8);
  auto changed = tokens;
  changed[1] = 99;
  const Keys keys = extend(one, tokens);
  EXPECT_EQ(store->num_collisions(), 1u);  // its second block met the first
  const Keys other_keys = extend(other, changed);
  EXPECT_NE(other_keys[0], keys[0]);  // other tokens
  EXPECT_NE(other_keys[1], keys[1]);  // the same tokens after another block
  EXPECT_EQ(extend(again, tokens), keys);
  EXPECT_EQ(store->num_entries(), 4u);
}

TEST(TokenStoreTest, CollidingRootsAnchorsAndExtraRangesAreKeptApart) {
  const auto store = std::make_shared<TokenStore>(constant_hash);
  const auto tokens = range_of_tokens(0, 12);
  auto other_anchor = tokens;
  other_anchor[0] = 99;
  std::set<Digest> span_keys;
  const auto add = [&](const Digest& root, const std::vector<std::int32_t>& prompt,
                       std::vector<ExtraRange> extra = {}) {
    BlockChain chain = store_chain(store, root);
    span_keys.insert(extend(chain, prompt, {{4, 8}}, std::move(extra)).at(1));
  };
  add(kRoot, tokens);
  add(kSpanRoot, tokens);
  add(kRoot, other_anchor);
  add(kRoot, tokens, {{5, 6, filled_digest(7)}});
  add(kRoot, tokens, {{5, 6, filled_digest(8)}});
  EXPECT_EQ(span_keys.size(), 5u);
  add(kRoot, tokens);
  EXPECT_EQ(span_keys.size(), 5u);
}

// Equal under a store if and only if equal under SHA-256, whatever the hash.
TEST(TokenStoreTest, SharesExactlyWhatSha256Shares) {
  const auto store = std::make_shared<TokenStore>(four_bit_hash);
  std::map<Digest, Digest> by_sha256, by_store;
  std::mt19937 random(3);
  std::size_t num_blocks = 0;
  for (int i = 0; i < 60; ++i) {
    const Digest root = filled_digest(static_cast<std::uint8_t>(i % 2));
    BlockChain strong(4, root, kSpanRoot, i % 3 == 0);
    BlockChain weak = store_chain(store, root, i % 3 == 0);
    const RandomPrompt prompt(random, 4);
    const Keys expected = extend(strong, prompt.tokens, prompt.spans, prompt.extra);
    const Keys keys = extend(weak, prompt.tokens, prompt.spans, prompt.extra);
    ASSERT_EQ(keys.size(), expected.size());
    for (std::size_t k = 0; k < keys.size(); ++k, ++num_blocks) {
      ASSERT_EQ(by_sha256.try_emplace(expected[k], keys[k]).first->second, keys[k]);
      ASSERT_EQ(by_store.try_emplace(keys[k], expected[k]).first->second, expected[k]);
    }
  }
  EXPECT_LT(by_store.size(), num_blocks);  // some were shared
  EXPECT_GT(store->num_collisions(), 100u);
}

TEST(TokenStoreTest, KeysSayThatTheyAreWeak) {
  BlockChain chain = store_chain(std::make_shared<TokenStore>(four_bit_hash));
  for (const Digest& key : extend(chain, range_of_tokens(0, 8))) {
    EXPECT_EQ(std::memcmp(key.data() + 16, "kvspan/1 xxh3\0\0", 16), 0);
  }
}

TEST(TokenStoreTest, CountsWhatItKeeps) {
  const auto store = std::make_shared<TokenStore>(four_bit_hash);
  BlockChain chain = store_chain(store);
  extend(chain, range_of_tokens(0, 8));
  EXPECT_EQ(store->num_entries(), 2u);
  EXPECT_EQ(store->num_bytes(), 2 * (16 + 32 + 4 * 4u));
}

TEST(TokenStoreTest, ChainsFromBeforeClearAreRefused) {
  const auto store = std::make_shared<TokenStore>(four_bit_hash);
  BlockChain before = store_chain(store);
  const Keys keys = extend(before, range_of_tokens(0, 8));
  store->clear();
  EXPECT_EQ(store->num_entries(), 0u);
  EXPECT_EQ(store->num_bytes(), 0u);
  EXPECT_THROW(extend(before, range_of_tokens(8, 4)), ArgumentError);
  EXPECT_EQ(before.num_tokens(), 8);
  BlockChain after = store_chain(store);
  EXPECT_EQ(extend(after, range_of_tokens(0, 8)).size(), keys.size());
}

TEST(TokenStoreTest, ChainsOfAnotherStoreDoNotMixInOneCall) {
  BlockChain strong = make_chain(), weak = store_chain(std::make_shared<TokenStore>(four_bit_hash));
  std::vector<BlockChain*> chains{&strong, &weak};
  std::vector<std::int32_t> tokens = range_of_tokens(0, 8);
  const std::vector<std::int64_t> cu_seqlens{0, 4, 8};
  std::vector<std::uint8_t> keys(2 * sizeof(Digest));
  EXPECT_THROW(
      extend_chains({.chains = chains, .token_ids = token_view(tokens), .cu_seqlens = cu_seqlens},
                    keys),
      ArgumentError);
}

TEST(TokenStoreTest, OneCallWithManyThreadsSharesWhatIsEqual) {
  const auto store = std::make_shared<TokenStore>(four_bit_hash);
  constexpr int kPrompts = 16;
  std::vector<std::unique_ptr<BlockChain>> owned;
  std::vector<BlockChain*> chains;
  std::vector<std::int32_t> tokens;
  std::vector<std::int64_t> cu_seqlens{0};
  for (int p = 0; p < kPrompts; ++p) {
    owned.push_back(
        std::make_unique<BlockChain>(4, kRoot, kSpanRoot, true, Sha256Isa::kAuto, store));
    chains.push_back(owned.back().get());
    for (int i = 0; i < 32; ++i) tokens.push_back(i < 16 ? i : i + 100 * (p % 4));
    cu_seqlens.push_back(static_cast<std::int64_t>(tokens.size()));
  }
  std::vector<std::uint8_t> bytes(kPrompts * 8 * sizeof(Digest));
  extend_chains({.chains = chains,
                 .token_ids = token_view(tokens),
                 .cu_seqlens = cu_seqlens,
                 .num_threads = 4},
                bytes);
  const Keys keys = to_keys(bytes);
  EXPECT_EQ(std::set<Digest>(keys.begin(), keys.end()).size(), 4u + 4 * 4);
  for (int p = 4; p < kPrompts; ++p) {
    EXPECT_TRUE(
        std::equal(keys.begin() + 8 * p, keys.begin() + 8 * (p + 1), keys.begin() + 8 * (p % 4)));
  }
}

TEST(TokenStoreTest, ThreadsAgreeOnEveryMessage) {
  TokenStore store(four_bit_hash);
  const auto intern_all = [&store] {
    Keys keys;
    for (std::uint8_t i = 0; i < 100; ++i) keys.push_back(store.intern({&i, 1}));
    return keys;
  };
  std::vector<Keys> found(4);
  {
    std::vector<std::thread> threads;
    for (Keys& keys : found) threads.emplace_back([&] { keys = intern_all(); });
    for (std::thread& thread : threads) thread.join();
  }
  EXPECT_EQ(std::set<Digest>(found[0].begin(), found[0].end()).size(), 100u);
  for (const Keys& keys : found) EXPECT_EQ(keys, found[0]);
}

// xxHash's own values; without it, the reason.
TEST(Xxh3Test, CanonicalDigestOrTheReasonWhyNot) {
  if (built_with_xxhash()) {
    const Digest128 empty{0x99, 0xaa, 0x06, 0xd3, 0x01, 0x47, 0x98, 0xd8,
                          0x60, 0x01, 0xc3, 0x24, 0x46, 0x8d, 0x49, 0x7f};
    EXPECT_EQ(xxh3_128({}, 0), empty);
    EXPECT_NE(xxh3_128({}, 1), empty);
    EXPECT_EQ(TokenStore().num_entries(), 0u);
  } else {
    EXPECT_THROW(TokenStore(), std::runtime_error);
    EXPECT_THROW(xxh3_128({}, 0), std::runtime_error);
  }
}

}  // namespace
}  // namespace kvspan
