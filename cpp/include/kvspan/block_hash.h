// Chained SHA-256 block hashes with span pause/resume (DESIGN.md "Hash").
//
// A chain walks the tokens of one prompt and gives one 32-byte key per full block. Outside spans a
// key commits to everything before it. Inside a span it commits only to the span's own tokens, the
// span root and (anchored scope) the tokens before the first span, so a span has the same keys at
// every position. After a span the outer chain absorbs the span's last key: later keys depend on
// the content and the order of all spans before them. The last keys of spans that follow each other
// are absorbed together, by the next block of text, so that a span adds 32 bytes to hash and no
// message of its own.
//
// Every preimage starts with a 16-byte ASCII tag, zero padded; tags keep the uses apart. All
// preimages are hashed with plain SHA-256 (but see token_store.h).
//
//   block  offset  0  16 bytes  "kvspan/1 block"
//                 16  32 bytes  parent: the key before it in its chain, or the chain's root
//                 48  4n bytes  the n = block_size token ids, each an unsigned 32-bit little endian
//
//   extra          0  16 bytes  "kvspan/1 extra"
//                 16  32 bytes  parent
//                 48  32 bytes  the digest of an extra range
//                 80   8 bytes  the range's start minus the block's start, in tokens, negative if
//                               it began in an earlier block: signed 64-bit little endian
//                 88   8 bytes  the range's length in tokens: unsigned 64-bit little endian
//     takes the parent's place for a block that the range overlaps. Several ranges are folded in
//     one after the other, from left to right, and the last result is the block's parent.
//
//   span start     0  16 bytes  "kvspan/1 span"
//                 16  32 bytes  span_root
//                 48  32 bytes  anchored: the outer chain's digest at the start of the first
//                               non-empty span; isolated: 32 zero bytes
//     gives the parent of the span's first block.
//
//   block behind   0  16 bytes  "kvspan/1 absorb"
//   spans         16  32 bytes  parent, as for a block: the key before it in the outer chain
//                 48   8 bytes  how many spans, m: unsigned 64-bit little endian
//                 56  32m bytes the key of the last block of each span since then, in order
//            56+32m  4n bytes  the token ids
//     is the first block of the outer chain behind spans. Without token ids it is the digest of a
//     chain that ends with spans, or with spans and an unfinished block.
//
// Where the rest of what a key must depend on enters:
//   model, LoRA (name and id), tenant salt, scope: the whole prompt, so into root and span_root,
//     which kvspan.ops.digest_fields makes. Salt and LoRA thus enter every block's key, span or
//     not, through its chain's start.
//   multimodal inputs, prompt embeddings, an adapter that is active for some tokens only: extra
//     ranges. Their offset counts from the block, not from the prompt, so a span with an image
//     keeps its keys when it is moved.
//   anchor: the chain itself.
// Blocks of spans and of text share a tag; a span's never has an ordinary block's key, because its
// chain starts from a "span" digest.
//
// Token ids from int32 and int64 arrays give the same keys; ids outside [0, 2^32) are refused. An
// empty span or extra range (start == end) changes nothing. A partial last block has no key; its
// tokens are kept and continued by the next call.
//
// Cost, in runs of the SHA-256 compression function over 64 bytes: a block of n tokens
// (57 + 4n + 63) / 64, each extra range of a block 2, each span half of one, a run of spans between
// texts (its count) an eighth: 32 bytes a span have to enter the chain. Two messages at a time are
// hashed where they are independent: of different prompts, of spans of one prompt, of a span and
// the text before it. So one prompt with spans costs less than one without; the least is gained
// where one-block spans and one block of text take turns (blocks of 16: 3 runs where a block of
// text has 2). What a layout adds shows where pairs gain nothing, which is without SHA
// instructions, and in a batch of prompts, where those without spans are hashed in pairs too. It is
// the 32 bytes: 1 / 4b for spans of b blocks of 16, 1 / 10b for blocks of 64, so 0.8% and 1.3% for
// 512 tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "kvspan/large_vector.h"
#include "kvspan/sha256.h"
#include "kvspan/tensor_view.h"
#include "kvspan/token_store.h"

namespace kvspan {

// [start, end) in tokens, counted from the start of the chain.
using SpanRange = std::pair<std::int64_t, std::int64_t>;

// Something besides their ids that the tokens [start, end) stand for: the content of an image whose
// placeholders they are, embeddings given in their place, ... Several things about the same tokens
// are joined in one digest (kvspan.ops.digest_fields).
struct ExtraRange {
  std::int64_t start = 0;  // counted from the start of the chain
  std::int64_t end = 0;
  Digest digest{};
};

struct ExtendArgs;

class BlockChain {
 public:
  // block_size: tokens per block, from 1 to 2^20. anchored: whether span keys depend on the tokens
  // before the first span. store: null for SHA-256; else xxh3-128 with the tokens compared
  // (token_store.h), and isa has no use.
  BlockChain(std::int64_t block_size, const Digest& root, const Digest& span_root, bool anchored,
             Sha256Isa isa = Sha256Isa::kAuto, std::shared_ptr<TokenStore> store = nullptr);

  // The number of keys that extend() would give for num_tokens more tokens.
  std::int64_t num_new_blocks(std::int64_t num_tokens) const;

  // Adds tokens and writes the keys of the blocks they fill.
  //   token_ids  [num_tokens] int32 or int64 on the CPU, any stride; not written
  //   spans      sorted, disjoint, aligned to blocks, within the tokens added by this call
  //   extra      sorted, disjoint, within the tokens added by this call, aligned to nothing
  //   keys       [num_new_blocks(num_tokens) * 32] bytes; written
  // On an error nothing is changed. Calls on one chain from several threads are serialised.
  void extend(const TensorView& token_ids, std::span<const SpanRange> spans,
              std::span<const ExtraRange> extra, std::span<std::uint8_t> keys);

  std::int64_t block_size() const { return block_size_; }
  std::int64_t num_tokens() const;
  // The outer chain's digest after the last full block or span.
  Digest digest() const;

 private:
  friend void extend_chains(const ExtendArgs& args, std::span<std::uint8_t> keys);
  // What extending changes.
  struct State {
    Digest outer{};
    std::optional<Digest> span_parent;  // of every span's first block, known from the first span on
    std::int64_t num_tokens = 0;
    std::vector<std::uint32_t> pending;     // tokens of the unfinished last block
    std::vector<ExtraRange> pending_extra;  // those that overlap it
    LargeVector<Digest> waiting;            // last keys of the spans behind `outer`
  };

  static void extend_locked(const ExtendArgs& args, std::span<std::uint8_t> keys);
  void validate(const ExtendArgs& args, std::size_t prompt) const;

  const std::int64_t block_size_;
  const Sha256Code code_;
  const Digest span_root_;
  const bool anchored_;
  const std::shared_ptr<TokenStore> store_;
  const std::uint64_t store_generation_;

  mutable std::mutex mutex_;
  State state_;
};

// Tokens for many chains: prompt p adds token_ids[cu_seqlens[p] : cu_seqlens[p + 1]] to chains[p].
struct ExtendArgs {
  std::span<BlockChain* const> chains;       // [num_prompts], distinct; one block size, one store
  TensorView token_ids;                      // [num_tokens] int32 or int64 on the CPU, any stride
  std::span<const std::int64_t> cu_seqlens;  // [num_prompts + 1], from 0 to num_tokens

  // Prompt p has spans[cu_spans[p] : cu_spans[p + 1]] and likewise extra; rules as for extend().
  // Positions count from the start of each chain. Where there are none, both may be empty.
  std::span<const SpanRange> spans = {};        // [num_spans]
  std::span<const std::int64_t> cu_spans = {};  // [num_prompts + 1], from 0 to num_spans
  std::span<const ExtraRange> extra = {};       // [num_extra]
  std::span<const std::int64_t> cu_extra = {};  // [num_prompts + 1], from 0 to num_extra

  int num_threads = 0;  // over prompts; 0 chooses by the number of tokens
};

// Where the keys of each prompt start, in blocks: [num_prompts + 1], the last is the total.
std::vector<std::int64_t> key_offsets(const ExtendArgs& args);

// extend() for many chains at once, by several threads: the same keys, one prompt's after the
// other's. keys: [key_offsets(args).back() * 32] bytes; written. On an error nothing is changed.
void extend_chains(const ExtendArgs& args, std::span<std::uint8_t> keys);

}  // namespace kvspan
