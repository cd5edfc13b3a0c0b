//! [`MeanAveragePrecision`]: how well boxes of objects are found.

use numcore::{Error, Result, Within};

use super::{Metric, bytes, scores};

/// The most boxes of one class in an image that count, those of the highest scores: COCO's.
const MOST: usize = 100;
/// The operation that errors name.
const OP: &str = "MeanAveragePrecision::update";
/// The recalls at which precisions are read: 0, 0.01, …, 1.
const RECALLS: usize = 101;

/// A box found in an image: its corners `[x1, y1, x2, y2]` in any unit, class, and score.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Detection {
    /// The corners, of which the second is below and to the right of the first.
    pub corners: [f64; 4],
    /// The class.
    pub class: i64,
    /// The confidence, by which boxes are ordered.
    pub score: f64,
}

/// The average precision of boxes, as a mean over classes and over thresholds of intersection over union: COCO's `AP`.
/// Objects have any size, and at most 100 boxes of a class in an image count.
///
/// A box is right if it covers an object of its class to the threshold that no box of a higher score has taken. Classes
/// without an object are no part of the mean; without any object there is no value.
#[doc(alias("mAP", "AP"))]
#[derive(Clone, Debug, PartialEq)]
pub struct MeanAveragePrecision {
    thresholds: Vec<f64>,
    /// The number of objects of each class.
    objects: Vec<u64>,
    found: Vec<Found>,
}

/// A counted box: one bit for each threshold at which it is right. Boxes of equal scores are in the order of images and
/// of boxes within one.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Found {
    class: u64,
    score: f64,
    image: u64,
    place: u64,
    right: u64,
}

impl MeanAveragePrecision {
    /// Makes the metric over the thresholds 0.5, 0.55, …, 0.95.
    pub fn coco(classes: usize) -> Self {
        Self::new(classes, (0..10).map(|k| 0.5 + 0.05 * f64::from(k)).collect())
    }

    /// Makes the metric at one threshold: 0.5 for Pascal's.
    ///
    /// # Errors
    /// An error unless the threshold is in `0..=1`.
    #[track_caller]
    pub fn at(threshold: f64, classes: usize) -> Result<Self> {
        if (0.0..=1.0).contains(&threshold) {
            return Ok(Self::new(classes, vec![threshold]));
        }
        Err(Error::range("MeanAveragePrecision::at", "threshold", threshold, "in 0..=1")).at_caller()
    }

    fn new(classes: usize, thresholds: Vec<f64>) -> Self {
        MeanAveragePrecision { thresholds, objects: vec![0; classes], found: Vec::new() }
    }

    /// Counts the boxes found in an image against its objects, corners and class of each. The image's number orders
    /// boxes of equal scores; each image is counted once, on one rank.
    ///
    /// # Errors
    /// An error if a class is none, a score is NaN, or corners are not finite or in the wrong order; nothing is counted
    /// then.
    #[track_caller]
    pub fn update(&mut self, image: u64, found: &[Detection], objects: &[([f64; 4], i64)]) -> Result<()> {
        let check = |corners: &[f64; 4], class: i64| {
            let [x1, y1, x2, y2] = *corners;
            if !corners.iter().all(|x| x.is_finite()) || x1 > x2 || y1 > y2 {
                let why =
                    format!("the corners {corners:?} of image {image} are no [x1, y1, x2, y2] with x1 ≤ x2, y1 ≤ y2");
                return Err(Error::argument(OP, why));
            }
            scores::class(OP, class, self.objects.len())
        };
        let classes = objects.iter().map(|(corners, class)| check(corners, *class)).collect::<Result<Vec<_>>>();
        let classes = classes.at_caller()?;
        for one in found {
            check(&one.corners, one.class).at_caller()?;
            if one.score.is_nan() {
                let why = format!("a box of image {image} has the score NaN");
                return Err(Error::argument(OP, why)).at_caller();
            }
        }
        classes.into_iter().for_each(|class| self.objects[class] += 1);
        for class in 0..self.objects.len() as i64 {
            let mut boxes: Vec<&Detection> = found.iter().filter(|one| one.class == class).collect();
            boxes.sort_by(|a, b| b.score.total_cmp(&a.score));
            boxes.truncate(MOST);
            let objects: Vec<&[f64; 4]> = objects.iter().filter(|(_, of)| *of == class).map(|(at, _)| at).collect();
            self.count(image, class as u64, &boxes, &objects);
        }
        Ok(())
    }

    /// Counts the boxes of a class, from the highest score.
    fn count(&mut self, image: u64, class: u64, boxes: &[&Detection], objects: &[&[f64; 4]]) {
        let mut right = vec![0; boxes.len()];
        for (t, &threshold) in self.thresholds.iter().enumerate() {
            let mut taken = vec![false; objects.len()];
            for (one, right) in boxes.iter().zip(&mut right) {
                let free = (0..objects.len()).filter(|&k| !taken[k]).map(|k| (iou(&one.corners, objects[k]), k));
                // Of equal ones the last, as in COCO.
                let best =
                    free.filter(|(iou, _)| *iou >= threshold.min(1.0 - 1e-10)).max_by(|a, b| a.0.total_cmp(&b.0));
                if let Some((_, k)) = best {
                    taken[k] = true;
                    *right |= 1 << t;
                }
            }
        }
        let counted = boxes.iter().zip(right).enumerate();
        self.found.extend(counted.map(|(k, (one, right))| Found {
            class,
            score: one.score,
            image,
            place: k as u64,
            right,
        }));
    }

    /// The average precision of boxes, from the highest score: the mean of the greatest precisions beyond recalls.
    fn average_precision(&self, boxes: &[&Found], objects: u64, threshold: usize) -> f64 {
        let (mut right, mut curve) = (0, Vec::with_capacity(boxes.len()));
        for (k, one) in boxes.iter().enumerate() {
            right += one.right >> threshold & 1;
            curve.push((right as f64 / objects as f64, right as f64 / (k + 1) as f64));
        }
        for k in (1..curve.len()).rev() {
            curve[k - 1].1 = curve[k - 1].1.max(curve[k].1);
        }
        let at = |k: usize| {
            let recall = k as f64 / (RECALLS - 1) as f64;
            curve.get(curve.partition_point(|point| point.0 < recall)).map_or(0.0, |point| point.1)
        };
        (0..RECALLS).map(at).sum::<f64>() / RECALLS as f64
    }
}

/// The intersection over union of two boxes; 0 for two without an area.
fn iou(a: &[f64; 4], b: &[f64; 4]) -> f64 {
    let area = |corners: [f64; 4]| (corners[2] - corners[0]).max(0.0) * (corners[3] - corners[1]).max(0.0);
    let both = area([a[0].max(b[0]), a[1].max(b[1]), a[2].min(b[2]), a[3].min(b[3])]);
    let either = area(*a) + area(*b) - both;
    if either > 0.0 { both / either } else { 0.0 }
}

impl Metric for MeanAveragePrecision {
    fn counted(&self) -> Vec<u8> {
        let found = self.found.iter().flat_map(|f| [f.class, f.score.to_bits(), f.image, f.place, f.right]);
        bytes::of(self.objects.iter().copied().chain(found))
    }

    fn absorb(&mut self, counted: &[u8]) -> Result<()> {
        const ABSORB: &str = "MeanAveragePrecision::absorb";
        let numbers = bytes::read(ABSORB, counted)?;
        let (objects, found) = numbers.split_at_checked(self.objects.len()).ok_or_else(|| bytes::other(ABSORB))?;
        let (found, []) = found.as_chunks() else { return Err(bytes::other(ABSORB)) };
        let found = found.iter().map(|&[class, score, image, place, right]| Found {
            class,
            score: f64::from_bits(score),
            image,
            place,
            right,
        });
        self.found.extend(found);
        self.objects.iter_mut().zip(objects).for_each(|(own, other)| *own += other);
        Ok(())
    }

    fn reset(&mut self) {
        self.objects.fill(0);
        self.found.clear();
    }

    fn value(&self) -> Option<f64> {
        let (mut sum, mut classes) = (0.0, 0);
        for (class, &objects) in self.objects.iter().enumerate().filter(|(_, objects)| **objects > 0) {
            let mut boxes: Vec<&Found> = self.found.iter().filter(|one| one.class == class as u64).collect();
            boxes.sort_by(|a, b| b.score.total_cmp(&a.score).then((a.image, a.place).cmp(&(b.image, b.place))));
            let of = |threshold| self.average_precision(&boxes, objects, threshold);
            sum += (0..self.thresholds.len()).map(of).sum::<f64>() / self.thresholds.len() as f64;
            classes += 1;
        }
        (classes > 0).then(|| sum / f64::from(classes))
    }
}
