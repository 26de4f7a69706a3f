// SHA-256 with the x86 SHA extensions, compiled for them by function attribute so that the rest of
// the library keeps the baseline instruction set.
#include "sha256_impl.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#define KVSPAN_TARGET_SHA_NI __attribute__((target("sha,sse4.1,ssse3")))

namespace kvspan::sha256_impl {

bool has_sha_ni() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !(ebx & (1u << 29))) return false;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return false;
  return (ecx & (1u << 9)) && (ecx & (1u << 19));  // SSSE3 and SSE4.1, used beside SHA
}

namespace {

// The instructions keep the eight state words as (a b e f) and (c d g h), four rounds need two
// sha256rnds2, and the message schedule of the next rounds is computed in between.
//
// The rounds of one message wait for each other, so the processor idles for most of their latency;
// a second, independent message fills the gaps. Two messages fit the sixteen registers.
template <int kMessages>
KVSPAN_TARGET_SHA_NI inline void compress(std::uint32_t* const (&states)[kMessages],
                                          const std::uint8_t* const (&messages)[kMessages],
                                          std::size_t num_chunks) {
  const __m128i byte_swap = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
  const auto* k = reinterpret_cast<const __m128i*>(kRoundConstants);

  __m128i abef[kMessages], cdgh[kMessages];
  for (int m = 0; m < kMessages; ++m) {
    __m128i dcba = _mm_loadu_si128(reinterpret_cast<const __m128i*>(states[m]));
    __m128i hgfe = _mm_loadu_si128(reinterpret_cast<const __m128i*>(states[m] + 4));
    dcba = _mm_shuffle_epi32(dcba, 0xB1);
    hgfe = _mm_shuffle_epi32(hgfe, 0x1B);
    abef[m] = _mm_alignr_epi8(dcba, hgfe, 8);
    cdgh[m] = _mm_blend_epi16(hgfe, dcba, 0xF0);
  }

  for (std::size_t chunk = 0; chunk < num_chunks; ++chunk) {
    __m128i abef_before[kMessages], cdgh_before[kMessages], w[kMessages][4];
    for (int m = 0; m < kMessages; ++m) {
      abef_before[m] = abef[m];
      cdgh_before[m] = cdgh[m];
      const auto* words = reinterpret_cast<const __m128i*>(messages[m] + 64 * chunk);
      for (int i = 0; i < 4; ++i) w[m][i] = _mm_shuffle_epi8(_mm_loadu_si128(words + i), byte_swap);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
#pragma GCC unroll 2
      for (int m = 0; m < kMessages; ++m) {
        __m128i wk = _mm_add_epi32(w[m][i % 4], _mm_load_si128(k + i));
        cdgh[m] = _mm_sha256rnds2_epu32(cdgh[m], abef[m], wk);
        wk = _mm_shuffle_epi32(wk, 0x0E);
        abef[m] = _mm_sha256rnds2_epu32(abef[m], cdgh[m], wk);
        if (i < 12) {
          // w[t] = w[t-16] + s0(w[t-15]) + w[t-7] + s1(w[t-2]), four words at a time.
          const __m128i w7 = _mm_alignr_epi8(w[m][(i + 3) % 4], w[m][(i + 2) % 4], 4);
          const __m128i sum =
              _mm_add_epi32(_mm_sha256msg1_epu32(w[m][i % 4], w[m][(i + 1) % 4]), w7);
          w[m][i % 4] = _mm_sha256msg2_epu32(sum, w[m][(i + 3) % 4]);
        }
      }
    }
    for (int m = 0; m < kMessages; ++m) {
      abef[m] = _mm_add_epi32(abef[m], abef_before[m]);
      cdgh[m] = _mm_add_epi32(cdgh[m], cdgh_before[m]);
    }
  }

  for (int m = 0; m < kMessages; ++m) {
    const __m128i feba = _mm_shuffle_epi32(abef[m], 0x1B);
    const __m128i dchg = _mm_shuffle_epi32(cdgh[m], 0xB1);
    auto* state = reinterpret_cast<__m128i*>(states[m]);
    _mm_storeu_si128(state, _mm_blend_epi16(feba, dchg, 0xF0));
    _mm_storeu_si128(state + 1, _mm_alignr_epi8(dchg, feba, 8));
  }
}

}  // namespace

KVSPAN_TARGET_SHA_NI void compress_sha_ni(std::uint32_t state[8], const std::uint8_t* chunks,
                                          std::size_t num_chunks) {
  compress<1>({state}, {chunks}, num_chunks);
}

KVSPAN_TARGET_SHA_NI void compress_pair_sha_ni(std::uint32_t first_state[8],
                                               const std::uint8_t* first_chunks,
                                               std::uint32_t second_state[8],
                                               const std::uint8_t* second_chunks,
                                               std::size_t num_chunks) {
  compress<2>({first_state, second_state}, {first_chunks, second_chunks}, num_chunks);
}

}  // namespace kvspan::sha256_impl
#endif
