//! Models in ONNX's format, as modules.

mod build;
mod call;
mod control;
mod graph;
mod host;
mod host_ops;
mod ops;
mod proto;
mod tensor;
mod value;

use std::path::Path;

use autograd::Var;
use nn::{Forward, Mode, Module, Stage, Visitor};
use numcore::{Error, Result, Runtime, Within, ops::Apply};

pub use self::proto::{OnnxInput, OnnxSize};
use self::{
    build::{HeldTensor, build},
    graph::{PassFrame, PassValues, ResolvedGraph},
    proto::ModelProto,
    value::NodeValue,
};

/// A model of an ONNX file: a graph of operators, computed by the framework's own operations.
///
/// Floating-point initializers with at least one axis are parameters under their names in the file. The statistics of
/// batch norms are buffers; other initializers are constants. So the model trains, and is saved, like any module.
/// Exporters merge tensors of equal values by `Identity`: under each of their names they are trained apart. Sizes that
/// the file leaves open are those of each call's inputs. Integers of shapes are computed on the host.
///
/// Like every module it starts in training: batch norm uses the statistics of the batch and updates the running ones,
/// and dropout drops. Call [`eval`](nn::ModuleExt::eval) for the outputs of other programs.
///
/// As a [`Stage`] it takes all inputs in order, and makes all outputs; as [`Forward`] it has one of each.
pub struct OnnxModel<R: Runtime> {
    device: R,
    graph: ResolvedGraph<R>,
    opset: i64,
    places: usize,
    held: Vec<(usize, String, HeldTensor<R>)>,
    inputs: Vec<OnnxInput>,
    outputs: Vec<OnnxInput>,
    mode: Mode,
}

impl<R: Runtime> OnnxModel<R> {
    /// Reads a model and its weights onto a device. Weights in files of their own must lie in the model's folder.
    ///
    /// # Errors
    /// Fails if the file is malformed, or has an operator, attribute, element type or version that is not supported;
    /// all such nodes are named. They are found before memory is taken for weights.
    ///
    /// ```
    /// use autograd::Var;
    /// use models_import::OnnxModel;
    /// use nn::{Forward, loss::cross_entropy};
    /// use numcore::{DType, Tensor};
    /// use optim::{AdamW, AdamWConfig, Optimizer};
    /// # fn main() -> numcore::Result<()> {
    /// # let file = concat!(env!("CARGO_MANIFEST_DIR"), "/references/mlp.onnx");
    /// let cpu = runtime_cpu::Cpu::new();
    /// let model = OnnxModel::load(file, &cpu)?;
    /// let mut optimizer = AdamW::new(&model, AdamWConfig { lr: 0.1, ..Default::default() })?;
    /// let x = Var::new(Tensor::normal(&cpu, [8, 6], DType::F32, 0.0, 1.0, 7)?);
    /// let labels = Var::new(Tensor::zeros(&cpu, [8], DType::I64)?);
    /// let mut losses = Vec::new();
    /// for _ in 0..20 {
    ///     let loss = cross_entropy(&model.forward(&x)?, &labels)?;
    ///     optimizer.backward(&loss)?;
    ///     optimizer.step()?;
    ///     losses.push(loss.item()?);
    /// }
    /// assert!(losses[19] < 0.1 * losses[0], "{losses:?}");
    /// # Ok(())
    /// # }
    /// ```
    pub fn load(path: impl AsRef<Path>, device: &R) -> Result<Self> {
        let path = path.as_ref();
        let bytes = std::fs::read(path).map_err(|e| Error::io(path, e))?;
        Self::read(&bytes, Some(path.parent().unwrap_or(Path::new(""))), device).within(path.display())
    }

    /// Reads a model that is in memory, all weights included; see [`load`](OnnxModel::load).
    pub fn from_bytes(bytes: &[u8], device: &R) -> Result<Self> {
        Self::read(bytes, None, device)
    }

    fn read(bytes: &[u8], folder: Option<&Path>, device: &R) -> Result<Self> {
        let file = ModelProto::read(bytes)?;
        let built = build(&file, folder, device)?;
        let is_held = |name: &str| file.graph.initializers.iter().any(|tensor| tensor.name == name);
        Ok(OnnxModel {
            device: device.clone(),
            graph: built.graph,
            opset: built.opset,
            places: built.places,
            held: built.held,
            inputs: file.graph.inputs.iter().filter(|input| !is_held(&input.name)).cloned().collect(),
            outputs: file.graph.outputs.clone(),
            mode: Mode::default(),
        })
    }

    /// The inputs, in order.
    pub fn inputs(&self) -> &[OnnxInput] {
        &self.inputs
    }

    /// The outputs, in order.
    pub fn outputs(&self) -> &[OnnxInput] {
        &self.outputs
    }

    /// The outputs with their names, in the file's order, for inputs by name in any order.
    ///
    /// # Errors
    /// Fails if an input is missing, unknown, or of another element type or shape than the file states.
    #[track_caller]
    pub fn forward_named(&self, inputs: &[(&str, &Var<R>)]) -> Result<Vec<(String, Var<R>)>> {
        if let Some((name, _)) = inputs.iter().find(|(name, _)| !self.inputs.iter().any(|input| input.name == *name)) {
            return Err(Error::argument("onnx", format!("the model has no input `{name}`; it has {}", self.names())));
        }
        let find = |input: &OnnxInput| {
            let found = inputs.iter().find(|(name, _)| *name == input.name).map(|(_, x)| (*x).clone());
            found.ok_or_else(|| Error::argument("onnx", format!("the input `{}` is missing", input.name)))
        };
        let outs = self.forward_values(&self.inputs.iter().map(find).collect::<Result<Vec<_>>>()?)?;
        Ok(self.outputs.iter().map(|output| output.name.clone()).zip(outs).collect())
    }

    fn names(&self) -> String {
        self.inputs.iter().map(|input| format!("`{}`", input.name)).collect::<Vec<_>>().join(", ")
    }

    fn check(&self, inputs: &[Var<R>]) -> Result<()> {
        if inputs.len() != self.inputs.len() {
            let why =
                format!("the model has {} inputs, {}, and {} are given", self.inputs.len(), self.names(), inputs.len());
            return Err(Error::argument("onnx", why));
        }
        for (input, x) in self.inputs.iter().zip(inputs) {
            let spec = x.spec();
            if let Some(dtype) = input.dtype.filter(|&dtype| dtype != spec.dtype) {
                let why = format!("the input `{}` must be {dtype}: cast it with `to_dtype`", input.name);
                return Err(Error::dtype("onnx", &[spec.dtype], why));
            }
            let Some(sizes) = &input.sizes else { continue };
            let fits = |(size, &d): (&OnnxSize, &usize)| !matches!(size, OnnxSize::Is(n) if *n != d);
            if sizes.len() != spec.shape.rank() || !sizes.iter().zip(spec.shape.dims()).all(fits) {
                let why = format!("the input `{}` must be {}", input.name, shown(sizes));
                return Err(Error::shape("onnx", &[spec.shape], why));
            }
        }
        Ok(())
    }
}

/// A shape with its open sizes, as `[batch, 3, 224, 224]`.
fn shown(sizes: &[OnnxSize]) -> String {
    let size = |size: &OnnxSize| match size {
        OnnxSize::Is(n) => n.to_string(),
        OnnxSize::Any(name) if name.is_empty() => "?".into(),
        OnnxSize::Any(name) => name.clone(),
    };
    format!("[{}]", sizes.iter().map(size).collect::<Vec<_>>().join(", "))
}

impl<R: Runtime> Module<R> for OnnxModel<R> {
    fn visit(&self, name: &str, visitor: &mut dyn Visitor<R>) {
        visitor.enter(name);
        for (_, name, held) in &self.held {
            match held {
                HeldTensor::Weight(parameter) => visitor.parameter(name, parameter),
                HeldTensor::Running(buffer) => visitor.buffer(name, buffer),
                HeldTensor::Constant(_) => {}
            }
        }
        visitor.mode(&self.mode);
        visitor.leave();
    }
}

impl<R: Runtime> Stage<R> for OnnxModel<R> {
    #[track_caller]
    fn forward_values(&self, inputs: &[Var<R>]) -> Result<Vec<Var<R>>> {
        self.check(inputs)?;
        let mut values: PassValues<R> = vec![None; self.places];
        for (place, _, held) in &self.held {
            values[*place] = Some(match held {
                HeldTensor::Constant(value) => value.clone(),
                HeldTensor::Weight(parameter) => NodeValue::Device(parameter.var()),
                HeldTensor::Running(buffer) => NodeValue::Device(buffer.var()),
            });
        }
        let buffers = |place: usize| {
            let found = self.held.iter().find(|(at, ..)| *at == place);
            found
                .and_then(|(.., held)| if let HeldTensor::Running(buffer) = held { Some(buffer.clone()) } else { None })
        };
        let (device, training) = (&self.device, self.mode.is_training());
        let frame = PassFrame { device, opset: self.opset, training, buffers: &buffers };
        let outs = self.graph.call(&frame, &mut values, inputs.iter().cloned().map(NodeValue::Device))?;
        outs.iter().map(|out| out.var(device).cloned()).collect()
    }
}

impl<R: Runtime> Forward<R> for OnnxModel<R> {
    #[track_caller]
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        match self.forward_values(std::slice::from_ref(x))?.as_slice() {
            [y] => Ok(y.clone()),
            outs => Err(Error::usage("onnx", format!("the model has {} outputs: use `forward_named`", outs.len()))),
        }
    }
}
