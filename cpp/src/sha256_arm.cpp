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
__attribute__((target("sha2")))
#else
__attribute__((target("+crypto")))  // what arm_neon.h of GCC 12 asks for
#endif
void compress_armv8(std::uint32_t state[8], const std::uint8_t* chunks, std::size_t num_chunks) {
  uint32x4_t abcd = vld1q_u32(state);
  uint32x4_t efgh = vld1q_u32(state + 4);
  for (; num_chunks > 0; --num_chunks, chunks += 64) {
    const uint32x4_t abcd_before = abcd;
    const uint32x4_t efgh_before = efgh;
    uint32x4_t w[4];
    for (int i = 0; i < 4; ++i) {
      w[i] = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(chunks + 16 * i)));
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const uint32x4_t wk = vaddq_u32(w[i % 4], vld1q_u32(kRoundConstants + 4 * i));
      if (i < 12) {
        w[i % 4] = vsha256su1q_u32(vsha256su0q_u32(w[i % 4], w[(i + 1) % 4]), w[(i + 2) % 4],
                                   w[(i + 3) % 4]);
      }
      const uint32x4_t abcd_round = abcd;
      abcd = vsha256hq_u32(abcd, efgh, wk);
      efgh = vsha256h2q_u32(efgh, abcd_round, wk);
    }
    abcd = vaddq_u32(abcd, abcd_before);
    efgh = vaddq_u32(efgh, efgh_before);
  }
  vst1q_u32(state, abcd);
  vst1q_u32(state + 4, efgh);
}

}  // namespace kvspan::sha256_impl
#endif
