// Block hashes: tokens per second of whole prompts, spans, batches and the xxh3-128 mode.
//
//   kvspan_bench_hash --benchmark_filter=Prompt --benchmark_repetitions=9
#include <benchmark/benchmark.h>

#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kvspan/block_hash.h"

namespace kvspan {
namespace {

constexpr std::int64_t kNumTokens = std::int64_t{1} << 16;
constexpr int kVocabulary = 150'000;

std::vector<std::int32_t> random_tokens(std::int64_t count) {
  std::mt19937 random(0);
  std::uniform_int_distribution<std::int32_t> id(0, kVocabulary - 1);
  std::vector<std::int32_t> tokens(count);
  for (auto& token : tokens) token = id(random);
  return tokens;
}

TensorView view_of(std::vector<std::int32_t>& tokens) {
  return make_view(tokens.data(), kInt32, {static_cast<std::int64_t>(tokens.size())});
}

void count_tokens(benchmark::State& state, std::int64_t num_tokens) {
  state.counters["tokens"] =
      benchmark::Counter(static_cast<double>(num_tokens) * static_cast<double>(state.iterations()),
                         benchmark::Counter::kIsRate);
}

// Spans of span_tokens, with `every` times as many tokens from the start of one to the next's.
void hash_layout(benchmark::State& state, std::int64_t block_size, std::int64_t num_tokens,
                 std::int64_t span_tokens, std::int64_t every, Sha256Isa isa = Sha256Isa::kAuto,
                 std::shared_ptr<TokenStore> store = nullptr) {
  auto tokens = random_tokens(num_tokens);
  std::vector<SpanRange> spans;
  for (std::int64_t i = 0; span_tokens > 0 && i + span_tokens <= num_tokens;
       i += every * span_tokens) {
    spans.emplace_back(i, i + span_tokens);
  }
  std::vector<std::uint8_t> keys(num_tokens / block_size * sizeof(Digest));
  for (auto _ : state) {
    BlockChain chain(block_size, Digest{1}, Digest{2}, true, isa, store);
    chain.extend(view_of(tokens), spans, {}, keys);
    benchmark::DoNotOptimize(keys.data());
  }
  count_tokens(state, num_tokens);
}

void hash_prompt(benchmark::State& state, std::int64_t block_size, std::int64_t num_tokens,
                 std::int64_t span_tokens, Sha256Isa isa, std::shared_ptr<TokenStore> store) {
  hash_layout(state, block_size, num_tokens, span_tokens, 1, isa, std::move(store));
}

void hash_batch(benchmark::State& state, std::int64_t block_size, std::int64_t num_prompts,
                int num_threads) {
  auto tokens = random_tokens(kNumTokens);
  std::vector<std::int64_t> cu_seqlens;
  for (std::int64_t p = 0; p <= num_prompts; ++p) {
    cu_seqlens.push_back(kNumTokens * p / num_prompts);
  }
  for (auto _ : state) {
    std::vector<std::unique_ptr<BlockChain>> owned;
    std::vector<BlockChain*> chains;
    for (std::int64_t p = 0; p < num_prompts; ++p) {
      owned.push_back(std::make_unique<BlockChain>(block_size, Digest{1}, Digest{2}, true));
      chains.push_back(owned.back().get());
    }
    const ExtendArgs args{.chains = chains,
                          .token_ids = view_of(tokens),
                          .cu_seqlens = cu_seqlens,
                          .num_threads = num_threads};
    std::vector<std::uint8_t> keys(key_offsets(args).back() * sizeof(Digest));
    extend_chains(args, keys);
    benchmark::DoNotOptimize(keys.data());
  }
  count_tokens(state, kNumTokens);
}

// One token for each of many prompts: what a decode step adds.
void hash_decode_step(benchmark::State& state, std::int64_t num_prompts) {
  auto tokens = random_tokens(num_prompts);
  std::vector<std::unique_ptr<BlockChain>> owned;
  std::vector<BlockChain*> chains;
  std::vector<std::int64_t> cu_seqlens{0};
  for (std::int64_t p = 0; p < num_prompts; ++p) {
    owned.push_back(std::make_unique<BlockChain>(16, Digest{1}, Digest{2}, true));
    chains.push_back(owned.back().get());
    cu_seqlens.push_back(p + 1);
  }
  const ExtendArgs args{
      .chains = chains, .token_ids = view_of(tokens), .cu_seqlens = cu_seqlens, .num_threads = 1};
  for (auto _ : state) {
    std::vector<std::uint8_t> keys(key_offsets(args).back() * sizeof(Digest));
    extend_chains(args, keys);
    benchmark::DoNotOptimize(keys.data());
  }
  count_tokens(state, num_prompts);
}

// The same images or none: what extra ranges cost where every block has one.
void hash_extra(benchmark::State& state, std::int64_t block_size) {
  auto tokens = random_tokens(kNumTokens);
  const std::vector<ExtraRange> extra{{0, kNumTokens, Digest{3}}};
  std::vector<std::uint8_t> keys(kNumTokens / block_size * sizeof(Digest));
  for (auto _ : state) {
    BlockChain chain(block_size, Digest{1}, Digest{2}, true);
    chain.extend(view_of(tokens), {}, extra, keys);
    benchmark::DoNotOptimize(keys.data());
  }
  count_tokens(state, kNumTokens);
}

std::string name(const std::string& kind, std::int64_t block_size, const std::string& what) {
  return kind + "/block_size:" + std::to_string(block_size) + "/" + what;
}

const bool kRegistered = [] {
  using benchmark::RegisterBenchmark;
  for (const std::int64_t size : {16, 64}) {
    for (const Sha256Isa isa : sha256_isas()) {
      RegisterBenchmark(name("Prompt", size, std::string(to_string(isa))).c_str(), hash_prompt,
                        size, kNumTokens, 0, isa, nullptr);
    }
    for (const std::int64_t span : {size, 4 * size, std::int64_t{512}}) {
      RegisterBenchmark(name("Spans", size, "span_tokens:" + std::to_string(span)).c_str(),
                        hash_prompt, size, kNumTokens, span, Sha256Isa::kAuto, nullptr);
    }
    // As much text between the spans as in them.
    RegisterBenchmark(name("Spans", size, "every_other_block").c_str(),
                      [size](auto& state) { hash_layout(state, size, kNumTokens, size, 2); });
    RegisterBenchmark(name("Extra", size, "every_block").c_str(), hash_extra, size);
    for (const int threads : {1, 2, 4}) {
      RegisterBenchmark(
          name("Batch", size, "prompts:64/threads:" + std::to_string(threads)).c_str(), hash_batch,
          size, 64, threads)
          ->UseRealTime();
    }
    if (built_with_xxhash()) {
      // One store for all iterations: after the first, every block is a hit that is compared.
      RegisterBenchmark(name("Store", size, "hits").c_str(), hash_prompt, size, kNumTokens, 0,
                        Sha256Isa::kAuto, std::make_shared<TokenStore>());
    }
  }
  for (const std::int64_t spans : {100, 1'000, 10'000}) {  // linear: the rate stays
    RegisterBenchmark(name("Growth", 16, "spans:" + std::to_string(spans)).c_str(), hash_prompt, 16,
                      64 * spans, 64, Sha256Isa::kAuto, nullptr);
  }
  RegisterBenchmark("DecodeStep/prompts:256", hash_decode_step, 256);
  return true;
}();

}  // namespace
}  // namespace kvspan
