//! A search along a direction for a length that meets the strong Wolfe conditions, one loss at a time.

use crate::{HyperNumbers, HyperValue};

/// The decrease of the loss that is enough, and the slope that is flat enough, relative to the slope at the start.
const DECREASE: f64 = 1e-4;
const FLATNESS: f64 = 0.9;
/// The number of further lengths that are tried.
const MOST: f64 = 25.0;

/// A point along a direction: its length, and the loss and the slope there.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct LinePoint {
    pub(crate) at: f64,
    pub(crate) loss: f64,
    pub(crate) slope: f64,
}

/// The part of a search.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Stage {
    /// The next point is taken as it is.
    #[default]
    Take,
    /// The bracket is extended: `pair` has the point before.
    Extend,
    /// The bracket is narrowed: `pair` has its lower and its higher end.
    Narrow,
}

/// The state of a line search between two losses.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LineSearch {
    stage: Stage,
    /// The length at which the parameters are.
    pub(crate) length: f64,
    start: LinePoint,
    pair: [LinePoint; 2],
    tried: f64,
    /// True if the last length was near an end of the bracket.
    is_near_end: bool,
}

impl HyperValue for LineSearch {
    fn numbers(&self) -> HyperNumbers {
        let points = [self.start, self.pair[0], self.pair[1]];
        let head = [f64::from(self.stage as u8), f64::from(u8::from(self.is_near_end)), self.tried, self.length];
        head.into_iter().chain(points.iter().flat_map(|p| [p.at, p.loss, p.slope])).collect()
    }

    fn assign(&mut self, numbers: &[f64]) -> bool {
        let (&[stage, near, tried, length], Some(points)) =
            (numbers.first_chunk().unwrap_or(&[0.0; 4]), numbers.get(4..))
        else {
            return false;
        };
        let [start, low, high] =
            [0, 3, 6].map(|k| points.get(k..k + 3).map(|p| LinePoint { at: p[0], loss: p[1], slope: p[2] }));
        let stage = [Stage::Take, Stage::Extend, Stage::Narrow].into_iter().find(|own| f64::from(*own as u8) == stage);
        let (Some(stage), Some(start), Some(low), Some(high)) = (stage, start, low, high) else { return false };
        *self = LineSearch { stage, length, start, pair: [low, high], tried, is_near_end: near != 0.0 };
        points.len() == 9
    }
}

impl LineSearch {
    /// Begins along a direction with this loss and slope at its start. The parameters move to `length`. Without a
    /// `search` they stay there.
    pub(crate) fn begin(&mut self, loss: f64, slope: f64, length: f64, search: bool) {
        let start = LinePoint { at: 0.0, loss, slope };
        let stage = if search { Stage::Extend } else { Stage::Take };
        *self = LineSearch { stage, length, start, pair: [start; 2], ..Default::default() };
    }

    /// Judges the point at which the parameters are. True if it is accepted; if not, they move to the new `length`. The
    /// search ends where changes along a direction of norm `size` are below `tolerance`.
    ///
    /// Nocedal and Wright, *Numerical Optimization*, 2006, algorithms 3.5 and 3.6, with the safeguards of minFunc.
    pub(crate) fn judge(&mut self, loss: f64, slope: f64, size: f64, tolerance: f64) -> bool {
        // A point at which the loss is not finite is a high one, between which and the start the search goes on.
        let loss = if loss.is_nan() { f64::INFINITY } else { loss };
        let slope = if slope.is_finite() { slope } else { 0.0 };
        let (now, start) = (LinePoint { at: self.length, loss, slope }, self.start);
        let is_low = loss <= start.loss + DECREASE * now.at * start.slope;
        let is_flat = slope.abs() <= -FLATNESS * start.slope;
        let [low, high] = self.pair;
        match self.stage {
            Stage::Take => return true,
            Stage::Extend if self.tried >= MOST => self.pair = ordered([start, now]),
            Stage::Extend if !is_low || (self.tried > 1.0 && loss >= low.loss) => self.pair = ordered([low, now]),
            Stage::Extend if is_flat => return true,
            Stage::Extend if slope >= 0.0 => self.pair = ordered([low, now]),
            Stage::Extend => {
                self.length = interpolated(low, now, [now.at + 0.01 * (now.at - low.at), now.at * 10.0]);
                (self.pair, self.tried) = ([now; 2], self.tried + 1.0);
                return false;
            }
            Stage::Narrow if !is_low || loss >= low.loss => self.pair = ordered([low, now]),
            Stage::Narrow if is_flat => return true,
            Stage::Narrow => self.pair = [now, if slope * (high.at - low.at) >= 0.0 { low } else { high }],
        }
        self.stage = Stage::Narrow;
        self.narrow(now, size, tolerance)
    }

    /// Chooses the next length within the bracket. True if the search ends at `now`.
    fn narrow(&mut self, now: LinePoint, size: f64, tolerance: f64) -> bool {
        let [low, high] = self.pair;
        let (least, most) = (low.at.min(high.at), low.at.max(high.at));
        if self.tried >= MOST || (most - least) * size < tolerance {
            (self.stage, self.length) = (Stage::Take, low.at);
            return low.at == now.at;
        }
        let (mut at, margin) = (interpolated(low, high, [least, most]), 0.1 * (most - least));
        // Two lengths in a row near an end would narrow the bracket too little.
        let is_near = (most - at).min(at - least) < margin;
        let moves = is_near && (self.is_near_end || at >= most || at <= least);
        if moves {
            at = if (at - most).abs() < (at - least).abs() { most - margin } else { least + margin };
        }
        (self.length, self.tried, self.is_near_end) = (at, self.tried + 1.0, is_near && !moves);
        false
    }
}

/// Two points, the lower one first.
fn ordered([a, b]: [LinePoint; 2]) -> [LinePoint; 2] {
    if b.loss < a.loss { [b, a] } else { [a, b] }
}

/// The minimum within bounds of the cubic with the losses and slopes of two points; the middle if it has none.
fn interpolated(a: LinePoint, b: LinePoint, [least, most]: [f64; 2]) -> f64 {
    let (a, b) = if a.at <= b.at { (a, b) } else { (b, a) };
    let bend = a.slope + b.slope - 3.0 * (a.loss - b.loss) / (a.at - b.at);
    let square = bend * bend - a.slope * b.slope;
    let at = b.at - (b.at - a.at) * ((b.slope + square.sqrt() - bend) / (b.slope - a.slope + 2.0 * square.sqrt()));
    if square >= 0.0 && !at.is_nan() { at.max(least).min(most) } else { (least + most) / 2.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A loss that rises after the first extension alone is extended further; after a later one it ends the extension.
    #[test]
    fn extensions_end_where_the_loss_rises() {
        let mut search = LineSearch::default();
        search.begin(0.0, -1.0, 1.0, true);
        assert!(!search.judge(-1.0, -1.0, 1.0, 1e-9));
        let second = search.length;
        assert!(second > 1.0 && !search.judge(-0.9, -1.0, 1.0, 1e-9));
        let third = search.length;
        assert!(third > second && !search.judge(-0.8, -1.0, 1.0, 1e-9));
        assert!(second < search.length && search.length < third);
    }

    /// Of two lengths in a row near an end of the bracket, the second is moved a tenth of the bracket away from it.
    #[test]
    fn a_second_length_near_an_end_is_moved() {
        let [low, high] = [(0.0, 0.0, -1e-3), (1.0, 1.0, 3.0)].map(|(at, loss, slope)| LinePoint { at, loss, slope });
        let mut search = LineSearch { stage: Stage::Narrow, pair: [low, high], ..Default::default() };
        assert!(!search.narrow(high, 1.0, 1e-9));
        assert!(search.length < 0.1 && search.is_near_end);
        assert!(!search.narrow(high, 1.0, 1e-9));
        assert!(search.length == 0.1 && !search.is_near_end);
    }
}
