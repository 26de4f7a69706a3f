// Many layers in one call, position axes and packed layouts: the CPU kernels of every instruction
// set and the CUDA kernel bodies (on the host) against one plain call per layer.
#include "host_shim.h"
// The shim comes first: it stands in for <cuda_runtime.h>.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "kvspan/rerope.h"
#include "rerope_launch.cuh"
#include "test_tensor.h"

namespace kvspan {
namespace {

using Bytes = std::vector<std::uint8_t>;

constexpr std::int64_t kNumBlocks = 7;
constexpr std::int64_t kBlockSize = 3;

struct LayerShape {
  DType dtype;
  std::int64_t num_kv_heads, head_dim, value_dim;
  int num_frequencies;
  float theta;
  bool is_neox;
};

// Two groups of equal frequencies, a layer without any, an interleaved one, other shapes and types,
// rows that no access of 16 bytes divides.
const std::vector<LayerShape>& shapes() {
  static const std::vector<LayerShape> all{
      {kBFloat16, 2, 64, 64, 32, 1e4f, true},     {kBFloat16, 2, 64, 64, 32, 1e6f, true},
      {kBFloat16, 2, 64, 24, 0, 0.0f, true},      {kBFloat16, 2, 64, 64, 32, 1e4f, true},
      {kFloat32, 1, 10, 6, 3, 1e4f, true},        {kFloat16, 3, 32, 16, 8, 1e4f, false},
      {kFloat8E4M3FN, 2, 64, 64, 32, 1e4f, true}, {kFloat8E5M2, 2, 48, 48, 16, 1e4f, false},
  };
  return all;
}

std::vector<float> frequencies(const LayerShape& shape) {
  std::vector<float> inv_freq;
  for (int i = 0; i < shape.num_frequencies; ++i) {
    inv_freq.push_back(std::pow(shape.theta, -static_cast<float>(i) / shape.num_frequencies));
  }
  return inv_freq;
}

// Pools of all layers; small finite numbers of every type.
class Pools {
 public:
  Pools() {
    for (const LayerShape& shape : shapes()) {
      keys_.push_back(bytes(shape, shape.head_dim));
      values_.push_back(bytes(shape, shape.value_dim));
    }
  }

  void poison() {
    for (auto* pools : {&keys_, &values_}) {
      for (Bytes& pool : *pools) std::fill(pool.begin(), pool.end(), 0xff);
    }
  }

  TensorView keys(std::size_t layer) { return view(keys_[layer], layer, shapes()[layer].head_dim); }
  TensorView values(std::size_t layer) {
    return view(values_[layer], layer, shapes()[layer].value_dim);
  }

  bool operator==(const Pools&) const = default;

 private:
  static Bytes bytes(const LayerShape& shape, std::int64_t dim) {
    const std::int64_t count = kNumBlocks * kBlockSize * shape.num_kv_heads * dim;
    Bytes result = test::make_bytes(count * shape.dtype.size_bytes(), static_cast<unsigned>(count));
    const std::int64_t size = shape.dtype.size_bytes();
    // Clear the exponent's highest bit: neither infinity nor NaN.
    for (std::int64_t i = size - 1; i < count * size; i += size) result[i] &= 0xbf;
    return result;
  }

  static TensorView view(Bytes& pool, std::size_t layer, std::int64_t dim) {
    const LayerShape& shape = shapes()[layer];
    return make_view(pool.data(), shape.dtype, {kNumBlocks, kBlockSize, shape.num_kv_heads, dim});
  }

  std::vector<Bytes> keys_, values_;
};

struct Moves {
  std::vector<std::int64_t> src, dst, deltas;
  int num_axes = 1;
};

const Moves kBetweenBlocks{{0, 3, 1, 3}, {5, 2, 4, 6}, {17, -1000, 0, 17}};
const Moves kInPlace{{0, 3, 1}, {0, 3, 1}, {17, -1000, 0}};
const Moves kThreeAxes{{0, 3, 1}, {5, 2, 4}, {1, 20, 300, 0, 0, 0, 0, 0, -9}, 3};

// One call for all layers, or one a layer.
class LayersCall {
 public:
  LayersCall(Pools& src, Pools& dst, const Moves& moves, bool with_values = true) : moves_(moves) {
    for (std::size_t i = 0; i < shapes().size(); ++i)
      frequencies_.push_back(frequencies(shapes()[i]));
    for (std::size_t i = 0; i < shapes().size(); ++i) {
      ReropeLayer layer;
      layer.k_src = src.keys(i);
      layer.k_dst = dst.keys(i);
      if (with_values) {
        layer.v_src = src.values(i);
        layer.v_dst = dst.values(i);
      }
      layer.inv_freq = frequencies_[i];
      layer.is_neox = shapes()[i].is_neox;
      layers_.push_back(layer);
    }
  }

  // Layers [first, first + count).
  ReropeArgs args(std::size_t first, std::size_t count, VectorIsa isa = VectorIsa::kBaseline) {
    ReropeArgs args;
    args.layers = std::span(layers_).subspan(first, count);
    args.src_blocks = moves_.src;
    args.dst_blocks = moves_.dst;
    args.deltas = moves_.deltas;
    args.num_axes = moves_.num_axes;
    args.isa = isa;
    if (moves_.num_axes > 1) {
      axes_.resize(layers_[first].inv_freq.size());
      for (std::size_t i = 0; i < axes_.size(); ++i) axes_[i] = static_cast<int>(i % 3);
      args.axes = axes_;
    }
    return args;
  }

  std::size_t num_layers() const { return layers_.size(); }

 private:
  const Moves moves_;
  std::vector<std::vector<float>> frequencies_;
  std::vector<ReropeLayer> layers_;
  std::vector<std::int64_t> axes_;
};

Pools moved_layer_by_layer(const Moves& moves, bool within) {
  Pools src, dst;
  if (!within) dst.poison();
  LayersCall call(within ? dst : src, dst, moves);
  for (std::size_t i = 0; i < call.num_layers(); ++i) {
    ReropeArgs args = call.args(i, 1);
    args.num_threads = 1;
    cpu::rerope(args);
  }
  return dst;
}

class LayersTest : public testing::TestWithParam<VectorIsa> {};

TEST_P(LayersTest, OneCallGivesTheBitsOfOneCallALayer) {
  for (const bool within : {false, true}) {
    for (const Moves* moves : {&kBetweenBlocks, &kInPlace}) {
      const Pools expected = moved_layer_by_layer(*moves, within);
      for (const int num_threads : {1, 2, 5, 64}) {
        Pools src, dst;
        if (!within) dst.poison();
        LayersCall call(within ? dst : src, dst, *moves);
        ReropeArgs args = call.args(0, call.num_layers(), GetParam());
        args.num_threads = num_threads;
        cpu::rerope(args);
        EXPECT_TRUE(dst == expected) << num_threads << " threads" << (within ? ", one pool" : "");
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(AllIsas, LayersTest, testing::ValuesIn(vector_isas()),
                         [](const auto& info) { return std::string(to_string(info.param)); });

TEST(LayersKernelTest, GivesTheBytesOfTheCpu) {
  for (const bool within : {false, true}) {
    for (const Moves* moves : {&kBetweenBlocks, &kInPlace}) {
      Pools src, dst;
      if (!within) dst.poison();
      LayersCall call(within ? dst : src, dst, *moves);
      cuda::launch_rerope(call.args(0, call.num_layers()), cuda::HostLauncher{16});
      EXPECT_TRUE(dst == moved_layer_by_layer(*moves, within)) << (within ? "one pool" : "");
    }
  }
}

// Counts launches and passes them on.
struct CountingLauncher {
  int* count;

  template <typename Args>
  void operator()(void (*kernel)(Args), unsigned grid_x, unsigned grid_y, const Args& args) const {
    ++*count;
    cuda::HostLauncher{8}(kernel, grid_x, grid_y, args);
  }
};

TEST(LayersKernelTest, LayersThatDifferOnlyInTheirPoolsShareLaunches) {
  const std::size_t num_layers = 2 * cuda::kLayersPerLaunch + 1;
  const std::vector<float> inv_freq(8, 0.5f);
  Bytes src = test::make_bytes(num_layers * 2 * 4 * 4 * 16, 5), on_shim(src.size(), 0xff);
  for (std::size_t i = 3; i < src.size(); i += 4) src[i] &= 0xbf;
  Bytes on_cpu = on_shim;
  const std::vector<std::int64_t> from{0, 1, 2}, to{3, 0, 1}, deltas{1, 2, 3};
  const auto layers_to = [&](Bytes& dst) {
    std::vector<ReropeLayer> layers(num_layers);
    for (std::size_t i = 0; i < num_layers; ++i) {
      const auto part = [&](Bytes& bytes, std::size_t half) {
        return make_view(bytes.data() + (2 * i + half) * 256, kFloat32, {4, 1, 1, 16});
      };
      layers[i].k_src = part(src, 0);
      layers[i].k_dst = part(dst, 0);
      layers[i].v_src = part(src, 1);
      layers[i].v_dst = part(dst, 1);
      layers[i].inv_freq = inv_freq;
    }
    return layers;
  };
  ReropeArgs args;
  args.src_blocks = from;
  args.dst_blocks = to;
  args.deltas = deltas;
  args.isa = VectorIsa::kBaseline;
  int launches = 0;
  const auto shim_layers = layers_to(on_shim), cpu_layers = layers_to(on_cpu);
  args.layers = shim_layers;
  cuda::launch_rerope(args, CountingLauncher{&launches});
  args.layers = cpu_layers;
  cpu::rerope(args);
  EXPECT_EQ(on_shim, on_cpu);
  EXPECT_EQ(launches, 3);  // values among them
}

TEST(AxesTest, EachFrequencyTurnsByItsAxis) {
  for (const std::size_t layer : {std::size_t{0}, std::size_t{4}, std::size_t{5}}) {
    Pools src, on_cpu, on_shim;
    LayersCall cpu_call(src, on_cpu, kThreeAxes, false), shim_call(src, on_shim, kThreeAxes, false);
    cpu::rerope(cpu_call.args(layer, 1));
    cuda::launch_rerope(shim_call.args(layer, 1), cuda::HostLauncher{16});
    EXPECT_TRUE(on_cpu == on_shim) << "layer " << layer;

    // One axis at a time: only its frequencies turn as they do above.
    const std::size_t half = shapes()[layer].num_frequencies;
    for (int axis = 0; axis < 3; ++axis) {
      Moves moves{{0}, {5}, {kThreeAxes.deltas[axis]}};
      Pools one;
      LayersCall call(src, one, moves, false);
      cpu::rerope(call.args(layer, 1));
      const TensorView all = on_cpu.keys(layer), single = one.keys(layer);
      const std::int64_t size = all.dtype.size_bytes(), block = 5 * all.strides[0];
      for (std::size_t i = 0; i < half; ++i) {
        if (static_cast<int>(i % 3) != axis) continue;
        const std::size_t at = shapes()[layer].is_neox ? i : 2 * i;
        EXPECT_EQ(std::memcmp(all.as<char>() + (block + at) * size,
                              single.as<char>() + (block + at) * size, size),
                  0)
            << "layer " << layer << ", frequency " << i;
      }
    }
  }
}

struct PackedCase {
  KvLayout layout;
  DType dtype;
  bool is_neox;
  VectorIsa isa;
};

class PackedTest : public testing::TestWithParam<PackedCase> {
 protected:
  static constexpr std::int64_t kHeads = 2, kTokens = 48, kDim = 32, kOffset = 4;

  // The place of a token's dimension in a head, by the formulas of kvspan/rerope.h.
  static std::int64_t place(KvLayout layout, bool is_value, std::int64_t t, std::int64_t d) {
    const std::int64_t base = is_value ? kTokens * kDim : 0;
    if (layout == KvLayout::kCpuVec) return base + (is_value ? t * kDim + d : d * kTokens + t);
    if (is_value) return base + d / 16 * 16 * kTokens + t / 2 * 32 + d % 16 * 2 + t % 2;
    return t / 16 * 16 * kDim + d / 2 * 32 + t % 16 * 2 + d % 2;
  }
};

TEST_P(PackedTest, GivesTheBitsOfTokenRows) {
  const PackedCase& param = GetParam();
  const std::int64_t size = param.dtype.size_bytes(), count = 4 * kHeads * kTokens * kDim;
  Bytes keys = test::make_bytes(count * size, 1), values = test::make_bytes(count * size, 2);
  for (std::int64_t i = size - 1; i < count * size; i += size) keys[i] &= 0xbf;
  Bytes moved_keys(keys.size()), packed(2 * keys.size()), out(packed.size(), 0xff);
  const auto for_each = [&](const auto& visit) {
    for (std::int64_t row = 0; row < 4 * kHeads * kTokens; ++row) {
      const std::int64_t token = row % kTokens, head = row / kTokens;
      for (std::int64_t d = 0; d < kDim; ++d) {
        for (const bool is_value : {false, true}) {
          visit((head / kHeads * kTokens * kHeads + token * kHeads + head % kHeads) * kDim + d,
                head * 2 * kTokens * kDim + place(param.layout, is_value, token, d), is_value);
        }
      }
    }
  };
  for_each([&](std::int64_t nhd, std::int64_t at, bool is_value) {
    std::memcpy(&packed[at * size], &(is_value ? values : keys)[nhd * size], size);
  });

  const std::vector<float> inv_freq{1.0f, 0.3f, 0.1f, 0.03f, 0.01f, 0.003f};
  const std::vector<std::int64_t> from{2, 0}, to{2, 1}, deltas{-70000, 5};
  ReropeLayer layer;
  layer.inv_freq = inv_freq;
  layer.is_neox = param.is_neox;
  ReropeArgs args;
  args.layers = {&layer, 1};
  args.src_blocks = from;
  args.dst_blocks = to;
  args.deltas = deltas;
  args.rotary_offset = kOffset;
  args.isa = param.isa;
  layer.k_src = make_view(keys.data(), param.dtype, {4, kTokens, kHeads, kDim});
  layer.k_dst = make_view(moved_keys.data(), param.dtype, {4, kTokens, kHeads, kDim});
  cpu::rerope(args);
  layer.k_src = make_view(packed.data(), param.dtype, {4, kHeads, kTokens, 2 * kDim});
  layer.k_dst = make_view(out.data(), param.dtype, {4, kHeads, kTokens, 2 * kDim});
  args.layout = param.layout;
  cpu::rerope(args);
  for_each([&](std::int64_t nhd, std::int64_t at, bool is_value) {
    const std::int64_t block = at / (2 * kHeads * kTokens * kDim);
    const std::int64_t source = block == 1 ? nhd - kHeads * kTokens * kDim : nhd;
    if (block == 1 || block == 2) {
      const std::uint8_t* expected = is_value ? &values[source * size] : &moved_keys[nhd * size];
      ASSERT_EQ(std::memcmp(&out[at * size], expected, size), 0)
          << (is_value ? "value" : "key") << " of block " << block << " at " << at;
    } else {
      ASSERT_EQ(out[at * size], 0xff) << "block " << block << " was written";
    }
  });
}

std::vector<PackedCase> packed_cases() {
  std::vector<PackedCase> cases;
  for (const VectorIsa isa : vector_isas()) {
    for (const bool is_neox : {true, false}) {
      for (const DType dtype : {kFloat32, kBFloat16, kFloat16, kFloat8E4M3FN, kFloat8E5M2}) {
        cases.push_back({KvLayout::kCpuVec, dtype, is_neox, isa});
      }
      cases.push_back({KvLayout::kCpuAmx, kBFloat16, is_neox, isa});
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(All, PackedTest, testing::ValuesIn(packed_cases()), [](const auto& info) {
  return std::string(to_string(info.param.layout)) + "_" + to_string(info.param.dtype) +
         (info.param.is_neox ? "_neox_" : "_interleaved_") + std::string(to_string(info.param.isa));
});

}  // namespace
}  // namespace kvspan
