//! Texts, pictures and histograms of a report.

use std::fmt::Write as _;

use super::{axis::label, chart::Frame};
use crate::{
    escape::escaped,
    sink::{Histogram, Picture, Record, Value},
};

/// Values of one name that are shown: the last ones.
const SHOWN: usize = 5;

/// The last texts and pictures of each name, and the last histogram.
pub fn to_html(records: &[Record]) -> String {
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

/// A bar for each bucket, over the number of the bucket: edges grow too fast for a common axis.
fn bars(h: &Histogram, name: &str, step: u64) -> String {
    let highest = h.counts.iter().copied().max().unwrap_or(0) as f64;
    let frame = Frame::over([0.0, h.counts.len().max(1) as f64].into_iter(), [0.0, highest].into_iter());
    let bar = |(k, &count): (usize, &u64)| {
        let ((x, y), (right, bottom)) = (frame.at((k as f64, count as f64)), frame.at((k as f64 + 1.0, 0.0)));
        let from = k.checked_sub(1).map_or(h.min, |k| h.limits[k].max(h.min));
        format!(
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"#0072b2\"><title>{} to {}: {count}</title></rect>\n",
            right - x,
            bottom - y,
            label(from),
            label(h.limits[k].min(h.max)),
        )
    };
    let body: String = h.counts.iter().enumerate().map(bar).collect();
    let title = format!("{name} at step {step}: {} to {}, {} not finite", label(h.min), label(h.max), h.not_finite);
    frame.around(&title, "bucket", &[], &body)
}

/// RFC 4648.
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
    fn base64_is_that_of_the_standard() {
        let words = ["", "f", "fo", "foo", "foob", "fooba", "foobar"].map(|word| base64(word.as_bytes()));
        assert_eq!(words, ["", "Zg==", "Zm8=", "Zm9v", "Zm9vYg==", "Zm9vYmE=", "Zm9vYmFy"]);
        assert_eq!(base64(&[0xfb, 0xff, 0xfe]), "+//+");
    }
}
