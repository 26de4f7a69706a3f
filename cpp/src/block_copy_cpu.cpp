#include <algorithm>

#include "block_layout.h"
#include "kvspan/block_copy.h"
#include "parallel.h"

namespace kvspan::cpu {

void copy_blocks(const BlockCopyArgs& args) {
  const BlockLayout layout = make_block_layout(args.src, args.dst);
  const std::int64_t num_ahead = blocks_ahead(layout);
  const auto num_moves = static_cast<std::int64_t>(args.src_blocks.size());
  const int num_threads =
      choose_num_threads(args.num_threads, num_moves, num_moves * block_bytes(args.src));
  parallel_ranges(num_threads, num_moves, [&](int, std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      if ((i - begin) % num_ahead == 0) {
        const std::int64_t last = std::min(i + num_ahead, end - 1);
        for (std::int64_t next = i + 1; next <= last; ++next) {
          prefetch_pages(layout, block_data(args.src, args.src_blocks[next]),
                         block_data(args.dst, args.dst_blocks[next]));
        }
      }
      copy_block(layout, block_data(args.src, args.src_blocks[i]),
                 block_data(args.dst, args.dst_blocks[i]));
    }
  });
}

}  // namespace kvspan::cpu
