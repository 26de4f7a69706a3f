// SHA-256 (FIPS 180-4) with the processor's own instructions where it has them.
//
// Why not OpenSSL: the core stays a static library without dependencies, so that set-up is two
// commands and the wheel carries no libcrypto; a block of 16 tokens is two compressions, about
// 0.1 us with SHA-NI, beside which EVP's work per message (context, init, final) would show; and
// hashing straight from one padded buffer needs no streaming interface at all. The price is this
// one well-specified function, checked against NIST's vectors on every path.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace kvspan {

using Digest = std::array<std::uint8_t, 32>;

enum class Sha256Isa : std::uint8_t {
  kAuto,    // the fastest one of this machine
  kScalar,  // portable C++
  kShaNi,   // x86-64 SHA extensions
  kArmv8,   // ARMv8 cryptography extensions
};

// The compression function of one path, over num_chunks chunks of 64 bytes; states are updated in
// place. compress_pair runs two independent messages of the same length side by side, which hides
// the latency of the SHA instructions: about 1.5 times the speed of one after the other.
struct Sha256Code {
  void (*compress)(std::uint32_t state[8], const std::uint8_t* chunks, std::size_t num_chunks);
  void (*compress_pair)(std::uint32_t first_state[8], const std::uint8_t* first_chunks,
                        std::uint32_t second_state[8], const std::uint8_t* second_chunks,
                        std::size_t num_chunks);
};

// Throws ArgumentError if this machine lacks the path.
Sha256Code sha256_code(Sha256Isa isa);

// The paths of this machine, fastest first; always ends with kScalar.
std::vector<Sha256Isa> sha256_isas();

// "auto", "scalar", "sha_ni", "armv8"; parsing throws ArgumentError on another name.
std::string_view to_string(Sha256Isa isa);
Sha256Isa parse_sha256_isa(std::string_view name);

inline constexpr std::array<std::uint32_t, 8> kSha256InitialState{
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

// The digest of a whole message.
Digest sha256(std::span<const std::uint8_t> message, Sha256Isa isa = Sha256Isa::kAuto);

// The digest of a message that already carries its padding.
Digest sha256_padded(const Sha256Code& code, const std::uint8_t* chunks, std::size_t num_chunks);

// The digest that a state stands for, once a message is compressed to its end.
Digest sha256_digest(const std::array<std::uint32_t, 8>& state);

// The length of a message of size bytes once padded: a multiple of 64.
constexpr std::size_t sha256_padded_size(std::size_t size) { return (size + 9 + 63) / 64 * 64; }

// Writes the padding behind a message of size bytes; buffer holds sha256_padded_size(size) bytes.
void sha256_write_padding(std::uint8_t* buffer, std::size_t size);

}  // namespace kvspan
