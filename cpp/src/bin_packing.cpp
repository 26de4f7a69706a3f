#include "kvspan/bin_packing.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <numeric>

#include "kvspan/check.h"

namespace kvspan {
namespace {

// Bins in the leaves, and in every inner node the most room that a bin below it has.
class RoomTree {
 public:
  RoomTree(std::size_t num_bins, std::int64_t capacity)
      : num_leaves_(std::bit_ceil(std::max<std::size_t>(num_bins, 1))),
        room_(2 * num_leaves_, capacity) {}

  std::int64_t room(std::size_t bin) const { return room_[num_leaves_ + bin]; }

  // The first bin with room for size; one has it.
  std::size_t first_fit(std::int64_t size) const {
    std::size_t node = 1;
    while (node < num_leaves_) {
      node *= 2;
      if (room_[node] < size) ++node;
    }
    return node - num_leaves_;
  }

  void take(std::size_t bin, std::int64_t size) {
    std::size_t node = num_leaves_ + bin;
    room_[node] -= size;
    while (node > 1) {
      node /= 2;
      const std::int64_t most = std::max(room_[2 * node], room_[2 * node + 1]);
      if (room_[node] == most) break;
      room_[node] = most;
    }
  }

 private:
  std::size_t num_leaves_;
  LargeVector<std::int64_t> room_;  // node i has the children 2i and 2i + 1
};

}  // namespace

BinPacking first_fit_decreasing(std::span<const std::int64_t> sizes, std::int64_t capacity) {
  const std::size_t n = sizes.size();
  for (std::size_t i = 0; i < n; ++i) {
    KVSPAN_CHECK_ARG(sizes[i] >= 1 && sizes[i] <= capacity, "sizes[", i,
                     "]: expected 1 to capacity = ", capacity, ", got ", sizes[i]);
  }
  LargeVector<std::size_t> order(n);
  std::iota(order.begin(), order.end(), std::size_t{0});
  if (!std::is_sorted(sizes.begin(), sizes.end(), std::greater<>())) {
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return sizes[a] > sizes[b]; });
  }

  BinPacking packing;
  packing.bin_of.resize(n);
  packing.offset_of.resize(n);
  RoomTree tree(n, capacity);
  for (const std::size_t item : order) {
    const std::size_t bin = tree.first_fit(sizes[item]);
    packing.bin_of[item] = static_cast<std::int64_t>(bin);
    packing.offset_of[item] = capacity - tree.room(bin);
    packing.num_bins = std::max(packing.num_bins, packing.bin_of[item] + 1);
    tree.take(bin, sizes[item]);
  }
  return packing;
}

}  // namespace kvspan
