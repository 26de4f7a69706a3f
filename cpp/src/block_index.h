// A map from block id to the moves that use the block: a plain table where ids are small compared
// with the number of moves, as they are in a busy pool, else open addressing; one flat allocation
// either way, because planning is linear and mostly lookups.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "kvspan/large_vector.h"

namespace kvspan {

class BlockIndex {
 public:
  // Positions in the list of moves, -1 for none.
  struct Entry {
    std::int32_t writer = -1;
    std::int32_t reader = -1;
  };

  // For up to num_entries different blocks, none above max_block.
  BlockIndex(std::size_t num_entries, std::int64_t max_block) {
    if (max_block < static_cast<std::int64_t>(8 * num_entries)) {
      table_.resize(max_block + 1);
    } else {
      slots_.resize(std::bit_ceil(2 * num_entries + 1));
    }
  }

  // The block's entry, added if it is not there.
  Entry& operator[](std::int64_t block) {
    if (!table_.empty()) return table_[block];
    Slot& slot = slots_[find_slot(block)];
    slot.block = block;
    return slot.entry;
  }

  // Fetches the block's entry, of a table at least. Any block id will do. To be called some
  // look-ups ahead: where what is read is then written, or decides a branch, blocks that come in no
  // order otherwise wait for memory one by one.
  void prefetch(std::int64_t block) const {
    if (static_cast<std::uint64_t>(block) < table_.size()) __builtin_prefetch(&table_[block], 1);
  }

  // The block's entry, or one that says none. Any block id will do.
  Entry find(std::int64_t block) const {
    if (!table_.empty()) {
      return static_cast<std::uint64_t>(block) < table_.size() ? table_[block] : Entry{};
    }
    if (slots_.empty()) return {};
    const Slot& slot = slots_[find_slot(block)];
    return slot.block == block ? slot.entry : Entry{};
  }

 private:
  struct Slot {
    std::int64_t block = -1;
    Entry entry;
  };

  std::size_t find_slot(std::int64_t block) const {
    // Fibonacci hashing: block ids come in runs, which the multiplication spreads.
    const std::size_t mask = slots_.size() - 1;
    std::size_t i = (static_cast<std::uint64_t>(block) * 0x9E3779B97F4A7C15u) >> 20 & mask;
    while (slots_[i].block >= 0 && slots_[i].block != block) i = (i + 1) & mask;
    return i;
  }

  LargeVector<Entry> table_;
  LargeVector<Slot> slots_;
};

// A set of block ids: a bit each where ids are small, else the keys of a BlockIndex.
class BlockSet {
 public:
  // For up to num_entries different blocks, none above max_block.
  BlockSet(std::size_t num_entries, std::int64_t max_block)
      : has_bits_(static_cast<std::uint64_t>(max_block) / 64 <= 4 * num_entries),
        sparse_(has_bits_ ? 0 : num_entries, max_block) {
    if (has_bits_) bits_.assign(max_block / 64 + 1, 0);
  }

  // Whether the block was not in it yet.
  bool insert(std::int64_t block) {
    if (!has_bits_) return std::exchange(sparse_[block].writer, 0) < 0;
    const std::uint64_t bit = std::uint64_t{1} << (block % 64);
    return (std::exchange(bits_[block / 64], bits_[block / 64] | bit) & bit) == 0;
  }

  // Any block id will do.
  bool contains(std::int64_t block) const {
    if (!has_bits_) return sparse_.find(block).writer >= 0;
    const std::uint64_t word = static_cast<std::uint64_t>(block) / 64;
    return word < bits_.size() && (bits_[word] >> (block % 64) & 1) != 0;
  }

 private:
  bool has_bits_;
  LargeVector<std::uint64_t> bits_;
  BlockIndex sparse_;
};

}  // namespace kvspan
