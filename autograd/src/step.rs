//! A node of a backward pass: the inputs of its gradient rule, and the delivery of its results.

use std::sync::Arc;

use numcore::{
    Error, ErrorKind, Result, Runtime,
    ops::{Apply, Backprop, Op, Outs, Rule, Spec, all_by_example},
};
use smallvec::SmallVec;

use crate::{
    BackwardHook, Var, anomaly, is_grad_enabled,
    node::{Edge, Node, NodeCall, Saved},
    sweep::{PendingGrads, Sweep, run},
};

/// The context of a node's gradient rule during a backward pass.
pub(crate) struct NodeStep<'a, R: Runtime> {
    pub(crate) sweep: &'a mut Sweep<R>,
    pub(crate) hook: &'a mut dyn BackwardHook<R>,
    pub(crate) node: &'a Arc<Node<R>>,
    pub(crate) saved: Saved<R>,
    pub(crate) upstream: PendingGrads<R>,
    /// True, for each input, if its gradient was given.
    pub(crate) given: &'a mut [bool],
}

impl<R: Runtime> NodeStep<'_, R> {
    /// The error for an input or output that this node's call does not have.
    fn missing(&self, what: &'static str, i: usize, count: usize) -> Error {
        Error::range(self.node.call.name(), what, i, format!("in 0..{count} where its gradient rule names one"))
    }

    /// Checks a gradient that a user's [`Function`](crate::Function) gives for input `i`: it must have the input's
    /// shape and dtype. The rules of this workspace are covered by tests instead. Each input gets one gradient: a
    /// second would be lost or added, depending on the origin of the input.
    fn check_given(&self, i: usize, spec: impl FnOnce() -> Result<Spec>) -> Result<()> {
        let name = self.node.call.name();
        if self.given[i] {
            let why = format!("its gradient rule gave two gradients for input {i}; add them, and give the sum");
            return Err(Error::usage(name, why));
        }
        if !matches!(self.node.call, NodeCall::Function(_)) {
            return Ok(());
        }
        let (given, due) = (spec()?, self.node.input_spec(i));
        if given == due {
            return Ok(());
        }
        let why = format!(
            "its gradient rule gave {} {} for input {i}, which is {} {}",
            given.dtype, given.shape, due.dtype, due.shape
        );
        Err(if given.dtype == due.dtype {
            Error::shape(name, &[given.shape, due.shape], why)
        } else {
            Error::dtype(name, &[given.dtype, due.dtype], why)
        })
    }

    fn not_saved(&self, what: &str, i: usize) -> Error {
        let why = format!("its gradient rule asked for {what} {i}, which it had not declared");
        ErrorKind::NoGradient { op: self.node.call.name(), why }.into()
    }
}

impl<R: Runtime> Backprop<Var<R>> for NodeStep<'_, R> {
    fn wants(&self, i: usize) -> bool {
        self.node.edges.get(i).is_some_and(Option::is_some)
    }

    fn input_spec(&self, i: usize) -> Result<Spec> {
        let count = self.inputs();
        if i < count { Ok(self.node.input_spec(i)) } else { Err(self.missing("input", i, count)) }
    }

    fn output_spec(&self, k: usize) -> Result<Spec> {
        let count = self.upstream.len();
        if k < count { Ok(self.node.output_spec(k)) } else { Err(self.missing("output", k, count)) }
    }

    fn inputs(&self) -> usize {
        self.node.edges.len()
    }

    fn input(&mut self, i: usize) -> Result<Var<R>> {
        self.input_spec(i)?;
        let Some(saved) = self.saved.inputs[i].clone() else { return Err(self.not_saved("input", i)) };
        let value = saved.fetch(&mut self.sweep.remade, self.hook)?;
        let edge = self.node.edges[i].clone().filter(|_| self.sweep.options.create_graph);
        Ok(Var { value, edge })
    }

    fn output(&mut self, k: usize) -> Result<Var<R>> {
        self.output_spec(k)?;
        let Some(saved) = self.saved.outputs[k].clone() else { return Err(self.not_saved("output", k)) };
        let value = saved.fetch(&mut self.sweep.remade, self.hook)?;
        let edge = self.sweep.options.create_graph.then(|| Edge::Node(self.node.clone(), k as u32));
        Ok(Var { edge: edge.filter(|_| value.spec().dtype.is_float()), value })
    }

    fn upstream(&mut self, k: usize) -> Result<Option<Var<R>>> {
        self.output_spec(k)?;
        Ok(self.upstream[k].clone())
    }

    fn is_recorded(&self) -> bool {
        self.sweep.options.create_graph && is_grad_enabled()
    }

    fn give(&mut self, i: usize, op: Op, ins: &[&Var<R>]) -> Result<()> {
        let Some(edge) = self.node.edges.get(i) else { return Err(self.missing("input", i, self.inputs())) };
        let Some(to) = edge else { return Ok(()) };
        self.check_given(i, || result(&op, ins))?;
        self.given[i] = true;
        if anomaly::looks_at_gradients() {
            // A value of its own: the memory of a gradient may have a sum of others in it.
            let gradient = run(op.clone(), ins)?;
            anomaly::check_gradient(&gradient, i, self.node, &self.upstream)?;
        }
        self.sweep.deliver(to, op, ins, self.hook)
    }

    fn give_all(&mut self, first: usize, op: Op, ins: &[&Var<R>]) -> Result<()> {
        let specs: SmallVec<[Spec; 8]> = ins.iter().map(|v| v.spec()).collect();
        let outs = op.infer(&specs)?;
        let Some(edges) = self.node.edges.get(first..first + outs.len()) else {
            return Err(self.missing("input", first + outs.len() - 1, self.inputs()));
        };
        for (i, spec) in (first..).zip(&outs) {
            if self.wants(i) {
                self.check_given(i, || Ok(*spec))?;
                self.given[i] = true;
            }
        }
        if anomaly::looks_at_gradients() {
            for (i, gradient) in (first..).zip(Var::apply(op.clone(), ins)?).filter(|(i, _)| self.wants(*i)) {
                anomaly::check_gradient(&gradient, i, self.node, &self.upstream)?;
            }
        }
        match self.sweep.options.examples {
            Some(examples) => self.give_by_example(edges, &op, ins, examples),
            None => self.sweep.deliver_all(edges, op, ins, self.hook),
        }
    }
}

impl<R: Runtime> NodeStep<'_, R> {
    /// Gives the outputs of an op call as gradients: those of leaves for each example.
    fn give_by_example(&mut self, to: &[Option<Edge<R>>], op: &Op, ins: &[&Var<R>], examples: usize) -> Result<()> {
        let to_leaf = |edge: &Option<Edge<R>>| matches!(edge, Some(Edge::Leaf(_)));
        let apart = if to.iter().any(to_leaf) { all_by_example(op, ins, examples)? } else { Outs::new() };
        for (k, out) in Var::apply(op.clone(), ins)?.iter().enumerate() {
            match &to[k] {
                Some(Edge::Leaf(view)) => {
                    self.sweep.add_part(view, apart[k].clone())?;
                    self.sweep.finish_edge(view.leaf(), self.hook)?;
                }
                Some(edge) => self.sweep.deliver(edge, Op::identity(), &[out], self.hook)?,
                None => {}
            }
        }
        Ok(())
    }
}

/// The shape and dtype of the output of `op`; an error if it has several outputs.
fn result<R: Runtime>(op: &Op, ins: &[&Var<R>]) -> Result<Spec> {
    let specs: SmallVec<[Spec; 8]> = ins.iter().map(|v| v.spec()).collect();
    match op.infer(&specs)?[..] {
        [spec] => Ok(spec),
        ref outs => {
            Err(Error::usage(op.name(), format!("has {} outputs; `give` takes one, `give_all` more", outs.len())))
        }
    }
}
