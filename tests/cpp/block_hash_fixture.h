// Chains, tokens and naive digests for the tests of block hashes.
#pragma once

#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kvspan/block_hash.h"
#include "test_tensor.h"

namespace kvspan::test {

using Keys = std::vector<Digest>;

inline Digest filled_digest(std::uint8_t byte) {
  Digest digest;
  digest.fill(byte);
  return digest;
}

inline const Digest kRoot = filled_digest(1);
inline const Digest kSpanRoot = filled_digest(2);

inline std::vector<std::int32_t> range_of_tokens(std::int32_t first, std::int32_t count) {
  std::vector<std::int32_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

inline Keys to_keys(const std::vector<std::uint8_t>& bytes) {
  Keys keys(bytes.size() / sizeof(Digest));
  if (!bytes.empty()) std::memcpy(keys.data(), bytes.data(), bytes.size());
  return keys;
}

template <typename Token>
TensorView token_view(std::vector<Token>& tokens) {
  return make_view(tokens.data(), DType{TypeCode::kInt, sizeof(Token) * 8},
                   {static_cast<std::int64_t>(tokens.size())});
}

template <typename Token>
Keys extend(BlockChain& chain, std::vector<Token> tokens, std::vector<SpanRange> spans = {},
            std::vector<ExtraRange> extra = {}) {
  const auto size = static_cast<std::int64_t>(tokens.size());
  std::vector<std::uint8_t> bytes(chain.num_new_blocks(size) * sizeof(Digest));
  chain.extend(token_view(tokens), spans, extra, bytes);
  return to_keys(bytes);
}

inline BlockChain make_chain(std::int64_t block_size = 4, bool anchored = true) {
  return BlockChain(block_size, kRoot, kSpanRoot, anchored);
}

// A prompt with spans and extra ranges here and there, some of them empty.
struct RandomPrompt {
  std::vector<std::int64_t> tokens;
  std::vector<SpanRange> spans;
  std::vector<ExtraRange> extra;

  // `start`: tokens that the chain has already.
  RandomPrompt(std::mt19937& random, std::int64_t block_size, std::int64_t start = 0) {
    const auto below = [&](std::int64_t n) { return static_cast<std::int64_t>(random() % n); };
    const std::int64_t stop = start + below(20 * block_size);
    for (std::int64_t i = start; i < stop; ++i) tokens.push_back(below(4));
    std::int64_t at = start + (block_size - start % block_size) % block_size;
    while ((at += below(4) * block_size) <= stop) {
      const std::int64_t end = at + below(4) * block_size;
      if (end > stop) break;
      spans.emplace_back(at, end);
      at = end;
    }
    for (at = start + below(20); at <= stop; at += below(3 * block_size)) {
      const std::int64_t end = at + below(3 * block_size);
      if (end > stop) break;
      extra.push_back({at, end, filled_digest(static_cast<std::uint8_t>(below(3)))});
      at = end;
    }
  }
};

}  // namespace kvspan::test
