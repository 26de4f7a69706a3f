// Keys from a fast hash that is not collision resistant, with the tokens compared.
//
// A BlockChain that is given a TokenStore hashes the preimages of block_hash.h with XXH3-128
// instead of SHA-256. Anyone who can choose tokens can make two blocks collide under XXH3, so every
// preimage (parent, tokens, extra range) is kept, and whenever a digest was seen before, the
// preimages are compared. If they differ, the newcomer is hashed again with the next seed. So,
// within one store, equal keys always mean equal content, by induction from the roots: a
// preimage holds its parents' digests, and each of them stands for one preimage only.
//
// What it is for: one tenant whose inputs are trusted, above all on a processor without SHA
// instructions, where it is several times as fast. With them SHA-256 keeps up on new content, and
// only known content is faster (kvspan_bench_hash measures both).
// What it costs and does not give:
//   - memory: a preimage and about 100 bytes for each distinct block, until clear();
//   - keys of another store, process or machine mean nothing here: after a collision they depend
//     on which content came first. Never share or persist them;
//   - how long hashing takes, and so whether somebody else's tokens are in the store, can be
//     measured from outside.
//
// A key is 16 bytes of hash (XXH3-128 in its canonical, big-endian form) and the 16 bytes
// "kvspan/1 xxh3", zero padded: never equal to a SHA-256 key but by an accident of 2^-128.
//
// Entries cannot be dropped one by one: later keys stand on earlier ones. clear() drops all, along
// with the cache that uses the keys; chains started before are then refused.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <span>
#include <string>
#include <unordered_map>

#include "kvspan/sha256.h"

namespace kvspan {

using Digest128 = std::array<std::uint8_t, 16>;

// A hash with a seed: different seeds give unrelated functions.
using SeededHash = Digest128 (*)(std::span<const std::uint8_t> message, std::uint64_t seed);

// XXH3-128 of xxHash, in canonical byte order. xxHash is a single header (Debian: libxxhash-dev)
// and optional, as this mode is: set-up must not need it. Without it these calls throw
// std::runtime_error.
bool built_with_xxhash();
Digest128 xxh3_128(std::span<const std::uint8_t> message, std::uint64_t seed);

class TokenStore {
 public:
  // XXH3-128. Throws std::runtime_error in a build without xxHash.
  TokenStore();
  // Another hash; tests force collisions with one.
  explicit TokenStore(SeededHash hash) : hash_(hash) {}

  // The digest that stands for this message, and for no other, until clear(). Thread safe.
  Digest intern(std::span<const std::uint8_t> message);

  // Drops all entries, once no chain is being extended.
  void clear();

  std::size_t num_entries() const;
  // Bytes of messages kept, the map's own memory not counted.
  std::size_t num_bytes() const;
  // Comparisons that found another message under the same digest.
  std::uint64_t num_collisions() const { return num_collisions_; }

  // How often the store was cleared.
  std::uint64_t generation() const { return generation_; }
  // Keeps clear() waiting while it is held.
  std::shared_lock<std::shared_mutex> hold() const { return std::shared_lock(lifetime_); }

 private:
  struct HashPrefix {
    std::size_t operator()(const Digest128& digest) const {
      std::size_t prefix;
      std::memcpy(&prefix, digest.data(), sizeof(prefix));
      return prefix;
    }
  };
  // Prompts are hashed by several threads: few of them meet in one shard.
  struct Shard {
    mutable std::mutex mutex;
    std::unordered_map<Digest128, std::string, HashPrefix> messages;
    std::size_t num_bytes = 0;
  };

  const SeededHash hash_;
  std::array<Shard, 16> shards_;
  std::atomic<std::uint64_t> num_collisions_ = 0;
  std::atomic<std::uint64_t> generation_ = 0;
  mutable std::shared_mutex lifetime_;
};

}  // namespace kvspan
