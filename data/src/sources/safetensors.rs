//! Rows of the tensors in a safetensors file.

use std::{collections::BTreeMap, path::Path};

use numcore::{DType, Error, Result, Shape, Within, safetensors::Reader};

use crate::{Array, Dataset};

/// Tensors of one file whose first axis counts examples. An example has a row of each tensor, by name. Only rows that
/// are read come into memory.
pub struct SafetensorsRows {
    reader: Reader,
    columns: Vec<(String, DType, Shape)>,
    rows: usize,
}

impl SafetensorsRows {
    /// Opens a file for the rows of all its tensors.
    ///
    /// # Errors
    /// Fails if the file cannot be read or has no tensor, an element type is not supported, or the first axes differ.
    #[track_caller]
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let reader = Reader::open(path).at_caller()?;
        let wrong = |why: String| Err(Error::format(reader.path().display().to_string(), why));
        let column = |name: &str| reader.tensor(name).map(|(dtype, shape)| (name.to_owned(), dtype, *shape));
        let columns: Vec<(String, DType, Shape)> = reader.names().map(column).collect::<Result<_>>().at_caller()?;
        let Some((first, _, shape)) = columns.first() else {
            return wrong("it has no tensor, so no rows".into()).at_caller();
        };
        let Some(&rows) = shape.dims().first() else {
            return wrong(format!("`{first}` is a single value and has no rows")).at_caller();
        };
        if let Some((name, _, other)) = columns.iter().find(|(_, _, other)| other.dims().first() != Some(&rows)) {
            return wrong(format!("`{first}` {shape} and `{name}` {other} differ in their number of rows")).at_caller();
        }
        Ok(SafetensorsRows { reader, columns, rows })
    }

    /// The names, element types and shapes of the tensors.
    pub fn columns(&self) -> impl Iterator<Item = (&str, DType, &Shape)> {
        self.columns.iter().map(|(name, dtype, shape)| (name.as_str(), *dtype, shape))
    }
}

impl Dataset for SafetensorsRows {
    type Example = BTreeMap<String, Array>;

    fn len(&self) -> usize {
        self.rows
    }

    fn get(&self, index: usize) -> Result<Self::Example> {
        crate::dataset::check_index("SafetensorsRows", index, self.rows)?;
        let row = |(name, dtype, shape): &(String, DType, Shape)| {
            let dims = &shape.dims()[1..];
            let mut bytes = vec![0; dims.iter().product::<usize>() * dtype.size()];
            self.reader.read_range(name, index * bytes.len(), &mut bytes)?;
            Ok((name.clone(), Array::from_bytes(dims, *dtype, bytes)?))
        };
        self.columns.iter().map(row).collect()
    }
}
