#include "kvspan/vector_isa.h"

#include "kvspan/check.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace kvspan {
namespace {

#if defined(__x86_64__)
// __builtin_cpu_supports also asks the operating system whether it saves the wide registers.
bool has_avx2() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & (1u << 29));
  return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool has_avx512_vbmi() { return has_avx512() && __builtin_cpu_supports("avx512vbmi"); }
#endif

}  // namespace

std::vector<VectorIsa> vector_isas() {
  std::vector<VectorIsa> isas;
#if defined(__x86_64__)
  if (has_avx512_vbmi()) isas.push_back(VectorIsa::kAvx512Vbmi);
  if (has_avx512()) isas.push_back(VectorIsa::kAvx512);
  if (has_avx2()) isas.push_back(VectorIsa::kAvx2);
#endif
  isas.push_back(VectorIsa::kBaseline);
  return isas;
}

VectorIsa resolve_vector_isa(VectorIsa isa) {
  static const std::vector<VectorIsa> available = vector_isas();
  if (isa == VectorIsa::kAuto) return available.front();
  for (const VectorIsa candidate : available) {
    if (candidate == isa) return isa;
  }
  throw ArgumentError(concat("isa: this machine has no '", to_string(isa), "'; its widest is '",
                             to_string(available.front()), "'"));
}

std::string_view to_string(VectorIsa isa) {
  switch (isa) {
    case VectorIsa::kAuto:
      return "auto";
    case VectorIsa::kBaseline:
      return "baseline";
    case VectorIsa::kAvx2:
      return "avx2";
    case VectorIsa::kAvx512:
      return "avx512";
    case VectorIsa::kAvx512Vbmi:
      return "avx512_vbmi";
  }
  return "unknown";
}

VectorIsa parse_vector_isa(std::string_view name) {
  for (const VectorIsa isa : {VectorIsa::kAuto, VectorIsa::kBaseline, VectorIsa::kAvx2,
                              VectorIsa::kAvx512, VectorIsa::kAvx512Vbmi}) {
    if (name == to_string(isa)) return isa;
  }
  throw ArgumentError(
      concat("isa: expected auto, baseline, avx2, avx512 or avx512_vbmi, got '", name, "'"));
}

}  // namespace kvspan
