// Moving blocks: bytes per second of copy + rotate, of rotation in place and of the same bytes by
// memcpy with the same threads, all layers in one call.
//
//   kvspan_bench_rerope --benchmark_filter=bfloat16 --benchmark_repetitions=9
//     --benchmark_enable_random_interleaving=true
//
// Bytes are those read and written, as for memcpy. Blocks are scattered over pools larger than most
// caches; the moves of a plan share a delta, as the blocks of a span do.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kvspan/block_copy.h"
#include "kvspan/rerope.h"
#include "parallel.h"

namespace kvspan {
namespace {

constexpr int kNumLayers = 8;
constexpr std::int64_t kBlockSize = 16, kNumKvHeads = 8, kHeadDim = 128;
constexpr std::int64_t kPoolBytes = std::int64_t{1} << 23;  // of one layer

// Memory as allocators of tensors give it: on cache lines.
struct Aligned {
  explicit Aligned(std::size_t size)
      : bytes(static_cast<std::uint8_t*>(::operator new(size, std::align_val_t{64}))) {
    std::memset(bytes.get(), 0x24, size);
  }

  struct Delete {
    void operator()(std::uint8_t* p) const { ::operator delete(p, std::align_val_t{64}); }
  };
  std::unique_ptr<std::uint8_t, Delete> bytes;
};

// Pools of all layers. Bytes are small numbers of any type: 0x24 is neither large nor subnormal.
struct Pools {
  explicit Pools(DType dtype, std::int64_t head_dim = kHeadDim) {
    const std::int64_t block_bytes = kBlockSize * kNumKvHeads * head_dim * dtype.size_bytes();
    num_blocks = kPoolBytes / block_bytes;
    for (int layer = 0; layer < kNumLayers; ++layer) {
      memory.emplace_back(static_cast<std::size_t>(kPoolBytes));
      TensorView view;
      view.data = memory.back().bytes.get();
      view.dtype = dtype;
      view.ndim = 4;
      view.shape = {num_blocks, kBlockSize, kNumKvHeads, head_dim};
      view.strides = {kBlockSize * kNumKvHeads * head_dim, kNumKvHeads * head_dim, head_dim, 1};
      views.push_back(view);
    }
  }

  std::int64_t num_blocks;
  std::vector<Aligned> memory;
  std::vector<TensorView> views;
};

std::vector<std::int64_t> scattered(std::int64_t num_blocks, unsigned seed) {
  std::vector<std::int64_t> blocks(num_blocks);
  std::iota(blocks.begin(), blocks.end(), 0);
  std::shuffle(blocks.begin(), blocks.end(), std::mt19937(seed));
  return blocks;
}

void count_bytes(benchmark::State& state) {
  state.SetBytesProcessed(state.iterations() * 2 * kNumLayers * kPoolBytes);
}

// The yardstick: one memcpy per layer and thread.
void run_memcpy(benchmark::State& state, int num_threads) {
  Pools src(kFloat32), dst(kFloat32);
  for (auto _ : state) {
    for (int layer = 0; layer < kNumLayers; ++layer) {
      parallel_ranges(num_threads, kPoolBytes, [&](int, std::int64_t begin, std::int64_t end) {
        std::memcpy(dst.memory[layer].bytes.get() + begin, src.memory[layer].bytes.get() + begin,
                    static_cast<std::size_t>(end - begin));
      });
    }
    benchmark::ClobberMemory();
  }
  count_bytes(state);
}

void run_copy_blocks(benchmark::State& state, int num_threads) {
  Pools src(kBFloat16), dst(kBFloat16);
  const auto from = scattered(src.num_blocks, 1), to = scattered(src.num_blocks, 2);
  for (auto _ : state) {
    for (int layer = 0; layer < kNumLayers; ++layer) {
      BlockCopyArgs args;
      args.src = src.views[layer];
      args.dst = dst.views[layer];
      args.src_blocks = from;
      args.dst_blocks = to;
      args.num_threads = num_threads;
      copy_blocks(args);
    }
  }
  count_bytes(state);
}

struct Case {
  DType dtype;
  bool is_neox;
  bool in_place;
  VectorIsa isa;
  int num_threads;
  std::int64_t head_dim = kHeadDim;
};

void run_rerope(benchmark::State& state, Case c) {
  Pools src(c.dtype, c.head_dim), other(c.dtype, c.head_dim);
  Pools& dst = c.in_place ? src : other;
  const auto from = scattered(src.num_blocks, 1);
  const auto to = c.in_place ? from : scattered(src.num_blocks, 2);
  std::vector<std::int64_t> deltas(from.size(), 12345);
  std::vector<float> inv_freq(c.head_dim / 2);
  for (std::size_t i = 0; i < inv_freq.size(); ++i) {
    inv_freq[i] = std::pow(1e4f, -2.0f * static_cast<float>(i) / static_cast<float>(c.head_dim));
  }
  std::vector<ReropeLayer> layers(kNumLayers);
  for (int i = 0; i < kNumLayers; ++i) {
    layers[i].k_src = src.views[i];
    layers[i].k_dst = dst.views[i];
    layers[i].inv_freq = inv_freq;
    layers[i].is_neox = c.is_neox;
  }
  ReropeArgs args;
  args.layers = layers;
  args.src_blocks = from;
  args.dst_blocks = to;
  args.deltas = deltas;
  args.num_threads = c.num_threads;
  args.isa = c.isa;
  for (auto _ : state) rerope(args);
  count_bytes(state);
}

std::vector<int> thread_counts() {
  const int most = choose_num_threads(0, 1 << 20, std::int64_t{1} << 40);
  return most > 1 ? std::vector<int>{1, most} : std::vector<int>{1};
}

void register_rerope(const Case& c) {
  const std::string name =
      std::string(c.in_place ? "in_place/" : "copy_rotate/") + to_string(c.dtype) +
      (c.is_neox ? "/neox/" : "/interleaved/") + std::string(to_string(c.isa)) +
      (c.head_dim == kHeadDim ? "" : "/head_dim:" + std::to_string(c.head_dim)) +
      "/threads:" + std::to_string(c.num_threads);
  benchmark::RegisterBenchmark(name.c_str(), run_rerope, c)->UseRealTime();
}

const int kRegistered = [] {
  for (const int threads : thread_counts()) {
    const std::string suffix = "/threads:" + std::to_string(threads);
    benchmark::RegisterBenchmark(("memcpy" + suffix).c_str(), run_memcpy, threads)->UseRealTime();
    benchmark::RegisterBenchmark(("copy_blocks" + suffix).c_str(), run_copy_blocks, threads)
        ->UseRealTime();
    for (const DType dtype : {kBFloat16, kFloat16, kFloat32, kFloat8E4M3FN, kFloat8E5M2}) {
      for (const VectorIsa isa : vector_isas()) {
        register_rerope({dtype, true, false, isa, threads});
        register_rerope({dtype, true, true, isa, threads});
      }
      register_rerope({dtype, false, false, vector_isas().front(), threads});
      register_rerope({dtype, true, false, vector_isas().front(), threads, 64});
    }
  }
  return 0;
}();

}  // namespace
}  // namespace kvspan
