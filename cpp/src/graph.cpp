#include "kvspan/graph.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace kvspan {
namespace {

// A node whose edges are being followed.
struct Frame {
  std::int32_t node;
  std::int32_t next_edge;
  std::int32_t number;  // the order in which it was reached, from 1
};

}  // namespace

Components strongly_connected_components(const CsrGraph& graph) {
  const auto num_nodes = static_cast<std::int32_t>(graph.offsets.size()) - 1;
  Components components;
  components.nodes.reserve(num_nodes);
  components.offsets.reserve(num_nodes + 1);
  components.offsets.push_back(0);

  // Of a node not reached yet: 0. Of one not finished: the smallest number of an unfinished node
  // that it is known to lead to. Of a finished one: past_numbers plus its position, so that edges
  // to it, which lead out of the component at hand, change nothing.
  components.position_of.assign(num_nodes, 0);
  auto& lowest = components.position_of;
  const std::int32_t past_numbers = num_nodes + 1;
  LargeVector<std::int32_t> open;  // left, but their component's root is still on the path
  LargeVector<Frame> path;
  std::int32_t num_reached = 0;
  const auto enter = [&](std::int32_t node) {
    lowest[node] = ++num_reached;
    path.push_back({node, graph.offsets[node], num_reached});
  };
  const auto finish = [&](std::int32_t node) {
    lowest[node] = past_numbers + static_cast<std::int32_t>(components.nodes.size());
    components.nodes.push_back(node);
  };

  for (std::int32_t first = 0; first < num_nodes; ++first) {
    if (lowest[first] != 0) continue;
    enter(first);
    while (!path.empty()) {
      Frame& frame = path.back();
      const std::int32_t node = frame.node;
      if (frame.next_edge < graph.offsets[node + 1]) {
        const std::int32_t target = graph.targets[frame.next_edge];
        if (lowest[target] == 0) {
          enter(target);  // the edge is looked at again on the way back
        } else {
          if (lowest[target] < lowest[node]) lowest[node] = lowest[target];
          ++frame.next_edge;
        }
        continue;
      }
      const std::int32_t number = frame.number;
      path.pop_back();
      if (lowest[node] < number) {
        open.push_back(node);
        continue;
      }
      // The root of a component: its other nodes are the open ones reached after it.
      while (!open.empty() && lowest[open.back()] >= number) {
        finish(open.back());
        open.pop_back();
      }
      finish(node);
      components.offsets.push_back(static_cast<std::int32_t>(components.nodes.size()));
    }
  }
  for (std::int32_t& position : components.position_of) position -= past_numbers;
  return components;
}

namespace {

constexpr std::int32_t kPrefetchDistance = 16;

// A graph of one edge a node, whose components of more than one node are its cycles: all other
// nodes are peeled off first, from the leaves on, and what is left is walked around.
//
// Both go from node to node through memory in no order, so that what counts is how many cache
// misses are under way at a time. There is one lookup a node. Nodes are peeled first in, first out:
// those in the queue do not wait for each other, and what they lead to is fetched ahead. Cycles are
// walked in kNumWalkers places at once: each walker goes on until it meets the start of a piece,
// its own or another's, and the pieces are put together afterwards.
class Peeler {
 public:
  explicit Peeler(LargeVector<std::int32_t> successor)
      : num_nodes_(static_cast<std::int32_t>(successor.size())), nodes_(successor.size()) {
    for (std::int32_t v = 0; v < num_nodes_; ++v) nodes_[v] = {successor[v], 0};
    for (const std::int32_t next : successor) {
      if (next >= 0) ++nodes_[next].num_waits;
    }
    out_.nodes.resize(num_nodes_);
    out_.successor = std::move(successor);  // overwritten position by position
    out_.cycle_offsets.push_back(0);
  }

  PeeledGraph run() {
    const std::int32_t num_on_cycles = peel();
    has_trees_ = num_on_cycles < num_nodes_;
    if (num_on_cycles > 0) {
      walk_cycles(num_on_cycles);
      join_pieces();
    }
    for (std::int32_t position = num_on_cycles; position < num_nodes_; ++position) {
      std::int32_t& next = out_.successor[position];
      if (next >= 0) next = nodes_[next].successor_or_position;
    }
    return std::move(out_);
  }

 private:
  struct Node {
    std::int32_t successor_or_position;  // its position once it has one
    // The nodes before it that are not peeled: 0 of one that may be or is, 1 of one on a cycle.
    // Then below 0 where a walker was: ~p for the first node of piece p.
    std::int32_t num_waits;
  };
  struct Piece {
    std::int32_t begin;  // in walked_
    std::int32_t end;
    std::int32_t next;  // the piece that goes on where this one ends
  };
  struct Walker {
    std::int32_t node;
    std::int32_t piece;       // that it is in, or may use again; -1 for none
    std::int32_t room_begin;  // its part of walked_ that is not used yet
    std::int32_t room_end;
    std::int32_t scan;  // where the next node not reached may be
    std::int32_t scan_end;
  };
  static constexpr std::int32_t kNumWalkers = 16;
  static constexpr std::int32_t kRoom = 4096;

  // Nodes that are on no cycle go to the end, those waited for first: the last peeled comes first.
  // Returns the number of the others.
  std::int32_t peel() {
    std::int32_t begin = num_nodes_;  // peeled nodes have positions from here on
    const auto add = [&](std::int32_t node) {
      out_.nodes[--begin] = node;
      out_.successor[begin] = std::exchange(nodes_[node].successor_or_position, begin);
    };
    for (std::int32_t node = 0; node < num_nodes_; ++node) {
      if (nodes_[node].num_waits == 0) add(node);
    }
    for (std::int32_t position = num_nodes_; position-- > begin;) {
      const std::int32_t ahead = out_.successor[std::max(position - kPrefetchDistance, begin)];
      if (ahead >= 0) __builtin_prefetch(&nodes_[ahead], 1);
      const std::int32_t next = out_.successor[position];
      if (next >= 0 && --nodes_[next].num_waits == 0) add(next);
    }
    return begin;
  }

  // Each node that is left has one before it, so that a walker which meets a node reached before
  // meets the start of a piece.
  void walk_cycles(std::int32_t num_on_cycles) {
    walked_.resize(num_on_cycles + kNumWalkers * kRoom);
    std::vector<Walker> walkers;
    for (std::int64_t w = 0; w < kNumWalkers; ++w) {
      Walker walker{};
      walker.piece = -1;
      walker.scan = static_cast<std::int32_t>(w * num_nodes_ / kNumWalkers);
      walker.scan_end = static_cast<std::int32_t>((w + 1) * num_nodes_ / kNumWalkers);
      if (start(walker)) walkers.push_back(walker);
    }
    while (!walkers.empty()) {
      for (std::size_t w = 0; w < walkers.size(); ++w) {
        if (step(walkers[w])) continue;
        walkers[w] = walkers.back();
        walkers.pop_back();
      }
    }
  }

  // At a node not reached yet; false if there is none.
  bool start(Walker& walker) {
    while (walker.scan < walker.scan_end && nodes_[walker.scan].num_waits <= 0) ++walker.scan;
    if (walker.scan == walker.scan_end) return false;
    walker.node = walker.scan;
    open_piece(walker);
    return true;
  }

  void open_piece(Walker& walker) {
    if (walker.room_begin == walker.room_end) {
      walker.room_begin = walked_used_;
      walker.room_end = walked_used_ += kRoom;
    }
    if (walker.piece < 0) {
      walker.piece = static_cast<std::int32_t>(pieces_.size());
      pieces_.push_back({0, 0, -1});
    }
    pieces_[walker.piece].begin = walker.room_begin;
    append(walker, ~walker.piece);
  }

  void append(Walker& walker, std::int32_t mark) {
    Node& node = nodes_[walker.node];
    node.num_waits = mark;
    walked_[walker.room_begin++] = walker.node;
    walker.node = node.successor_or_position;
    __builtin_prefetch(&nodes_[walker.node], 1);
  }

  bool step(Walker& walker) {
    const std::int32_t mark = nodes_[walker.node].num_waits;
    const bool is_new = mark >= 0;
    if (is_new && walker.room_begin < walker.room_end) {
      append(walker, -1);
      return true;
    }
    Piece& piece = pieces_[walker.piece];
    if (~mark == walker.piece) {  // a whole cycle: its room and its piece are free again
      append_cycle_nodes(piece.begin, walker.room_begin);
      close_cycle();
      walker.room_begin = piece.begin;
      return start(walker);
    }
    piece.end = walker.room_begin;
    piece.next = is_new ? static_cast<std::int32_t>(pieces_.size()) : ~mark;
    walker.piece = -1;
    if (!is_new) return start(walker);
    open_piece(walker);  // there was no room left
    return true;
  }

  // What was walked from begin to end - 1 comes next among the cycles.
  void append_cycle_nodes(std::int32_t begin, std::int32_t end) {
    for (std::int32_t k = begin; k < end; ++k) {
      out_.nodes[position_] = walked_[k];
      if (has_trees_) nodes_[walked_[k]].successor_or_position = position_;
      out_.successor[position_] = position_ + 1;
      ++position_;
    }
  }

  void close_cycle() {
    out_.successor[position_ - 1] = out_.cycle_offsets.back();
    out_.cycle_offsets.push_back(position_);
  }

  void join_pieces() {
    for (std::size_t first = 0; first < pieces_.size(); ++first) {
      if (pieces_[first].next < 0) continue;
      for (auto p = static_cast<std::int32_t>(first); pieces_[p].next >= 0;) {
        append_cycle_nodes(pieces_[p].begin, pieces_[p].end);
        p = std::exchange(pieces_[p].next, -1);
      }
      close_cycle();
    }
  }

  const std::int32_t num_nodes_;
  bool has_trees_ = false;  // nodes on no cycle, which look up where those on cycles stand
  LargeVector<Node> nodes_;
  LargeVector<std::int32_t> walked_;
  std::int32_t walked_used_ = 0;
  std::int32_t position_ = 0;  // behind the cycles placed so far
  LargeVector<Piece> pieces_;
  PeeledGraph out_;
};

}  // namespace

PeeledGraph peel_graph(LargeVector<std::int32_t> successor) {
  return Peeler(std::move(successor)).run();
}

}  // namespace kvspan
