#include "kvspan/sha256.h"

#include <bit>
#include <cstring>

#include "kvspan/check.h"
#include "sha256_impl.h"

namespace kvspan {

namespace sha256_impl {
namespace {

constexpr std::uint32_t load_be32(const std::uint8_t* p) {
  return std::uint32_t{p[0]} << 24 | std::uint32_t{p[1]} << 16 | std::uint32_t{p[2]} << 8 | p[3];
}

}  // namespace

void compress_scalar(std::uint32_t state[8], const std::uint8_t* chunks, std::size_t num_chunks) {
  for (; num_chunks > 0; --num_chunks, chunks += 64) {
    std::uint32_t w[64];
    for (int t = 0; t < 16; ++t) w[t] = load_be32(chunks + 4 * t);
    for (int t = 16; t < 64; ++t) {
      const std::uint32_t s0 =
          std::rotr(w[t - 15], 7) ^ std::rotr(w[t - 15], 18) ^ (w[t - 15] >> 3);
      const std::uint32_t s1 = std::rotr(w[t - 2], 17) ^ std::rotr(w[t - 2], 19) ^ (w[t - 2] >> 10);
      w[t] = w[t - 16] + s0 + w[t - 7] + s1;
    }
    std::uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
    std::uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
    for (int t = 0; t < 64; ++t) {
      const std::uint32_t sum1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
      const std::uint32_t choose = (e & f) ^ (~e & g);
      const std::uint32_t t1 = h + sum1 + choose + kRoundConstants[t] + w[t];
      const std::uint32_t sum0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
      const std::uint32_t majority = (a & b) ^ (a & c) ^ (b & c);
      h = g;
      g = f;
      f = e;
      e = d + t1;
      d = c;
      c = b;
      b = a;
      a = t1 + sum0 + majority;
    }
    state[0] += a;
    state[1] += b;
    state[2] += c;
    state[3] += d;
    state[4] += e;
    state[5] += f;
    state[6] += g;
    state[7] += h;
  }
}

// Nothing to gain: the scalar rounds fill the processor already.
void compress_pair_scalar(std::uint32_t first_state[8], const std::uint8_t* first_chunks,
                          std::uint32_t second_state[8], const std::uint8_t* second_chunks,
                          std::size_t num_chunks) {
  compress_scalar(first_state, first_chunks, num_chunks);
  compress_scalar(second_state, second_chunks, num_chunks);
}

}  // namespace sha256_impl

std::vector<Sha256Isa> sha256_isas() {
  std::vector<Sha256Isa> isas;
#if defined(__x86_64__)
  if (sha256_impl::has_sha_ni()) isas.push_back(Sha256Isa::kShaNi);
#elif defined(__aarch64__)
  if (sha256_impl::has_armv8_sha2()) isas.push_back(Sha256Isa::kArmv8);
#endif
  isas.push_back(Sha256Isa::kScalar);
  return isas;
}

Sha256Code sha256_code(Sha256Isa isa) {
  static const Sha256Isa best = sha256_isas().front();
  if (isa == Sha256Isa::kAuto) isa = best;
#if defined(__x86_64__)
  if (isa == Sha256Isa::kShaNi && best == isa) {
    return {sha256_impl::compress_sha_ni, sha256_impl::compress_pair_sha_ni};
  }
#elif defined(__aarch64__)
  if (isa == Sha256Isa::kArmv8 && best == isa) {
    return {sha256_impl::compress_armv8, sha256_impl::compress_pair_armv8};
  }
#endif
  KVSPAN_CHECK_ARG(isa == Sha256Isa::kScalar, "isa: this machine has no '", to_string(isa),
                   "' SHA-256; its best is '", to_string(best), "'");
  return {sha256_impl::compress_scalar, sha256_impl::compress_pair_scalar};
}

std::string_view to_string(Sha256Isa isa) {
  switch (isa) {
    case Sha256Isa::kAuto:
      return "auto";
    case Sha256Isa::kScalar:
      return "scalar";
    case Sha256Isa::kShaNi:
      return "sha_ni";
    case Sha256Isa::kArmv8:
      return "armv8";
  }
  return "unknown";
}

Sha256Isa parse_sha256_isa(std::string_view name) {
  for (const Sha256Isa isa :
       {Sha256Isa::kAuto, Sha256Isa::kScalar, Sha256Isa::kShaNi, Sha256Isa::kArmv8}) {
    if (name == to_string(isa)) return isa;
  }
  throw ArgumentError(concat("isa: expected auto, scalar, sha_ni or armv8, got '", name, "'"));
}

void sha256_write_padding(std::uint8_t* buffer, std::size_t size) {
  const std::size_t padded = sha256_padded_size(size);
  std::memset(buffer + size, 0, padded - size);
  buffer[size] = 0x80;
  const std::uint64_t bits = std::uint64_t{size} * 8;
  for (int i = 0; i < 8; ++i) buffer[padded - 1 - i] = static_cast<std::uint8_t>(bits >> (8 * i));
}

static_assert(std::endian::native == std::endian::little, "digests are written in big endian");

// Whole words, because the next block of a chain loads the digest at once: the processor cannot
// forward single bytes to such a load.
Digest sha256_digest(const std::array<std::uint32_t, 8>& state) {
  Digest digest;
  for (int i = 0; i < 8; ++i) {
    const std::uint32_t word = __builtin_bswap32(state[i]);
    std::memcpy(digest.data() + 4 * i, &word, sizeof(word));
  }
  return digest;
}

Digest sha256_padded(const Sha256Code& code, const std::uint8_t* chunks, std::size_t num_chunks) {
  std::array<std::uint32_t, 8> state = kSha256InitialState;
  code.compress(state.data(), chunks, num_chunks);
  return sha256_digest(state);
}

Digest sha256(std::span<const std::uint8_t> message, Sha256Isa isa) {
  std::vector<std::uint8_t> padded(sha256_padded_size(message.size()));
  if (!message.empty()) std::memcpy(padded.data(), message.data(), message.size());
  sha256_write_padding(padded.data(), message.size());
  return sha256_padded(sha256_code(isa), padded.data(), padded.size() / 64);
}

}  // namespace kvspan
