// Strongly connected components of a directed graph.
//
// Tarjan's algorithm in Pearce's form (one number per node; "A space-efficient algorithm for
// finding strongly connected components", 2016), with the recursion unrolled: a chain of a million
// nodes needs no call stack. Time O(nodes + edges), and no allocation per node.
#pragma once

#include <cstdint>
#include <span>

#include "kvspan/large_vector.h"

namespace kvspan {

// Compressed sparse rows: the edges of node v lead to targets[offsets[v]] to
// targets[offsets[v + 1] - 1]. Self loops and repeated edges are allowed.
struct CsrGraph {
  std::span<const std::int32_t> offsets;  // [num_nodes + 1], not decreasing, from 0
  std::span<const std::int32_t> targets;  // [num_edges], in [0, num_nodes)
};

// Component c holds the nodes nodes[offsets[c]] to nodes[offsets[c + 1] - 1]. Components come in
// reverse topological order: an edge from component a to another, b, has a > b.
struct Components {
  LargeVector<std::int32_t> nodes;        // [num_nodes]
  LargeVector<std::int32_t> position_of;  // [num_nodes], where each node stands in nodes
  LargeVector<std::int32_t> offsets;      // [num_components + 1]

  std::int32_t size() const { return static_cast<std::int32_t>(offsets.size()) - 1; }
};

// Fewer than 2^30 nodes. Assumes a valid graph.
Components strongly_connected_components(const CsrGraph& graph);

// A graph of at most one edge from each node, its nodes in another order: cycle by cycle, each in
// the order of its edges, then the nodes on none, each behind the one it leads to. A node's place
// in that order is its position.
struct PeeledGraph {
  LargeVector<std::int32_t> nodes;          // [num_nodes], by position
  LargeVector<std::int32_t> successor;      // [num_nodes], by position, a position or as given
  LargeVector<std::int32_t> cycle_offsets;  // [num_cycles + 1], from 0: positions

  std::int32_t num_cycles() const { return static_cast<std::int32_t>(cycle_offsets.size()) - 1; }
};

// The strongly connected components of such a graph: its cycles, and each other node alone. That
// takes no search: what is on no cycle is peeled off. Several times as fast where edges go
// anywhere. successor: [num_nodes], to which node each leads, or negative for none.
PeeledGraph peel_graph(LargeVector<std::int32_t> successor);

}  // namespace kvspan
