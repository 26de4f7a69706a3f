// Instruction sets of the CPU kernels, chosen at run time.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace kvspan {

enum class VectorIsa : std::uint8_t {
  kAuto,        // the widest one of this machine
  kBaseline,    // SSE2 on x86-64, NEON on AArch64
  kAvx2,        // AVX2, F16C, FMA
  kAvx512,      // AVX-512 F, BW, DQ, VL
  kAvx512Vbmi,  // and VBMI: shuffles of all bytes of a vector
};

// The sets of this machine, widest first; always ends with kBaseline.
std::vector<VectorIsa> vector_isas();

// The set to run: the widest for kAuto. Throws ArgumentError if this machine lacks it.
VectorIsa resolve_vector_isa(VectorIsa isa);

// "auto", "baseline", "avx2", "avx512", "avx512_vbmi"; parsing throws ArgumentError on another
// name.
std::string_view to_string(VectorIsa isa);
VectorIsa parse_vector_isa(std::string_view name);

}  // namespace kvspan
