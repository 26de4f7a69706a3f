#include "kvspan/block_hash.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "kvspan/check.h"

namespace kvspan {
namespace {

static_assert(std::endian::native == std::endian::little, "preimages hold little-endian tokens");

constexpr std::size_t kTagBytes = 16;
constexpr std::size_t kParentOffset = kTagBytes;
constexpr std::size_t kTokensOffset = kTagBytes + sizeof(Digest);
constexpr std::int64_t kMaxBlockSize = std::int64_t{1} << 20;

// Each zero padded to 16 bytes by its type.
constexpr char kBlockTag[kTagBytes] = "kvspan/1 block";
constexpr char kSpanTag[kTagBytes] = "kvspan/1 span";
constexpr char kAbsorbTag[kTagBytes] = "kvspan/1 absorb";

constexpr std::int64_t kMaxTokenId = std::numeric_limits<std::uint32_t>::max();

template <typename Token>
void check_token_ids(const Token* tokens, std::int64_t stride, std::int64_t num_tokens) {
  for (std::int64_t i = 0; i < num_tokens; ++i) {
    const std::int64_t id = tokens[i * stride];
    KVSPAN_CHECK_ARG(id >= 0 && id <= kMaxTokenId, "token_ids[", i, "]: expected an id in [0, ",
                     kMaxTokenId, "], got ", id);
  }
}

}  // namespace

BlockChain::BlockChain(std::int64_t block_size, const Digest& root, const Digest& span_root,
                       bool anchored, Sha256Isa isa)
    : block_size_(block_size),
      code_(sha256_code(isa)),
      span_root_(span_root),
      anchored_(anchored),
      outer_(root) {
  KVSPAN_CHECK_ARG(block_size >= 1 && block_size <= kMaxBlockSize, "block_size: expected 1 to ",
                   kMaxBlockSize, " tokens, got ", block_size);
  const std::size_t size = kTokensOffset + static_cast<std::size_t>(block_size) * 4;
  preimage_.resize(sha256_padded_size(size));
  std::memcpy(preimage_.data(), kBlockTag, kTagBytes);
  sha256_write_padding(preimage_.data(), size);
}

std::int64_t BlockChain::num_tokens() const {
  const std::lock_guard lock(mutex_);
  return num_tokens_;
}

Digest BlockChain::digest() const {
  const std::lock_guard lock(mutex_);
  return outer_;
}

std::int64_t BlockChain::num_new_blocks(std::int64_t num_tokens) const {
  const std::lock_guard lock(mutex_);
  return (num_tokens_ % block_size_ + num_tokens) / block_size_;
}

void BlockChain::validate(const TensorView& token_ids, std::span<const SpanRange> spans) const {
  KVSPAN_CHECK_ARG(token_ids.ndim == 1, "token_ids: expected shape [num_tokens], got ",
                   shape_to_string(token_ids));
  KVSPAN_CHECK_ARG(token_ids.device.type == DeviceType::kCpu,
                   "token_ids: expected a cpu tensor, got ", to_string(token_ids.device));
  KVSPAN_CHECK(token_ids.dtype == kInt32 || token_ids.dtype == kInt64, TypeError,
               "token_ids: expected int32 or int64, got ", to_string(token_ids.dtype));
  const std::int64_t added = token_ids.shape[0];
  if (token_ids.dtype == kInt32) {
    check_token_ids(token_ids.as<std::int32_t>(), token_ids.strides[0], added);
  } else {
    check_token_ids(token_ids.as<std::int64_t>(), token_ids.strides[0], added);
  }

  const std::int64_t stop = num_tokens_ + added;
  std::int64_t previous_end = num_tokens_;
  for (std::size_t i = 0; i < spans.size(); ++i) {
    const auto [start, end] = spans[i];
    KVSPAN_CHECK_ARG(start <= end, "spans[", i, "]: expected start <= end, got (", start, ", ", end,
                     ")");
    KVSPAN_CHECK_ARG(start >= num_tokens_ && end <= stop, "spans[", i,
                     "]: expected a range within the tokens added, [", num_tokens_, ", ", stop,
                     "), got (", start, ", ", end, ")");
    KVSPAN_CHECK_ARG(start >= previous_end, "spans[", i,
                     "]: expected sorted, disjoint spans: a start of at least ", previous_end,
                     ", got (", start, ", ", end, ")");
    KVSPAN_CHECK_ARG(start % block_size_ == 0 && end % block_size_ == 0, "spans[", i,
                     "]: expected multiples of block_size ", block_size_, ", got (", start, ", ",
                     end, ")");
    previous_end = end;
  }
}

void BlockChain::extend(const TensorView& token_ids, std::span<const SpanRange> spans,
                        std::span<std::uint8_t> keys) {
  const std::lock_guard lock(mutex_);
  validate(token_ids, spans);
  const std::int64_t added = token_ids.shape[0];
  const std::int64_t new_blocks = (num_tokens_ % block_size_ + added) / block_size_;
  KVSPAN_CHECK_ARG(static_cast<std::int64_t>(keys.size()) == new_blocks * 32, "keys: expected ",
                   new_blocks * 32, " bytes, got ", keys.size());
  if (token_ids.dtype == kInt32) {
    append<std::int32_t>(token_ids, spans, keys.data());
  } else {
    append<std::int64_t>(token_ids, spans, keys.data());
  }
}

template <typename Token>
void BlockChain::append(const TensorView& token_ids, std::span<const SpanRange> spans,
                        std::uint8_t* keys) {
  const std::int64_t stride = token_ids.strides[0];
  const std::int64_t stop = num_tokens_ + token_ids.shape[0];
  const Token* next = token_ids.as<Token>();
  const auto advance_to = [&](std::int64_t position, Digest& parent) {
    const std::int64_t count = position - num_tokens_;
    keys = hash_blocks(next, stride, count, parent, keys);
    next += count * stride;
  };
  for (const auto& [start, end] : spans) {
    if (start == end) continue;
    advance_to(start, outer_);
    if (anchored_ && !has_anchor_) {
      anchor_ = outer_;
      has_anchor_ = true;
    }
    Digest inner = hash_pair(kSpanTag, span_root_, anchor_);
    advance_to(end, inner);
    outer_ = hash_pair(kAbsorbTag, outer_, inner);
  }
  advance_to(stop, outer_);
}

template <typename Token>
std::uint8_t* BlockChain::hash_blocks(const Token* tokens, std::int64_t stride,
                                      std::int64_t num_tokens, Digest& parent, std::uint8_t* keys) {
  std::int64_t filled = num_tokens_ % block_size_;
  num_tokens_ += num_tokens;
  while (num_tokens > 0) {
    const std::int64_t count = std::min(num_tokens, block_size_ - filled);
    std::uint8_t* out = preimage_.data() + kTokensOffset + 4 * filled;
    for (std::int64_t i = 0; i < count; ++i) {
      const auto id = static_cast<std::uint32_t>(tokens[i * stride]);
      std::memcpy(out + 4 * i, &id, 4);
    }
    tokens += count * stride;
    num_tokens -= count;
    filled += count;
    if (filled == block_size_) {
      std::memcpy(preimage_.data() + kParentOffset, parent.data(), parent.size());
      parent = sha256_padded(code_, preimage_.data(), preimage_.size() / 64);
      std::memcpy(keys, parent.data(), parent.size());
      keys += parent.size();
      filled = 0;
    }
  }
  return keys;
}

Digest BlockChain::hash_pair(const char* tag, const Digest& first, const Digest& second) const {
  constexpr std::size_t kSize = kTagBytes + 2 * sizeof(Digest);
  std::uint8_t preimage[sha256_padded_size(kSize)];
  std::memcpy(preimage, tag, kTagBytes);
  std::memcpy(preimage + kTagBytes, first.data(), sizeof(Digest));
  std::memcpy(preimage + kTagBytes + sizeof(Digest), second.data(), sizeof(Digest));
  sha256_write_padding(preimage, kSize);
  return sha256_padded(code_, preimage, sizeof(preimage) / 64);
}

}  // namespace kvspan
