//! Memory over time, by use.

use std::{collections::BTreeMap, fmt::Write as _};

use numcore::MemoryCategory;

use super::chart::{COLOURS, Frame};
use crate::recorder::RankTimeline;

/// The number of points of a picture: a pixel or two each.
const POINTS: u64 = 400;
const MIB: f64 = (1 << 20) as f64;

/// Draws areas on top of each other, one for each category; none if no memory was recorded.
pub(super) fn to_svg(rank: &RankTimeline, length: u64) -> Option<String> {
    let categories: Vec<&str> = MemoryCategory::ALL.iter().map(|category| category.name()).collect();
    let series: Vec<&[(u64, u64)]> = categories
        .iter()
        .map(|name| rank.counters.iter().find(|c| c.name == *name).map_or(&[][..], |c| &c.points))
        .collect();
    if series.iter().all(|points| points.is_empty()) {
        return None;
    }
    let peaks: Vec<BTreeMap<u64, u64>> = series.iter().map(|points| peaks_of(points, length)).collect();
    let mut below = vec![0.0; POINTS as usize + 1];
    let mut areas = Vec::new();
    for peaks in &peaks {
        let above: Vec<f64> = below.iter().zip(values(peaks)).map(|(sum, bytes)| sum + bytes as f64 / MIB).collect();
        areas.push((below, above.clone()));
        below = above;
    }
    let at = |k: usize| k as f64 / POINTS as f64 * length as f64 / 1e6;
    let frame = Frame::over([0.0, length as f64 / 1e6].into_iter(), below.iter().copied().chain([0.0]));
    let mut body = String::new();
    for ((below, above), colour) in areas.iter().zip(COLOURS) {
        let there = above.iter().enumerate().map(|(k, &y)| (at(k), y));
        let back = below.iter().enumerate().rev().map(|(k, &y)| (at(k), y));
        let corners: String = there
            .chain(back)
            .map(|point| {
                let (x, y) = frame.at(point);
                format!("{x:.1},{y:.1} ")
            })
            .collect();
        let _ = writeln!(body, "<polygon points=\"{corners}\" fill=\"{colour}\" fill-opacity=\"0.75\"/>");
    }
    let names: Vec<String> = categories.iter().map(|name| (*name).into()).collect();
    Some(frame.around(&format!("memory of rank {} in MiB", rank.rank), "ms", &names, &body))
}

/// The peak in bytes of each interval with a change, and the remaining bytes for the interval after it.
fn peaks_of(points: &[(u64, u64)], length: u64) -> BTreeMap<u64, u64> {
    let mut peaks = BTreeMap::new();
    let mut before = 0;
    for &(at, bytes) in points {
        let interval = (u128::from(at.min(length)) * u128::from(POINTS) / u128::from(length.max(1))) as u64;
        let peak = peaks.entry(interval).or_insert(before);
        *peak = bytes.max(*peak);
        // Overwritten by the peak of the next interval, if there is a change in it.
        before = bytes;
        if interval < POINTS {
            peaks.insert(interval + 1, bytes);
        }
    }
    peaks
}

/// The values of all intervals; one without a value has the previous interval's.
fn values(peaks: &BTreeMap<u64, u64>) -> impl Iterator<Item = u64> {
    (0..=POINTS).scan(0, |last, k| {
        *last = peaks.get(&k).copied().unwrap_or(*last);
        Some(*last)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_peak_is_seen_and_is_over_after_it() {
        let peaks = peaks_of(&[(0, 10), (1000, 50), (1001, 20), (3000, 5)], 4000);
        let values: Vec<u64> = values(&peaks).collect();
        let at = |ns: u64| values[(ns * POINTS / 4000) as usize];
        assert_eq!([at(0), at(500), at(1000), at(1500), at(2990), at(3000), at(3500)], [10, 10, 50, 20, 20, 20, 5]);
        assert_eq!(values.len() as u64, POINTS + 1);
    }
}
