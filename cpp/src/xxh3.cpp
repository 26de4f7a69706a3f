// The one file that includes xxHash, inlined so that nothing is linked.
#include <stdexcept>

#include "kvspan/token_store.h"

#if defined(KVSPAN_WITH_XXHASH)
#define XXH_INLINE_ALL
#include <xxhash.h>
#endif

namespace kvspan {

#if defined(KVSPAN_WITH_XXHASH)

bool built_with_xxhash() { return true; }

Digest128 xxh3_128(std::span<const std::uint8_t> message, std::uint64_t seed) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits_withSeed(message.data(), message.size(), seed));
  Digest128 digest;
  static_assert(sizeof(canonical.digest) == sizeof(digest));
  std::memcpy(digest.data(), canonical.digest, digest.size());
  return digest;
}

#else

bool built_with_xxhash() { return false; }

Digest128 xxh3_128(std::span<const std::uint8_t>, std::uint64_t) {
  throw std::runtime_error(
      "this kvspan was built without xxHash: install its header (Debian: libxxhash-dev) and build "
      "with KVSPAN_XXHASH=ON, or use SHA-256 keys (no TokenStore)");
}

#endif

}  // namespace kvspan
