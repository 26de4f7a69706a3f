#include "kvspan/token_store.h"

#include <string_view>

namespace kvspan {
namespace {

constexpr char kMarker[16] = "kvspan/1 xxh3";

Digest to_key(const Digest128& digest) {
  Digest key;
  std::memcpy(key.data(), digest.data(), digest.size());
  std::memcpy(key.data() + digest.size(), kMarker, sizeof(kMarker));
  return key;
}

}  // namespace

TokenStore::TokenStore() : hash_(xxh3_128) {
  xxh3_128({}, 0);  // throws in a build without xxHash: now, and not at the first block
}

Digest TokenStore::intern(std::span<const std::uint8_t> message) {
  const std::string_view bytes(reinterpret_cast<const char*>(message.data()), message.size());
  for (std::uint64_t seed = 0;; ++seed) {
    const Digest128 digest = hash_(message, seed);
    // The map uses the first bytes; the last one is as good for the shards.
    Shard& shard = shards_[digest.back() % shards_.size()];
    const std::lock_guard lock(shard.mutex);
    const auto [entry, is_new] = shard.messages.try_emplace(digest, bytes);
    if (is_new) shard.num_bytes += bytes.size();
    if (is_new || entry->second == bytes) return to_key(digest);
    ++num_collisions_;
  }
}

void TokenStore::clear() {
  const std::unique_lock lock(lifetime_);
  ++generation_;
  for (Shard& shard : shards_) {
    const std::lock_guard shard_lock(shard.mutex);
    shard.messages.clear();
    shard.num_bytes = 0;
  }
}

std::size_t TokenStore::num_entries() const {
  std::size_t total = 0;
  for (const Shard& shard : shards_) {
    const std::lock_guard lock(shard.mutex);
    total += shard.messages.size();
  }
  return total;
}

std::size_t TokenStore::num_bytes() const {
  std::size_t total = 0;
  for (const Shard& shard : shards_) {
    const std::lock_guard lock(shard.mutex);
    total += shard.num_bytes;
  }
  return total;
}

}  // namespace kvspan
