//! Texts, pictures and histograms of a report.

use std::fmt::Write as _;

use super::{axis::label, chart::Frame};
use crate::{
    escape::escaped,
    sink::{Histogram, Picture, Record, Value},
};

/// The number of values of one name that are shown: the last ones.
const SHOWN: usize = 5;

/// The last texts and pictures of each name, and the last histogram.
pub(super) fn to_html(records: &[Record]) -> String {
    let mut names: Vec<&str> = Vec::new();
    for (name, value) in records.iter().flat_map(|record| &record.values) {
        if !matches!(value, Value::Scalar(_)) && !names.contains(&name.as_str()) {
            names.push(name);
        }
    }
    names.into_iter().map(|name| of_name(records, name)).collect()
}

fn of_name(records: &[Record], name: &str) -> String {
    let mut out = format!("<h3>{}</h3>\n", escaped(name));
    let all: Vec<(u64, &Value)> = records
        .iter()
        .flat_map(|record| record.values.iter().map(move |(n, value)| (record.step, n, value)))
        .filter(|(_, n, _)| *n == name)
        .map(|(step, _, value)| (step, value))
        .collect();
    for (k, (step, value)) in all.iter().enumerate().skip(all.len().saturating_sub(SHOWN)) {
        match value {
            Value::Text(text) => {
                let _ = writeln!(out, "<p class=\"step\">step {step}</p><pre>{}</pre>", escaped(text));
            }
            Value::Image(picture) => {
                let _ = writeln!(out, "<figure>{}<figcaption>step {step}</figcaption></figure>", img(picture));
            }
            Value::Histogram(histogram) if k + 1 == all.len() => out.push_str(&bars(histogram, name, *step)),
            Value::Histogram(_) | Value::Scalar(_) => {}
        }
    }
    out
}

fn img(picture: &Picture) -> String {
    let (width, height) = (picture.width(), picture.height());
    format!(
        "<img alt=\"\" width=\"{width}\" height=\"{height}\" src=\"data:image/png;base64,{}\">",
        base64(&picture.to_png())
    )
}

/// Bars of equal width.
fn bars(h: &Histogram, name: &str, step: u64) -> String {
    let counts = rebinned(h);
    let width = (h.max - h.min) / BINS as f64;
    let frame = Frame::over([h.min, h.max].into_iter(), counts.iter().copied().chain([0.0]));
    let bar = |(k, &count): (usize, &f64)| {
        let (from, to) = (h.min + k as f64 * width, h.min + (k + 1) as f64 * width);
        let ((x, y), (right, bottom)) = (frame.at((from, count)), frame.at((to, 0.0)));
        format!(
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"#0072b2\"><title>{} to {}: {}</title></rect>\n",
            (right - x).max(1.0),
            bottom - y,
            label(from),
            label(to),
            label(count),
        )
    };
    let body: String = counts.iter().enumerate().filter(|(_, count)| **count > 0.0).map(bar).collect();
    let title = format!("{name} at step {step}: {} numbers, {} not finite", h.count(), h.not_finite);
    frame.around(&title, "value", &[], &body)
}

/// The number of bars of a histogram.
const BINS: usize = 40;

/// The counts in bins of equal width from the least number to the greatest. The count of a bucket is spread evenly over
/// it, as TensorBoard shows it.
fn rebinned(h: &Histogram) -> Vec<f64> {
    let width = (h.max - h.min) / BINS as f64;
    let mut bins = vec![0.0; BINS];
    let lefts = [h.min].into_iter().chain(h.limits.iter().copied());
    for ((left, &right), &count) in lefts.zip(&h.limits).zip(&h.counts) {
        let (left, right) = (left.clamp(h.min, h.max), right.clamp(h.min, h.max));
        let place = |x: f64| if width > 0.0 { ((x - h.min) / width).clamp(0.0, BINS as f64) } else { 0.0 };
        let (from, to) = (place(left), place(right));
        let (first, last) = ((from as usize).min(BINS - 1), (to as usize).min(BINS - 1));
        for (k, bin) in bins.iter_mut().enumerate().take(last + 1).skip(first) {
            let part = (to.min(k as f64 + 1.0) - from.max(k as f64)).max(0.0);
            *bin += count as f64 * if to > from { part / (to - from) } else { 1.0 / (last + 1 - first) as f64 };
        }
    }
    bins
}

/// Base64 of RFC 4648.
fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let group = |three: &[u8]| {
        let bits = (0..3).fold(0usize, |bits, i| bits << 8 | usize::from(three.get(i).copied().unwrap_or(0)));
        let letter = move |i: usize| if i <= three.len() { LETTERS[bits >> (18 - 6 * i) & 63] as char } else { '=' };
        [letter(0), letter(1), letter(2), letter(3)]
    };
    bytes.chunks(3).flat_map(group).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_hold_every_number() {
        for values in [&[0.1, 0.2, -3.0, 5.0, 5.0][..], &[1.0], &[1e-12, 1e12], &[-1.0, -1.0], &[f64::NAN]] {
            let h = Histogram::of(values);
            let sum: f64 = rebinned(&h).iter().sum();
            assert!((sum - h.count() as f64).abs() < 1e-9, "{values:?}: {sum}");
        }
        let even = rebinned(&Histogram {
            min: 0.0,
            max: 40.0,
            limits: vec![0.0, 20.0, 40.0],
            counts: vec![0, 60, 20],
            ..Histogram::default()
        });
        assert!(even.iter().enumerate().all(|(k, n)| (n - if k < 20 { 3.0 } else { 1.0 }).abs() < 1e-9), "{even:?}");
    }

    #[test]
    fn base64_is_that_of_the_standard() {
        let words = ["", "f", "fo", "foo", "foob", "fooba", "foobar"].map(|word| base64(word.as_bytes()));
        assert_eq!(words, ["", "Zg==", "Zm8=", "Zm9v", "Zm9vYg==", "Zm9vYmE=", "Zm9vYmFy"]);
        assert_eq!(base64(&[0xfb, 0xff, 0xfe]), "+//+");
    }
}
