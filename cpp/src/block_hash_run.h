// Hashes the blocks of many prompts, two independent messages at a time.
//
// A prompt's outer chain is serial, but prompts do not depend on each other, and neither do a
// prompt's spans once its anchor is known. So there are runs of blocks that may be hashed at once:
//   - the text of each prompt up to its first span;
//   - then each of its spans;
//   - and its text behind a span, as soon as that span and the text before it are hashed.
// Two lanes take runs of the last and first kind where there are some, since the end waits for
// those, and spans otherwise. Their messages need not be of one length: the lanes meet after every
// 64 bytes at which one of them is through.
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

#include "block_hash_messages.h"
#include "kvspan/block_hash.h"

namespace kvspan::block_hash {

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
  LargeVector<Digest> new_waiting;
  bool absorbed = false;
};

// Token: std::int32_t or std::int64_t, ids already checked.
template <typename Token>
class Runner {
 public:
  // token_ids and stride: of the whole call.
  Runner(const Token* token_ids, std::int64_t stride, std::int64_t block_size, const Hasher& hasher)
      : token_ids_(token_ids),
        stride_(stride),
        block_size_(block_size),
        log2_block_size_(std::has_single_bit(static_cast<std::uint64_t>(block_size))
                             ? std::countr_zero(static_cast<std::uint64_t>(block_size))
                             : -1),
        hasher_(hasher) {
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
    courses_.reserve(prompts.size());
    for (Prompt& p : prompts) {
      courses_.push_back({.prompt = &p, .at = p.start, .next = next_span(p, p.spans.data())});
    }
    for (std::size_t c = courses_.size(); c-- > 0;) ready_.push_back(&courses_[c]);
    if (hasher_.store) {
      Lane& lane = lanes_[0];
      while (start(lane)) {
        while (lane.blocks_left > 0) finish_block(lane, hasher_.store->intern(lane.message));
      }
    } else {
      run_lanes();
    }
  }

 private:
  using Id = std::uint32_t;

  // How far a prompt is.
  struct Course {
    Prompt* prompt;
    std::int64_t at;                     // where the text that is next in the outer chain begins
    const SpanRange* next;               // the span behind that text, or null
    const SpanRange* to_hash = nullptr;  // the next span for a lane; null: none is left
    bool has_opened = false;             // to_hash is valid
    bool waits = false;                  // for `next` to be hashed
  };

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
    Course* course = nullptr;
    const SpanRange* span = nullptr;  // what is hashed, or null: text of the outer chain

    // The block in hand: its message, and for SHA-256 what is left of that and the state so far.
    std::span<const std::uint8_t> message;
    std::vector<std::uint8_t> absorbing;  // the message of a block that absorbs spans
    const std::uint8_t* chunks = nullptr;
    std::size_t chunks_left = 0;
    std::array<std::uint32_t, 8> state;
  };

  // The first span from `from` on that is not empty, or null.
  static const SpanRange* next_span(const Prompt& prompt, const SpanRange* from) {
    const SpanRange* end = prompt.spans.data() + prompt.spans.size();
    while (from != end && from->first == from->second) ++from;
    return from == end ? nullptr : from;
  }

  // Whole blocks of so many tokens. A division would show where runs are of one block.
  std::int64_t num_blocks(std::int64_t num_tokens) const {
    return log2_block_size_ >= 0 ? num_tokens >> log2_block_size_ : num_tokens / block_size_;
  }

  std::uint8_t* keys_at(const Prompt& prompt, std::int64_t position) const {
    const auto pending = static_cast<std::int64_t>(prompt.pending.size());
    return prompt.keys + num_blocks(position - (prompt.start - pending)) * sizeof(Digest);
  }

  // Sets the lane to the full blocks of tokens [start, end); false if there are none.
  bool fill(Lane& lane, const Prompt& prompt, std::int64_t start, std::int64_t end,
            const Digest& parent) const {
    lane.filled = start == prompt.start ? static_cast<std::int64_t>(prompt.pending.size()) : 0;
    lane.position = start - lane.filled;
    lane.blocks_left = num_blocks(end - lane.position);
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

  void begin_block(Lane& lane) {
    prepare(lane);
    lane.message = {lane.preimage, preimage_bytes_};
    std::size_t padded_bytes = preimage_padded_bytes_;
    Prompt& prompt = *lane.course->prompt;
    const std::span<const Digest> old_keys =
        prompt.absorbed ? std::span<const Digest>() : prompt.waiting;
    if (!lane.span && !(old_keys.empty() && prompt.new_waiting.empty())) {
      const std::size_t size = absorb_message(lane.parent, old_keys, prompt.new_waiting,
                                              lane.message.subspan(kTokensOffset), lane.absorbing);
      lane.message = {lane.absorbing.data(), size};
      padded_bytes = lane.absorbing.size();
      prompt.absorbed = true;
      prompt.new_waiting.clear();
    }
    lane.chunks = lane.message.data();
    lane.chunks_left = padded_bytes / 64;
    lane.state = kSha256InitialState;
  }

  void finish_block(Lane& lane, const Digest& key) {
    lane.parent = key;
    std::memcpy(lane.keys, key.data(), sizeof(Digest));
    lane.keys += sizeof(Digest);
    if (--lane.blocks_left > 0) return begin_block(lane);
    Course& course = *lane.course;
    if (!lane.span) {
      course.prompt->outer = key;
      ready_.push_back(&course);
    } else if (course.waits && lane.span == course.next) {
      course.waits = false;
      ready_.push_back(&course);
    }
    lane.span = nullptr;
  }

  // Gives an idle lane the next run of blocks; false if there is none now.
  bool start(Lane& lane) {
    while (!ready_.empty()) {
      Course& course = *ready_.back();
      ready_.pop_back();
      if (start_text(lane, course)) return true;
    }
    if (next_opened_ == opened_.size()) return false;
    Course& course = *opened_[next_opened_];
    const Prompt& prompt = *course.prompt;
    lane.course = &course;
    lane.span = course.to_hash;
    fill(lane, prompt, lane.span->first, lane.span->second, *prompt.span_parent);
    course.to_hash = next_span(prompt, lane.span + 1);
    if (!course.to_hash) ++next_opened_;
    begin_block(lane);
    return true;
  }

  // Moves an outer chain on to its next block of text; false if it waits for a span, or ends.
  bool start_text(Lane& lane, Course& course) {
    do {
      const Prompt& prompt = *course.prompt;
      const std::int64_t start = course.at;
      course.at = course.next ? course.next->first : prompt.stop;
      if (start < course.at && fill(lane, prompt, start, course.at, prompt.outer)) {
        lane.course = &course;
        begin_block(lane);
        return true;
      }
    } while (pass_span(course));
    return false;
  }

  // Takes the last key of the span that an outer chain has come to; false if there is none yet.
  bool pass_span(Course& course) {
    if (!course.next) return false;
    Prompt& prompt = *course.prompt;
    if (!course.has_opened) {
      course.has_opened = true;
      course.to_hash = course.next;
      opened_.push_back(&course);
      if (!prompt.span_parent) {
        prompt.span_parent = hasher_.hash_pair(kSpanTag, prompt.span_root,
                                               prompt.anchored ? prompt.outer : Digest{});
      }
    }
    course.waits = course.next == course.to_hash || course.next == lanes_[0].span ||
                   course.next == lanes_[1].span;
    if (course.waits) return false;
    course.at = course.next->second;
    Digest last_key;
    std::memcpy(last_key.data(), keys_at(prompt, course.at) - sizeof(Digest), sizeof(Digest));
    prompt.new_waiting.push_back(last_key);
    course.next = next_span(prompt, course.next + 1);
    return true;
  }

  void run_lanes() {
    Lane& first = lanes_[0];
    Lane& second = lanes_[1];
    const auto finish = [&](Lane& lane, std::size_t num_chunks) {
      lane.chunks += 64 * num_chunks;
      lane.chunks_left -= num_chunks;
      if (lane.chunks_left == 0) finish_block(lane, sha256_digest(lane.state));
    };
    for (;;) {
      const bool has_first = first.blocks_left > 0 || start(first);
      const bool has_second = second.blocks_left > 0 || start(second);
      if (has_first && has_second) {
        const std::size_t num_chunks = std::min(first.chunks_left, second.chunks_left);
        hasher_.code.compress_pair(first.state.data(), first.chunks, second.state.data(),
                                   second.chunks, num_chunks);
        finish(first, num_chunks);
        finish(second, num_chunks);
      } else if (has_first || has_second) {
        Lane& lane = has_first ? first : second;
        hasher_.code.compress(lane.state.data(), lane.chunks, lane.chunks_left);
        finish(lane, lane.chunks_left);
      } else {
        return;
      }
    }
  }

  const Token* const token_ids_;
  const std::int64_t stride_;
  const std::int64_t block_size_;
  const int log2_block_size_;  // -1: it is no power of two
  const Hasher hasher_;
  std::size_t preimage_bytes_ = 0;
  std::size_t preimage_padded_bytes_ = 0;
  std::vector<std::uint8_t> preimages_;
  std::array<Lane, 2> lanes_;
  std::vector<Course> courses_;
  std::vector<Course*> ready_;   // whose outer chain can go on, the next one last
  std::vector<Course*> opened_;  // with spans that can be hashed, from next_opened_ on
  std::size_t next_opened_ = 0;
};

}  // namespace kvspan::block_hash
