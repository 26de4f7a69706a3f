// Two cached spans change places: block keys find them, a plan orders the moves, rerope() does
// them.
#include <kvspan/block_hash.h>
#include <kvspan/block_moves.h>
#include <kvspan/rerope.h>

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstdint>
#include <exception>
#include <iostream>
#include <map>
#include <numeric>
#include <span>
#include <vector>

namespace {

using kvspan::Digest;
using Ids = std::vector<std::int64_t>;

constexpr std::int64_t kBlockSize = 16, kSpanBlocks = 4, kNumBlocks = 10;
constexpr std::int64_t kNumKvHeads = 2, kHeadDim = 64;

// The keys of a prompt of two spans.
std::vector<Digest> block_keys(std::vector<std::int32_t> tokens) {
  const std::int64_t half = kSpanBlocks * kBlockSize;
  const kvspan::SpanRange spans[] = {{0, half}, {half, 2 * half}};
  // What every key must depend on: the model, the tenant's salt, ...
  const Digest root = kvspan::sha256({}), span_root = root;
  kvspan::BlockChain chain(kBlockSize, root, span_root, /*anchored=*/true);
  std::vector<Digest> keys(chain.num_new_blocks(2 * half));
  chain.extend(kvspan::make_view(tokens.data(), kvspan::kInt32, {2 * half}), spans, {},
               {keys.front().data(), keys.size() * sizeof(Digest)});
  return keys;
}

// One layer's pool of keys. A key that is 1 + 0i before rotation is cos(p w) + i sin(p w) at
// position p, for each of its frequencies w.
class Pool {
 public:
  Pool() : keys_(kNumBlocks * kBlockSize * kNumKvHeads * kHeadDim), inv_freq_(kHeadDim / 2) {
    for (std::int64_t i = 0; i < kHeadDim / 2; ++i) {
      inv_freq_[i] =
          static_cast<float>(std::pow(10000.0, -2.0 * static_cast<double>(i) / kHeadDim));
    }
  }

  void fill() {
    for_each_pair([](float& real, float& imaginary, std::complex<double> key) {
      real = static_cast<float>(key.real());
      imaginary = static_cast<float>(key.imag());
    });
  }

  // From what fill() writes.
  double largest_error() {
    double largest = 0;
    for_each_pair([&](float real, float imaginary, std::complex<double> key) {
      largest = std::max(largest, std::abs(std::complex<double>(real, imaginary) - key));
    });
    return largest;
  }

  kvspan::ReropeLayer layer() {
    const kvspan::TensorView keys = kvspan::make_view(
        keys_.data(), kvspan::kFloat32, {kNumBlocks, kBlockSize, kNumKvHeads, kHeadDim});
    return {.k_src = keys, .k_dst = keys, .v_src = {}, .v_dst = {}, .inv_freq = inv_freq_};
  }

 private:
  template <typename Visit>
  void for_each_pair(const Visit& visit) {
    for (std::int64_t row = 0; row < 2 * kSpanBlocks * kBlockSize * kNumKvHeads; ++row) {
      const auto position = static_cast<double>(row / kNumKvHeads);
      float* const key = keys_.data() + row * kHeadDim;
      for (std::int64_t i = 0; i < kHeadDim / 2; ++i) {
        visit(key[i], key[i + kHeadDim / 2], std::polar(1.0, position * inv_freq_[i]));
      }
    }
  }

  std::vector<float> keys_;  // [kNumBlocks, kBlockSize, kNumKvHeads, kHeadDim]
  std::vector<float> inv_freq_;
};

void move_blocks(const kvspan::MovePlan& plan, const kvspan::ReropeLayer& layer) {
  for (std::int64_t b = 0; b < plan.num_batches(); ++b) {
    const std::int64_t begin = plan.batch_offsets[b], end = plan.batch_offsets[b + 1];
    const auto batch = [&](const auto& all) { return std::span(all).subspan(begin, end - begin); };
    kvspan::ReropeArgs args;
    args.layers = {&layer, 1};
    args.src_blocks = batch(plan.src_blocks);
    args.dst_blocks = batch(plan.dst_blocks);
    args.deltas = batch(plan.deltas);
    kvspan::rerope(args);
  }
}

void run() {
  // A prompt of two spans, cached in blocks 0 to 7, and then the same spans the other way round.
  std::vector<std::int32_t> prompt(2 * kSpanBlocks * kBlockSize);
  std::iota(prompt.begin(), prompt.end(), 1000);
  std::map<Digest, std::int64_t> cached;
  for (const Digest& key : block_keys(prompt)) cached.emplace(key, cached.size());
  std::rotate(prompt.begin(), prompt.begin() + kSpanBlocks * kBlockSize, prompt.end());

  Ids src, dst, deltas;
  for (const Digest& key : block_keys(prompt)) {
    src.push_back(cached.at(key));
    dst.push_back(static_cast<std::int64_t>(dst.size()));
    deltas.push_back((dst.back() - src.back()) * kBlockSize);
  }
  const Ids scratch{8, 9};
  kvspan::PlanMovesArgs moves;
  moves.src_blocks = src;
  moves.dst_blocks = dst;
  moves.deltas = deltas;
  moves.scratch_blocks = scratch;
  const kvspan::MovePlan plan = kvspan::plan_moves(moves);
  std::cout << src.size() << " moves: " << plan.stats.num_cycles << " cycles, " << plan.kinds.size()
            << " steps in " << plan.num_batches() << " batches\n";

  Pool pool;
  pool.fill();
  move_blocks(plan, pool.layer());
  std::cout << "largest difference from keys computed at their new positions: "
            << pool.largest_error() << "\n";
}

}  // namespace

int main() {
  try {
    run();
  } catch (const std::exception& error) {
    std::cerr << "move_spans: " << error.what() << "\n";
    return 1;
  }
}
