//! Attention as nodes: products, a mask, and softmax.

use numcore::{Result, Runtime, fused::Attention, pointwise::Number};

use super::{CallRecorder, GraphValue};
use crate::onnx::parts::{Attribute, OnnxType};

impl<'a, R: Runtime + 'a> CallRecorder<'a, R> {
    /// Adds attention of `q: [B, H, T, D]`, `k: [B, K, S, D]` and `v: [B, K, S, E]`: `[B, H, T, E]`.
    pub(super) fn attention(&mut self, attention: &Attention, ins: &[GraphValue]) -> Result<String> {
        let (q, k, v) = (&ins[Attention::QUERIES], &ins[Attention::KEYS], &ins[Attention::VALUES]);
        let (dtype, [b, h, t, d]) = (q.spec.dtype, [0, 1, 2, 3].map(|i| q.spec.shape[i]));
        let [groups, s, e] = [k.spec.shape[1], k.spec.shape[2], v.spec.shape[3]];
        // The queries of heads that share keys are rows of one product.
        let rows = [b, groups, h / groups.max(1) * t];
        let grouped = |recorder: &mut Self, name: &str, last| match h == groups {
            true => name.to_owned(),
            false => recorder.reshaped(name, &[&rows[..], &[last]].concat()),
        };
        let ungrouped = |recorder: &mut Self, name: String, last| match h == groups {
            true => name,
            false => recorder.reshaped(&name, &[b, h, t, last]),
        };
        let queries = grouped(self, &q.name, d);
        let keys = self.graph.op_with("Transpose", &[&k.name], &[("perm", Attribute::Ints(&[0, 1, 3, 2]))]);
        let products = self.graph.op("MatMul", &[&queries, &keys]);
        let products = ungrouped(self, products, s);
        let mut number = |x: f64| self.graph.number(Number::Float(x), dtype);
        let (scale, least) = (number(attention.scale)?, number(f64::NEG_INFINITY)?);
        let cap = attention.softcap.map(number).transpose()?;
        let mut scores = self.graph.op("Mul", &[&products, &scale]);
        if let Some(cap) = cap {
            let part = self.graph.op("Div", &[&scores, &cap]);
            let part = self.graph.op("Tanh", &[&part]);
            scores = self.graph.op("Mul", &[&part, &cap]);
        }
        if attention.masked {
            scores = self.graph.op("Add", &[&scores, &ins[Attention::MASK].name]);
        }
        let seen = self.seen(attention, t, s);
        if let Some((mask, _)) = &seen {
            scores = self.graph.op("Where", &[mask, &scores, &least]);
        }
        let mut shares = self.graph.op_with("Softmax", &[&scores], &[("axis", Attribute::Int(-1))]);
        if attention.masked || seen.is_some_and(|(_, all_see)| !all_see) {
            // A query that sees no key has shares of 0.
            let zero = self.graph.number(Number::Int(0), dtype)?;
            let top = self.graph.op_with("ReduceMax", &[&scores], &[("axes", Attribute::Ints(&[-1]))]);
            let blind = self.graph.op("Equal", &[&top, &least]);
            shares = self.graph.op("Where", &[&blind, &zero, &shares]);
        }
        let shares = grouped(self, &shares, s);
        let found = self.graph.op("MatMul", &[&shares, &v.name]);
        Ok(ungrouped(self, found, e))
    }

    /// The mask of the keys that queries see by position, `[T, S]`, and true if every query sees one; `None` if all
    /// queries see all keys.
    fn seen(&mut self, attention: &Attention, queries: usize, keys: usize) -> Option<(String, bool)> {
        let reach = [attention.window[0], attention.right()];
        if reach == [None, None] {
            return None;
        }
        let far = queries + keys;
        let [left, right] = reach.map(|n| n.unwrap_or(far).min(far) as isize);
        let offset = attention.offset(queries, keys);
        let sees = |t: usize, s: usize| (-left..=right).contains(&(s as isize - t as isize - offset));
        let all_see = (0..queries).all(|t| (0..keys).any(|s| sees(t, s)));
        let mask: Vec<u8> = (0..queries).flat_map(|t| (0..keys).map(move |s| u8::from(sees(t, s)))).collect();
        let name = format!("mask_{queries}_{keys}_{left}_{right}_{offset}");
        let name = self.graph.tensor(&name, OnnxType::Bool, &[queries, keys], move || Ok(mask.clone()));
        Some((name, all_see))
    }
}
