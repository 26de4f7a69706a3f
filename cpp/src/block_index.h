// A map from block id to the position of the move that writes it: open addressing in one flat
// allocation, because planning is linear and mostly lookups.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvspan {

class BlockIndex {
 public:
  explicit BlockIndex(std::size_t capacity)
      : slots_(std::bit_ceil(2 * capacity + 1)), mask_(slots_.size() - 1) {}

  // Returns -1 if the block was added, or the position it was added with before.
  std::int64_t insert(std::int64_t block, std::int64_t position) {
    Slot& slot = slots_[find_slot(block)];
    if (slot.position >= 0) return slot.position;
    slot = {block, position};
    return -1;
  }

  // The block's position, or -1.
  std::int64_t find(std::int64_t block) const { return slots_[find_slot(block)].position; }

 private:
  struct Slot {
    std::int64_t block = 0;
    std::int64_t position = -1;
  };

  std::size_t find_slot(std::int64_t block) const {
    // Fibonacci hashing: block ids come in runs, which the multiplication spreads.
    std::size_t i = (static_cast<std::uint64_t>(block) * 0x9E3779B97F4A7C15u) >> 20 & mask_;
    while (slots_[i].position >= 0 && slots_[i].block != block) i = (i + 1) & mask_;
    return i;
  }

  std::vector<Slot> slots_;
  std::size_t mask_;
};

}  // namespace kvspan
