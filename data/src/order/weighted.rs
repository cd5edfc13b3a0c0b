//! Orders that draw examples by their weights.

use std::{
    hash::Hasher,
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};

use numcore::{Error, Fnv1a, Result, Within, rng::Philox};

use super::Order;
use crate::random::keyed;

/// Examples drawn at random by weights that need not add up to 1: PyTorch's `WeightedRandomSampler`. Examples of weight
/// 0 are never drawn.
///
/// ```
/// use data::{order::{Order, WeightedOrder}, split::class_weights};
/// # fn main() -> numcore::Result<()> {
/// let classes = [0, 0, 0, 0, 0, 0, 0, 1];
/// let weights = class_weights(&classes, 2)?; // [0.571…, 4]
/// let weights: Vec<f64> = classes.iter().map(|&class| weights[class as usize]).collect();
/// let order = WeightedOrder::with_replacement(&weights, 1000, 7)?;
/// let rare = order.indices(0, 0..1000).iter().filter(|&&example| example == 7).count();
/// assert!((400..600).contains(&rare));
/// # Ok(())
/// # }
/// ```
#[doc(alias("WeightedRandomSampler"))]
#[doc(alias("oversampling"))]
#[doc(alias("ImbalancedDatasetSampler"))]
pub struct WeightedOrder {
    weights: Vec<f64>,
    /// The sum of the weights up to each example.
    ends: Vec<f64>,
    /// The last example with a weight above 0.
    last: usize,
    len: u64,
    seed: u64,
    /// A digest of the weights.
    digest: u64,
    /// The order of the epoch read last, without replacement; `None` for draws with replacement.
    drawn: Option<Mutex<(u64, Arc<[u64]>)>>,
}

/// The stream of the generator whose first value is the key of draws. Augmentation by an equal seed has other values.
const STREAM: u32 = 0x5745_0000;

impl WeightedOrder {
    /// Draws `len` examples an epoch, each from all examples. A position costs a search in the sums of the weights.
    ///
    /// # Errors
    /// Fails if a weight is negative or not finite, or no weight is above 0.
    #[track_caller]
    pub fn with_replacement(weights: &[f64], len: u64, seed: u64) -> Result<Self> {
        let op = "WeightedOrder";
        if let Some((at, &weight)) =
            weights.iter().enumerate().find(|(_, weight)| !(0.0..f64::INFINITY).contains(*weight))
        {
            return Err(Error::range(op, "weight", weight, format!("finite and at least 0, at example {at}")))
                .at_caller();
        }
        let ends: Vec<f64> = weights
            .iter()
            .scan(0.0, |end, weight| {
                *end += weight;
                Some(*end)
            })
            .collect();
        let Some(last) = weights.iter().rposition(|&weight| weight > 0.0).filter(|&last| ends[last].is_finite()) else {
            let why = format!("the {} weights need a finite sum above 0", weights.len());
            return Err(Error::argument(op, why)).at_caller();
        };
        let mut digest = Fnv1a::new();
        weights.iter().for_each(|weight| digest.write_u64(weight.to_bits()));
        let seed = Philox::new(seed, STREAM).next_u64();
        Ok(WeightedOrder { weights: weights.into(), ends, last, len, seed, digest: digest.finish(), drawn: None })
    }

    /// Draws `len` different examples an epoch: each next one from those that are left. The first reading of an epoch
    /// sorts all examples, which takes their memory (Efraimidis & Spirakis 2006).
    ///
    /// # Errors
    /// Fails as [`with_replacement`](WeightedOrder::with_replacement), or if fewer than `len` weights are above 0.
    #[track_caller]
    pub fn without_replacement(weights: &[f64], len: u64, seed: u64) -> Result<Self> {
        let order = WeightedOrder::with_replacement(weights, len, seed).at_caller()?;
        let most = weights.iter().filter(|&&weight| weight > 0.0).count();
        if len > most as u64 {
            let allowed = format!("at most {most}, the examples with a weight above 0, where none is drawn twice");
            return Err(Error::range("WeightedOrder", "len", len, allowed)).at_caller();
        }
        let first = order.all_of(0);
        Ok(WeightedOrder { drawn: Some(Mutex::new((0, first))), ..order })
    }

    /// The examples of an epoch without replacement: by exponential times whose rates are the weights.
    fn all_of(&self, epoch: u64) -> Arc<[u64]> {
        let mut rng = keyed(self.seed, epoch, 0);
        let time = |(example, &weight): (usize, &f64)| (-libm::log(1.0 - rng.uniform()) / weight, example as u64);
        let mut times: Vec<(f64, u64)> =
            self.weights.iter().enumerate().filter(|(_, weight)| **weight > 0.0).map(time).collect();
        times.sort_by(|(a, i), (b, j)| a.total_cmp(b).then(i.cmp(j)));
        times.into_iter().take(self.len as usize).map(|(_, example)| example).collect()
    }

    fn one_of(&self, epoch: u64, position: u64) -> u64 {
        let drawn = keyed(self.seed, epoch, position).uniform() * self.ends[self.last];
        self.ends.partition_point(|&end| end <= drawn).min(self.last) as u64
    }
}

impl Order for WeightedOrder {
    fn len(&self) -> u64 {
        self.len
    }

    fn indices(&self, epoch: u64, positions: Range<u64>) -> Vec<u64> {
        let Some(drawn) = &self.drawn else {
            return positions.map(|position| self.one_of(epoch, position)).collect();
        };
        let mut drawn = drawn.lock().unwrap_or_else(PoisonError::into_inner);
        if drawn.0 != epoch {
            *drawn = (epoch, self.all_of(epoch));
        }
        drawn.1[positions.start as usize..positions.end as usize].to_vec()
    }

    /// Positions counted over epochs: an epoch may hold an example twice.
    fn readings(&self, epoch: u64, positions: Range<u64>) -> Option<Vec<u64>> {
        let start = epoch.wrapping_mul(self.len);
        self.drawn.is_none().then(|| positions.map(|position| start.wrapping_add(position)).collect())
    }

    fn describe(&self) -> String {
        let how = if self.drawn.is_some() { "without" } else { "with" };
        let WeightedOrder { len, digest, seed, weights, .. } = self;
        format!("{len} of {} drawn {how} replacement by weights {digest:016x} key {seed:016x}", weights.len())
    }
}
