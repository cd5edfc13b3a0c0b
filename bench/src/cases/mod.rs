//! The cases: a name and sizes make a closure that does one unit of work on data it keeps.

mod data;
mod fused;
mod kernels;
mod tape;
mod train;

use std::{cell::Cell, rc::Rc};

use weftgrad::{Result, Runtime};

/// Work to be timed.
pub struct Case {
    /// Runs one call.
    pub run: Box<dyn FnMut() -> Result<()>>,
    /// True if a call takes long enough to be timed alone.
    pub long: bool,
    /// The loss of the last call, if it has one.
    pub loss: Rc<Cell<Option<f64>>>,
    /// Waits until all calls are done: a device may only have queued them.
    pub finish: Box<dyn Fn() -> Result<()>>,
}

impl Case {
    fn new(run: impl FnMut() -> Result<()> + 'static) -> Case {
        Case { run: Box::new(run), long: false, loss: Rc::default(), finish: Box::new(|| Ok(())) }
    }
}

type Build<R> = fn(&R, &str, &[usize]) -> Result<Case>;

/// A name, the meaning of the numbers after it, and the constructor.
type Row<R> = (&'static str, &'static str, Build<R>);

fn table<R: Runtime>() -> [Row<R>; 67] {
    [
        ("gemm", "M K N", kernels::gemm),
        ("gemmnt", "M K N", kernels::gemm),
        ("gemmtn", "M K N", kernels::gemm),
        ("gemmbf16", "M K N", kernels::gemm),
        ("gemmbf16nt", "M K N", kernels::gemm),
        ("gemmbf16tn", "M K N", kernels::gemm),
        ("gemmf16", "M K N", kernels::gemm),
        ("gemmalloc", "M K N", kernels::gemm_new),
        ("add", "N", kernels::elementwise),
        ("addnew", "N", kernels::add_new),
        ("copy", "N", kernels::elementwise),
        ("exp", "N", kernels::elementwise),
        ("tanh", "N", kernels::elementwise),
        ("relu", "N", kernels::elementwise),
        ("gelu", "N", kernels::elementwise),
        ("gelutanh", "N", kernels::elementwise),
        ("sum", "N", kernels::sum),
        ("colsum", "ROWS C", kernels::column_sums),
        ("colsumbf16", "ROWS C", kernels::column_sums),
        ("emb", "V D N", kernels::embedding),
        ("softmax", "ROWS C", fused::forward),
        ("layernorm", "ROWS C", fused::forward),
        ("rmsnorm", "ROWS C", fused::forward),
        ("xent", "ROWS C", fused::cross_entropy),
        ("xentfb", "ROWS C", fused::cross_entropy),
        ("softmaxbf16", "ROWS C", fused::forward),
        ("layernormbf16", "ROWS C", fused::forward),
        ("xentbf16fb", "ROWS C", fused::cross_entropy),
        ("linearbf16", "M K N", fused::linear),
        ("linearbf16fb", "M K N", fused::linear),
        ("gelufb", "N", fused::forward_backward),
        ("gelutanhfb", "N", fused::forward_backward),
        ("tanhfb", "N", fused::forward_backward),
        ("softmaxfb", "ROWS C", fused::forward_backward),
        ("softmaxbf16fb", "ROWS C", fused::forward_backward),
        ("layernormbf16fb", "ROWS C", fused::forward_backward),
        ("layernormfb", "ROWS C", fused::forward_backward),
        ("rmsnormfb", "ROWS C", fused::forward_backward),
        ("attn", "B H T D", fused::attention),
        ("attnfb", "B H T D", fused::attention),
        ("attnfull", "B H T D", fused::attention),
        ("attnfullfb", "B H T D", fused::attention),
        ("attnprogram", "B H T D", fused::attention),
        ("attnprogramfb", "B H T D", fused::attention),
        ("attndocs", "B H T D", fused::attention),
        ("attndocsfb", "B H T D", fused::attention),
        ("attnalibi", "B H T D", fused::attention),
        ("attnalibifb", "B H T D", fused::attention),
        ("attncap", "B H T D", fused::attention),
        ("attncapfb", "B H T D", fused::attention),
        ("attnbf16", "B H T D", fused::attention),
        ("attnbf16fb", "B H T D", fused::attention),
        ("tinyadd", "", tape::tiny_add),
        ("tinyadd_nograd", "", tape::tiny_add),
        ("chain", "", tape::chain),
        ("chainfwd", "", tape::chain),
        ("chainmul", "", tape::chain_mul),
        ("adamw", "N", train::adamw),
        ("adamwbf16", "N", train::adamw),
        ("mlp", "", train::steps),
        ("cnn", "", train::steps),
        ("gpt", "", train::steps),
        ("gpttinybf16", "", train::steps),
        ("gptbf16", "", train::steps),
        ("gpt2", "B T", train::steps),
        ("gpt2f32", "B T", train::steps),
        ("gptkept", "PERCENT", train::steps),
    ]
}

/// Builds the case that these words name.
pub fn build<R: Runtime>(rt: &R, words: &[&str]) -> std::result::Result<Case, String> {
    build_by(rt, words, None)
}

/// Builds the training that these words name, with its step captured once and launched by each call.
#[cfg(feature = "cuda")]
pub fn build_captured(rt: &weftgrad::Cuda, words: &[&str]) -> std::result::Result<Case, String> {
    build_by(rt, words, Some(train::captured))
}

/// Builds the case that these words name, by the constructor `other` in place of its own if one is given.
fn build_by<R: Runtime>(rt: &R, words: &[&str], other: Option<Build<R>>) -> std::result::Result<Case, String> {
    let name = words.first().ok_or("an empty case")?;
    let (_, sizes, make) = table::<R>()
        .into_iter()
        .find(|(n, ..)| n == name)
        .ok_or_else(|| format!("no case `{name}`; `--help` names all"))?;
    let numbers = words[1..].iter().map(|w| w.parse::<usize>().map_err(|_| format!("`{w}` is not a size")));
    let numbers = numbers.collect::<std::result::Result<Vec<_>, _>>()?;
    if numbers.len() != sizes.split_whitespace().count() {
        return Err(format!("`{name}` takes these sizes: {sizes}"));
    }
    let mut case = other.unwrap_or(make)(rt, name, &numbers).map_err(|e| format!("{name}: {e}"))?;
    let rt = rt.clone();
    case.finish = Box::new(move || rt.synchronize());
    Ok(case)
}

/// The help text, with every case.
pub fn help() -> String {
    let lines: String =
        table::<weftgrad::numcore::NullRuntime>().iter().map(|(n, sizes, _)| format!("  {n} {sizes}\n")).collect();
    format!("Cases:\n{lines}")
}
