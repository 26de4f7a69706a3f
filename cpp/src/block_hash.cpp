#include "kvspan/block_hash.h"

#include <algorithm>
#include <exception>
#include <limits>

#include "block_hash_run.h"
#include "kvspan/check.h"
#include "parallel.h"

namespace kvspan {
namespace {

constexpr std::int64_t kMaxBlockSize = std::int64_t{1} << 20;
constexpr std::int64_t kMaxTokenId = std::numeric_limits<std::uint32_t>::max();

// choose_num_threads() counts in bytes copied. This makes it one thread for 32K tokens, some 0.15
// ms of work: a thread that the machine is slow to wake costs more than it saves on less.
constexpr std::int64_t kCopyBytesPerToken = 16;

template <typename Token>
void check_token_ids(const Token* tokens, std::int64_t stride, std::int64_t num_tokens) {
  // The bits of all ids; without branches, so that it is cheap beside hashing.
  Token bits = 0;
  if (stride == 1) {
    for (std::int64_t i = 0; i < num_tokens; ++i) bits |= tokens[i];
  } else {
    for (std::int64_t i = 0; i < num_tokens; ++i) bits |= tokens[i * stride];
  }
  if ((static_cast<std::int64_t>(bits) & ~kMaxTokenId) == 0) return;
  for (std::int64_t i = 0; i < num_tokens; ++i) {
    const std::int64_t id = tokens[i * stride];
    KVSPAN_CHECK_ARG(id >= 0 && id <= kMaxTokenId, "token_ids[", i, "]: expected an id in [0, ",
                     kMaxTokenId, "], got ", id);
  }
}

void check_token_ids(const TensorView& token_ids) {
  KVSPAN_CHECK_ARG(token_ids.ndim == 1, "token_ids: expected shape [num_tokens], got ",
                   shape_to_string(token_ids));
  KVSPAN_CHECK_ARG(token_ids.device.type == DeviceType::kCpu,
                   "token_ids: expected a cpu tensor, got ", to_string(token_ids.device));
  KVSPAN_CHECK(token_ids.dtype == kInt32 || token_ids.dtype == kInt64, TypeError,
               "token_ids: expected int32 or int64, got ", to_string(token_ids.dtype));
  if (token_ids.dtype == kInt32) {
    check_token_ids(token_ids.as<std::int32_t>(), token_ids.strides[0], token_ids.shape[0]);
  } else {
    check_token_ids(token_ids.as<std::int64_t>(), token_ids.strides[0], token_ids.shape[0]);
  }
}

void check_offsets(std::span<const std::int64_t> offsets, const char* name, std::size_t num_prompts,
                   std::int64_t total, const char* what) {
  KVSPAN_CHECK_ARG(offsets.size() == num_prompts + 1, name, ": expected [", num_prompts + 1,
                   "] offsets for ", num_prompts, " chains, got [", offsets.size(), "]");
  KVSPAN_CHECK_ARG(offsets.front() == 0, name, "[0]: expected 0, got ", offsets.front());
  for (std::size_t i = 0; i < num_prompts; ++i) {
    KVSPAN_CHECK_ARG(offsets[i] <= offsets[i + 1], name, "[", i + 1, "]: expected at least ",
                     offsets[i], " like the offset before, got ", offsets[i + 1]);
  }
  KVSPAN_CHECK_ARG(offsets.back() == total, name, "[", num_prompts, "]: expected ", total,
                   ", the number of ", what, ", got ", offsets.back());
}

// Sorted, disjoint and within the tokens added, [begin, stop).
void check_range(const char* name, std::int64_t i, std::int64_t start, std::int64_t end,
                 std::int64_t previous_end, std::int64_t begin, std::int64_t stop) {
  KVSPAN_CHECK_ARG(start <= end, name, "[", i, "]: expected start <= end, got (", start, ", ", end,
                   ")");
  KVSPAN_CHECK_ARG(start >= begin && end <= stop, name, "[", i,
                   "]: expected a range within the tokens added, [", begin, ", ", stop, "), got (",
                   start, ", ", end, ")");
  KVSPAN_CHECK_ARG(start >= previous_end, name, "[", i, "]: expected sorted, disjoint ", name,
                   ": a start of at least ", previous_end, ", got (", start, ", ", end, ")");
}

// The items of one prompt; no offsets: there are none.
template <typename Item>
std::span<const Item> slice(std::span<const Item> items, std::span<const std::int64_t> offsets,
                            std::size_t prompt) {
  if (offsets.empty()) return {};
  return items.subspan(offsets[prompt], offsets[prompt + 1] - offsets[prompt]);
}

// One thread's share: the prompts that start in its share of the tokens, so that long and short
// prompts are spread evenly.
std::pair<std::size_t, std::size_t> prompts_within(std::span<const std::int64_t> cu_seqlens,
                                                   std::int64_t begin, std::int64_t end) {
  const auto starts = cu_seqlens.first(cu_seqlens.size() - 1);
  const auto index = [&](std::int64_t token) {
    return static_cast<std::size_t>(std::lower_bound(starts.begin(), starts.end(), token) -
                                    starts.begin());
  };
  return {index(begin), index(end)};
}

template <typename Token>
void run(std::span<block_hash::Prompt> prompts, const ExtendArgs& args, std::int64_t block_size,
         const block_hash::Hasher& hasher) {
  const std::int64_t num_tokens = args.token_ids.shape[0];
  const int num_threads = choose_num_threads(
      args.num_threads, static_cast<std::int64_t>(prompts.size()), num_tokens * kCopyBytesPerToken);
  std::vector<std::exception_ptr> errors(num_threads);
  parallel_ranges(num_threads, num_tokens, [&](int thread, std::int64_t begin, std::int64_t end) {
    try {
      const auto [first, last] = prompts_within(args.cu_seqlens, begin, end);
      block_hash::Runner<Token> runner(args.token_ids.as<Token>(), args.token_ids.strides[0],
                                       block_size, hasher);
      runner.run(prompts.subspan(first, last - first));
    } catch (...) {  // out of memory; no exception may leave a thread
      errors[thread] = std::current_exception();
    }
  });
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

// Makes room for count more, at least twice the room there was if that was too little.
void grow(LargeVector<Digest>& digests, std::size_t count) {
  const std::size_t size = digests.size() + count;
  if (size > digests.capacity()) digests.reserve(std::max(size, 2 * digests.capacity()));
}

}  // namespace

BlockChain::BlockChain(std::int64_t block_size, const Digest& root, const Digest& span_root,
                       bool anchored, Sha256Isa isa, std::shared_ptr<TokenStore> store)
    : block_size_(block_size),
      code_(sha256_code(isa)),
      span_root_(span_root),
      anchored_(anchored),
      store_(std::move(store)),
      store_generation_(store_ ? store_->generation() : 0) {
  KVSPAN_CHECK_ARG(block_size >= 1 && block_size <= kMaxBlockSize, "block_size: expected 1 to ",
                   kMaxBlockSize, " tokens, got ", block_size);
  state_.outer = root;
}

std::int64_t BlockChain::num_tokens() const {
  const std::lock_guard lock(mutex_);
  return state_.num_tokens;
}

Digest BlockChain::digest() const {
  const std::lock_guard lock(mutex_);
  if (state_.waiting.empty()) return state_.outer;
  std::shared_lock<std::shared_mutex> store_lock;
  if (store_) store_lock = store_->hold();
  std::vector<std::uint8_t> message;
  const std::size_t size =
      block_hash::absorb_message(state_.outer, state_.waiting, {}, {}, message);
  return block_hash::Hasher{code_, store_.get()}.hash(message, size);
}

std::int64_t BlockChain::num_new_blocks(std::int64_t num_tokens) const {
  const std::lock_guard lock(mutex_);
  return (static_cast<std::int64_t>(state_.pending.size()) + num_tokens) / block_size_;
}

void BlockChain::extend(const TensorView& token_ids, std::span<const SpanRange> spans,
                        std::span<const ExtraRange> extra, std::span<std::uint8_t> keys) {
  BlockChain* const chain = this;
  const std::int64_t cu_seqlens[2] = {0, token_ids.ndim == 1 ? token_ids.shape[0] : 0};
  const std::int64_t cu_spans[2] = {0, static_cast<std::int64_t>(spans.size())};
  const std::int64_t cu_extra[2] = {0, static_cast<std::int64_t>(extra.size())};
  const std::lock_guard lock(mutex_);
  extend_locked({.chains = {&chain, 1},
                 .token_ids = token_ids,
                 .cu_seqlens = cu_seqlens,
                 .spans = spans,
                 .cu_spans = cu_spans,
                 .extra = extra,
                 .cu_extra = cu_extra,
                 .num_threads = 1},
                keys);
}

void BlockChain::validate(const ExtendArgs& args, std::size_t prompt) const {
  const BlockChain& first = *args.chains.front();
  KVSPAN_CHECK_ARG(block_size_ == first.block_size_, "chains[", prompt, "]: expected block_size ",
                   first.block_size_, " like chains[0], got ", block_size_);
  KVSPAN_CHECK_ARG(store_ == first.store_, "chains[", prompt,
                   "]: expected the same TokenStore as chains[0], or none like it");
  const std::int64_t begin = state_.num_tokens;
  const std::int64_t stop = begin + args.cu_seqlens[prompt + 1] - args.cu_seqlens[prompt];
  std::int64_t previous_end = begin;
  std::int64_t i = args.cu_spans.empty() ? 0 : args.cu_spans[prompt];
  for (const auto& [start, end] : slice(args.spans, args.cu_spans, prompt)) {
    check_range("spans", i, start, end, previous_end, begin, stop);
    KVSPAN_CHECK_ARG(start % block_size_ == 0 && end % block_size_ == 0, "spans[", i,
                     "]: expected multiples of block_size ", block_size_, ", got (", start, ", ",
                     end, ")");
    previous_end = end;
    ++i;
  }
  previous_end = begin;
  i = args.cu_extra.empty() ? 0 : args.cu_extra[prompt];
  for (const ExtraRange& range : slice(args.extra, args.cu_extra, prompt)) {
    check_range("extra", i, range.start, range.end, previous_end, begin, stop);
    previous_end = range.end;
    ++i;
  }
}

// All chains are locked by the caller.
void BlockChain::extend_locked(const ExtendArgs& args, std::span<std::uint8_t> keys) {
  const std::size_t num_prompts = args.chains.size();
  check_token_ids(args.token_ids);
  const std::int64_t num_tokens = args.token_ids.shape[0];
  check_offsets(args.cu_seqlens, "cu_seqlens", num_prompts, num_tokens, "tokens");
  if (!args.cu_spans.empty() || !args.spans.empty()) {
    check_offsets(args.cu_spans, "cu_spans", num_prompts,
                  static_cast<std::int64_t>(args.spans.size()), "spans");
  }
  if (!args.cu_extra.empty() || !args.extra.empty()) {
    check_offsets(args.cu_extra, "cu_extra", num_prompts,
                  static_cast<std::int64_t>(args.extra.size()), "extra ranges");
  }
  KVSPAN_CHECK_ARG(args.num_threads >= 0, "num_threads: expected 0 (automatic) or more, got ",
                   args.num_threads);
  if (num_prompts == 0) return;
  for (std::size_t p = 0; p < num_prompts; ++p) args.chains[p]->validate(args, p);

  // The work is done on copies of the chains' states, which take effect only when all is done.
  const BlockChain& first = *args.chains.front();
  const std::int64_t block_size = first.block_size_;
  std::vector<block_hash::Prompt> prompts(num_prompts);
  std::vector<State> next_states(num_prompts);
  std::int64_t num_blocks = 0;
  for (std::size_t p = 0; p < num_prompts; ++p) {
    const BlockChain& chain = *args.chains[p];
    const State& state = chain.state_;
    const std::int64_t added = args.cu_seqlens[p + 1] - args.cu_seqlens[p];
    std::span<const ExtraRange> extra = slice(args.extra, args.cu_extra, p);
    if (!state.pending_extra.empty()) {
      auto& all = next_states[p].pending_extra;
      all = state.pending_extra;
      all.insert(all.end(), extra.begin(), extra.end());
      extra = all;
    }
    prompts[p] = {.span_root = chain.span_root_,
                  .anchored = chain.anchored_,
                  .pending = state.pending,
                  .start = state.num_tokens,
                  .stop = state.num_tokens + added,
                  .first_token = args.cu_seqlens[p],
                  .spans = slice(args.spans, args.cu_spans, p),
                  .extra = extra,
                  .keys = keys.data() + num_blocks * sizeof(Digest),
                  .waiting = state.waiting,
                  .outer = state.outer,
                  .span_parent = state.span_parent,
                  .new_waiting = {}};
    num_blocks += (static_cast<std::int64_t>(state.pending.size()) + added) / block_size;
  }
  const auto expected = num_blocks * static_cast<std::int64_t>(sizeof(Digest));
  KVSPAN_CHECK_ARG(static_cast<std::int64_t>(keys.size()) == expected, "keys: expected ", expected,
                   " bytes, got ", keys.size());

  std::shared_lock<std::shared_mutex> store_lock;
  if (first.store_) store_lock = first.store_->hold();
  for (const BlockChain* chain : args.chains) {
    KVSPAN_CHECK_ARG(!first.store_ || chain->store_generation_ == first.store_->generation(),
                     "store: expected the entries that this chain stands on, got a store that was "
                     "cleared since; start a new chain");
  }
  if (num_blocks > 0) {
    const block_hash::Hasher hasher{first.code_, first.store_.get()};
    if (args.token_ids.dtype == kInt32) {
      run<std::int32_t>(prompts, args, block_size, hasher);
    } else {
      run<std::int64_t>(prompts, args, block_size, hasher);
    }
  }

  const auto token_at = [&](std::int64_t i) {
    i *= args.token_ids.strides[0];
    return static_cast<std::uint32_t>(args.token_ids.dtype == kInt32
                                          ? args.token_ids.as<std::int32_t>()[i]
                                          : args.token_ids.as<std::int64_t>()[i]);
  };
  for (std::size_t p = 0; p < num_prompts; ++p) {
    block_hash::Prompt& prompt = prompts[p];
    State& next = next_states[p];
    next.outer = prompt.outer;
    next.span_parent = prompt.span_parent;
    next.num_tokens = prompt.stop;
    const std::int64_t unfinished = prompt.stop - prompt.stop % block_size;
    if (unfinished < prompt.start) {
      next.pending.assign(prompt.pending.begin(), prompt.pending.end());
    }
    for (std::int64_t i = std::max(unfinished, prompt.start); i < prompt.stop; ++i) {
      next.pending.push_back(token_at(prompt.first_token + i - prompt.start));
    }
    std::vector<ExtraRange> overlapping;
    for (const ExtraRange& range : prompt.extra) {
      if (range.end > unfinished) overlapping.push_back(range);
    }
    next.pending_extra = std::move(overlapping);
    if (prompt.absorbed) {
      next.waiting = std::move(prompt.new_waiting);
    } else {
      grow(args.chains[p]->state_.waiting, prompt.new_waiting.size());
    }
  }
  // Nothing below throws.
  for (std::size_t p = 0; p < num_prompts; ++p) {
    State& state = args.chains[p]->state_;
    if (!prompts[p].absorbed) {  // appended to, so that many calls cost no copies of all
      const auto& added = prompts[p].new_waiting;
      state.waiting.insert(state.waiting.end(), added.begin(), added.end());
      next_states[p].waiting = std::move(state.waiting);
    }
    state = std::move(next_states[p]);
  }
}

std::vector<std::int64_t> key_offsets(const ExtendArgs& args) {
  check_offsets(args.cu_seqlens, "cu_seqlens", args.chains.size(),
                args.token_ids.ndim == 1 ? args.token_ids.shape[0] : 0, "tokens");
  std::vector<std::int64_t> offsets{0};
  for (std::size_t p = 0; p < args.chains.size(); ++p) {
    const std::int64_t added = args.cu_seqlens[p + 1] - args.cu_seqlens[p];
    offsets.push_back(offsets.back() + args.chains[p]->num_new_blocks(added));
  }
  return offsets;
}

void extend_chains(const ExtendArgs& args, std::span<std::uint8_t> keys) {
  // In one order everywhere, so that two calls with chains in common cannot block each other.
  std::vector<BlockChain*> ordered(args.chains.begin(), args.chains.end());
  std::sort(ordered.begin(), ordered.end(), std::less<>());
  const auto repeated = std::adjacent_find(ordered.begin(), ordered.end());
  KVSPAN_CHECK_ARG(repeated == ordered.end(), "chains: expected distinct chains, got one twice");
  std::vector<std::unique_lock<std::mutex>> locks;
  locks.reserve(ordered.size());
  for (BlockChain* chain : ordered) locks.emplace_back(chain->mutex_);
  BlockChain::extend_locked(args, keys);
}

}  // namespace kvspan
