// Threads of the CPU kernels: OpenMP where the build has it, else one thread.
//
// Under ThreadSanitizer they are std::threads: it cannot see the barriers inside of libgomp, which
// is not instrumented, and would report every write before one as a race with every read after it.
// The bodies, and how they share the work out, are the same.
#pragma once

#include <algorithm>
#include <cstdint>

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define KVSPAN_THREAD_SANITIZER
#endif
#endif
#if defined(__SANITIZE_THREAD__)
#define KVSPAN_THREAD_SANITIZER
#endif

#if defined(KVSPAN_THREAD_SANITIZER)
#include <thread>
#include <vector>
#elif defined(_OPENMP)
#include <omp.h>
#endif

namespace kvspan {

// Below this a thread costs more to wake than it saves.
inline constexpr std::int64_t kMinBytesPerThread = std::int64_t{1} << 19;

// The number of threads for work on num_items items of total_bytes; requested 0 chooses.
inline int choose_num_threads(int requested, std::int64_t num_items, std::int64_t total_bytes) {
#if defined(_OPENMP) || defined(KVSPAN_THREAD_SANITIZER)
#if defined(KVSPAN_THREAD_SANITIZER)
  const std::int64_t most = std::thread::hardware_concurrency();
#else
  const std::int64_t most = omp_get_max_threads();
#endif
  const std::int64_t wanted =
      requested > 0 ? requested : std::min<std::int64_t>(most, total_bytes / kMinBytesPerThread);
  return static_cast<int>(
      std::clamp<std::int64_t>(wanted, 1, std::max<std::int64_t>(num_items, 1)));
#else
  static_cast<void>(requested);
  static_cast<void>(num_items);
  static_cast<void>(total_bytes);
  return 1;
#endif
}

// Calls body(thread, begin, end) with one contiguous part of [0, num_items) per thread. The body
// must not throw.
template <typename Body>
void parallel_ranges(int num_threads, std::int64_t num_items, const Body& body) {
#if defined(KVSPAN_THREAD_SANITIZER)
  if (num_threads > 1) {
    std::vector<std::thread> threads;
    for (int thread = 0; thread < num_threads; ++thread) {
      threads.emplace_back([&, thread] {
        body(thread, num_items * thread / num_threads, num_items * (thread + 1) / num_threads);
      });
    }
    for (std::thread& thread : threads) thread.join();
    return;
  }
#elif defined(_OPENMP)
  if (num_threads > 1) {
#pragma omp parallel num_threads(num_threads)
    {
      // The runtime may give fewer threads than asked for.
      const std::int64_t threads = omp_get_num_threads();
      const std::int64_t thread = omp_get_thread_num();
      body(static_cast<int>(thread), num_items * thread / threads,
           num_items * (thread + 1) / threads);
    }
    return;
  }
#else
  static_cast<void>(num_threads);
#endif
  body(0, 0, num_items);
}

}  // namespace kvspan
