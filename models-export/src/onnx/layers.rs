//! Layers as nodes of a graph, by the names of their parameters.

use std::collections::BTreeMap;

use models::Pretrained;
use nn::{Activation, ModuleExt, Param};
use numcore::{
    DType, Error, Result, Runtime,
    ops::{PointwiseOps, ViewOps},
};

use super::{graph::OnnxGraph, parts::Attribute};

/// A graph, and the parameters of the model that it is built from.
pub(super) struct ModelGraph<'a, R: Runtime> {
    /// The graph.
    pub graph: OnnxGraph<'a>,
    parameters: BTreeMap<String, (String, Param<R>)>,
}

impl<'a, R: Runtime> ModelGraph<'a, R> {
    /// An empty graph. Weights get their names in Hugging Face's files.
    pub(super) fn new(name: &'static str, model: &impl Pretrained<R>) -> Self {
        let table = model.table();
        let named = model.named_parameters().into_iter().map(|(name, parameter)| {
            let theirs = table.theirs(&name).map_or_else(|| name.clone(), |c| c.name);
            (name, (theirs, parameter))
        });
        ModelGraph { graph: OnnxGraph::new(name), parameters: named.collect() }
    }

    /// Adds a parameter as a weight, in `f32` and untransposed.
    pub(super) fn parameter(&mut self, name: &str) -> Result<String> {
        let (theirs, parameter) = self.find(name)?;
        let shape = parameter.shape();
        let value = move || parameter.value()?.to_dtype(DType::F32)?.contiguous()?.to_vec();
        Ok(self.graph.weight(&theirs, &shape, value))
    }

    /// Adds `x · Wᵀ + b`, with the parameters `module.weight` and `module.bias`, which may be absent.
    pub(super) fn linear(&mut self, x: &str, module: &str) -> Result<String> {
        let (theirs, parameter) = self.find(&format!("{module}.weight"))?;
        let shape = parameter.shape();
        let value = move || parameter.value()?.to_dtype(DType::F32)?.t()?.contiguous()?.to_vec();
        let weight = self.graph.weight(&format!("{theirs}.transposed"), &[shape[1], shape[0]], value);
        let product = self.graph.op("MatMul", &[x, &weight]);
        let bias = format!("{module}.bias");
        if !self.parameters.contains_key(&bias) {
            return Ok(product);
        }
        let bias = self.parameter(&bias)?;
        Ok(self.graph.op("Add", &[&product, &bias]))
    }

    /// Adds a layer norm of the last axis, with the parameters `module.weight` and `module.bias`.
    pub(super) fn layer_norm(&mut self, x: &str, module: &str, eps: f64) -> Result<String> {
        let (weight, bias) = (self.parameter(&format!("{module}.weight"))?, self.parameter(&format!("{module}.bias"))?);
        let attributes = [("axis", Attribute::Int(-1)), ("epsilon", Attribute::Float(eps as f32))];
        Ok(self.graph.op_with("LayerNormalization", &[x, &weight, &bias], &attributes))
    }

    /// Adds an RMS norm of the last axis, with the parameter `module.weight`.
    pub(super) fn rms_norm(&mut self, x: &str, module: &str, eps: f64) -> Result<String> {
        let weight = self.parameter(&format!("{module}.weight"))?;
        let g = &mut self.graph;
        let (square, eps) = (g.op("Mul", &[x, x]), g.float(eps as f32));
        let mean = g.op_with("ReduceMean", &[&square], &[("axes", Attribute::Ints(&[-1]))]);
        let sum = g.op("Add", &[&mean, &eps]);
        let root = g.op("Sqrt", &[&sum]);
        let normal = g.op("Div", &[x, &root]);
        Ok(g.op("Mul", &[&normal, &weight]))
    }

    /// Adds softmax of `q · kᵀ / √D`, times `v`, for `q`, `k` and `v: [B, H, T, D]`. Keys where `mask` is false are
    /// hidden. The output is `[B, T, H · D]`.
    pub(super) fn attention(&mut self, [q, k, v]: [&str; 3], [heads, depth]: [usize; 2], mask: Option<&str>) -> String {
        let g = &mut self.graph;
        let keys = g.op_with("Transpose", &[k], &[("perm", Attribute::Ints(&[0, 1, 3, 2]))]);
        let scale = g.float(1.0 / (depth as f32).sqrt());
        let scaled = g.op("Mul", &[q, &scale]);
        let mut scores = g.op("MatMul", &[&scaled, &keys]);
        if let Some(mask) = mask {
            let hidden = g.float(f32::MIN);
            scores = g.op("Where", &[mask, &scores, &hidden]);
        }
        let shares = g.op_with("Softmax", &[&scores], &[("axis", Attribute::Int(-1))]);
        let found = g.op("MatMul", &[&shares, v]);
        let found = g.op_with("Transpose", &[&found], &[("perm", Attribute::Ints(&[0, 2, 1, 3]))]);
        let merged = g.ints(&[0, 0, (heads * depth) as i64]);
        g.op("Reshape", &[&found, &merged])
    }

    /// Adds a reshape from `[B, T, H · D]` to `[B, T, H, D]`.
    pub(super) fn heads(&mut self, x: &str, [heads, depth]: [usize; 2]) -> String {
        let shape = self.graph.ints(&[0, 0, heads as i64, depth as i64]);
        self.graph.op("Reshape", &[x, &shape])
    }

    /// Adds a transpose from `[B, T, H, D]` to `[B, H, T, D]`.
    pub(super) fn heads_first(&mut self, x: &str) -> String {
        self.graph.op_with("Transpose", &[x], &[("perm", Attribute::Ints(&[0, 2, 1, 3]))])
    }

    /// Adds an activation of `x`.
    pub(super) fn activation(&mut self, x: &str, activation: Activation) -> String {
        let g = &mut self.graph;
        match activation {
            Activation::Relu => g.op("Relu", &[x]),
            Activation::Silu => {
                let sigmoid = g.op("Sigmoid", &[x]);
                g.op("Mul", &[x, &sigmoid])
            }
            Activation::QuickGelu => {
                let factor = g.float(1.702);
                let scaled = g.op("Mul", &[x, &factor]);
                let sigmoid = g.op("Sigmoid", &[&scaled]);
                g.op("Mul", &[x, &sigmoid])
            }
            Activation::Gelu => {
                let root = g.float(std::f32::consts::FRAC_1_SQRT_2);
                let scaled = g.op("Mul", &[x, &root]);
                let erf = g.op("Erf", &[&scaled]);
                half_times_one_plus(g, x, &erf)
            }
            Activation::GeluTanh => {
                let (small, root) = (g.float(0.044_715), g.float((2.0 / std::f32::consts::PI).sqrt()));
                let square = g.op("Mul", &[x, x]);
                let cube = g.op("Mul", &[&square, x]);
                let cube = g.op("Mul", &[&cube, &small]);
                let sum = g.op("Add", &[x, &cube]);
                let scaled = g.op("Mul", &[&sum, &root]);
                let tanh = g.op("Tanh", &[&scaled]);
                half_times_one_plus(g, x, &tanh)
            }
        }
    }

    fn find(&self, name: &str) -> Result<(String, Param<R>)> {
        self.parameters.get(name).cloned().ok_or_else(|| Error::state(name, "is no parameter of this model"))
    }
}

/// Adds `x / 2 · (1 + part)`.
fn half_times_one_plus(g: &mut OnnxGraph<'_>, x: &str, part: &str) -> String {
    let (one, half) = (g.float(1.0), g.float(0.5));
    let sum = g.op("Add", &[part, &one]);
    let scaled = g.op("Mul", &[x, &half]);
    g.op("Mul", &[&scaled, &sum])
}
