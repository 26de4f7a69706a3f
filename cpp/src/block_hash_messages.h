// The messages that keys are digests of (block_hash.h gives their bytes), and how they are hashed.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
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

// The message of an outer block that absorbs spans, by their last keys; no tokens: of a chain that
// ends with them. padded: where it is written, with SHA-256's padding. Returns its size without.
inline std::size_t absorb_message(const Digest& parent, std::span<const Digest> old_keys,
                                  std::span<const Digest> new_keys,
                                  std::span<const std::uint8_t> tokens,
                                  std::vector<std::uint8_t>& padded) {
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
  sha256_write_padding(padded.data(), size);
  return size;
}

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

  // The digest of a message from absorb_message().
  Digest hash(std::span<const std::uint8_t> padded, std::size_t size) const {
    if (store) return store->intern(padded.first(size));
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

}  // namespace kvspan::block_hash
