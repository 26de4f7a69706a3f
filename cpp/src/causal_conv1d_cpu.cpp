#include <algorithm>
#include <cstdint>
#include <vector>

#include "gated_delta_select.h"
#include "kvspan/causal_conv1d.h"
#include "parallel.h"

namespace kvspan::cpu {
namespace {

// Tokens that one item works on: with a vector's width of channels they stay in the first cache.
constexpr std::int64_t kTokensPerItem = 64;
static_assert(kTokensPerItem >= kMaxConvWidth);

struct TokenRange {
  std::int64_t sequence, begin, end;
};

// What is copied before the convolution, with elements as bits.
template <typename Bits>
struct Prepared {
  std::vector<Bits> weight;    // [width, num_channels]
  std::vector<Bits> bias;      // [num_channels], or none
  std::vector<Bits> previous;  // [num_sequences, width - 1, num_channels]
};

template <typename Bits>
Prepared<Bits> prepare(const CausalConv1dArgs& args) {
  const std::int64_t num_channels = args.weight.shape[0], width = args.weight.shape[1];
  Prepared<Bits> prepared;
  const auto* weight = args.weight.as<const Bits>();
  prepared.weight.resize(width * num_channels);
  for (std::int64_t c = 0; c < num_channels; ++c) {
    for (std::int64_t w = 0; w < width; ++w) {
      prepared.weight[w * num_channels + c] =
          weight[c * args.weight.strides[0] + w * args.weight.strides[1]];
    }
  }
  if (args.bias.data) {
    for (std::int64_t c = 0; c < num_channels; ++c) {
      prepared.bias.push_back(args.bias.as<const Bits>()[c * args.bias.strides[0]]);
    }
  }
  const auto& strides = args.state.strides;
  const std::int64_t num_sequences = args.state.shape[0];
  prepared.previous.resize(num_sequences * (width - 1) * num_channels);
  for (std::int64_t n = 0; n < num_sequences; ++n) {
    for (std::int64_t c = 0; c < num_channels; ++c) {
      for (std::int64_t w = 0; w < width - 1; ++w) {
        prepared.previous[(n * (width - 1) + w) * num_channels + c] =
            args.state.as<const Bits>()[n * strides[0] + c * strides[1] + w * strides[2]];
      }
    }
  }
  return prepared;
}

// Each sequence's last width - 1 inputs, of those carried along and its tokens'.
template <typename Bits>
void write_states(const CausalConv1dArgs& args, const Prepared<Bits>& prepared) {
  const std::int64_t num_channels = args.weight.shape[0], num_rows = args.weight.shape[1] - 1;
  const auto& strides = args.state.strides;
  for (std::int64_t n = 0; n < args.state.shape[0]; ++n) {
    const std::int64_t begin = args.cu_seqlens[n], end = args.cu_seqlens[n + 1];
    for (std::int64_t w = 0; w < num_rows; ++w) {
      const std::int64_t token = end - num_rows + w;
      const Bits* row = token >= begin ? args.x.as<const Bits>() + token * args.x.strides[0]
                                       : prepared.previous.data() +
                                             ((n + 1) * num_rows + token - begin) * num_channels;
      for (std::int64_t c = 0; c < num_channels; ++c) {
        args.state.as<Bits>()[n * strides[0] + c * strides[1] + w * strides[2]] = row[c];
      }
    }
  }
}

template <typename Bits>
void run(const CausalConv1dArgs& args) {
  const std::int64_t num_channels = args.weight.shape[0], width = args.weight.shape[1];
  const Prepared<Bits> prepared = prepare<Bits>(args);
  write_states(args, prepared);
  std::vector<TokenRange> ranges;
  for (std::int64_t n = 0; n < args.state.shape[0]; ++n) {
    const std::int64_t end = args.cu_seqlens[n + 1];
    for (std::int64_t token = args.cu_seqlens[n]; token < end; token += kTokensPerItem) {
      ranges.push_back({n, token, std::min(end, token + kTokensPerItem)});
    }
  }
  const auto kernel = select_kernels(args.isa).conv[state_type(args.x.dtype)];
  const auto num_items = static_cast<std::int64_t>(ranges.size());
  const std::int64_t total_bytes =
      2 * args.x.shape[0] * num_channels * static_cast<std::int64_t>(sizeof(Bits));
  const int num_threads = choose_num_threads(args.num_threads, num_items, total_bytes);
  parallel_ranges(num_threads, num_items, [&](int, std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const TokenRange& range = ranges[i];
      ConvItem item{};
      item.num_tokens = range.end - range.begin;
      item.num_channels = num_channels;
      item.width = width;
      item.x_token_stride = args.x.strides[0];
      item.x = args.x.as<const Bits>() + range.begin * item.x_token_stride;
      item.out_token_stride = args.out.strides[0];
      item.out = args.out.as<Bits>() + range.begin * item.out_token_stride;
      if (range.begin == args.cu_seqlens[range.sequence]) {
        item.previous_stride = num_channels;
        item.previous = prepared.previous.data() + range.sequence * (width - 1) * num_channels;
      } else {
        item.previous_stride = item.x_token_stride;
        item.previous = args.x.as<const Bits>() + (range.begin - (width - 1)) * item.x_token_stride;
      }
      item.weight = prepared.weight.data();
      item.weight_stride = num_channels;
      item.bias = prepared.bias.empty() ? nullptr : prepared.bias.data();
      item.silu = args.silu;
      kernel(item);
    }
  });
}

}  // namespace

void causal_conv1d(const CausalConv1dArgs& args) {
  args.x.dtype.bits == 32 ? run<std::uint32_t>(args) : run<std::uint16_t>(args);
}

}  // namespace kvspan::cpu
