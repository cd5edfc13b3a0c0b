//! Cases and their tensors, as stored in the files of a folder.

use std::{collections::BTreeMap, fs, path::Path, sync::Arc};

use numcore::{
    DType, Element, Error, Result, Runtime, Shape, Tensor,
    float8::{E4M3, E5M2},
    safetensors,
};
use serde_json::Value;

use super::Attrs;

/// A tensor of a file, in host memory.
#[derive(Clone, Debug)]
pub struct HostValue {
    /// The element type of the value.
    pub dtype: DType,
    /// The sizes of the value.
    pub shape: Shape,
    bytes: Vec<u8>,
}

impl HostValue {
    /// Uploads the value as a tensor on a device.
    pub fn on<R: Runtime>(&self, rt: &R) -> Result<Tensor<R>> {
        Tensor::from_bytes(rt, self.shape, self.dtype, &self.bytes)
    }

    /// The elements, row-major, each as the nearest `f64`.
    pub fn to_f64s(&self) -> Vec<f64> {
        match self.dtype {
            DType::F32 => self.decoded::<f32>(),
            DType::F64 => self.decoded::<f64>(),
            DType::F16 => self.decoded::<half::f16>(),
            DType::BF16 => self.decoded::<half::bf16>(),
            DType::I32 => self.decoded::<i32>(),
            DType::I64 => self.decoded::<i64>(),
            DType::U32 => self.decoded::<u32>(),
            DType::U8 => self.decoded::<u8>(),
            DType::Bool => self.decoded::<bool>(),
            DType::F8E4M3 => self.bytes.iter().map(|&code| E4M3::decode(code).into()).collect(),
            DType::F8E5M2 => self.bytes.iter().map(|&code| E5M2::decode(code).into()).collect(),
        }
    }

    fn decoded<E: Element>(&self) -> Vec<f64> {
        let mut values = vec![E::default(); self.shape.numel()];
        E::fill(&mut values, &self.bytes);
        values.into_iter().map(E::to_f64).collect()
    }
}

/// One case: an op, its inputs, and PyTorch's values.
#[derive(Clone, Debug)]
pub struct Case {
    /// The name of the case in reports.
    pub id: String,
    /// The file that the case comes from, without extension.
    pub group: String,
    /// The op that the case computes.
    pub op: String,
    /// The attributes of the op.
    pub attrs: Attrs,
    json: Value,
    tensors: Arc<BTreeMap<String, HostValue>>,
}

impl Case {
    /// The tensor `ID/name` of this case; an error if the file does not have it.
    pub fn tensor(&self, name: &str) -> Result<&HostValue> {
        self.maybe(name).ok_or_else(|| Error::state(name, format!("is not among the tensors of {}", self.id)))
    }

    /// The tensor `ID/name` of this case, if the file has it.
    pub fn maybe(&self, name: &str) -> Option<&HostValue> {
        self.tensors.get(&format!("{}/{name}", self.id))
    }

    /// All tensors of this case whose names begin with `prefix`, in order, each with the rest of its name.
    pub fn under(&self, prefix: &str) -> impl Iterator<Item = (&str, &HostValue)> {
        let start = format!("{}/{prefix}", self.id);
        let from = self.tensors.range(start.clone()..);
        from.map_while(move |(k, v)| Some((k.strip_prefix(&start)?, v)))
    }

    /// The element types of the case's tensors.
    pub fn dtypes(&self) -> impl Iterator<Item = DType> {
        self.under("").map(|(_, t)| t.dtype)
    }

    /// A count that the case states outside of its attributes; an error if it is missing.
    pub fn count(&self, field: &str) -> Result<usize> {
        let found = self.json.get(field).and_then(Value::as_u64);
        found.map(|n| n as usize).ok_or_else(|| self.incomplete(field))
    }

    /// A list of reals that the case states outside of its attributes; empty if it is absent.
    pub fn numbers(&self, field: &str) -> Vec<f64> {
        let list = self.json.get(field).and_then(Value::as_array);
        list.map_or_else(Vec::new, |l| l.iter().map(|v| v.as_f64().unwrap_or(f64::NAN)).collect())
    }

    /// The shape to which input `i` is repeated along axes of size 1, if the case states one.
    pub fn expanded(&self, i: usize) -> Option<Vec<usize>> {
        let shape = self.json.get("expand")?.get(i.to_string())?.as_array()?;
        shape.iter().map(|n| n.as_u64().map(|n| n as usize)).collect()
    }

    /// A real that the case states outside of its attributes.
    pub fn number(&self, field: &str) -> Option<f64> {
        self.json.get(field).and_then(Value::as_f64)
    }

    /// The suggested relative tolerance; an error if it is missing.
    pub fn tolerance(&self) -> Result<f64> {
        self.number("tol").ok_or_else(|| self.incomplete("tol"))
    }

    fn incomplete(&self, field: &str) -> Error {
        Error::format(self.id.as_str(), format!("has no `{field}`"))
    }
}

/// Loads the cases of a folder's groups; all groups if none is named.
///
/// # Errors
///
/// A named group does not exist, or a file cannot be read.
pub fn load(folder: impl AsRef<Path>, groups: &[String]) -> Result<Vec<Case>> {
    let folder = folder.as_ref();
    let there = groups_of(folder)?;
    if let Some(unknown) = groups.iter().find(|g| !there.contains(g)) {
        let why = format!("has no group `{unknown}`; there are {}", there.join(", "));
        return Err(Error::format(folder.display().to_string(), why));
    }
    let chosen = there.iter().filter(|g| groups.is_empty() || groups.contains(g));
    let mut cases = Vec::new();
    for group in chosen {
        cases.extend(load_group(folder, group)?);
    }
    Ok(cases)
}

fn groups_of(folder: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(folder).map_err(|e| Error::io(folder, e))?;
    let mut names = Vec::new();
    for entry in entries {
        let path = entry.map_err(|e| Error::io(folder, e))?.path();
        if path.extension().is_some_and(|e| e == "json") {
            names.extend(path.file_stem().map(|s| s.to_string_lossy().into_owned()));
        }
    }
    if names.is_empty() {
        return Err(Error::format(folder.display().to_string(), "holds no group (a GROUP.json)"));
    }
    names.sort();
    Ok(names)
}

fn load_group(folder: &Path, group: &str) -> Result<Vec<Case>> {
    let path = folder.join(format!("{group}.json"));
    let text = fs::read_to_string(&path).map_err(|e| Error::io(&path, e))?;
    let bad = |why: String| Error::format(path.display().to_string(), why);
    let json: Value = serde_json::from_str(&text).map_err(|e| bad(e.to_string()))?;
    // Learning rates have no tensors, and their file is a list without a head.
    let (list, tensors) = match &json {
        Value::Array(list) => (list, BTreeMap::new()),
        _ => {
            let list = json.get("cases").and_then(Value::as_array).ok_or_else(|| bad("has no list `cases`".into()))?;
            (list, load_tensors(&folder.join(format!("{group}.safetensors")))?)
        }
    };
    let tensors = Arc::new(tensors);
    let case = |(i, json): (usize, &Value)| {
        let text = |field: &str| json.get(field).and_then(Value::as_str).map(str::to_string);
        let op = text("op").ok_or_else(|| bad(format!("case {i} has no `op`")))?;
        let id = text("id").unwrap_or_else(|| format!("{group}.{i:03}.{op}"));
        let attrs = Attrs::new(json.get("attrs").unwrap_or(&Value::Null));
        Ok(Case { id, group: group.into(), op, attrs, json: json.clone(), tensors: tensors.clone() })
    };
    list.iter().enumerate().map(case).collect()
}

fn load_tensors(path: &Path) -> Result<BTreeMap<String, HostValue>> {
    let bytes = fs::read(path).map_err(|e| Error::io(path, e))?;
    let tensors =
        safetensors::read_host(&bytes).map_err(|e| Error::format(path.display().to_string(), e.to_string()))?;
    let value = |t: safetensors::HostTensor<'_>| {
        (t.name, HostValue { dtype: t.dtype, shape: t.shape, bytes: t.bytes.to_vec() })
    };
    Ok(tensors.into_iter().map(value).collect())
}
