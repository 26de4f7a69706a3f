#include "block_layout.h"
#include "kvspan/block_copy.h"
#include "parallel.h"

namespace kvspan::cpu {

void copy_blocks(const BlockCopyArgs& args) {
  const BlockLayout layout = make_block_layout(args.src, args.dst);
  const auto num_moves = static_cast<std::int64_t>(args.src_blocks.size());
  const int num_threads =
      choose_num_threads(args.num_threads, num_moves, num_moves * block_bytes(args.src));
  parallel_ranges(num_threads, num_moves, [&](int, std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      if (i + 1 < end) {
        prefetch_pages(layout, block_data(args.src, args.src_blocks[i + 1]),
                       block_data(args.dst, args.dst_blocks[i + 1]));
      }
      copy_block(layout, block_data(args.src, args.src_blocks[i]),
                 block_data(args.dst, args.dst_blocks[i]));
    }
  });
}

}  // namespace kvspan::cpu
