// Bin packing by first-fit decreasing.
//
// Items go, the largest first, into the first bin that has room. At most 11/9 OPT + 6/9 bins are
// used, OPT being the fewest possible (Dosa, "The tight bound of first fit decreasing bin-packing
// algorithm and FFD(I) <= 11/9 OPT(I) + 6/9", 2007). The first bin with room is found in a
// tournament tree over the bins, so the time is O(n log n) for n items however many bins there are.
#pragma once

#include <cstdint>
#include <span>

#include "kvspan/large_vector.h"

namespace kvspan {

struct BinPacking {
  LargeVector<std::int64_t> bin_of;     // [num_items]
  LargeVector<std::int64_t> offset_of;  // [num_items], the room in its bin taken by items before it
  std::int64_t num_bins = 0;            // every bin holds an item
};

// sizes: [num_items], each in 1 to capacity. Items of one size are placed in the order given.
// Throws ArgumentError.
BinPacking first_fit_decreasing(std::span<const std::int64_t> sizes, std::int64_t capacity);

}  // namespace kvspan
