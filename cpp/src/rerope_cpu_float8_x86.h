// 8-bit floats where bytes can be shuffled: AVX2 and wider. A step is a vector of bytes; each comes
// to a float by two look-ups, of the two bytes of its bfloat16, which holds every 8-bit float.
//
// Rounding: to a number v of exponent e, max(e, least normal exponent) deciding, 1.5 * 2^(e + s) is
// added, whose last place is the last place of the 8-bit float. The sum's mantissa then ends in the
// rounded significand r, its leading one included, subnormals without, and its exponent stands in
// the upper half: one multiply-add of the two 16-bit halves makes r + 2^mantissa_bits * e, the code
// but for a constant. The constant is taken off by an even number added to the mantissa before, so
// that even stays even.
#pragma once

#include "rerope_cpu_vector.h"

namespace kvspan::cpu {
namespace {

// Vectors of bytes.
#if defined(__AVX512F__)
using Bytes = __m512i;
#else
using Bytes = __m256i;
#endif

#if defined(__AVX512F__)
// The zero-masked forms where GCC 12 warns of an uninitialised variable inside the plain ones.
inline Bytes load_bytes(const void* p) { return _mm512_loadu_si512(p); }
inline Bytes all_bytes(int b) { return _mm512_set1_epi8(static_cast<char>(b)); }
inline Bytes both(Bytes a, Bytes b) { return _mm512_and_si512(a, b); }
inline Bytes either(Bytes a, Bytes b) { return _mm512_or_si512(a, b); }
inline Bytes differs(Bytes a, Bytes b) { return _mm512_xor_si512(a, b); }
inline Bytes add_bytes(Bytes a, Bytes b) { return _mm512_add_epi8(a, b); }
inline Bytes add_saturated(Bytes a, Bytes b) { return _mm512_adds_epu8(a, b); }
inline Bytes subtract_bytes(Bytes a, Bytes b) { return _mm512_sub_epi8(a, b); }
inline Bytes smaller_bytes(Bytes a, Bytes b) { return _mm512_min_epu8(a, b); }
inline Bytes look_up(Bytes table, Bytes at) { return _mm512_shuffle_epi8(table, at); }
template <int kBits>
inline Bytes shift_words_right(Bytes v) {
  return _mm512_srli_epi16(v, kBits);
}
inline Bytes zip_bytes_low(Bytes a, Bytes b) { return _mm512_unpacklo_epi8(a, b); }
inline Bytes zip_bytes_high(Bytes a, Bytes b) { return _mm512_unpackhi_epi8(a, b); }
inline Bytes zip_words_low(Bytes a, Bytes b) { return _mm512_unpacklo_epi16(a, b); }
inline Bytes zip_words_high(Bytes a, Bytes b) { return _mm512_unpackhi_epi16(a, b); }
inline Bytes pack_words(Bytes a, Bytes b) { return _mm512_packs_epi32(a, b); }
inline Bytes pack_unsigned(Bytes a, Bytes b) { return _mm512_packus_epi16(a, b); }
inline Bytes pack_signed(Bytes a, Bytes b) { return _mm512_packs_epi16(a, b); }
inline Bytes multiply_add(Bytes a, Bytes b) { return _mm512_madd_epi16(a, b); }
inline Bytes repeat_lane(const void* p) {
  return _mm512_maskz_broadcast_i32x4(0xffff, load_bits<__m128i>(p));
}
inline F32 fused(F32 a, F32 b, F32 c) {
  return (F32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
inline Bytes larger_lanes(Bytes a, Bytes b) { return _mm512_maskz_max_epi32(0xffff, a, b); }
// 0xff where a byte of a, signed, is larger than b's.
inline Bytes greater_bytes(Bytes a, Bytes b) {
  return _mm512_movm_epi8(_mm512_cmpgt_epi8_mask(a, b));
}
inline bool any_greater(Bytes a, Bytes b) { return _mm512_cmpgt_epi8_mask(a, b) != 0; }
#else
inline Bytes load_bytes(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
inline Bytes all_bytes(int b) { return _mm256_set1_epi8(static_cast<char>(b)); }
inline Bytes both(Bytes a, Bytes b) { return _mm256_and_si256(a, b); }
inline Bytes either(Bytes a, Bytes b) { return _mm256_or_si256(a, b); }
inline Bytes differs(Bytes a, Bytes b) { return _mm256_xor_si256(a, b); }
inline Bytes add_bytes(Bytes a, Bytes b) { return _mm256_add_epi8(a, b); }
inline Bytes add_saturated(Bytes a, Bytes b) { return _mm256_adds_epu8(a, b); }
inline Bytes subtract_bytes(Bytes a, Bytes b) { return _mm256_sub_epi8(a, b); }
inline Bytes smaller_bytes(Bytes a, Bytes b) { return _mm256_min_epu8(a, b); }
inline Bytes look_up(Bytes table, Bytes at) { return _mm256_shuffle_epi8(table, at); }
template <int kBits>
inline Bytes shift_words_right(Bytes v) {
  return _mm256_srli_epi16(v, kBits);
}
inline Bytes zip_bytes_low(Bytes a, Bytes b) { return _mm256_unpacklo_epi8(a, b); }
inline Bytes zip_bytes_high(Bytes a, Bytes b) { return _mm256_unpackhi_epi8(a, b); }
inline Bytes zip_words_low(Bytes a, Bytes b) { return _mm256_unpacklo_epi16(a, b); }
inline Bytes zip_words_high(Bytes a, Bytes b) { return _mm256_unpackhi_epi16(a, b); }
inline Bytes pack_words(Bytes a, Bytes b) { return _mm256_packs_epi32(a, b); }
inline Bytes pack_unsigned(Bytes a, Bytes b) { return _mm256_packus_epi16(a, b); }
inline Bytes pack_signed(Bytes a, Bytes b) { return _mm256_packs_epi16(a, b); }
inline Bytes multiply_add(Bytes a, Bytes b) { return _mm256_madd_epi16(a, b); }
inline Bytes repeat_lane(const void* p) {
  return _mm256_broadcastsi128_si256(load_bits<__m128i>(p));
}
inline F32 fused(F32 a, F32 b, F32 c) {
  return (F32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
inline Bytes larger_lanes(Bytes a, Bytes b) { return _mm256_max_epi32(a, b); }
inline Bytes greater_bytes(Bytes a, Bytes b) { return _mm256_cmpgt_epi8(a, b); }
inline bool any_greater(Bytes a, Bytes b) {
  return _mm256_movemask_epi8(_mm256_cmpgt_epi8(a, b)) != 0;
}
#endif

// What differs between the types.
template <int kMantissaBits, int kBias, int kLargestCode>
struct Float8Format {
  static constexpr int kMantissa = kMantissaBits;
  static constexpr int kLargest = kLargestCode;
  static constexpr int kPlace = 23 - kMantissaBits;        // of a float's mantissa that is cut off
  static constexpr int kFirstNormal = 1 << kMantissaBits;  // as a code
  static constexpr int kFloatBias = 127 - kBias;           // from a code's exponent to a float's
  static constexpr uint32_t kLeast = uint32_t{kFloatBias + 1} << 23;  // the least normal number

  static_assert(kFloatBias % 2 == 0, "its last bit is the upper one of the lower byte");

  // The upper half of the float of a code without its sign, finite.
  static constexpr int as_normal(int code) {
    return (code << (7 - kMantissaBits)) + (kFloatBias << 7);
  }
  static constexpr int bfloat16(int code) {
    if (code == 0) return 0;
    int shift = 0;
    while ((code << shift) < kFirstNormal) ++shift;
    return as_normal(code << shift) - (shift << 7);
  }
};

using FormatE4M3 = Float8Format<3, 7, 0x7e>;   // 448
using FormatE5M2 = Float8Format<2, 15, 0x7b>;  // 57344

// The two bytes of each byte's bfloat16.
template <typename Format>
inline void decode(Bytes code, Bytes* low, Bytes* high) {
#if defined(__AVX512VBMI__)
  alignas(64) static constexpr struct Tables {
    uint8_t low[128], high[128];
    constexpr Tables() : low{}, high{} {
      for (int i = 0; i < 128; ++i) {
        const bool finite = i <= Format::kLargest;
        // Infinity where the mantissa of its code is 0; what else is not finite is NaN.
        const int bits = finite ? Format::bfloat16(i) : Format::bfloat16(i) | 0x7f80;
        low[i] = static_cast<uint8_t>(bits);
        high[i] = static_cast<uint8_t>(bits >> 8);
      }
    }
  } kTables;
  *low = _mm512_permutex2var_epi8(load_bytes(kTables.low), code, load_bytes(kTables.low + 64));
  const Bytes magnitude =
      _mm512_permutex2var_epi8(load_bytes(kTables.high), code, load_bytes(kTables.high + 64));
  *high = _mm512_ternarylogic_epi32(magnitude, code, all_bytes(0x80), 0xf8);  // a | (b & c)
#else
  constexpr int kHighShift = Format::kMantissa + 1;
  const Bytes magnitude = both(code, all_bytes(0x7f));
  // As if normal, by the last four bits; then corrected by the others' where it is not: the sum
  // stays below 128 there alone, and a look-up at 128 or more gives 0.
  const Bytes subnormal = add_saturated(magnitude, all_bytes(0x80 - Format::kFirstNormal));
  alignas(16) static constexpr struct Tables {
    uint8_t low[16], low_fix[16], high_fix[16];
    constexpr Tables() : low{}, low_fix{}, high_fix{} {
      for (int i = 0; i < 16; ++i) {
        low[i] = static_cast<uint8_t>(Format::as_normal(i));
        const int code = i - (16 - Format::kFirstNormal);
        if (code < 0) continue;
        low_fix[i] = static_cast<uint8_t>(Format::as_normal(code) ^ Format::bfloat16(code));
        high_fix[i] = static_cast<uint8_t>((Format::as_normal(code) ^ Format::bfloat16(code)) >> 8);
      }
    }
  } kTables;
  const Bytes exponent =
      both(shift_words_right<kHighShift>(magnitude), all_bytes(0x7f >> kHighShift));
  *low = differs(look_up(repeat_lane(kTables.low), magnitude),
                 look_up(repeat_lane(kTables.low_fix), subnormal));
  *high = differs(add_bytes(exponent, all_bytes(Format::kFloatBias >> 1)),
                  look_up(repeat_lane(kTables.high_fix), subnormal));
  const Bytes largest = all_bytes(Format::kLargest);
  if (any_greater(magnitude, largest)) {  // never in a sound cache
    const Bytes is_special = greater_bytes(magnitude, largest);
    *low = either(*low, both(is_special, all_bytes(0x80)));
    *high = either(*high, both(is_special, all_bytes(0x7f)));
  }
  *high = either(*high, both(code, all_bytes(0x80)));
#endif
}

// The sum described above, its halves multiplied and added: kUnit times the code plus what the
// offset leaves. power: 2^exponent, of v's sign or none.
template <typename Format, int kUnit, int kOffset>
inline Bytes encode_lanes(F32 power, F32 v) {
  static_assert(kOffset % 2 == 0, "even stays even");
  constexpr int kExponentUnit = kUnit >> (7 - Format::kMantissa);  // of the sum's upper half
  constexpr float kFactor =
      1.5f * (1 << Format::kPlace) + 1.0f * kOffset / (1 << Format::kMantissa);
  const Bytes sum = (Bytes)fused(power, F32{} + kFactor, v);
  return multiply_add(sum, (Bytes)(U32{} + (uint32_t{kExponentUnit} << 16 | kUnit)));
}

// kSplits: the even elements to the first two vectors, the odd ones to the others.
template <typename Format, bool kSplits>
struct Float8Step {
  static constexpr bool kSplitsPairs = kSplits;
  static constexpr int kVectors = 4;
  static constexpr ElementOrder kOrder =
      kSplitsPairs ? ElementOrder::kPairLanes : ElementOrder::kLanes;

  // The first stage of loading: the two bytes of each number's bfloat16.
  struct Halves {
    Bytes low, high;
  };
  static Halves take_apart(Bytes code) {
    Halves halves;
    decode<Format>(code, &halves.low, &halves.high);
    return halves;
  }

  // The second stage: one of the four vectors.
  static F32 widen(const Halves& halves, int vector) {
    if constexpr (kSplitsPairs) {
      const Bytes words = vector % 2 == 0 ? zip_bytes_low(halves.low, halves.high)
                                          : zip_bytes_high(halves.low, halves.high);
      return (F32)(vector < 2 ? (U32)words << 16 : (U32)words & 0xffff0000);
    }
    const Bytes words = vector < 2 ? zip_bytes_low(halves.low, halves.high)
                                   : zip_bytes_high(halves.low, halves.high);
    return (F32)(vector % 2 == 0 ? zip_words_low(Bytes{}, words) : zip_words_high(Bytes{}, words));
  }

  static void load(const void* p, F32* x) {
    const Halves halves = take_apart(load_bytes(p));
    for (int v = 0; v < kVectors; ++v) x[v] = widen(halves, v);
  }

  static constexpr size_t kStoreBytes = sizeof(Bytes);
  template <bool kStream>
  static void store(void* p, const F32* x) {
    put<kStream>(p, encode(x));
  }

  // To nearest even; what lies beyond the largest number, infinity included, becomes that. NaN
  // becomes 0x7f, as CUDA's conversion has it.
#if defined(__AVX512VBMI__)
  static Bytes encode(const F32* x) {
    constexpr int kPartner = kSplitsPairs ? 2 : 1;
    return pick(
        {pair_up(round(x[0]), round(x[kPartner])), pair_up(round(x[3 - kPartner]), round(x[3]))});
  }

  // The first stage of storing: the code in a lane's byte 1, its sign in byte 3.
  static Bytes round(F32 v) {
    constexpr int kOffset = (kAdded + 255) / 256 * 256 - kAdded;
    constexpr int kLargerMagnitude = 3;  // with the sign of the first
    const auto at_least = (U32)_mm512_maskz_range_ps(
        0xffff, (__m512)v, (__m512)(U32{} + Format::kLeast), kLargerMagnitude);
    return encode_lanes<Format, kUnit, kOffset>((F32)(at_least & 0xff800000), v);
  }

  // The second one: these two bytes of each lane of two vectors.
  static Bytes pair_up(Bytes a, Bytes b) {
    return _mm512_permutex2var_epi8(a, load_bytes(kIndices.pair), b);
  }

  // The third one: of pairs of vectors 0 and 1, 2 and 3, or, if pairs are split, 0 and 2, 1 and 3.
  struct Rounded {
    Bytes first, second;
  };
  static Bytes pick(const Rounded& rounded) {
    const Bytes code =
        _mm512_permutex2var_epi8(rounded.first, load_bytes(kIndices.code), rounded.second);
    const Bytes sign =
        _mm512_permutex2var_epi8(rounded.first, load_bytes(kIndices.sign), rounded.second);
    const Bytes signed_code =
        _mm512_ternarylogic_epi32(smaller_bytes(code, all_bytes(Format::kLargest)), sign,
                                  all_bytes(0x80), 0xf8);  // a | (b & c)
    return _mm512_mask_mov_epi8(signed_code, _mm512_cmpge_epu8_mask(code, all_bytes(kLeastNan)),
                                all_bytes(0x7f));
  }

 private:
  static constexpr int kUnit = 256;
  // Of the quiet NaNs, whose lower half is 0: of those loaded, and of those that arithmetic makes.
  // Numbers of twice the largest and less have smaller ones, infinity too.
  static constexpr int kLeastNan = ((0x7fc0 * (kUnit >> (7 - Format::kMantissa))) >> 8) & 0xff;
  static_assert(kLeastNan > Format::kLargest + 2 * Format::kFirstNormal);

  struct Indices {
    uint8_t pair[64], code[64], sign[64];
    constexpr Indices() : pair{}, code{}, sign{} {
      for (int i = 0; i < 64; ++i) {
        pair[i] = static_cast<uint8_t>(4 * (i / 2) + 1 + i % 2 * 2);
        const int vector = kSplitsPairs ? i % 16 / 8 * 2 + i % 2 : i % 16 / 4;
        const int lane = i / 16 * 4 + (kSplitsPairs ? i % 8 / 2 : i % 4);
        code[i] = static_cast<uint8_t>(32 * vector + 2 * lane);
        sign[i] = static_cast<uint8_t>(code[i] + 1);
      }
    }
  };
  alignas(64) static constexpr Indices kIndices{};
#else
  static Bytes encode(const F32* x) {
    // The code plus one, times the least unit that leaves the sum's upper half whole.
    constexpr int kUnitBits = 7 - Format::kMantissa;
    constexpr int kOffset = 2 - kAdded;  // below 0: it borrows a unit of the exponent's
    Bytes lanes[4];
    for (int v = 0; v < 4; ++v) {
      const U32 u = (U32)x[v];
      const Bytes power = larger_lanes((Bytes)(u & 0x7f800000), (Bytes)(U32{} + Format::kLeast));
      lanes[v] = encode_lanes<Format, 1 << kUnitBits, kOffset>((F32)power, (F32)(u & 0x7fffffff));
    }
    const Bytes first = shift_words_right<kUnitBits>(pack_words(lanes[0], lanes[1]));
    const Bytes second = shift_words_right<kUnitBits>(pack_words(lanes[2], lanes[3]));
    const Bytes magnitude = subtract_bytes(
        smaller_bytes(pack_unsigned(first, second), all_bytes(Format::kLargest + 1)), all_bytes(1));
    const Bytes sign =
        pack_signed(pack_words((Bytes)x[0], (Bytes)x[1]), pack_words((Bytes)x[2], (Bytes)x[3]));
    const Bytes code = either(magnitude, both(sign, all_bytes(0x80)));
    // Never in a sound cache.
    return any_nan(x[0], x[1]) || any_nan(x[2], x[3]) ? mark_nan(code, x) : code;
  }

 private:
  static Bytes mark_nan(Bytes code, const F32* x) {
    Bytes words[2];
    for (int i = 0; i < 2; ++i) {
      const F32 a = x[2 * i], b = x[2 * i + 1];
      words[i] = pack_words((Bytes)(S32)(a != a), (Bytes)(S32)(b != b));
    }
    const Bytes is_nan = pack_signed(words[0], words[1]);
    const Bytes nan = all_bytes(0x7f);
    return differs(code, both(differs(code, nan), is_nan));
  }
#endif

  // What the exponents and the leading one of the sum of a number without any add to the code.
  static constexpr int kAdded =
      ((Format::kFloatBias + 1 + Format::kPlace) << Format::kMantissa) + Format::kFirstNormal / 2;
};

template <>
struct Step<Float8E4M3> : Float8Step<FormatE4M3, false> {};

template <>
struct Step<Float8E5M2> : Float8Step<FormatE5M2, false> {};

#if defined(__AVX512VBMI__)
template <>
struct PairStep<Float8E4M3> : Float8Step<FormatE4M3, true> {};

template <>
struct PairStep<Float8E5M2> : Float8Step<FormatE5M2, true> {};
#endif

}  // namespace
}  // namespace kvspan::cpu
