// Hashes the blocks of many prompts, two independent runs of blocks at a time.
//
// A prompt's outer chain is serial, but prompts do not depend on each other, and neither do a
// prompt's spans once its anchor is known. So one thread takes its prompts through three steps,
// each of which has runs of blocks that may be hashed in any order:
//   1. every prompt's text before its first span;
//   2. every span;
//   3. every prompt's text after its first span, gap by gap, absorbing the spans on the way.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "kvspan/block_hash.h"

namespace kvspan::block_hash {

static_assert(std::endian::native == std::endian::little, "preimages hold little-endian numbers");

inline constexpr std::size_t kTagBytes = 16;
inline constexpr std::size_t kParentOffset = kTagBytes;
inline constexpr std::size_t kTokensOffset = kTagBytes + sizeof(Digest);

// Each zero padded to 16 bytes by its type.
inline constexpr char kBlockTag[kTagBytes] = "kvspan/1 block";
inline constexpr char kExtraTag[kTagBytes] = "kvspan/1 extra";
inline constexpr char kSpanTag[kTagBytes] = "kvspan/1 span";
inline constexpr char kAbsorbTag[kTagBytes] = "kvspan/1 absorb";

// One prompt's share of a call. Positions count from the start of its chain.
struct Prompt {
  Digest span_root;
  bool anchored = true;
  std::span<const std::uint32_t> pending;  // of the unfinished block, before `start`
  std::int64_t start = 0;                  // [start, stop) are the tokens added
  std::int64_t stop = 0;
  std::int64_t first_token = 0;  // where `start` lies in token_ids
  std::span<const SpanRange> spans;
  std::span<const ExtraRange> extra;  // those that overlap the unfinished block included
  std::uint8_t* keys = nullptr;
  std::span<const Digest> waiting;  // last keys of the spans since the last outer block
  // Read, and updated.
  Digest outer;
  std::optional<Digest> span_parent;
  // Written: those of this call, and whether an outer block has absorbed `waiting`.
  std::vector<Digest> new_waiting;
  bool absorbed = false;
};

// How messages become digests: SHA-256, or a store.
struct Hasher {
  Sha256Code code;
  TokenStore* store = nullptr;

  // The digest of kSize bytes.
  template <std::size_t kSize>
  Digest hash(const std::uint8_t (&message)[kSize]) const {
    if (store) return store->intern({message, kSize});
    std::uint8_t padded[sha256_padded_size(kSize)];
    std::memcpy(padded, message, kSize);
    sha256_write_padding(padded, kSize);
    return sha256_padded(code, padded, sizeof(padded) / 64);
  }

  // The digest of an outer block that absorbs spans, by their last keys; no tokens: of a chain that
  // ends with them. padded: room for the message, kept from call to call.
  Digest hash_absorb(const Digest& parent, std::span<const Digest> old_keys,
                     std::span<const Digest> new_keys, std::span<const std::uint8_t> tokens,
                     std::vector<std::uint8_t>& padded) const {
    const std::uint64_t count = old_keys.size() + new_keys.size();
    const std::size_t size = kTokensOffset + sizeof(count) + count * sizeof(Digest) + tokens.size();
    padded.resize(sha256_padded_size(size));
    std::uint8_t* out = padded.data();
    const auto put = [&](const void* bytes, std::size_t n) {
      if (n > 0) std::memcpy(out, bytes, n);
      out += n;
    };
    put(kAbsorbTag, kTagBytes);
    put(parent.data(), sizeof(Digest));
    put(&count, sizeof(count));
    put(old_keys.data(), old_keys.size_bytes());
    put(new_keys.data(), new_keys.size_bytes());
    put(tokens.data(), tokens.size());
    if (store) return store->intern({padded.data(), size});
    sha256_write_padding(padded.data(), size);
    return sha256_padded(code, padded.data(), padded.size() / 64);
  }

  Digest hash_pair(const char* tag, const Digest& first, const Digest& second) const {
    std::uint8_t message[kTagBytes + 2 * sizeof(Digest)];
    std::memcpy(message, tag, kTagBytes);
    std::memcpy(message + kTagBytes, first.data(), sizeof(Digest));
    std::memcpy(message + kTagBytes + sizeof(Digest), second.data(), sizeof(Digest));
    return hash(message);
  }

  Digest hash_extra(const Digest& parent, const ExtraRange& range, std::int64_t block_start) const {
    std::uint8_t message[kTagBytes + 2 * sizeof(Digest) + 16];
    const std::int64_t offset = range.start - block_start;
    const std::int64_t length = range.end - range.start;
    std::memcpy(message, kExtraTag, kTagBytes);
    std::memcpy(message + kTagBytes, parent.data(), sizeof(Digest));
    std::memcpy(message + kTagBytes + sizeof(Digest), range.digest.data(), sizeof(Digest));
    std::memcpy(message + kTagBytes + 2 * sizeof(Digest), &offset, 8);
    std::memcpy(message + kTagBytes + 2 * sizeof(Digest) + 8, &length, 8);
    return hash(message);
  }
};

// Token: std::int32_t or std::int64_t, ids already checked.
template <typename Token>
class Runner {
 public:
  // token_ids and stride: of the whole call.
  Runner(const Token* token_ids, std::int64_t stride, std::int64_t block_size, const Hasher& hasher)
      : token_ids_(token_ids), stride_(stride), block_size_(block_size), hasher_(hasher) {
    const std::size_t size = kTokensOffset + static_cast<std::size_t>(block_size) * sizeof(Id);
    preimage_bytes_ = size;
    preimage_padded_bytes_ = sha256_padded_size(size);
    preimages_.resize(2 * preimage_padded_bytes_);
    for (std::size_t i = 0; i < lanes_.size(); ++i) {
      lanes_[i].preimage = preimages_.data() + i * preimage_padded_bytes_;
      std::memcpy(lanes_[i].preimage, kBlockTag, kTagBytes);
      sha256_write_padding(lanes_[i].preimage, size);
    }
  }

  void run(std::span<Prompt> prompts) {
    hash_texts(prompts, [](const Prompt& p) {
      const SpanRange* span = next_span(p, p.spans.data());
      return SpanRange{p.start, span ? span->first : p.stop};
    });
    hash_spans(prompts);
    hash_gaps(prompts);
  }

 private:
  using Id = std::uint32_t;

  // A run of blocks in hand.
  struct Lane {
    std::uint8_t* preimage = nullptr;  // tag and SHA-256 padding in place
    const Token* tokens = nullptr;
    std::int64_t position = 0;  // of the block's first token
    std::int64_t filled = 0;    // tokens of the block that are in the preimage already
    std::int64_t blocks_left = 0;
    std::span<const ExtraRange> extra;  // those that end behind `position`
    Digest parent;
    std::uint8_t* keys = nullptr;
    Digest* result = nullptr;  // where the last key also goes, or null
  };

  // The first span from `from` on that is not empty, or null.
  static const SpanRange* next_span(const Prompt& prompt, const SpanRange* from) {
    const SpanRange* end = prompt.spans.data() + prompt.spans.size();
    while (from != end && from->first == from->second) ++from;
    return from == end ? nullptr : from;
  }

  std::uint8_t* keys_at(const Prompt& prompt, std::int64_t position) const {
    const auto pending = static_cast<std::int64_t>(prompt.pending.size());
    return prompt.keys + (position - (prompt.start - pending)) / block_size_ * sizeof(Digest);
  }

  // Sets the lane to the full blocks of tokens [start, end); false if there are none.
  bool fill(Lane& lane, const Prompt& prompt, std::int64_t start, std::int64_t end,
            const Digest& parent, Digest* result) const {
    lane.filled = start == prompt.start ? static_cast<std::int64_t>(prompt.pending.size()) : 0;
    lane.position = start - lane.filled;
    lane.blocks_left = (end - lane.position) / block_size_;
    if (lane.blocks_left == 0) return false;
    if (lane.filled > 0) {
      std::memcpy(lane.preimage + kTokensOffset, prompt.pending.data(), lane.filled * sizeof(Id));
    }
    lane.tokens = token_ids_ + (prompt.first_token + start - prompt.start) * stride_;
    const auto first_extra =
        std::partition_point(prompt.extra.begin(), prompt.extra.end(),
                             [&](const ExtraRange& range) { return range.end <= lane.position; });
    lane.extra = {first_extra, prompt.extra.end()};
    lane.parent = parent;
    lane.keys = keys_at(prompt, lane.position);
    lane.result = result;
    return true;
  }

  void copy_tokens(Lane& lane) const {
    const std::int64_t count = block_size_ - lane.filled;
    std::uint8_t* out = lane.preimage + kTokensOffset + lane.filled * sizeof(Id);
    if (stride_ == 1) {
      if constexpr (sizeof(Token) == sizeof(Id)) {
        std::memcpy(out, lane.tokens, count * sizeof(Id));
      } else {
        copy_ids(lane.tokens, 1, count, out);
      }
    } else {
      copy_ids(lane.tokens, stride_, count, out);
    }
    lane.tokens += count * stride_;
    lane.filled = 0;
  }

  static void copy_ids(const Token* tokens, std::int64_t stride, std::int64_t count,
                       std::uint8_t* out) {
    for (std::int64_t i = 0; i < count; ++i) {
      const auto id = static_cast<Id>(tokens[i * stride]);
      std::memcpy(out + i * sizeof(Id), &id, sizeof(Id));
    }
  }

  // Makes the preimage of the block in hand.
  void prepare(Lane& lane) const {
    copy_tokens(lane);
    const std::int64_t end = lane.position + block_size_;
    while (!lane.extra.empty() && lane.extra.front().start < end) {
      const ExtraRange& range = lane.extra.front();
      if (range.start < range.end) {
        lane.parent = hasher_.hash_extra(lane.parent, range, lane.position);
      }
      if (range.end > end) break;  // the next block's too
      lane.extra = lane.extra.subspan(1);
    }
    lane.position = end;
    std::memcpy(lane.preimage + kParentOffset, lane.parent.data(), sizeof(Digest));
  }

  static void finish(Lane& lane, const Digest& key) {
    lane.parent = key;
    std::memcpy(lane.keys, key.data(), sizeof(Digest));
    lane.keys += sizeof(Digest);
    if (--lane.blocks_left == 0 && lane.result) *lane.result = key;
  }

  void hash_block(Lane& lane) const {
    prepare(lane);
    if (hasher_.store) {
      finish(lane, hasher_.store->intern({lane.preimage, preimage_bytes_}));
    } else {
      finish(lane, sha256_padded(hasher_.code, lane.preimage, preimage_padded_bytes_ / 64));
    }
  }

  void hash_block_pair(Lane& first, Lane& second) const {
    prepare(first);
    prepare(second);
    const auto [one, two] = sha256_padded_pair(hasher_.code, first.preimage, second.preimage,
                                               preimage_padded_bytes_ / 64);
    finish(first, one);
    finish(second, two);
  }

  // The first block of text behind spans.
  void hash_head(Lane& lane, Prompt& prompt) {
    prepare(lane);
    const std::span<const Digest> old_keys =
        prompt.absorbed ? std::span<const Digest>() : prompt.waiting;
    finish(lane, hasher_.hash_absorb(
                     lane.parent, old_keys, prompt.new_waiting,
                     {lane.preimage + kTokensOffset, preimage_bytes_ - kTokensOffset}, absorbing_));
    prompt.absorbed = true;
    prompt.new_waiting.clear();
  }

  // Like fill() for text of the outer chain; false if no block is left to hash.
  bool fill_text(Lane& lane, Prompt& prompt, std::int64_t start, std::int64_t end) {
    if (!fill(lane, prompt, start, end, prompt.outer, &prompt.outer)) return false;
    const bool waits = !prompt.new_waiting.empty() || (!prompt.absorbed && !prompt.waiting.empty());
    if (waits) hash_head(lane, prompt);
    return lane.blocks_left > 0;
  }

  // Hashes independent runs. next(lane) fills a lane with the next one, or returns false.
  template <typename Next>
  void run_lanes(const Next& next) {
    Lane* busy = &lanes_[0];
    Lane* idle = &lanes_[1];
    bool more = next(*busy);
    while (more && !hasher_.store) {
      more = next(*idle);
      if (!more) break;
      for (auto n = std::min(busy->blocks_left, idle->blocks_left); n > 0; --n) {
        hash_block_pair(*busy, *idle);
      }
      if (busy->blocks_left == 0) std::swap(busy, idle);
      if (busy->blocks_left == 0) more = next(*busy);
    }
    do {
      while (busy->blocks_left > 0) hash_block(*busy);
    } while (more && (more = next(*busy)));
  }

  // Hashes one piece of text of each prompt, and moves its outer chain on.
  // piece(prompt): its tokens [start, end).
  template <typename Piece>
  void hash_texts(std::span<Prompt> prompts, const Piece& piece) {
    auto prompt = prompts.begin();
    run_lanes([&](Lane& lane) {
      while (prompt != prompts.end()) {
        Prompt& p = *prompt++;
        const auto [start, end] = piece(p);
        if (fill_text(lane, p, start, end)) return true;
      }
      return false;
    });
  }

  void hash_spans(std::span<Prompt> prompts) {
    for (Prompt& p : prompts) {
      if (p.span_parent || !next_span(p, p.spans.data())) continue;
      p.span_parent = hasher_.hash_pair(kSpanTag, p.span_root, p.anchored ? p.outer : Digest{});
    }
    std::size_t prompt = 0, span = 0;
    run_lanes([&](Lane& lane) {
      for (; prompt < prompts.size(); ++prompt, span = 0) {
        const Prompt& p = prompts[prompt];
        while (span < p.spans.size()) {
          const auto [start, end] = p.spans[span++];
          if (start == end) continue;
          fill(lane, p, start, end, *p.span_parent, nullptr);
          return true;
        }
      }
      return false;
    });
  }

  void hash_gaps(std::span<Prompt> prompts) {
    struct Cursor {
      Prompt* prompt;
      const SpanRange* span;
    };
    std::vector<Cursor> cursors;
    for (Prompt& p : prompts) {
      if (const SpanRange* span = next_span(p, p.spans.data())) cursors.push_back({&p, span});
    }
    while (!cursors.empty()) {
      std::size_t cursor = 0;
      run_lanes([&](Lane& lane) {
        while (cursor < cursors.size()) {
          auto& [p, span] = cursors[cursor++];
          while (span) {  // several where spans touch
            const std::int64_t end = span->second;
            Digest last_key;
            std::memcpy(last_key.data(), keys_at(*p, end) - sizeof(Digest), sizeof(Digest));
            p->new_waiting.push_back(last_key);
            span = next_span(*p, span + 1);
            if (fill_text(lane, *p, end, span ? span->first : p->stop)) return true;
          }
        }
        return false;
      });
      std::erase_if(cursors, [](const Cursor& c) { return c.span == nullptr; });
    }
  }

  const Token* const token_ids_;
  const std::int64_t stride_;
  const std::int64_t block_size_;
  const Hasher hasher_;
  std::size_t preimage_bytes_ = 0;
  std::size_t preimage_padded_bytes_ = 0;
  std::vector<std::uint8_t> preimages_;
  std::vector<std::uint8_t> absorbing_;  // the message of a block that absorbs spans
  std::array<Lane, 2> lanes_;
};

}  // namespace kvspan::block_hash
