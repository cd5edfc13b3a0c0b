//! A node with its inputs: what operators read.

use numcore::{DType, Tensor};
use runtime_cpu::Cpu;
use serde_json::Value;

use crate::{
    file::{Answer, Cases},
    graph::T,
};

pub struct Call<'a> {
    pub cases: &'a Cases,
    pub node: &'a Value,
    pub ins: Vec<Option<T>>,
    pub opset: u64,
}

impl Call<'_> {
    pub fn op(&self) -> &str {
        self.node["op"].as_str().unwrap_or_default()
    }

    pub fn cpu(&self) -> &Cpu {
        self.cases.cpu()
    }

    /// The number of outputs that the node names.
    pub fn outputs(&self) -> usize {
        self.node["out"].as_array().map_or(0, Vec::len)
    }

    pub fn x(&self, i: usize) -> Answer<&T> {
        self.opt(i).ok_or_else(|| format!("input {i} is missing").into())
    }

    pub fn opt(&self, i: usize) -> Option<&T> {
        self.ins.get(i).and_then(Option::as_ref)
    }

    /// All inputs, none of which may be missing.
    pub fn all(&self) -> Answer<Vec<&T>> {
        (0..self.ins.len()).map(|i| self.x(i)).collect()
    }

    fn attr(&self, name: &str, kind: &str) -> Option<&Value> {
        self.node["attrs"].get(name).and_then(|a| a.get(kind))
    }

    pub fn has(&self, name: &str) -> bool {
        self.node["attrs"].get(name).is_some()
    }

    pub fn int(&self, name: &str, default: i64) -> i64 {
        self.attr(name, "i").and_then(Value::as_i64).unwrap_or(default)
    }

    pub fn ints(&self, name: &str) -> Option<Vec<i64>> {
        Some(self.attr(name, "is")?.as_array()?.iter().filter_map(Value::as_i64).collect())
    }

    pub fn float(&self, name: &str, default: f64) -> f64 {
        self.attr(name, "f").and_then(number).unwrap_or(default)
    }

    pub fn floats(&self, name: &str) -> Option<Vec<f64>> {
        Some(self.attr(name, "fs")?.as_array()?.iter().filter_map(number).collect())
    }

    pub fn text<'b>(&'b self, name: &str, default: &'b str) -> &'b str {
        self.attr(name, "s").and_then(Value::as_str).unwrap_or(default)
    }

    pub fn tensor(&self, name: &str) -> Option<Answer<T>> {
        Some(self.cases.tensor(self.attr(name, "t")?))
    }

    pub fn graph(&self, name: &str) -> Answer<&Value> {
        self.attr(name, "g").ok_or_else(|| format!("no graph {name}").into())
    }

    /// Input `i` as integers on the host: a shape, axes, sizes.
    pub fn host(&self, i: usize) -> Answer<Option<Vec<i64>>> {
        let read = |x: &T| Ok(x.to_f64s()?.into_iter().map(|v| v as i64).collect());
        self.opt(i).map(read).transpose()
    }

    /// A list that newer versions have as input `i`, and older ones as an attribute.
    pub fn list(&self, name: &str, i: usize) -> Answer<Option<Vec<i64>>> {
        Ok(self.ints(name).or(self.host(i)?))
    }

    pub fn scalar(&self, value: f64, dtype: DType) -> Answer<T> {
        Ok(Tensor::full(self.cpu(), [0usize; 0], dtype, value)
            .or_else(|_| Tensor::full(self.cpu(), [0usize; 0], dtype, value as i64))?)
    }

    /// Integers as a tensor of one axis.
    pub fn integers(&self, values: &[i64]) -> Answer<T> {
        Ok(Tensor::from_slice(self.cpu(), [values.len()], values)?)
    }
}

/// The framework's element type for a number of ONNX's.
pub fn dtype(number: i64) -> Answer<DType> {
    Ok(match number {
        1 => DType::F32,
        2 => DType::U8,
        6 => DType::I32,
        7 => DType::I64,
        9 => DType::Bool,
        10 => DType::F16,
        11 => DType::F64,
        12 => DType::U32,
        16 => DType::BF16,
        _ => return Err(format!("no element type has the number {number}").into()),
    })
}

fn number(value: &Value) -> Option<f64> {
    value.as_f64().or_else(|| value.as_str()?.parse().ok())
}
