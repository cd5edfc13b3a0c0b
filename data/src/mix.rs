//! Mixtures of two examples: mixup and CutMix.
//!
//! [`Loader::augment`](crate::Loader::augment) draws the second example from the whole dataset. So it depends on the
//! epoch and the first example alone, not on batch, rank or worker. A loss of classes `a` and `b` with weight `w` is
//! `w · loss(a) + (1 − w) · loss(b)`: for the cross-entropy, that of the soft targets `w` and `1 − w`.
//!
//! ```
//! use std::sync::Arc;
//!
//! use data::{Array, Dataset, InMemory, Loader, Rows, mix::mixup};
//! # fn main() -> numcore::Result<()> {
//! let images = Rows::new(Array::new([8, 3, 4, 4], vec![0.5f32; 8 * 48])?)?;
//! let examples = Arc::new(images.zip(InMemory::new((0..8).collect::<Vec<i64>>()))?);
//! let loader = Loader::new(Arc::clone(&examples)).batch(4).shuffle(7).augment(7, move |(x, class), rng| {
//!     let (other, other_class) = examples.get(rng.below(examples.len() as u64) as usize)?;
//!     let (x, weight) = mixup(&x, &other, 0.2, rng)?;
//!     Ok((x, (class, other_class, weight)))
//! });
//! let (x, (a, b, weight)) = loader.stack().epoch(0)?.next().unwrap()?.data;
//! assert_eq!((x.dims(), a.dims(), b.dims(), weight.dims()), (&[4, 3, 4, 4][..], &[4][..], &[4][..], &[4][..]));
//! # Ok(())
//! # }
//! ```

use numcore::{Error, Result, Within, rng::Philox};

use crate::{Array, random::beta};

/// The mixture `w · a + (1 − w) · b` of arrays of `f32`, and `w`, drawn from Beta(`alpha`, `alpha`) (Zhang et al.
/// 2018). Usual values of `alpha` are 0.1 to 0.4.
///
/// # Errors
/// Fails if shapes or element types differ, or `alpha` is not finite and above 0.
#[track_caller]
pub fn mixup(a: &Array, b: &Array, alpha: f64, rng: &mut Philox) -> Result<(Array, f32)> {
    let weight = weight("mixup", a, b, alpha, rng).at_caller()? as f32;
    let other = b.to_vec::<f32>().at_caller()?;
    let values = a.to_vec::<f32>().at_caller()?.into_iter().zip(other);
    let mixed = values.map(|(a, b)| weight * a + (1.0 - weight) * b).collect();
    Ok((Array::new(a.dims(), mixed)?, weight))
}

/// The image `a: [.., H, W]` with a random rectangle of `b`, and the part of the area that is still of `a`. The part is
/// drawn from Beta(`alpha`, `alpha`) before the rectangle is cut off at the border (Yun et al. 2019). The usual `alpha`
/// is 1. Elements are of any type.
///
/// # Errors
/// Fails as [`mixup`], or if the arrays have fewer than two axes.
#[track_caller]
#[doc(alias("CutMix"))]
pub fn cutmix(a: &Array, b: &Array, alpha: f64, rng: &mut Philox) -> Result<(Array, f32)> {
    let weight = weight("cutmix", a, b, alpha, rng).at_caller()?;
    let &[.., height, width] = a.dims() else {
        return Err(Error::shape("cutmix", &[*a.shape()], "images need the axes height and width")).at_caller();
    };
    let mut within = |side: usize| {
        let (centre, half) = (rng.below(side as u64) as usize, (0.5 * libm::sqrt(1.0 - weight) * side as f64) as usize);
        (centre.saturating_sub(half), side.min(centre + half))
    };
    let ((left, right), (top, bottom)) = (within(width), within(height));
    let (mut bytes, size) = (a.bytes().to_vec(), a.dtype().size());
    let rows = (0..bytes.len() / (width * size).max(1)).filter(|row| (top..bottom).contains(&(row % height)));
    for row in rows {
        let part = (row * width + left) * size..(row * width + right) * size;
        bytes[part.clone()].copy_from_slice(&b.bytes()[part]);
    }
    let cut = ((right - left) * (bottom - top)) as f64 / ((width * height) as f64).max(1.0);
    Ok((Array::from_bytes(a.dims(), a.dtype(), bytes)?, (1.0 - cut) as f32))
}

/// The weight of the first of two examples.
fn weight(op: &'static str, a: &Array, b: &Array, alpha: f64, rng: &mut Philox) -> Result<f64> {
    if (a.dims(), a.dtype()) != (b.dims(), b.dtype()) {
        let why = format!("elements of {} and {}: both must be of one shape and type", a.dtype(), b.dtype());
        return Err(Error::shape(op, &[*a.shape(), *b.shape()], why));
    }
    if !(alpha.is_finite() && alpha > 0.0) {
        return Err(Error::range(op, "alpha", alpha, "finite and above 0"));
    }
    beta(alpha, alpha, rng)
}
