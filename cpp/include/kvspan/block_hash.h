// Chained SHA-256 block hashes with span pause/resume (DESIGN.md "Hash").
//
// A chain walks the tokens of one prompt and gives one 32-byte key per full block. Outside spans a
// key commits to everything before it. Inside a span it commits only to the span's own tokens, the
// span root and (anchored scope) the tokens before the first span, so a span has the same keys at
// every position. After a span the outer chain absorbs the span's last key: later keys depend on
// the content and the order of all spans before them.
//
// Every preimage starts with a 16-byte ASCII tag, zero padded; tags keep the uses apart. All
// preimages are hashed with plain SHA-256.
//
//   block  offset  0  16 bytes  "kvspan/1 block"
//                 16  32 bytes  parent: the key before it in its chain, or the chain's root
//                 48  4n bytes  the n = block_size token ids, each an unsigned 32-bit little endian
//
//   span start     0  16 bytes  "kvspan/1 span"
//                 16  32 bytes  span_root
//                 48  32 bytes  anchored: the outer chain's digest at the start of the first
//                               non-empty span; isolated: 32 zero bytes
//     gives the parent of the span's first block.
//
//   span end       0  16 bytes  "kvspan/1 absorb"
//                 16  32 bytes  the outer chain's digest at the span's start
//                 48  32 bytes  the key of the span's last block
//     gives the outer chain's new digest.
//
// root and span_root carry everything else that a key must depend on (model, LoRA, multimodal
// inputs, tenant salt, scope); kvspan.ops.digest_fields makes them. Blocks of both kinds share a
// tag; a span's never has an ordinary block's key, because its chain starts from a "span" digest.
//
// Token ids from int32 and int64 arrays give the same keys; ids outside [0, 2^32) are refused. An
// empty span (start == end) holds no KV and changes nothing. A partial last block has no key; its
// tokens are kept and continued by the next extend().
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "kvspan/sha256.h"
#include "kvspan/tensor_view.h"

namespace kvspan {

// [start, end) in tokens, counted from the start of the chain.
using SpanRange = std::pair<std::int64_t, std::int64_t>;

class BlockChain {
 public:
  // block_size: tokens per block, from 1 to 2^20. anchored: whether span keys depend on the tokens
  // before the first span.
  BlockChain(std::int64_t block_size, const Digest& root, const Digest& span_root, bool anchored,
             Sha256Isa isa = Sha256Isa::kAuto);

  // The number of keys that extend() would give for num_tokens more tokens.
  std::int64_t num_new_blocks(std::int64_t num_tokens) const;

  // Adds tokens and writes the keys of the blocks they fill.
  //   token_ids  [num_tokens] int32 or int64 on the CPU, any stride; not written
  //   spans      sorted, disjoint, aligned to blocks, within the tokens added by this call
  //   keys       [num_new_blocks(num_tokens) * 32] bytes; written
  // On an error nothing is changed. Calls on one chain from several threads are serialised.
  void extend(const TensorView& token_ids, std::span<const SpanRange> spans,
              std::span<std::uint8_t> keys);

  std::int64_t block_size() const { return block_size_; }
  std::int64_t num_tokens() const;
  // The outer chain's digest after the last full block or span.
  Digest digest() const;

 private:
  void validate(const TensorView& token_ids, std::span<const SpanRange> spans) const;
  template <typename Token>
  void append(const TensorView& token_ids, std::span<const SpanRange> spans, std::uint8_t* keys);
  template <typename Token>
  std::uint8_t* hash_blocks(const Token* tokens, std::int64_t stride, std::int64_t num_tokens,
                            Digest& parent, std::uint8_t* keys);
  Digest hash_pair(const char* tag, const Digest& first, const Digest& second) const;

  const std::int64_t block_size_;
  const Sha256Code code_;
  const Digest span_root_;
  const bool anchored_;

  mutable std::mutex mutex_;
  Digest outer_;
  Digest anchor_{};
  bool has_anchor_ = false;
  std::int64_t num_tokens_ = 0;
  // The preimage of the block in hand, tag and SHA-256 padding already in place.
  std::vector<std::uint8_t> preimage_;
};

}  // namespace kvspan
