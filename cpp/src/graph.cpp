#include "kvspan/graph.h"

#include <algorithm>

namespace kvspan {
namespace {

// The edges of a node are numbered first_edge(node) to end_edge(node) - 1.
struct CsrEdges {
  const CsrGraph& graph;

  std::int32_t num_nodes() const { return static_cast<std::int32_t>(graph.offsets.size()) - 1; }
  std::int32_t first_edge(std::int32_t node) const { return graph.offsets[node]; }
  std::int32_t end_edge(std::int32_t node) const { return graph.offsets[node + 1]; }
  std::int32_t target(std::int32_t edge) const { return graph.targets[edge]; }
  void prefetch_targets(std::int32_t, std::span<const std::int32_t>) const {}
};

struct SuccessorEdges {
  std::span<const std::int32_t> successor;

  std::int32_t num_nodes() const { return static_cast<std::int32_t>(successor.size()); }
  std::int32_t first_edge(std::int32_t node) const { return node; }
  std::int32_t end_edge(std::int32_t node) const { return node + (successor[node] >= 0); }
  std::int32_t target(std::int32_t edge) const { return successor[edge]; }
  // What a search from the node looks at after it.
  void prefetch_targets(std::int32_t node, std::span<const std::int32_t> state) const {
    const std::int32_t next = successor[node];
    if (next < 0) return;
    __builtin_prefetch(&state[next]);
    __builtin_prefetch(&successor[next]);
  }
};

constexpr std::int32_t kPrefetchDistance = 16;

// A node whose edges are being followed.
struct Frame {
  std::int32_t node;
  std::int32_t next_edge;
  std::int32_t number;  // the order in which it was reached, from 1
};

template <typename Edges>
Components find_components(const Edges& edges) {
  const std::int32_t num_nodes = edges.num_nodes();
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
    path.push_back({node, edges.first_edge(node), num_reached});
  };
  const auto finish = [&](std::int32_t node) {
    lowest[node] = past_numbers + static_cast<std::int32_t>(components.nodes.size());
    components.nodes.push_back(node);
  };

  for (std::int32_t first = 0; first < num_nodes; ++first) {
    edges.prefetch_targets(std::min(first + kPrefetchDistance, num_nodes - 1), lowest);
    if (lowest[first] != 0) continue;
    enter(first);
    while (!path.empty()) {
      Frame& frame = path.back();
      const std::int32_t node = frame.node;
      if (frame.next_edge < edges.end_edge(node)) {
        const std::int32_t target = edges.target(frame.next_edge);
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

}  // namespace

Components strongly_connected_components(const CsrGraph& graph) {
  return find_components(CsrEdges{graph});
}

Components strongly_connected_components(std::span<const std::int32_t> successor) {
  return find_components(SuccessorEdges{successor});
}

}  // namespace kvspan
