#include "kvspan/graph.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <boost/graph/adjacency_list.hpp>
#include <boost/graph/strong_components.hpp>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

namespace kvspan {
namespace {

using Edges = std::vector<std::pair<std::int32_t, std::int32_t>>;
using Ints = std::vector<std::int32_t>;

struct OwnedGraph {
  Ints offsets;
  Ints targets;

  OwnedGraph(std::int32_t num_nodes, const Edges& edges) : offsets(num_nodes + 1, 0) {
    for (const auto& [source, target] : edges) ++offsets[source + 1];
    std::partial_sum(offsets.begin(), offsets.end(), offsets.begin());
    targets.resize(edges.size());
    Ints next(offsets.begin(), offsets.end() - 1);
    for (const auto& [source, target] : edges) targets[next[source]++] = target;
  }

  CsrGraph view() const { return {offsets, targets}; }
};

// The component of each node, after checking that nodes and offsets are in order.
Ints component_of(const Components& components, std::int32_t num_nodes) {
  Ints component(num_nodes, -1);
  EXPECT_EQ(components.nodes.size(), static_cast<std::size_t>(num_nodes));
  EXPECT_EQ(components.offsets.front(), 0);
  EXPECT_EQ(components.offsets.back(), num_nodes);
  for (std::int32_t c = 0; c < components.size(); ++c) {
    EXPECT_LT(components.offsets[c], components.offsets[c + 1]);
    for (std::int32_t k = components.offsets[c]; k < components.offsets[c + 1]; ++k) {
      EXPECT_EQ(std::exchange(component[components.nodes[k]], c), -1);
      EXPECT_EQ(components.position_of[components.nodes[k]], k);
    }
  }
  return component;
}

// Boost.Graph is the oracle: the same partition, and components in reverse topological order.
void expect_like_boost(std::int32_t num_nodes, const Edges& edges, const Components& components) {
  const Ints ours = component_of(components, num_nodes);
  boost::adjacency_list<boost::vecS, boost::vecS, boost::directedS> graph(num_nodes);
  for (const auto& [source, target] : edges) boost::add_edge(source, target, graph);
  Ints theirs(num_nodes);
  const int count = boost::strong_components(
      graph,
      boost::make_iterator_property_map(theirs.begin(), boost::get(boost::vertex_index, graph)));
  ASSERT_EQ(components.size(), count);
  Ints name(count, -1);  // Boost's number of each of ours
  for (std::int32_t node = 0; node < num_nodes; ++node) {
    std::int32_t& known = name[ours[node]];
    if (known < 0) known = theirs[node];
    ASSERT_EQ(known, theirs[node]) << "node " << node;
  }
  for (const auto& [source, target] : edges) ASSERT_GE(ours[source], ours[target]);
}

// The components of a peeled graph, after checking that positions are in order.
Components components_of(const PeeledGraph& graph, const Ints& successor) {
  const auto num_nodes = static_cast<std::int32_t>(successor.size());
  Components components;
  components.nodes = graph.nodes;
  components.offsets = graph.cycle_offsets;
  for (std::int32_t k = components.offsets.back(); k < num_nodes;) {
    components.offsets.push_back(++k);
  }
  components.position_of.resize(num_nodes);
  for (std::int32_t k = 0; k < num_nodes; ++k) components.position_of[graph.nodes[k]] = k;
  for (std::int32_t node = 0; node < num_nodes; ++node) {
    const std::int32_t next = successor[node];
    EXPECT_EQ(graph.successor[components.position_of[node]],
              next < 0 ? next : components.position_of[next]);
  }
  for (std::int32_t cycle = 0; cycle < graph.num_cycles(); ++cycle) {
    for (std::int32_t k = graph.cycle_offsets[cycle]; k + 1 < graph.cycle_offsets[cycle + 1]; ++k) {
      EXPECT_EQ(graph.successor[k], k + 1);
    }
  }
  return components;
}

PeeledGraph peel(const Ints& successor) {
  return peel_graph(LargeVector<std::int32_t>(successor.begin(), successor.end()));
}

TEST(GraphTest, Small) {
  for (const auto& [num_nodes, edges] : std::vector<std::pair<std::int32_t, Edges>>{
           {0, {}},
           {3, {}},
           {1, {{0, 0}}},
           {2, {{0, 1}, {1, 0}}},
           {2, {{0, 1}, {0, 1}}},
           {4, {{0, 1}, {1, 2}, {2, 1}, {2, 3}}},
           {5, {{4, 3}, {3, 2}, {2, 4}, {1, 4}, {0, 1}, {2, 2}}},
           {6, {{0, 1}, {1, 2}, {2, 0}, {3, 4}, {4, 5}, {5, 3}, {0, 3}}},
       }) {
    const OwnedGraph graph(num_nodes, edges);
    expect_like_boost(num_nodes, edges, strongly_connected_components(graph.view()));
  }
}

TEST(GraphTest, RandomGraphs) {
  std::mt19937 random(1);
  for (int round = 0; round < 2000; ++round) {
    const std::int32_t num_nodes = std::uniform_int_distribution(1, 30)(random);
    Edges edges(std::uniform_int_distribution(0, 2 * num_nodes)(random));
    std::uniform_int_distribution<std::int32_t> node(0, num_nodes - 1);
    for (auto& edge : edges) edge = {node(random), node(random)};
    const OwnedGraph graph(num_nodes, edges);
    expect_like_boost(num_nodes, edges, strongly_connected_components(graph.view()));
  }
}

TEST(GraphTest, RandomSuccessors) {
  std::mt19937 random(2);
  for (int round = 0; round < 2000; ++round) {
    const std::int32_t num_nodes = std::uniform_int_distribution(1, 40)(random);
    Ints successor(num_nodes);
    Edges edges;
    for (std::int32_t node = 0; node < num_nodes; ++node) {
      successor[node] = std::uniform_int_distribution(-2, num_nodes - 1)(random);
      if (successor[node] >= 0) edges.emplace_back(node, successor[node]);
    }
    expect_like_boost(num_nodes, edges, components_of(peel(successor), successor));
  }
}

// Large enough that a cycle is walked in several places, in several pieces each.
TEST(GraphTest, LargePermutationsAndRandomSuccessors) {
  std::mt19937 random(3);
  const std::int32_t num_nodes = 150'000;
  for (const bool is_permutation : {true, false}) {
    Ints successor(num_nodes);
    std::iota(successor.begin(), successor.end(), 0);
    std::shuffle(successor.begin(), successor.end(), random);
    Edges edges;
    for (std::int32_t node = 0; node < num_nodes; ++node) {
      if (!is_permutation) successor[node] = static_cast<std::int32_t>(random() % num_nodes);
      edges.emplace_back(node, successor[node]);
    }
    expect_like_boost(num_nodes, edges, components_of(peel(successor), successor));
  }
}

TEST(GraphTest, LargeGraphsNeedNoStack) {
  const std::int32_t n = 1000000;
  Ints successor(n);
  std::iota(successor.begin(), successor.end(), 1);
  successor.back() = -1;
  EXPECT_EQ(peel(successor).num_cycles(), 0);
  successor.back() = 0;
  EXPECT_EQ(peel(successor).num_cycles(), 1);
  EXPECT_EQ(peel(successor).cycle_offsets.back(), n);
}

}  // namespace
}  // namespace kvspan
