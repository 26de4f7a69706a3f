// Many prompts in one call against the same prompts one by one.
#include <gtest/gtest.h>

#include <memory>
#include <thread>

#include "block_hash_fixture.h"
#include "kvspan/check.h"

namespace kvspan {
namespace {

using namespace test;
using Offsets = std::vector<std::int64_t>;

// Ragged arguments, and what they point to.
struct Batch {
  std::vector<BlockChain*> chains;
  std::vector<std::int64_t> tokens;
  Offsets cu_seqlens{0}, cu_spans{0}, cu_extra{0};
  std::vector<SpanRange> spans;
  std::vector<ExtraRange> extra;

  void add(BlockChain& chain, const RandomPrompt& prompt) {
    chains.push_back(&chain);
    tokens.insert(tokens.end(), prompt.tokens.begin(), prompt.tokens.end());
    spans.insert(spans.end(), prompt.spans.begin(), prompt.spans.end());
    extra.insert(extra.end(), prompt.extra.begin(), prompt.extra.end());
    cu_seqlens.push_back(static_cast<std::int64_t>(tokens.size()));
    cu_spans.push_back(static_cast<std::int64_t>(spans.size()));
    cu_extra.push_back(static_cast<std::int64_t>(extra.size()));
  }

  ExtendArgs args(int num_threads = 1) {
    return {.chains = chains,
            .token_ids = token_view(tokens),
            .cu_seqlens = cu_seqlens,
            .spans = spans,
            .cu_spans = cu_spans,
            .extra = extra,
            .cu_extra = cu_extra,
            .num_threads = num_threads};
  }

  Keys run(int num_threads = 1) {
    const ExtendArgs arguments = args(num_threads);
    std::vector<std::uint8_t> bytes(key_offsets(arguments).back() * sizeof(Digest));
    extend_chains(arguments, bytes);
    return to_keys(bytes);
  }
};

class BlockHashBatchTest : public testing::TestWithParam<Sha256Isa> {
 protected:
  std::unique_ptr<BlockChain> chain(std::int64_t block_size, std::size_t index,
                                    Sha256Isa isa = GetParam()) {
    const Digest root = filled_digest(static_cast<std::uint8_t>(index % 5));
    const Digest span_root = filled_digest(static_cast<std::uint8_t>(10 + index % 3));
    return std::make_unique<BlockChain>(block_size, root, span_root, index % 2 == 0, isa);
  }
};

TEST_P(BlockHashBatchTest, GivesWhatThePromptsGiveOneByOne) {
  std::mt19937 random(1);
  for (int round = 0; round < 60; ++round) {
    const std::int64_t block_size = std::vector{1, 3, 16}[round % 3];
    const std::size_t num_prompts = random() % 7;
    std::vector<std::unique_ptr<BlockChain>> batch_chains, single_chains;
    for (std::size_t i = 0; i < num_prompts; ++i) {
      batch_chains.push_back(chain(block_size, i));
      single_chains.push_back(chain(block_size, i, Sha256Isa::kScalar));
    }
    for (int call = 0; call < 3; ++call) {  // the later ones append to unfinished blocks
      Batch batch;
      Keys expected;
      for (std::size_t i = 0; i < num_prompts; ++i) {
        const RandomPrompt prompt(random, block_size, single_chains[i]->num_tokens());
        batch.add(*batch_chains[i], prompt);
        for (const Digest& key :
             extend(*single_chains[i], prompt.tokens, prompt.spans, prompt.extra)) {
          expected.push_back(key);
        }
      }
      ASSERT_EQ(batch.run(1 + round % 4), expected) << "round " << round << ", call " << call;
      for (std::size_t i = 0; i < num_prompts; ++i) {
        ASSERT_EQ(batch_chains[i]->digest(), single_chains[i]->digest());
        ASSERT_EQ(batch_chains[i]->num_tokens(), single_chains[i]->num_tokens());
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(AllIsas, BlockHashBatchTest, testing::ValuesIn(sha256_isas()),
                         [](const auto& info) { return std::string(to_string(info.param)); });

TEST(BlockHashBatchErrorTest, KeyOffsetsCountUnfinishedBlocks) {
  BlockChain first = make_chain(), second = make_chain();
  extend(first, range_of_tokens(0, 3));
  std::vector<BlockChain*> chains{&first, &second};
  std::vector<std::int32_t> tokens = range_of_tokens(0, 8);
  const Offsets cu_seqlens{0, 1, 8};
  EXPECT_EQ(
      key_offsets({.chains = chains, .token_ids = token_view(tokens), .cu_seqlens = cu_seqlens}),
      (Offsets{0, 1, 2}));
}

TEST(BlockHashBatchErrorTest, ErrorsLeaveEveryChainAsItWas) {
  BlockChain first = make_chain(), second = make_chain(), wide = make_chain(8);
  extend(first, range_of_tokens(0, 6));
  const Digest before = first.digest();
  std::vector<std::int32_t> tokens = range_of_tokens(0, 8);
  const Offsets cu_seqlens{0, 2, 8};
  const std::vector<BlockChain*> both{&first, &second}, twice{&first, &first},
      unequal{&first, &wide};
  const auto fails = [&](const std::string& message, auto change, std::size_t num_keys = 2) {
    ExtendArgs args{.chains = both, .token_ids = token_view(tokens), .cu_seqlens = cu_seqlens};
    change(args);
    std::vector<std::uint8_t> keys(num_keys * sizeof(Digest));
    try {
      extend_chains(args, keys);
      ADD_FAILURE() << "expected: " << message;
    } catch (const ArgumentError& error) {
      EXPECT_NE(std::string(error.what()).find(message), std::string::npos)
          << "expected: " << message << "\ngot: " << error.what();
    }
    EXPECT_EQ(first.num_tokens(), 6);
    EXPECT_EQ(first.digest(), before);
    EXPECT_EQ(second.num_tokens(), 0);
  };
  const auto offsets_fail = [&](const std::string& message, const Offsets& offsets) {
    fails(message, [&](ExtendArgs& args) { args.cu_seqlens = offsets; });
  };
  const auto spans_fail = [&](const std::string& message, const std::vector<SpanRange>& spans,
                              const Offsets& offsets) {
    fails(message, [&](ExtendArgs& args) {
      args.spans = spans;
      args.cu_spans = offsets;
    });
  };
  const auto extra_fails = [&](const std::string& message, const std::vector<ExtraRange>& extra,
                               const Offsets& offsets) {
    fails(message, [&](ExtendArgs& args) {
      args.extra = extra;
      args.cu_extra = offsets;
    });
  };
  fails("chains: expected distinct chains, got one twice",
        [&](ExtendArgs& args) { args.chains = twice; });
  fails("chains[1]: expected block_size 4 like chains[0], got 8",
        [&](ExtendArgs& args) { args.chains = unequal; });
  fails("num_threads: expected 0 (automatic) or more, got -1",
        [&](ExtendArgs& args) { args.num_threads = -1; });
  fails("keys: expected 64 bytes, got 96", [](ExtendArgs&) {}, 3);
  offsets_fail("cu_seqlens: expected [3] offsets for 2 chains, got [2]", {0, 8});
  offsets_fail("cu_seqlens[0]: expected 0, got 1", {1, 2, 8});
  offsets_fail("cu_seqlens[2]: expected at least 9 like the offset before, got 8", {0, 9, 8});
  offsets_fail("cu_seqlens[2]: expected 8, the number of tokens, got 7", {0, 2, 7});
  spans_fail("cu_spans: expected [3] offsets for 2 chains, got [0]", {{0, 4}}, {});
  spans_fail("cu_spans[2]: expected 1, the number of spans, got 0", {{0, 4}}, {0, 0, 0});
  spans_fail("spans[0]: expected a range within the tokens added, [6, 8)", {{0, 4}}, {0, 1, 1});
  spans_fail("spans[1]: expected a range within the tokens added, [0, 6)", {{0, 4}, {4, 8}},
             {0, 0, 2});
  const Digest x = filled_digest(7);
  extra_fails("cu_extra: expected [3] offsets for 2 chains, got [2]", {{0, 1, x}}, {0, 1});
  extra_fails("cu_extra[2]: expected 1, the number of extra ranges, got 0", {{0, 1, x}}, {0, 0, 0});
  extra_fails("extra[0]: expected a range within the tokens added, [6, 8)", {{0, 1, x}}, {0, 1, 1});
  extra_fails("extra[1]: expected sorted, disjoint extra: a start of at least 2",
              {{0, 2, x}, {1, 3, x}}, {0, 0, 2});
}

TEST(BlockHashBatchErrorTest, ThreadsThatShareChainsDoNotBlockEachOther) {
  BlockChain first = make_chain(), second = make_chain();
  const auto repeat = [](std::vector<BlockChain*> chains) {
    std::vector<std::int32_t> tokens(16, 7);
    const Offsets cu_seqlens{0, 8, 16};
    std::vector<std::uint8_t> keys(4 * sizeof(Digest));
    for (int i = 0; i < 200; ++i) {
      extend_chains({.chains = chains,
                     .token_ids = token_view(tokens),
                     .cu_seqlens = cu_seqlens,
                     .num_threads = 1},
                    keys);
    }
  };
  std::thread other(repeat, std::vector<BlockChain*>{&second, &first});
  repeat({&first, &second});
  other.join();
  BlockChain expected = make_chain();
  extend(expected, std::vector<std::int32_t>(2 * 200 * 8, 7));
  EXPECT_EQ(first.digest(), expected.digest());
  EXPECT_EQ(second.digest(), expected.digest());
}

}  // namespace
}  // namespace kvspan
