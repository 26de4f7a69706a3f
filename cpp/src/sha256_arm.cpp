// SHA-256 with the ARMv8 cryptography extensions, compiled for them by function attribute so that
// the rest of the library keeps the baseline instruction set.
#include "sha256_impl.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#if defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace kvspan::sha256_impl {

bool has_armv8_sha2() {
#if defined(__APPLE__)
  return true;  // every 64-bit Apple processor has them
#elif defined(__linux__)
  return (getauxval(AT_HWCAP) & HWCAP_SHA2) != 0;
#else
  return false;
#endif
}

#if defined(__clang__)
#define KVSPAN_TARGET_SHA2 __attribute__((target("sha2")))
#else
#define KVSPAN_TARGET_SHA2 __attribute__((target("+crypto")))  // what arm_neon.h of GCC 12 asks for
#endif

namespace {

// The rounds of one message wait for each other; a second, independent one fills the gaps.
template <int kMessages>
KVSPAN_TARGET_SHA2 inline void compress(std::uint32_t* const (&states)[kMessages],
                                        const std::uint8_t* const (&messages)[kMessages],
                                        std::size_t num_chunks) {
  uint32x4_t abcd[kMessages], efgh[kMessages];
  for (int m = 0; m < kMessages; ++m) {
    abcd[m] = vld1q_u32(states[m]);
    efgh[m] = vld1q_u32(states[m] + 4);
  }
  for (std::size_t chunk = 0; chunk < num_chunks; ++chunk) {
    uint32x4_t abcd_before[kMessages], efgh_before[kMessages], w[kMessages][4];
    for (int m = 0; m < kMessages; ++m) {
      abcd_before[m] = abcd[m];
      efgh_before[m] = efgh[m];
      for (int i = 0; i < 4; ++i) {
        const std::uint8_t* words = messages[m] + 64 * chunk + 16 * i;
        w[m][i] = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(words)));
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
#pragma GCC unroll 2
      for (int m = 0; m < kMessages; ++m) {
        const uint32x4_t wk = vaddq_u32(w[m][i % 4], vld1q_u32(kRoundConstants + 4 * i));
        if (i < 12) {
          w[m][i % 4] = vsha256su1q_u32(vsha256su0q_u32(w[m][i % 4], w[m][(i + 1) % 4]),
                                        w[m][(i + 2) % 4], w[m][(i + 3) % 4]);
        }
        const uint32x4_t abcd_round = abcd[m];
        abcd[m] = vsha256hq_u32(abcd[m], efgh[m], wk);
        efgh[m] = vsha256h2q_u32(efgh[m], abcd_round, wk);
      }
    }
    for (int m = 0; m < kMessages; ++m) {
      abcd[m] = vaddq_u32(abcd[m], abcd_before[m]);
      efgh[m] = vaddq_u32(efgh[m], efgh_before[m]);
    }
  }
  for (int m = 0; m < kMessages; ++m) {
    vst1q_u32(states[m], abcd[m]);
    vst1q_u32(states[m] + 4, efgh[m]);
  }
}

}  // namespace

KVSPAN_TARGET_SHA2 void compress_armv8(std::uint32_t state[8], const std::uint8_t* chunks,
                                       std::size_t num_chunks) {
  compress<1>({state}, {chunks}, num_chunks);
}

KVSPAN_TARGET_SHA2 void compress_pair_armv8(std::uint32_t first_state[8],
                                            const std::uint8_t* first_chunks,
                                            std::uint32_t second_state[8],
                                            const std::uint8_t* second_chunks,
                                            std::size_t num_chunks) {
  compress<2>({first_state, second_state}, {first_chunks, second_chunks}, num_chunks);
}

}  // namespace kvspan::sha256_impl
#endif
