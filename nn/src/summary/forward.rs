//! [`ModuleSummary`]: what a forward pass does, module by module.

use std::fmt;

use autograd::{ObservedOp, Var, observe_ops, observe_outputs, saved_bytes};
use numcore::{Result, Runtime, Tensor, ops::Spec};

use super::{
    table::grouped,
    tree::{ModuleNode, ModuleTree},
};
use crate::Module;

/// The number of elements in a model's parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ParameterCount {
    /// Elements of the parameters that require gradients.
    pub trainable: usize,
    /// Elements of all parameters.
    pub total: usize,
}

/// The summary of a forward pass, module by module, as `torchinfo` shows it;
/// [`ModuleExt::summarize`](crate::ModuleExt::summarize) makes one.
///
/// A module is told by its parameters: an op call that reads some is their module's. Any other is of the innermost
/// module that holds both the parameters read last before it and those read next after it. So a call between two layers
/// is of the module that both are parts of.
#[derive(Clone, Debug, PartialEq)]
pub struct ModuleSummary {
    /// The whole model, then its modules in its own order. Numbers of a module include those of its parts.
    pub modules: Vec<ModuleRow>,
}

/// A module of a [`ModuleSummary`].
#[derive(Clone, Debug, PartialEq)]
pub struct ModuleRow {
    /// The module's full name; empty for the whole model.
    pub path: String,
    /// The number of modules that it is within.
    pub depth: usize,
    /// The shape and dtype that its last op call gave, if it has any.
    pub output: Option<Spec>,
    /// Elements of its parameters. A shared parameter is counted once, where it comes first.
    pub parameters: ParameterCount,
    /// Bytes of its parameters.
    pub parameter_bytes: u64,
    /// Floating-point operations of the forward pass, those of matrix products, attention and convolutions, as
    /// PyTorch's `FlopCounterMode` counts them.
    pub flops: u64,
    /// Bytes that the tape keeps for the backward pass. The values of parameters are none of these.
    pub saved_bytes: u64,
    /// Op calls.
    pub ops: u64,
}

impl ModuleSummary {
    pub(crate) fn of<R: Runtime>(
        model: &(impl Module<R> + ?Sized),
        forward: impl FnOnce() -> Result<Var<R>>,
    ) -> Result<Self> {
        let tree = ModuleTree::of(model);
        let (output, calls) = observe_ops(forward);
        let saved = saved_bytes(&output?);
        let mut rows = blank(&tree);
        for (module, parameter) in &tree.parameters {
            let (numel, dtype) = (parameter.shape().numel(), parameter.dtype());
            for row in tree.upwards(*module) {
                let row = &mut rows[row];
                row.parameters.total += numel;
                row.parameters.trainable += if parameter.requires_grad() { numel } else { 0 };
                row.parameter_bytes += (numel * dtype.size()) as u64;
            }
        }
        for (call, module) in calls.iter().zip(owners(&tree, &calls)) {
            let kept = |&(_, bytes): &(u64, usize)| bytes as u64;
            let kept = call.node.and_then(|node| saved.iter().find(|(number, _)| *number == node)).map_or(0, kept);
            let flops = call.flops();
            for row in tree.upwards(module) {
                let row = &mut rows[row];
                row.output = call.outputs.first().copied().or(row.output);
                row.flops += flops;
                row.saved_bytes += kept;
                row.ops += 1;
            }
        }
        Ok(ModuleSummary { modules: rows })
    }

    /// The module of this full name.
    pub fn module(&self, path: &str) -> Option<&ModuleRow> {
        self.modules.iter().find(|row| row.path == path)
    }
}

fn blank<R: Runtime>(tree: &ModuleTree<R>) -> Vec<ModuleRow> {
    let row = |(k, node): (usize, &ModuleNode)| ModuleRow {
        path: node.path.clone(),
        depth: tree.upwards(k).count() - 1,
        output: None,
        parameters: ParameterCount::default(),
        parameter_bytes: 0,
        flops: 0,
        saved_bytes: 0,
        ops: 0,
    };
    tree.modules.iter().enumerate().map(row).collect()
}

/// The outputs of modules, by their full names.
pub type ModuleOutputs<R> = Vec<(String, Tensor<R>)>;

/// The outputs of the last op call of each module; see [`ModuleExt::module_outputs`](crate::ModuleExt::module_outputs).
pub(crate) fn module_outputs<R: Runtime, T>(
    model: &(impl Module<R> + ?Sized),
    forward: impl FnOnce() -> Result<T>,
) -> Result<(T, ModuleOutputs<R>)> {
    let tree = ModuleTree::of(model);
    let (result, seen) = observe_outputs::<R, _>(forward);
    let (calls, outputs): (Vec<ObservedOp>, Vec<Vec<Tensor<R>>>) =
        seen.into_iter().map(|call| (call.op, call.outputs)).unzip();
    let mut last = vec![None; tree.modules.len()];
    for (call, module) in owners(&tree, &calls).into_iter().enumerate() {
        tree.upwards(module).for_each(|module| last[module] = Some(call));
    }
    let named = |(node, call): (&ModuleNode, Option<usize>)| {
        let output = outputs[call?].first().cloned()?;
        Some((node.path.clone(), output))
    };
    Ok((result?, tree.modules.iter().zip(last).filter_map(named).collect()))
}

/// The full name of the module of each op call of a model's forward pass, told as in [`ModuleSummary`]; empty for the
/// whole model.
pub fn modules_of_calls<R: Runtime>(model: &(impl Module<R> + ?Sized), calls: &[ObservedOp]) -> Vec<String> {
    let tree = ModuleTree::of(model);
    owners(&tree, calls).into_iter().map(|module| tree.modules[module].path.clone()).collect()
}

/// The module of each call.
fn owners<R: Runtime>(tree: &ModuleTree<R>, calls: &[ObservedOp]) -> Vec<usize> {
    let own = |call: &ObservedOp| {
        let modules = call.leaves.iter().filter_map(|leaf| tree.of_leaf.get(leaf).copied());
        modules.reduce(|a, b| tree.common(a, b))
    };
    let known: Vec<Option<usize>> = calls.iter().map(own).collect();
    let mut next = vec![0; calls.len()];
    let mut after = 0;
    for (k, module) in known.iter().enumerate().rev() {
        after = module.unwrap_or(after);
        next[k] = after;
    }
    let mut before = 0;
    let owner = |(module, next): (&Option<usize>, usize)| {
        before = module.unwrap_or(before);
        module.unwrap_or_else(|| tree.common(before, next))
    };
    known.iter().zip(next).map(owner).collect()
}

/// A table: a line per module, indented by its depth, then the sums.
impl fmt::Display for ModuleSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let titles = ["module", "output", "parameters", "FLOPs", "saved bytes"].map(String::from);
        let rows: Vec<[String; 5]> = [titles].into_iter().chain(self.modules.iter().map(ModuleRow::cells)).collect();
        let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let [a, b, c, d, e] = std::array::from_fn(width);
        let rule = "─".repeat(a + b + c + d + e + 8);
        for (k, [module, output, parameters, flops, saved]) in rows.iter().enumerate() {
            writeln!(f, "{module:<a$}  {output:<b$}  {parameters:>c$}  {flops:>d$}  {saved:>e$}")?;
            if k == 0 {
                writeln!(f, "{rule}")?;
            }
        }
        let Some(whole) = self.modules.first() else { return Ok(()) };
        let ParameterCount { trainable, total } = whole.parameters;
        writeln!(f, "{rule}")?;
        writeln!(
            f,
            "{} parameters, {} trained, {} bytes",
            grouped(total),
            grouped(trainable),
            sum(whole.parameter_bytes)
        )?;
        writeln!(f, "{} FLOPs forward, {} bytes kept for backward", sum(whole.flops), sum(whole.saved_bytes))
    }
}

impl ModuleRow {
    fn cells(&self) -> [String; 5] {
        let name = self.path.rsplit('.').next().unwrap_or_default();
        let name = if self.path.is_empty() { "(model)" } else { name };
        let output = self.output.map_or_else(String::new, |spec| format!("{} {}", spec.dtype, spec.shape));
        let some = |n: u64| if n == 0 { "–".into() } else { sum(n) };
        let module = format!("{}{name}", "  ".repeat(self.depth));
        [module, output, some(self.parameters.total as u64), some(self.flops), some(self.saved_bytes)]
    }
}

fn sum(n: u64) -> String {
    grouped(n as usize)
}
