//! Graphs whose names are resolved: each value has a place of its own, in the model and all graphs within it.

use autograd::Var;
use nn::Buffer;
use numcore::{Result, Runtime, Within};

use super::{
    call::{NodeAttributes, NodeCall, NodeOutputs, bad},
    control, host_ops,
    value::NodeValue,
};

/// Nodes in an order in which every value is made before it is read.
pub(super) struct ResolvedGraph<R: Runtime> {
    /// The places of the values that each run is given.
    pub(super) inputs: Vec<usize>,
    pub(super) outputs: Vec<usize>,
    pub(super) nodes: Vec<ResolvedNode<R>>,
}

/// A node whose operator is known.
pub(super) struct ResolvedNode<R: Runtime> {
    pub(super) op: String,
    /// The operator with the node's name, for errors.
    pub(super) label: String,
    pub(super) rule: NodeRule<R>,
    /// The places of the inputs; `None` is left out.
    pub(super) ins: Vec<Option<usize>>,
    pub(super) outs: Vec<Option<usize>>,
    pub(super) attributes: NodeAttributes<R>,
    /// The graphs among the attributes.
    pub(super) graphs: Vec<(String, ResolvedGraph<R>)>,
    /// The places that no later node reads.
    pub(super) last: Vec<usize>,
}

/// The computation of a node.
pub(super) enum NodeRule<R: Runtime> {
    Row(fn(&NodeCall<'_, R>) -> NodeOutputs<R>),
    /// An operator whose attributes are graphs.
    Special(control::SpecialRule<R>),
}

/// The values of one forward pass, each at its place, and what all nodes share.
pub(super) struct PassFrame<'a, R: Runtime> {
    pub(super) device: &'a R,
    pub(super) opset: i64,
    pub(super) training: bool,
    /// The buffer at each place that has one.
    pub(super) buffers: &'a dyn Fn(usize) -> Option<Buffer<R>>,
}

/// The value at each place.
pub(super) type PassValues<R> = Vec<Option<NodeValue<R>>>;

impl<R: Runtime> ResolvedGraph<R> {
    /// Runs the nodes, and returns the outputs.
    pub(super) fn run(&self, frame: &PassFrame<'_, R>, values: &mut PassValues<R>) -> Result<Vec<NodeValue<R>>> {
        for node in &self.nodes {
            let outs = node.run(frame, values).within(&node.label)?;
            if outs.len() < node.outs.iter().flatten().count() {
                let why = format!("makes {} outputs, and the node names {}", outs.len(), node.outs.len());
                return Err(bad(why)).within(&node.label);
            }
            for (place, out) in node.outs.iter().zip(outs) {
                if let Some(place) = place {
                    values[*place] = Some(out);
                }
            }
            node.last.iter().for_each(|&place| values[place] = None);
        }
        let output = |&place: &usize| values[place].clone().ok_or_else(|| bad("an output of the graph has no value"));
        self.outputs.iter().map(output).collect()
    }

    /// Runs the nodes on these inputs.
    pub(super) fn call(
        &self,
        frame: &PassFrame<'_, R>,
        values: &mut PassValues<R>,
        ins: impl IntoIterator<Item = NodeValue<R>>,
    ) -> Result<Vec<NodeValue<R>>> {
        let mut given = 0;
        for (place, x) in self.inputs.iter().zip(ins) {
            values[*place] = Some(x);
            given += 1;
        }
        if given != self.inputs.len() {
            return Err(bad(format!("a graph with {} inputs is given {given}", self.inputs.len())));
        }
        self.run(frame, values)
    }
}

impl<R: Runtime> ResolvedNode<R> {
    fn run(&self, frame: &PassFrame<'_, R>, values: &mut PassValues<R>) -> Result<Vec<NodeValue<R>>> {
        let ins = self.ins.iter().map(|place| place.and_then(|place| values[place].clone())).collect();
        let call = NodeCall { node: self, ins, frame };
        match &self.rule {
            NodeRule::Special(control) => control(&call, values),
            NodeRule::Row(row) => {
                if let Some(hosts) = host_ops::run(&call, &self.op) {
                    return Ok(hosts.into_iter().map(NodeValue::of).collect());
                }
                Ok(on_device(row(&call)?))
            }
        }
    }

    /// A graph among the attributes.
    pub(super) fn graph(&self, name: &str) -> Option<&ResolvedGraph<R>> {
        self.graphs.iter().find(|(known, _)| known == name).map(|(_, graph)| graph)
    }
}

/// Variables as values.
pub(super) fn on_device<R: Runtime>(made: Vec<Var<R>>) -> Vec<NodeValue<R>> {
    made.into_iter().map(NodeValue::Device).collect()
}
