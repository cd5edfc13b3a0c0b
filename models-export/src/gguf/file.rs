//! Writing of GGUF files: metadata, a list of tensors, and their data.

use std::path::Path;

use data::gguf::{ALIGNMENT, GgufValue, MAGIC, VERSION, put_text};
use numcore::{Error, Result, safetensors::Replacement};

use super::GgufWeights;

/// A tensor that is to be written, and the source of its values.
pub(super) struct GgufTensor<'a> {
    /// The name in the file.
    pub name: String,
    /// The sizes, outermost first.
    pub shape: Vec<usize>,
    /// The element type in the file.
    pub weights: GgufWeights,
    /// Computes the values, row-major.
    pub value: Box<dyn Fn() -> Result<Vec<f32>> + 'a>,
}

/// The content of a GGUF file, in its order.
pub(super) struct GgufWriter<'a> {
    /// The keys and values.
    pub metadata: Vec<(String, GgufValue)>,
    /// The tensors.
    pub tensors: Vec<GgufTensor<'a>>,
}

impl GgufWriter<'_> {
    /// A file without tensors.
    pub(super) fn new(metadata: Vec<(String, GgufValue)>) -> Self {
        GgufWriter { metadata, tensors: Vec::new() }
    }

    /// Writes the file, all or nothing, one tensor at a time.
    ///
    /// # Errors
    /// Fails if a value cannot be computed or does not fit its type, or the file cannot be written.
    pub(super) fn write(&self, path: &Path) -> Result<()> {
        let mut header = Vec::new();
        header.extend(MAGIC);
        header.extend(VERSION.to_le_bytes());
        header.extend((self.tensors.len() as u64).to_le_bytes());
        header.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            put_text(&mut header, key);
            value.put(&mut header);
        }
        let mut offset = 0;
        for tensor in &self.tensors {
            tensor.put_info(&mut header, offset);
            offset += tensor.size().next_multiple_of(ALIGNMENT);
        }
        pad(&mut header);
        let mut file = Replacement::new(path)?;
        file.write(&header)?;
        for tensor in &self.tensors {
            let mut bytes = tensor.bytes()?;
            pad(&mut bytes);
            file.write(&bytes)?;
        }
        file.commit()
    }

    /// Computes all values without writing: they are gathered over ranks, and another rank writes.
    ///
    /// # Errors
    /// Fails if a value cannot be computed.
    pub(super) fn gather(&self) -> Result<()> {
        self.tensors.iter().try_for_each(|tensor| (tensor.value)().map(drop))
    }
}

impl GgufTensor<'_> {
    fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    fn size(&self) -> u64 {
        self.weights.kind().bytes(self.elements()) as u64
    }

    /// Appends the tensor's entry: name, sizes (innermost first), type and offset of the data.
    fn put_info(&self, to: &mut Vec<u8>, offset: u64) {
        put_text(to, &self.name);
        to.extend((self.shape.len() as u32).to_le_bytes());
        self.shape.iter().rev().for_each(|&n| to.extend((n as u64).to_le_bytes()));
        to.extend(self.weights.kind().id().to_le_bytes());
        to.extend(offset.to_le_bytes());
    }

    fn bytes(&self) -> Result<Vec<u8>> {
        let values = (self.value)()?;
        if values.len() != self.elements() {
            let why = format!("has {} values, to be written as {:?}", values.len(), self.shape);
            return Err(Error::state(&*self.name, why));
        }
        self.weights.encode(&self.name, &values)
    }
}

fn pad(bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len().next_multiple_of(ALIGNMENT as usize), 0);
}
