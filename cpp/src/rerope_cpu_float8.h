// 8-bit floats to and from vectors of floats, for the rerope kernels (see rerope_cpu_vector.h).
#pragma once

#include "rerope_cpu_vector.h"

#if defined(__AVX2__)
#include "rerope_cpu_float8_x86.h"
#else

namespace kvspan::cpu {
namespace {

// Of non-negative lanes.
inline U32 larger(U32 a, U32 b) { return (S32)a > (S32)b ? a : b; }

inline U32 smaller(U32 a, U32 b) { return (S32)a < (S32)b ? a : b; }

// Whether a byte, its upper bit aside, is kFirst or more.
template <int kFirst>
inline bool any_byte_from(U16 v) {
  static_assert(sizeof(v) == sizeof(uint64_t));
  constexpr uint64_t kBytes = 0x0101010101010101;
  uint64_t bytes;
  memcpy(&bytes, &v, sizeof(bytes));
  return (((bytes & (0x7f * kBytes)) + (0x80 - kFirst) * kBytes) & (0x80 * kBytes)) != 0;
}

// Without byte shuffles: by way of halves, of which they are the upper byte (e5m2), or nearly: the
// fields of e4m3, moved one bit down, make a half of 2^-8 the value (exponent bias 15 - 7),
// subnormals included. A power of two commutes with every rounding, so e4m3 is rotated at that
// scale. Infinity and NaN are never in a sound cache, and so cheaper as a branch.
template <typename T, int kMantissaBits, uint32_t kLargest>
struct Float8Step {
  static constexpr int kVectors = 2;
  static constexpr ElementOrder kOrder = ElementOrder::kEvenOdd;

  static void load(const T* p, F32* x) {
    const auto bits = load_bits<U16>(p);
    if (kChecksLoads && any_byte_from<kShift == 8 ? 0x7c : 0x7f>(bits)) {
      x[0] = any_to_floats(bits << 8);
      x[1] = any_to_floats(bits & 0xff00);
    } else {
      x[0] = finite_to_floats(bits << 8);
      x[1] = finite_to_floats(bits & 0xff00);
    }
  }

  static constexpr size_t kStoreBytes = sizeof(U16);
  template <bool kStream>
  static void store(T* p, const F32* x) {
    U32 even = from_floats(x[0]), odd = from_floats(x[1]);
    if (any_nan(x[0], x[1])) {  // becomes 0x7f, as CUDA's conversion has it
      even = x[0] != x[0] ? U32{} + 0x7f : even;
      odd = x[1] != x[1] ? U32{} + 0x7f : odd;
    }
    put<kStream>(p, narrow(even | (odd << 8)));
  }

 private:
  static constexpr int kShift = 10 - kMantissaBits;  // from a half's fields to the type's
  static constexpr bool kChecksLoads = kShift != 8 || !kConvertsHalves;

  // Of bytes in the upper half of each lane, the lower one 0.
  static F32 any_to_floats(U16 byte) {
    const U16 half = to_half_bits(byte);
    return from_half(kShift != 8 && (byte & 0x7f00) == 0x7f00 ? (U16{} + 0x7e00) : half);
  }

  static F32 finite_to_floats(U16 byte) {
    const U16 half = to_half_bits(byte);
    if constexpr (kConvertsHalves) return from_half(half);
    // With a half's fields in a float's place, y is its value if it is subnormal, and larger if
    // not.
    const U32 h = widen(half);
    const F32 x = (F32)(((h & 0x7fff) << 13) + (112u << 23));  // exponent bias 127 - 15
    const F32 y = x + x - 0x1p-14f;
    const F32 magnitude = x < y ? x : y;
    return (F32)((U32)magnitude | (h & 0x8000) << 16);
  }

  static U16 to_half_bits(U16 byte) { return kShift == 8 ? byte : (U16)((S16)byte >> 1) & 0xbfff; }

  // The byte in each lane, rounded to nearest even; not for NaN. What lies beyond the largest
  // number, infinity included, becomes that. Adding 1.5 times the power of two whose last place is
  // the wanted one leaves the rounded mantissa, its leading one included, in the last bits. Below
  // 2^-14, the smallest normal half, the last place stays the same. The exponent, less one, is
  // added in its place; kOffset cancels its bias.
  static U32 from_floats(F32 v) {
    constexpr uint32_t kSmallest = 113u << 23;
    constexpr int kPlace = 23 - kMantissaBits;
    constexpr uint32_t kOffset = (kSmallest >> kPlace) & 0xff;
    static_assert(kOffset % 2 == 0, "even stays even");
    const U32 u = (U32)v;
    const U32 magnitude = smaller(u & 0x7fffffff, U32{} + kLargest);
    const U32 exponent = larger(magnitude, U32{} + kSmallest) & 0x7f800000;
    const F32 magic = (F32)(exponent + ((uint32_t{kPlace} << 23) + 0x400000 - kOffset));
    const U32 sum = (U32)((F32)magnitude + magic);
    const U32 code = (sum - exponent) + (exponent >> kPlace);
    return (code & 0x7f) | ((u >> 24) & 0x80);
  }
};

template <>
struct Step<Float8E4M3> : Float8Step<Float8E4M3, 3, 0x3fe00000> {};  // 448 * 2^-8

template <>
struct Step<Float8E5M2> : Float8Step<Float8E5M2, 2, 0x47600000> {};  // 57344

}  // namespace
}  // namespace kvspan::cpu

#endif
