// Runs CUDA kernel bodies on the host: one std::thread per CUDA thread, thread blocks one after the
// other, __syncthreads() a real barrier. For tests; slow, but every access and every race is there
// for the sanitizers to see.
#pragma once

#include <barrier>
#include <cmath>
#include <cstdint>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __launch_bounds__(...)
// Thread blocks run one at a time, so one static copy is what a block shares.
#define __shared__ static

namespace kvspan::cuda::shim {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

inline thread_local Index this_thread, this_block;
inline Index block_size, grid_size;
inline std::barrier<>* block_barrier = nullptr;

}  // namespace kvspan::cuda::shim

#define threadIdx (::kvspan::cuda::shim::this_thread)
#define blockIdx (::kvspan::cuda::shim::this_block)
#define blockDim (::kvspan::cuda::shim::block_size)
#define gridDim (::kvspan::cuda::shim::grid_size)

inline void __syncthreads() { kvspan::cuda::shim::block_barrier->arrive_and_wait(); }

namespace kvspan::cuda {

// A launcher for the launch_* functions of the kernel headers.
struct HostLauncher {
  unsigned num_threads = 32;  // any number works; fewer are quicker here

  template <typename Args>
  void operator()(void (*kernel)(Args), unsigned grid_x, unsigned grid_y, const Args& args) const {
    std::barrier<> barrier(num_threads);
    shim::block_barrier = &barrier;
    shim::block_size = {num_threads, 1, 1};
    shim::grid_size = {grid_x, grid_y, 1};
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < num_threads; ++t) {
      threads.emplace_back([&, t] {
        shim::this_thread = {t, 0, 0};
        for (unsigned y = 0; y < grid_y; ++y) {
          for (unsigned x = 0; x < grid_x; ++x) {
            shim::this_block = {x, y, 0};
            kernel(args);
            barrier.arrive_and_wait();
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
};

}  // namespace kvspan::cuda
