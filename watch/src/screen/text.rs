//! Numbers and times in few characters.

use crate::report::axis::label;

/// A time in the largest unit of which it has two.
pub(super) fn in_words(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}

/// A number in few characters; bytes, by the name of the value, in a unit.
pub(super) fn number(name: &str, x: f64) -> String {
    if !name.ends_with("bytes") || !x.is_finite() {
        return if x.is_finite() { label(x) } else { x.to_string() };
    }
    let units = [("KiB", 1u64 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("TiB", 1 << 40)];
    let (unit, size) = units.into_iter().rev().find(|(_, size)| x.abs() >= *size as f64).unwrap_or(units[0]);
    format!("{:.1} {unit}", x / size as f64)
}
