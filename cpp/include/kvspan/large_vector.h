// A std::vector for millions of elements: memory kept from one to the next, huge pages where the
// system has them, and no zeroing.
//
// Elements that resize() adds are not initialised if they are plain numbers, so that an array which
// is filled next is written once. Memory that is freed goes to the next array of about its size:
// a page that is new to the process is zeroed by the system first, which for a million moves took
// as long as a third of planning them. At most 256 MiB are kept, as much as a million moves take
// and far more than thousands do; telling the system that it may take them back (MADV_FREE) cost
// those a quarter of their time. Huge pages mean fewer page faults and address cache misses: a
// million moves in memory order are planned 1.6 to 2.8 times as fast with the hint as without it,
// in the same run, and moves in random order as fast.
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace kvspan {

// bytes >= kLargeBytes. Throws std::bad_alloc.
inline constexpr std::size_t kLargeBytes = std::size_t{1} << 16;
void* allocate_large(std::size_t bytes);
void free_large(void* memory, std::size_t bytes) noexcept;  // bytes as when it was allocated

template <typename T>
struct LargeAllocator {
  using value_type = T;

  LargeAllocator() = default;
  template <typename U>
  LargeAllocator(const LargeAllocator<U>&) {}  // NOLINT: allocators convert

  T* allocate(std::size_t n) {
    const std::size_t bytes = n * sizeof(T);
    if (bytes < kLargeBytes) return std::allocator<T>().allocate(n);
    return static_cast<T*>(allocate_large(bytes));
  }

  void deallocate(T* memory, std::size_t n) {
    if (n * sizeof(T) < kLargeBytes) {
      std::allocator<T>().deallocate(memory, n);
    } else {
      free_large(memory, n * sizeof(T));
    }
  }

  template <typename U>
  void construct(U* element) {
    ::new (static_cast<void*>(element)) U;
  }
  template <typename U, typename... Args>
  void construct(U* element, Args&&... args) {
    ::new (static_cast<void*>(element)) U(std::forward<Args>(args)...);
  }

  bool operator==(const LargeAllocator&) const { return true; }
};

template <typename T>
using LargeVector = std::vector<T, LargeAllocator<T>>;

}  // namespace kvspan
