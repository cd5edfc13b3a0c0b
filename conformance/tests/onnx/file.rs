//! The file of cases that `against/onnx_cases.py` writes.

use std::{collections::HashMap, io::Read, path::Path};

use flate2::read::ZlibDecoder;
use numcore::{DType, Shape, Tensor};
use runtime_cpu::Cpu;
use serde_json::Value;

/// A failure of a case: the framework's error, or a malformed file.
pub type Failure = Box<dyn std::error::Error>;
pub type Answer<T> = Result<T, Failure>;

/// All cases, and the tensors that they share.
pub struct Cases {
    pub list: Vec<Value>,
    tensors: Vec<(DType, Vec<usize>, usize)>,
    bytes: Vec<u8>,
    cpu: Cpu,
}

impl Cases {
    pub fn read(path: &Path) -> Answer<Cases> {
        let mut all = Vec::new();
        ZlibDecoder::new(std::fs::File::open(path)?).read_to_end(&mut all)?;
        let length = u32::from_le_bytes(all[..4].try_into()?) as usize;
        let mut header: Value = serde_json::from_slice(&all[4..4 + length])?;
        let row = |row: &Value| {
            let dims = row[1].as_array()?.iter().map(|d| Some(d.as_u64()? as usize)).collect::<Option<Vec<_>>>()?;
            Some((DType::from_name(row[0].as_str()?)?, dims, row[2].as_u64()? as usize))
        };
        let tensors = header["tensors"].as_array().ok_or("no tensors")?.iter().map(row).collect::<Option<Vec<_>>>();
        let Value::Array(list) = header["cases"].take() else { return Err("no cases".into()) };
        Ok(Cases { list, tensors: tensors.ok_or("a tensor's row")?, bytes: all.split_off(4 + length), cpu: Cpu::new() })
    }

    pub fn cpu(&self) -> &Cpu {
        &self.cpu
    }

    /// The tensor whose number is `id`, from planes of its elements' bytes.
    pub fn tensor(&self, id: &Value) -> Answer<Tensor<Cpu>> {
        let (dtype, dims, offset) = &self.tensors[id.as_u64().ok_or("a tensor's number")? as usize];
        let (count, size) = (dims.iter().product::<usize>(), dtype.size());
        let planes = &self.bytes[*offset..offset + count * size];
        let bytes: Vec<u8> = (0..count * size).map(|i| planes[(i % size) * count + i / size]).collect();
        Ok(Tensor::from_bytes(&self.cpu, Shape::new(dims)?, *dtype, &bytes)?)
    }

    /// The model at these bytes.
    pub fn model(&self, at: &Value) -> Answer<&[u8]> {
        let number = |i: usize| at[i].as_u64().map(|n| n as usize).ok_or("a model's place");
        Ok(&self.bytes[number(0)?..][..number(1)?])
    }

    /// The tensors with these numbers.
    pub fn tensors(&self, ids: &Value) -> Answer<Vec<Tensor<Cpu>>> {
        ids.as_array().ok_or("a list of tensors")?.iter().map(|id| self.tensor(id)).collect()
    }
}

/// The tests that are not supported: each name with its reason, the heading that is above it.
pub fn unsupported(text: &str) -> HashMap<&str, &str> {
    let mut reason = "";
    let mut found = HashMap::new();
    for line in text.lines().filter(|line| !line.is_empty()) {
        match line.strip_prefix("# ") {
            Some(heading) => reason = heading,
            None => assert!(found.insert(line, reason).is_none(), "{line} is listed twice"),
        }
    }
    found
}
