//! Models as ONNX files, which onnxruntime and others compute.
//!
//! A graph is of opset 17. Graphs of decoders and ViTs are in `f32`, for any batch and any number of tokens. That of
//! any module has the sizes of its example inputs. Weights lie in a file beside the graph, since one file of this
//! format holds 2 GiB at most.

mod decoder;
mod graph;
mod layers;
mod parts;
mod record;
mod vit;

use std::path::Path;

use autograd::Var;
use models::{Decoder, Vit, require_unchanged};
use nn::Module;
use numcore::{Result, Runtime, Tensor};

/// The options of an ONNX file.
#[derive(Clone, Copy, Debug)]
pub struct OnnxOptions {
    /// True on the rank that writes. Where parameters are sharded, all ranks save together, since values are gathered.
    pub writes: bool,
    /// True if the first axis of all inputs of [`save_onnx`] is a batch of any size; if not, all sizes are those of the
    /// examples. The graphs of the other functions are for any batch.
    pub any_batch: bool,
}

impl Default for OnnxOptions {
    fn default() -> Self {
        OnnxOptions { writes: true, any_batch: false }
    }
}

/// Writes a decoder as an ONNX file, and its weights as `PATH.data` beside it. The graph has the input `input_ids`,
/// `[batch, sequence]` (`i64`), and the output `logits`, `[batch, sequence, V]`, without a cache of keys and values.
///
/// # Errors
/// Fails if a layer has an adapter, the model has mixtures of experts, or a file cannot be written.
pub fn save_onnx_decoder<R: Runtime>(model: &Decoder<R>, path: impl AsRef<Path>, options: &OnnxOptions) -> Result<()> {
    require_unchanged(model)?;
    decoder::graph(model)?.save(path.as_ref(), options.writes)
}

/// Writes a vision transformer as an ONNX file, and its weights as `PATH.data` beside it. The graph has the input
/// `pixel_values`, `[batch, K, H, W]`, and the output `logits`, `[batch, N]`.
///
/// # Errors
/// Fails if a layer has an adapter, or a file cannot be written.
pub fn save_onnx_vit<R: Runtime>(model: &Vit<R>, path: impl AsRef<Path>, options: &OnnxOptions) -> Result<()> {
    require_unchanged(model)?;
    vit::graph(model)?.save(path.as_ref(), options.writes)
}

/// Writes what `forward` computes with a module as an ONNX file, and its weights as `PATH.data` beside it.
///
/// A forward pass is run on example inputs, and its op calls are written as nodes. The graph has the inputs' names,
/// shapes and dtypes, and `outputs` are the names of what `forward` returns. Another pass, on the elements in reverse,
/// must make the same calls. For [any batch](OnnxOptions::any_batch) both run at batches of their own, and sizes that
/// differ are multiples of them. Parameters and buffers keep their names. Values that the code makes by other means
/// than op calls on variables must be equal in both passes, and are constants of the file. A row of softmax that is all
/// −∞ gives NaN there, and zeros here.
///
/// ```
/// use models_export::{OnnxOptions, save_onnx};
/// use nn::{Forward, Init, Linear, ModuleExt};
/// use numcore::{DType, Tensor};
/// # fn main() -> numcore::Result<()> {
/// # let path = std::env::temp_dir().join(format!("weftgrad-module-{}.onnx", std::process::id()));
/// let cpu = runtime_cpu::Cpu::new();
/// let model = Linear::new(&Init::new(&cpu, 0), 4, 2)?;
/// model.eval();
/// let x = Tensor::zeros(&cpu, [3, 4], DType::F32)?;
/// save_onnx(&model, &path, &[("x", &x)], &["y"], |x| Ok(vec![model.forward(&x[0])?]), &OnnxOptions::default())?;
/// # [path.clone(), path.with_extension("onnx.data")].iter().try_for_each(std::fs::remove_file).unwrap();
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// Fails if a part of the module is in training, a value is of a half-precision type, or a file cannot be written.
/// Fails too if an op call has no form in the format: the error names the op and its module. The two passes may differ
/// by multiples of the batch alone. Nothing is written before all calls are known to have a form.
pub fn save_onnx<R: Runtime>(
    module: &(impl Module<R> + ?Sized),
    path: impl AsRef<Path>,
    inputs: &[(&str, &Tensor<R>)],
    outputs: &[&str],
    forward: impl Fn(&[Var<R>]) -> Result<Vec<Var<R>>>,
    options: &OnnxOptions,
) -> Result<()> {
    record::graph(module, inputs, outputs, forward, options.any_batch)?.save(path.as_ref(), options.writes)
}
