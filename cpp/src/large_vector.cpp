#include "kvspan/large_vector.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <iterator>
#include <mutex>
#include <new>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace kvspan {
namespace {

constexpr std::size_t kHugePageBytes = std::size_t{1} << 21;
constexpr std::size_t kMaxKeptBytes = std::size_t{1} << 28;
constexpr std::size_t kMaxKept = 64;

struct Block {
  void* memory;
  std::size_t bytes;
};

class KeptBlocks {
 public:
  KeptBlocks() { blocks_.reserve(kMaxKept); }

  // Memory of that size, the one given last, or null.
  void* take(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    const auto same_size = [&](const Block& block) { return block.bytes == bytes; };
    const auto found = std::find_if(blocks_.rbegin(), blocks_.rend(), same_size);
    if (found == blocks_.rend()) return nullptr;
    void* const memory = found->memory;
    blocks_.erase(std::next(found).base());
    bytes_ -= bytes;
    return memory;
  }

  void give(Block block) noexcept {
    if (block.bytes > kMaxKeptBytes) return std::free(block.memory);
    const std::lock_guard lock(mutex_);
    while (!blocks_.empty() &&
           (blocks_.size() == kMaxKept || bytes_ + block.bytes > kMaxKeptBytes)) {
      std::free(blocks_.front().memory);
      bytes_ -= blocks_.front().bytes;
      blocks_.erase(blocks_.begin());
    }
    blocks_.push_back(block);
    bytes_ += block.bytes;
  }

 private:
  std::mutex mutex_;
  std::vector<Block> blocks_;  // the one given last comes last
  std::size_t bytes_ = 0;
};

KeptBlocks& kept_blocks() {
  static auto* const blocks = new KeptBlocks;  // never destroyed: static objects may outlive it
  return *blocks;
}

// Eight sizes to a power of two, so that arrays of about the same size follow each other.
std::size_t round_up(std::size_t bytes) {
  std::size_t unit = std::bit_floor(bytes) / 8;
  if (bytes >= kHugePageBytes) unit = std::max(unit, kHugePageBytes);
  return (bytes + unit - 1) / unit * unit;
}

}  // namespace

void* allocate_large(std::size_t bytes) {
  bytes = round_up(bytes);
  if (void* const memory = kept_blocks().take(bytes)) return memory;
  const std::size_t alignment = bytes >= kHugePageBytes ? kHugePageBytes : 64;
  void* const memory = std::aligned_alloc(alignment, bytes);
  if (!memory) throw std::bad_alloc();
#if defined(__linux__)
  // A hint: refused, it costs nothing.
  if (bytes >= kHugePageBytes) madvise(memory, bytes, MADV_HUGEPAGE);
#endif
  return memory;
}

void free_large(void* memory, std::size_t bytes) noexcept {
  kept_blocks().give({memory, round_up(bytes)});
}

}  // namespace kvspan
