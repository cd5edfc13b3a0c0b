//! The graph of a module, from the op calls of one forward pass.

mod attention;
mod batch;
mod calls;
mod fused;
mod program;
mod view;

use std::collections::{BTreeMap, BTreeSet};

use autograd::{ObservedCall, Var, no_grad, observe_outputs};
use nn::{Module, ModuleEntry, ModuleExt, Param, modules_of_calls, walk};
use numcore::{
    DType, Error, Result, Runtime, Shape, Tensor, Within,
    fused::FusedOp,
    ops::{Apply, Op, Rule, Spec, ViewOps, cat},
    pointwise::Number,
};

use super::{
    graph::OnnxGraph,
    parts::{OnnxType, Size},
};

/// A value of the graph: its name there, its shape and its dtype.
#[derive(Clone, Debug)]
struct GraphValue {
    name: String,
    spec: Spec,
}

/// The identity of a tensor while it is in memory: the memory, the layout there, and the dtype. For look-up alone.
type TensorKey = (usize, usize, Vec<usize>, Vec<isize>, DType);

/// The values of a tensor in the graph: its own, or none, if only its call's other outputs are written.
type Written = Option<GraphValue>;

/// A graph that op calls are added to.
struct CallRecorder<'a, R: Runtime> {
    graph: OnnxGraph<'a>,
    /// The parameters by their leaves, with their names in the module.
    parameters: BTreeMap<usize, (String, Param<R>)>,
    /// The values of tensors.
    values: BTreeMap<TensorKey, Written>,
    /// The memory of values that the graph computes.
    computed: BTreeSet<usize>,
    /// The views of parameters that were added, by the parameter's name and the views.
    views: BTreeMap<String, GraphValue>,
    /// The values that were repeated along axes of size 1, by the name of the result.
    repeated: BTreeMap<String, GraphValue>,
    /// Tensors that stay in memory, so that a key names one value.
    kept: Vec<ObservedCall<R>>,
}

/// Builds the graph of the outputs that `forward` computes from inputs. `forward` runs twice, on the inputs and on
/// their elements in reverse order. Values that are no op calls must be equal in both runs. If `any_batch`, the runs
/// have inputs repeated twice and three times along the first axis, and the graph is for any number of examples.
///
/// # Errors
/// Fails if a part of the module is in training, or an op call has no form in the format.
pub(super) fn graph<'a, R: Runtime + 'a>(
    module: &(impl Module<R> + ?Sized),
    inputs: &[(&str, &Tensor<R>)],
    outputs: &[&str],
    forward: impl Fn(&[Var<R>]) -> Result<Vec<Var<R>>>,
    any_batch: bool,
) -> Result<OnnxGraph<'a>> {
    let repeats = if any_batch { [2, 3] } else { [1, 1] };
    let size = if any_batch { common_batch(inputs)? } else { 1 };
    let graphs = [(repeats[0], false), (repeats[1], true)].map(|(times, reversed)| {
        let given = |(name, x): &(_, &Tensor<R>)| {
            let x = if reversed { x.flatten(0, -1)?.flip(&[0])?.reshape(x.shape())? } else { (*x).clone() };
            Ok((*name, if times == 1 { x } else { cat(&vec![&x; times], 0)? }))
        };
        let given = inputs.iter().map(given).collect::<Result<Vec<(&str, Tensor<R>)>>>()?;
        let given: Vec<_> = given.iter().map(|(name, x)| (*name, x)).collect();
        recording(module, &given, outputs, &forward)
    });
    let [first, second] = graphs;
    batch::merged(first?, &second?, repeats.map(|times| times * size))
}

/// The number of examples along the first axis of all inputs.
fn common_batch<R: Runtime>(inputs: &[(&str, &Tensor<R>)]) -> Result<usize> {
    let batch = |x: &Tensor<R>| x.shape().first().copied();
    let Some(size) = inputs.first().and_then(|(_, x)| batch(x)).filter(|&n| n > 0) else {
        return Err(Error::argument("onnx", "a graph for any batch needs an input with examples along its first axis"));
    };
    match inputs.iter().find(|(_, x)| batch(x) != Some(size)) {
        Some((name, x)) => {
            let why = format!("the first axis of `{name}` must be the batch, as that of the first input, {size}");
            Err(Error::shape("onnx", &[*x.shape()], why))
        }
        None => Ok(size),
    }
}

/// Builds the graph of one forward pass.
fn recording<'a, R: Runtime + 'a>(
    module: &(impl Module<R> + ?Sized),
    inputs: &[(&str, &Tensor<R>)],
    outputs: &[&str],
    forward: impl Fn(&[Var<R>]) -> Result<Vec<Var<R>>>,
) -> Result<OnnxGraph<'a>> {
    check_modes(module)?;
    let parameters = module.named_parameters();
    let buffers = module.named_buffers();
    let held = || parameters.iter().map(|(name, _)| name).chain(buffers.iter().map(|(name, _)| name));
    let mut names: BTreeSet<&str> = held().map(String::as_str).collect();
    for name in inputs.iter().map(|(name, _)| *name).chain(outputs.iter().copied()) {
        if name.is_empty() || !names.insert(name) {
            let why = format!("the name `{name}` of an input or output is empty, or another value has it");
            return Err(Error::argument("onnx", why));
        }
    }
    let by_leaf = parameters.iter().map(|(name, p)| (p.leaf().id(), (name.clone(), p.clone()))).collect();
    let mut recorder = CallRecorder {
        graph: OnnxGraph::new("module"),
        parameters: by_leaf,
        values: BTreeMap::new(),
        computed: BTreeSet::new(),
        views: BTreeMap::new(),
        repeated: BTreeMap::new(),
        kept: Vec::new(),
    };
    held().for_each(|name| recorder.graph.reserve(name));
    for (name, buffer) in &buffers {
        recorder.stored(Some(name), &buffer.value())?;
    }
    for (name, x) in inputs {
        let sizes: Vec<Size> = x.shape().iter().map(|&n| Size::Is(n)).collect();
        let name = recorder.graph.input(name, OnnxType::of(x.dtype())?, &sizes);
        recorder.register(x, Some(GraphValue { name, spec: x.spec() }));
    }
    let given: Vec<Var<R>> = inputs.iter().map(|(_, x)| Var::new((*x).clone())).collect();
    let (made, calls) = observe_outputs::<R, _>(|| no_grad(|| forward(&given)));
    let made = made?;
    if made.len() != outputs.len() {
        let why = format!("the module made {} values, and {} names of outputs are given", made.len(), outputs.len());
        return Err(Error::argument("onnx", why));
    }
    let ops: Vec<_> = calls.iter().map(|call| call.op.clone()).collect();
    for (call, path) in calls.into_iter().zip(modules_of_calls(module, &ops)) {
        let what = || format!("`{}` of `{path}`", call.op.op.name());
        let what = if path.is_empty() { format!("`{}`", call.op.op.name()) } else { what() };
        recorder.call(call).within(what)?;
    }
    for (name, y) in outputs.iter().zip(&made) {
        let value = recorder.value(y).within(format!("output `{name}`"))?;
        let sizes: Vec<Size> = value.spec.shape.iter().map(|&n| Size::Is(n)).collect();
        recorder.graph.output(&value.name, name, OnnxType::of(value.spec.dtype)?, &sizes);
    }
    recorder.graph.prune();
    Ok(recorder.graph)
}

/// Checks that no part of a module is in training.
fn check_modes<R: Runtime>(module: &(impl Module<R> + ?Sized)) -> Result<()> {
    let mut training = None;
    walk(module, |name, entry| {
        if let ModuleEntry::Mode(mode) = entry
            && mode.is_training()
        {
            training.get_or_insert_with(|| name.to_owned());
        }
    });
    match training {
        Some(name) => Err(Error::usage("onnx", format!("the module `{name}` is in training: call `eval()` first"))),
        None => Ok(()),
    }
}

impl<'a, R: Runtime + 'a> CallRecorder<'a, R> {
    /// Adds a call, by nodes of its own or by those of its decomposition.
    fn call(&mut self, call: ObservedCall<R>) -> Result<()> {
        if call.op.draws {
            return Err(Error::unsupported("onnx", "it draws random values, which a file cannot repeat"));
        }
        let ins = call.inputs.iter().map(|x| self.value(x)).collect::<Result<Vec<_>>>()?;
        let names = match self.nodes(&call.op.op, &ins, &call.op.outputs)? {
            Some(names) => names.into_iter().map(Some).collect(),
            None => self.decomposed(&call)?,
        };
        for (k, (y, spec)) in call.outputs.iter().zip(&call.op.outputs).enumerate() {
            let name = names.get(k).cloned().flatten();
            self.register(y, name.map(|name| GraphValue { name, spec: *spec }));
        }
        self.kept.push(call);
        Ok(())
    }

    /// Adds the calls of a decomposition, and returns the names of its outputs.
    fn decomposed(&mut self, call: &ObservedCall<R>) -> Result<Vec<Option<String>>> {
        let Op::Fused(fused) = &call.op.op else {
            return Err(Error::unsupported("onnx", "it has no form in opset 17"));
        };
        let fused: &FusedOp = fused;
        let ins: Vec<&Var<R>> = call.inputs.iter().collect();
        let (outs, calls) = observe_outputs::<R, _>(|| no_grad(|| fused.decompose(&ins)));
        let outs = outs?;
        calls.into_iter().try_for_each(|part| {
            let name = part.op.op.name();
            self.call(part).within(format!("`{name}`"))
        })?;
        let name = |y: &Var<R>| match self.values.get(&key(&y.value()?)) {
            Some(None) => Ok(None),
            _ => self.value(y).map(|value| Some(value.name)),
        };
        outs.iter().map(name).collect()
    }

    /// The value of a variable: computed, a parameter or a view of one, or a constant.
    fn value(&mut self, x: &Var<R>) -> Result<GraphValue> {
        if let Some(view) = x.leaf_view() {
            let leaf = view.leaf();
            let (name, parameter) = self.parameters.get(&leaf.id()).cloned().ok_or_else(|| {
                Error::state(&*leaf.name(), "is no parameter of this module: save a module that holds all it reads")
            })?;
            let spec = leaf.spec();
            let bytes = move || parameter.value()?.to_bytes();
            let name = self.graph.tensor(&name, OnnxType::of(spec.dtype)?, &spec.shape, bytes);
            let mut value = GraphValue { name, spec };
            for op in view.views() {
                let key = format!("{} {op:?}", value.name);
                value = match self.views.get(&key) {
                    Some(known) => known.clone(),
                    None => self.view(op, &value)?,
                };
                self.views.insert(key, value.clone());
            }
            return Ok(value);
        }
        let tensor = x.value()?;
        match self.values.get(&key(&tensor)) {
            Some(Some(value)) => return Ok(value.clone()),
            Some(None) => return Err(Error::unsupported("onnx", "it reads an output that the format does not have")),
            None => {}
        }
        if self.computed.contains(&tensor.memory_id()) {
            let why = "it reads a view of a computed value that was not made by an op call on variables";
            return Err(Error::unsupported("onnx", why));
        }
        self.stored(None, &tensor)
    }

    /// Adds a tensor that the module holds or made, equal elements as one number.
    fn stored(&mut self, name: Option<&str>, tensor: &Tensor<R>) -> Result<GraphValue> {
        let spec = tensor.spec();
        let kind = OnnxType::of(spec.dtype)?;
        let values = tensor.to_f64s()?;
        let value = match values.first().filter(|first| values.iter().all(|x| x.to_bits() == first.to_bits())) {
            Some(&all) => {
                let number = if spec.dtype.is_float() { Number::Float(all) } else { Number::Int(all as i64) };
                let number = self.graph.number(number, spec.dtype)?;
                self.expanded(&number, spec.shape)
            }
            None => {
                let kept = tensor.clone();
                let bytes = move || kept.to_bytes();
                match name {
                    Some(name) => self.graph.tensor(name, kind, &spec.shape, bytes),
                    None => self.graph.made(kind, &spec.shape, bytes),
                }
            }
        };
        let value = GraphValue { name: value, spec };
        self.values.insert(key(tensor), Some(value.clone()));
        Ok(value)
    }

    /// Adds the repetition of a value along axes of size 1 and new axes in front.
    fn expanded(&mut self, name: &str, shape: Shape) -> String {
        if shape.rank() == 0 {
            return name.to_owned();
        }
        let sizes = self.sizes(&shape);
        self.graph.op("Expand", &[name, &sizes])
    }

    /// Adds a reshape.
    fn reshaped(&mut self, name: &str, shape: &[usize]) -> String {
        let sizes = self.sizes(shape);
        self.graph.op("Reshape", &[name, &sizes])
    }

    fn sizes(&mut self, sizes: &[usize]) -> String {
        self.graph.ints(&whole(sizes))
    }

    fn register(&mut self, tensor: &Tensor<R>, value: Written) {
        self.computed.insert(tensor.memory_id());
        self.values.insert(key(tensor), value);
    }
}

fn key<R: Runtime>(x: &Tensor<R>) -> TensorKey {
    let layout = x.layout();
    (x.memory_id(), layout.offset(), layout.dims().to_vec(), layout.strides().to_vec(), x.dtype())
}

/// Sizes as integers of a node.
fn whole(sizes: &[usize]) -> Vec<i64> {
    sizes.iter().map(|&n| n as i64).collect()
}
