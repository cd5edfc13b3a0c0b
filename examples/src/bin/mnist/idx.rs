//! The IDX format of the digits: a big-endian header, then bytes.

use std::{
    fs,
    io::Read,
    path::{Path, PathBuf},
};

use flate2::read::GzDecoder;
use weftgrad::{AnyRuntime, Result, Tensor, Var};

/// Pixels of an image's side.
pub const SIDE: usize = 28;
/// More than the largest known file holds: what a wrong header may ask for.
const MOST: usize = 1 << 30;

/// Images and what they show.
pub struct Digits {
    images: Vec<u8>,
    labels: Vec<u8>,
}

impl Digits {
    /// `images` of 28×28 bytes each and one label each.
    pub fn new(images: Vec<u8>, labels: Vec<u8>) -> Digits {
        Digits { images, labels }
    }

    /// Reads the two files in a folder.
    pub fn read(dir: &Path) -> std::result::Result<Digits, Box<dyn std::error::Error>> {
        let images = unpack(&find(dir, "images-idx3-ubyte.gz")?, &[0x803], &[SIDE, SIDE])?;
        let labels = unpack(&find(dir, "labels-idx1-ubyte.gz")?, &[0x801], &[])?;
        if images.len() != labels.len() * SIDE * SIDE {
            return Err(format!(
                "{}: {} images but {} labels",
                dir.display(),
                images.len() / (SIDE * SIDE),
                labels.len()
            )
            .into());
        }
        if let Some(i) = labels.iter().position(|&l| l > 9) {
            return Err(format!("{}: label {i} is {}, not a digit", dir.display(), labels[i]).into());
        }
        Ok(Digits::new(images, labels))
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Images `[N, 1, 28, 28]`, from −1 (paper) to 1 (ink), and their labels `[N]`.
    pub fn batch(&self, rt: &AnyRuntime, at: &[usize]) -> Result<(Var<AnyRuntime>, Var<AnyRuntime>)> {
        let size = SIDE * SIDE;
        let pixels = at.iter().flat_map(|&i| &self.images[i * size..(i + 1) * size]);
        let pixels: Vec<f32> = pixels.map(|&p| f32::from(p) / 127.5 - 1.0).collect();
        let labels: Vec<i64> = at.iter().map(|&i| i64::from(self.labels[i])).collect();
        let x = Tensor::from_slice(rt, [at.len(), 1, SIDE, SIDE], &pixels)?;
        Ok((Var::new(x), Var::new(Tensor::from_slice(rt, [at.len()], &labels)?)))
    }
}

fn find(dir: &Path, end: &str) -> std::result::Result<PathBuf, String> {
    let entries = fs::read_dir(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    let mut found: Vec<PathBuf> =
        entries.flatten().map(|e| e.path()).filter(|p| p.to_string_lossy().ends_with(end)).collect();
    found.sort();
    found.into_iter().next().ok_or_else(|| format!("{}: no file *{end}", dir.display()))
}

/// The bytes after the header, whose magic number and sizes (past the count) must be these.
fn unpack(path: &Path, magic: &[u32], sizes: &[usize]) -> std::result::Result<Vec<u8>, String> {
    let name = path.display();
    let file = fs::File::open(path).map_err(|e| format!("{name}: {e}"))?;
    let mut bytes = Vec::new();
    GzDecoder::new(file).take(MOST as u64).read_to_end(&mut bytes).map_err(|e| format!("{name}: {e}"))?;
    let word = |i: usize| bytes.get(4 * i..4 * i + 4).map(|b| u32::from_be_bytes([b[0], b[1], b[2], b[3]]));
    if word(0).is_none_or(|m| !magic.contains(&m)) {
        return Err(format!("{name}: not an IDX file of this kind"));
    }
    let shape: Vec<usize> = (1..2 + sizes.len()).filter_map(word).map(|n| n as usize).collect();
    let header = 4 * (2 + sizes.len());
    let fits = shape.get(1..) == Some(sizes) && bytes.len() - header == shape.iter().product::<usize>();
    if fits {
        Ok(bytes.split_off(header))
    } else {
        Err(format!("{name}: sizes {shape:?} do not fit its {} bytes", bytes.len()))
    }
}
