//! JSON in the order of its fields, with words for numbers that JSON lacks.

use serde_json::Value;

/// A JSON string, with escapes.
pub(crate) fn quoted(text: &str) -> String {
    // A string is always JSON.
    serde_json::to_string(text).unwrap_or_default()
}

/// A number; NaN and infinities, which JSON lacks, as one of three strings.
pub(crate) fn number(x: f64) -> String {
    match serde_json::Number::from_f64(x) {
        Some(number) => number.to_string(),
        None if x.is_nan() => "\"NaN\"".into(),
        None if x > 0.0 => "\"Infinity\"".into(),
        None => "\"-Infinity\"".into(),
    }
}

/// Reads a number that [`number`] wrote.
pub(crate) fn read_number(value: &Value) -> Option<f64> {
    match value {
        Value::String(word) if word == "NaN" => Some(f64::NAN),
        Value::String(word) if word == "Infinity" => Some(f64::INFINITY),
        Value::String(word) if word == "-Infinity" => Some(f64::NEG_INFINITY),
        other => other.as_f64(),
    }
}

/// A list of items that are JSON already.
pub(crate) fn list(items: impl IntoIterator<Item = String>) -> String {
    format!("[{}]", items.into_iter().collect::<Vec<_>>().join(","))
}

/// An object of names and of values that are JSON already.
pub(crate) fn object<N: AsRef<str>>(fields: impl IntoIterator<Item = (N, String)>) -> String {
    let field = |(name, value): (N, String)| format!("{}:{value}", quoted(name.as_ref()));
    format!("{{{}}}", fields.into_iter().map(field).collect::<Vec<_>>().join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back_bit_by_bit() {
        for x in [0.0, -0.0, 0.1, 1.0 / 3.0, 5e-324, f64::MAX, -1e300, 123_456_789.123_456_79, f64::INFINITY] {
            for x in [x, -x] {
                let read = read_number(&serde_json::from_str(&number(x)).unwrap()).unwrap();
                assert_eq!(read.to_bits(), x.to_bits(), "{x}");
            }
        }
        assert!(read_number(&serde_json::from_str(&number(f64::NAN)).unwrap()).unwrap().is_nan());
        assert_eq!(read_number(&serde_json::from_str("\"nan\"").unwrap()), None);
    }

    #[test]
    fn text_is_escaped() {
        assert_eq!(object([("a\"b\n", list([number(1.0), quoted("\u{1}")]))]), "{\"a\\\"b\\n\":[1.0,\"\\u0001\"]}");
    }
}
