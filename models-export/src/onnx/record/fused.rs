//! Fused operations as nodes of the format, where it has them.

use numcore::{
    Result, Runtime,
    fused::{Conv, ConvKind, FusedOp, MaxPool, Norm, NormKind},
    ops::Spec,
    pointwise::Number,
};

use super::{CallRecorder, GraphValue, whole};
use crate::onnx::parts::Attribute;

impl<'a, R: Runtime + 'a> CallRecorder<'a, R> {
    /// Adds the nodes of a fused operation; `None` if those of its decomposition serve.
    pub(super) fn fused(&mut self, op: &FusedOp, ins: &[GraphValue], outs: &[Spec]) -> Result<Option<Vec<String>>> {
        let x = &ins[0].name;
        let name = match op {
            FusedOp::Softmax(softmax) => {
                let kind = if softmax.log { "LogSoftmax" } else { "Softmax" };
                self.graph.op_with(kind, &[x], &[("axis", Attribute::Int(-1))])
            }
            FusedOp::Norm(norm) if norm.kind == NormKind::Layer => self.layer_norm(norm, ins)?,
            FusedOp::Attention(attention) => self.attention(attention, ins)?,
            FusedOp::Linear(_) => {
                let product = self.graph.op("MatMul", &[x, &ins[1].name]);
                ins[2..].iter().fold(product, |sum, term| self.graph.op("Add", &[&sum, &term.name]))
            }
            FusedOp::Conv(conv) => match self.convolution(conv, ins, &outs[0]) {
                Some(name) => name,
                None => return Ok(None),
            },
            FusedOp::MaxPool(pool) => self.max_pool(pool, x),
            _ => return Ok(None),
        };
        Ok(Some(vec![name]))
    }

    fn layer_norm(&mut self, norm: &Norm, ins: &[GraphValue]) -> Result<String> {
        let x = &ins[Norm::X];
        let scale = match ins.get(Norm::WEIGHT) {
            Some(weight) if norm.weight => weight.name.clone(),
            _ => {
                let (one, width) = (self.graph.number(Number::Int(1), x.spec.dtype)?, x.spec.shape.last().copied());
                let width = self.sizes(&[width.unwrap_or(1)]);
                self.graph.op("Expand", &[&one, &width])
            }
        };
        let mut names = vec![x.name.as_str(), &scale];
        names.extend(ins.get(Norm::BIAS).map(|bias| bias.name.as_str()));
        let attributes = [("axis", Attribute::Int(-1)), ("epsilon", Attribute::Float(norm.eps as f32))];
        Ok(self.graph.op_with("LayerNormalization", &names, &attributes))
    }

    /// Adds a convolution or a transposed one.
    fn convolution(&mut self, conv: &Conv, ins: &[GraphValue], out: &Spec) -> Option<String> {
        let (x, weight) = (&ins[0], &ins[1]);
        let kernel = [weight.spec.shape[2], weight.spec.shape[3]];
        let (sizes, strides, dilations) = (whole(&kernel), whole(&conv.stride), whole(&conv.dilation));
        let pads = whole(&[conv.padding, conv.padding].concat());
        let mut attributes = vec![
            ("kernel_shape", Attribute::Ints(&sizes)),
            ("strides", Attribute::Ints(&strides)),
            ("dilations", Attribute::Ints(&dilations)),
            ("pads", Attribute::Ints(&pads)),
            ("group", Attribute::Int(conv.groups as i64)),
        ];
        let rest: Vec<i64>;
        let kind = match conv.kind {
            ConvKind::Forward => "Conv",
            ConvKind::Input(size) => {
                // The elements of the result that no window reaches.
                let reached =
                    |i: usize| (x.spec.shape[2 + i] - 1) * conv.stride[i] + conv.dilation[i] * (kernel[i] - 1) + 1;
                rest = (0..2).map(|i| (size[i] + 2 * conv.padding[i]) as i64 - reached(i) as i64).collect();
                attributes.push(("output_padding", Attribute::Ints(&rest)));
                "ConvTranspose"
            }
            ConvKind::Weight(_) => return None,
        };
        let bias = ins.get(2).map(|bias| self.reshaped(&bias.name, &[out.shape[1]]));
        let names: Vec<&str> = [x.name.as_str(), &weight.name].into_iter().chain(bias.as_deref()).collect();
        Some(self.graph.op_with(kind, &names, &attributes))
    }

    fn max_pool(&mut self, pool: &MaxPool, x: &str) -> String {
        let pads = whole(&[pool.padding, pool.padding].concat());
        let attributes = [
            ("kernel_shape", Attribute::Ints(&whole(&pool.kernel))),
            ("strides", Attribute::Ints(&whole(&pool.stride))),
            ("pads", Attribute::Ints(&pads)),
        ];
        self.graph.op_with("MaxPool", &[x], &attributes)
    }
}
