//! Writing of weights to a folder, in files of a limited size.

use std::{collections::BTreeMap, fs, path::Path};

use numcore::{DType, Error, Result, Runtime, Shape, Tensor, safetensors};
use serde_json::{Map, Value, json};

use super::{save_json, staged::Staged};

/// The name and the fields of the JSON file beside weights.
pub(super) type ConfigFile<'a> = (&'a str, &'a Map<String, Value>);

/// The options of saving weights.
#[derive(Clone, Copy, Debug)]
pub struct SaveOptions {
    /// The element type in the files; that of the parameters if `None`.
    pub dtype: Option<DType>,
    /// The largest size of a file in bytes. A file may be larger if it holds a single tensor.
    pub max_shard_size: u64,
    /// True on the rank that writes. Where parameters are sharded or cut, all ranks save together.
    pub writes: bool,
}

impl Default for SaveOptions {
    fn default() -> Self {
        SaveOptions { dtype: None, max_shard_size: 50 << 30, writes: true }
    }
}

/// A weight that is to be written, and the source of its value.
pub struct WeightWriter<'a, R: Runtime> {
    /// The name in the file.
    pub name: String,
    /// The shape in the file.
    pub shape: Shape,
    /// The element type in the file.
    pub dtype: DType,
    /// Computes the value.
    pub value: Box<dyn Fn() -> Result<Tensor<R>> + 'a>,
}

impl<R: Runtime> WeightWriter<'_, R> {
    fn size(&self) -> u64 {
        self.shape.numel() as u64 * self.dtype.size() as u64
    }

    fn bytes(&self) -> Result<Vec<u8>> {
        let value = (self.value)()?;
        if *value.shape() != self.shape || value.dtype() != self.dtype {
            let why = format!("is {} {}, to be saved as {} {}", value.dtype(), value.shape(), self.dtype, self.shape);
            return Err(Error::state(&*self.name, why));
        }
        value.to_bytes()
    }

    /// Writes weights as `NAME.safetensors`, or as several files and their index where they are larger than the limit,
    /// and `config` beside them. Beyond the model, one weight at a time is in memory.
    ///
    /// Files of the folder are replaced once all weights are on disk. Files that an earlier save left under other names
    /// are removed.
    ///
    /// # Errors
    /// Fails if `options.dtype` is not floating point, a value cannot be computed, or a file cannot be written.
    pub(crate) fn save_all(
        folder: &Path,
        name: &str,
        weights: &[Self],
        config: ConfigFile<'_>,
        options: &SaveOptions,
    ) -> Result<()> {
        if let Some(dtype) = options.dtype.filter(|dtype| !dtype.is_float()) {
            let why = format!("weights cannot be saved as {dtype}: give a floating-point type, or none");
            return Err(Error::config("save", "dtype", why));
        }
        let files = divided(weights, options.max_shard_size);
        if !options.writes {
            // All ranks must compute the values, which are gathered.
            let order = files.iter().flat_map(|part| stored_order(weights, part));
            return order.into_iter().try_for_each(|w| weights[w].bytes().map(drop));
        }
        fs::create_dir_all(folder).map_err(|e| Error::io(folder, e))?;
        let mut staged = Staged::new(folder, name, files.len());
        let mut places = BTreeMap::new();
        for (i, part) in files.iter().enumerate() {
            places.extend(part.iter().map(|&w| (weights[w].name.clone(), Value::from(staged.file(i)))));
            write(&staged.add(i), weights, part)?;
        }
        staged.commit()?;
        save_json(&folder.join(config.0), config.1)?;
        if files.len() > 1 {
            let size: u64 = weights.iter().map(Self::size).sum();
            let map: Map<String, Value> = places.into_iter().collect();
            let index = json!({ "metadata": { "total_size": size }, "weight_map": map });
            let index = index.as_object().cloned().unwrap_or_default();
            save_json(&folder.join(format!("{name}.safetensors.index.json")), &index)?;
        }
        Ok(())
    }
}

/// The weights of each file: in order, as many as are within the limit.
fn divided<R: Runtime>(weights: &[WeightWriter<'_, R>], limit: u64) -> Vec<Vec<usize>> {
    let (mut files, mut size) = (vec![Vec::new()], 0);
    for (i, weight) in weights.iter().enumerate() {
        let full = size + weight.size() > limit;
        match files.last_mut() {
            Some(file) if file.is_empty() || !full => file.push(i),
            _ => {
                files.push(vec![i]);
                size = 0;
            }
        }
        size += weight.size();
    }
    files
}

/// The weights of a file in the order in which they are written. Ranks that do not write compute them in that order
/// too.
fn stored_order<R: Runtime>(weights: &[WeightWriter<'_, R>], part: &[usize]) -> Vec<usize> {
    let mut sorted = part.to_vec();
    sorted.sort_by_key(|&i| (std::cmp::Reverse(weights[i].dtype.size()), &weights[i].name));
    sorted
}

fn write<R: Runtime>(path: &Path, weights: &[WeightWriter<'_, R>], part: &[usize]) -> Result<()> {
    let sorted = stored_order(weights, part);
    let entries: Vec<_> =
        sorted.iter().map(|&i| (weights[i].name.clone(), weights[i].dtype, weights[i].shape)).collect();
    // Older versions of transformers require this entry.
    let notes = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    safetensors::save_with(path, &entries, &notes, |i| weights[sorted[i]].bytes())
}
