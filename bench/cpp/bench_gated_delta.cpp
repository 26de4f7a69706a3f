// The gated delta rule at Qwen3.5-4B's layer sizes (16 key heads, 32 value heads, 128 x 128) and
// the convolution before it: tokens per second, state only and with outputs, by instruction set.
//
//   kvspan_bench_gated_delta --benchmark_filter=state/bfloat16 --benchmark_repetitions=9
//     --benchmark_enable_random_interleaving=true
//
// GFLOP/s counts the multiplications and additions of the chunked form on whole matrices.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kvspan/causal_conv1d.h"
#include "kvspan/gated_delta.h"
#include "parallel.h"

namespace kvspan {
namespace {

constexpr std::int64_t kNumKeyHeads = 16, kNumValueHeads = 32, kDim = 128;

// A contiguous tensor.
struct Tensor {
  Tensor(DType dtype, const std::vector<std::int64_t>& shape) {
    std::int64_t count = 1;
    for (const std::int64_t size : shape) count *= size;
    bytes.resize(static_cast<std::size_t>(count * dtype.size_bytes()));
    view = make_view(bytes.data(), dtype, shape);
  }

  // Random numbers; of the 16-bit types, the upper halves of floats, which are numbers of both.
  void fill(float low, float high) {
    std::mt19937 random(7);
    std::uniform_real_distribution<float> uniform(low, high);
    const auto size = static_cast<std::size_t>(view.dtype.size_bytes());
    for (std::size_t i = 0; i + size <= bytes.size(); i += size) {
      const float value = uniform(random);
      std::memcpy(&bytes[i], reinterpret_cast<const char*>(&value) + sizeof(float) - size, size);
    }
  }

  std::vector<std::uint8_t> bytes;
  TensorView view;
};

struct Case {
  DType dtype;
  bool has_outputs;
  std::int64_t num_tokens;
  VectorIsa isa;
  int num_threads;
};

void run_gated_delta(benchmark::State& state, Case c) {
  Tensor q(c.dtype, {c.num_tokens, kNumKeyHeads, kDim}),
      k(c.dtype, {c.num_tokens, kNumKeyHeads, kDim}),
      v(c.dtype, {c.num_tokens, kNumValueHeads, kDim}),
      out(c.dtype, {c.num_tokens, kNumValueHeads, kDim}),
      g(kFloat32, {c.num_tokens, kNumValueHeads}), beta(kFloat32, {c.num_tokens, kNumValueHeads}),
      final_state(kFloat32, {1, kNumValueHeads, kDim, kDim});
  for (Tensor* tensor : {&q, &k, &v}) tensor->fill(0.25f, 1.0f);
  g.fill(-0.1f, -0.001f);
  beta.fill(0.1f, 0.9f);
  const std::vector<std::int64_t> cu_seqlens{0, c.num_tokens};
  GatedDeltaArgs args;
  if (c.has_outputs) {
    args.q = q.view;
    args.out = out.view;
  }
  args.k = k.view;
  args.v = v.view;
  args.g = g.view;
  args.beta = beta.view;
  args.final_state = final_state.view;
  args.initial_state = final_state.view;
  args.cu_seqlens = cu_seqlens;
  args.scale = 0.088f;
  args.num_threads = c.num_threads;
  args.isa = c.isa;
  for (auto _ : state) gated_delta(args);
  const double chunk = 64.0, dim = kDim;
  const double per_head =
      (c.has_outputs ? 3.0 : 2.0) * dim * dim + (c.has_outputs ? 1.0 : 0.5) * chunk * dim;
  const double per_token =
      2.0 * kNumValueHeads * per_head + (c.has_outputs ? 2.0 : 1.0) * kNumKeyHeads * chunk * dim;
  state.SetItemsProcessed(state.iterations() * c.num_tokens);
  state.counters["GFLOP/s"] =
      benchmark::Counter(per_token * static_cast<double>(c.num_tokens) * 1e-9,
                         benchmark::Counter::kIsIterationInvariantRate);
}

void run_conv(benchmark::State& state, Case c) {
  constexpr std::int64_t kChannels = 2 * kNumKeyHeads * kDim + kNumValueHeads * kDim, kWidth = 4;
  Tensor x(c.dtype, {c.num_tokens, kChannels}), out(c.dtype, {c.num_tokens, kChannels}),
      weight(c.dtype, {kChannels, kWidth}), carried(c.dtype, {1, kChannels, kWidth - 1});
  for (Tensor* tensor : {&x, &weight, &carried}) tensor->fill(0.25f, 1.0f);
  const std::vector<std::int64_t> cu_seqlens{0, c.num_tokens};
  CausalConv1dArgs args;
  args.x = x.view;
  args.weight = weight.view;
  args.state = carried.view;
  args.out = out.view;
  args.cu_seqlens = cu_seqlens;
  args.num_threads = c.num_threads;
  args.isa = c.isa;
  for (auto _ : state) causal_conv1d(args);
  state.SetItemsProcessed(state.iterations() * c.num_tokens);
  state.SetBytesProcessed(state.iterations() * 2 * c.num_tokens * kChannels * c.dtype.size_bytes());
}

void add(const char* what, void (*run)(benchmark::State&, Case), const Case& c) {
  const std::string name =
      std::string(what) + "/" + to_string(c.dtype) + "/tokens:" + std::to_string(c.num_tokens) +
      "/" + std::string(to_string(c.isa)) + "/threads:" + std::to_string(c.num_threads);
  benchmark::RegisterBenchmark(name.c_str(), run, c)->UseRealTime();
}

const int kRegistered = [] {
  const int most = choose_num_threads(0, 1 << 20, std::int64_t{1} << 40);
  for (const int threads : most > 1 ? std::vector<int>{1, most} : std::vector<int>{1}) {
    for (const VectorIsa isa : vector_isas()) {
      for (const std::int64_t tokens : {1, 1600}) {
        add("state", run_gated_delta, {kBFloat16, false, tokens, isa, threads});
        add("output", run_gated_delta, {kBFloat16, true, tokens, isa, threads});
        add("conv", run_conv, {kBFloat16, false, tokens, isa, threads});
      }
    }
    for (const DType dtype : {kFloat32, kFloat16}) {
      add("state", run_gated_delta, {dtype, false, 1600, vector_isas().front(), threads});
      add("conv", run_conv, {dtype, false, 1600, vector_isas().front(), threads});
    }
  }
  return 0;
}();

}  // namespace
}  // namespace kvspan
