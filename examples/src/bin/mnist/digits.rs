//! Images of digits and their labels: two IDX files.

use std::{
    fs,
    path::{Path, PathBuf},
};

use weftgrad::{
    AnyRuntime, Result, Tensor,
    data::{Array, Dataset, InMemory, Loader, Rows, Zip, sources::read_idx},
};
use weftgrad_examples::Outcome;

/// Pixels of an image's side.
pub(crate) const SIDE: usize = 28;

/// Images of bytes `[28, 28]` and one label each.
pub(crate) type Digits = Zip<Rows, InMemory<i64>>;

/// Images `[N, 1, 28, 28]` and their labels `[N]`.
pub(crate) type Images = (Tensor<AnyRuntime>, Tensor<AnyRuntime>);

/// Digits from the bytes of all images, and their labels.
pub(crate) fn from_bytes(images: Vec<u8>, labels: Vec<u8>) -> Result<Digits> {
    let images = Array::new([labels.len(), SIDE, SIDE], images)?;
    Rows::new(images)?.zip(InMemory::new(labels.into_iter().map(i64::from).collect::<Vec<_>>()))
}

/// Reads the two files in a folder.
pub(crate) fn read(dir: &Path) -> Outcome<Digits> {
    let images = read_idx(find(dir, "images-idx3-ubyte.gz")?)?;
    let labels = read_idx(find(dir, "labels-idx1-ubyte.gz")?)?.to_vec::<u8>()?;
    if images.dims().get(1..) != Some(&[SIDE, SIDE]) {
        return Err(format!("{}: images {} are not of {SIDE}×{SIDE} pixels", dir.display(), images.shape()).into());
    }
    if let Some(i) = labels.iter().position(|&l| l > 9) {
        return Err(format!("{}: label {i} is {}, not a digit", dir.display(), labels[i]).into());
    }
    Ok(from_bytes(images.to_vec()?, labels)?)
}

/// Batches on the device, pixels from −1 (paper) to 1 (ink).
pub(crate) fn batches(
    digits: impl Dataset<Example = (Array, i64)> + 'static,
    batch: usize,
    rt: &AnyRuntime,
) -> Loader<Images> {
    let scaled = |(image, label): (Array, i64)| {
        Ok((image.map(|p: u8| f32::from(p) / 127.5 - 1.0)?.reshape([1, SIDE, SIDE])?, label))
    };
    Loader::new(digits).batch(batch).map(scaled).stack().on(rt)
}

fn find(dir: &Path, end: &str) -> Outcome<PathBuf> {
    let entries = fs::read_dir(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    let mut found: Vec<PathBuf> =
        entries.flatten().map(|e| e.path()).filter(|p| p.to_string_lossy().ends_with(end)).collect();
    found.sort();
    Ok(found.into_iter().next().ok_or_else(|| format!("{}: no file *{end}", dir.display()))?)
}
