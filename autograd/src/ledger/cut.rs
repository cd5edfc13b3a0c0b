//! Minimal cuts of graphs with capacities, by Dinic's algorithm (1970): flow is sent along all shortest paths at once,
//! until the sink cannot be reached.

use std::collections::VecDeque;

/// A directed graph whose edges have capacities.
pub(super) struct FlowGraph {
    /// The edges of each node, as indices.
    of_node: Vec<Vec<usize>>,
    /// The edges, each followed by its reverse.
    edges: Vec<FlowEdge>,
}

#[derive(Clone, Copy)]
struct FlowEdge {
    to: usize,
    /// The capacity that the flow leaves.
    left: u128,
}

impl FlowGraph {
    /// The node that all flow leaves.
    pub(super) const SOURCE: usize = 0;
    /// The node that all flow reaches.
    pub(super) const SINK: usize = 1;

    /// A graph of these nodes, of which the first two are the source and the sink.
    pub(super) fn new(nodes: usize) -> Self {
        FlowGraph { of_node: vec![Vec::new(); nodes], edges: Vec::new() }
    }

    pub(super) fn connect(&mut self, from: usize, to: usize, capacity: u128) {
        for (from, to, left) in [(from, to, capacity), (to, from, 0)] {
            self.of_node[from].push(self.edges.len());
            self.edges.push(FlowEdge { to, left });
        }
    }

    /// The nodes on the source's side of the minimal cut. Of several minimal cuts, it has the fewest such nodes.
    pub(super) fn cut(mut self) -> Vec<bool> {
        loop {
            let distances = self.distances();
            if distances[Self::SINK].is_none() {
                return distances.iter().map(Option::is_some).collect();
            }
            self.saturate(&distances);
        }
    }

    /// The number of edges to each node that flow can reach.
    fn distances(&self) -> Vec<Option<usize>> {
        let mut distances = vec![None; self.of_node.len()];
        distances[Self::SOURCE] = Some(0);
        let mut queue = VecDeque::from([Self::SOURCE]);
        while let Some(node) = queue.pop_front() {
            for FlowEdge { to, left } in self.of_node[node].iter().map(|&edge| self.edges[edge]) {
                if left > 0 && distances[to].is_none() {
                    distances[to] = distances[node].map(|distance| distance + 1);
                    queue.push_back(to);
                }
            }
        }
        distances
    }

    /// Sends flow along the shortest paths until each has an edge without capacity.
    fn saturate(&mut self, distances: &[Option<usize>]) {
        // The edges of each node before this one lead nowhere.
        let mut next = vec![0; self.of_node.len()];
        let (mut path, mut node) = (Vec::new(), Self::SOURCE);
        loop {
            if node == Self::SINK {
                node = self.send(&mut path);
            } else if let Some(&edge) = self.of_node[node].get(next[node]) {
                let FlowEdge { to, left } = self.edges[edge];
                if left > 0 && distances[to] == distances[node].map(|distance| distance + 1) {
                    path.push(edge);
                    node = to;
                } else {
                    next[node] += 1;
                }
            } else {
                let Some(edge) = path.pop() else { return };
                node = self.edges[edge ^ 1].to;
                next[node] += 1;
            }
        }
    }

    /// Sends the flow that fits along a path, and returns the node before its first full edge, where the path now ends.
    fn send(&mut self, path: &mut Vec<usize>) -> usize {
        let flow = path.iter().map(|&edge| self.edges[edge].left).min().unwrap_or(0);
        for &edge in &*path {
            self.edges[edge].left -= flow;
            self.edges[edge ^ 1].left += flow;
        }
        let full = path.iter().position(|&edge| self.edges[edge].left == 0).unwrap_or(0);
        let node = path.get(full).map_or(Self::SOURCE, |&edge| self.edges[edge ^ 1].to);
        path.truncate(full);
        node
    }
}
