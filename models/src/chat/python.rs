//! Functions and filters of templates that behave as in Python: JSON, dates, exceptions.

use std::fmt::Write as _;

use minijinja::{
    Error, ErrorKind, Value,
    value::{Kwargs, ValueKind},
};

use super::template::ChatDate;

/// `raise_exception(message)`, by which a template refuses a conversation.
pub(super) fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

/// `strftime_now(format)`, of a day at midnight.
pub(super) fn strftime(date: ChatDate, format: &str) -> Result<String, Error> {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    let month = MONTHS[(date.month.clamp(1, 12) - 1) as usize];
    let (mut text, mut letters) = (String::new(), format.chars());
    while let Some(letter) = letters.next() {
        if letter != '%' {
            text.push(letter);
            continue;
        }
        match letters.next() {
            Some('Y') => text.push_str(&date.year.to_string()),
            Some('y') => text.push_str(&format!("{:02}", date.year.rem_euclid(100))),
            Some('m') => text.push_str(&format!("{:02}", date.month)),
            Some('d') => text.push_str(&format!("{:02}", date.day)),
            Some('B') => text.push_str(month),
            Some('b') => text.push_str(&month[..3]),
            Some('H' | 'M' | 'S') => text.push_str("00"),
            Some('%') => text.push('%'),
            other => {
                let why = format!("strftime_now does not know `%{}`", other.map_or(String::new(), String::from));
                return Err(Error::new(ErrorKind::InvalidOperation, why));
            }
        }
    }
    Ok(text)
}

/// `tojson`, as transformers defines it: Python's `json.dumps` without escapes of non-ASCII characters.
pub(super) fn to_json(value: Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let escapes: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let mut text = String::new();
    dump(&value, indent, 0, &mut text)?;
    Ok(Value::from_safe_string(if escapes == Some(true) { in_ascii(&text) } else { text }))
}

/// Replaces characters other than printable ASCII by JSON's escapes. JSON has such characters in strings alone.
fn in_ascii(text: &str) -> String {
    let mut ascii = String::with_capacity(text.len());
    for letter in text.chars() {
        if letter < '\u{7f}' {
            ascii.push(letter);
            continue;
        }
        letter.encode_utf16(&mut [0; 2]).iter().for_each(|unit| ascii.push_str(&format!("\\u{unit:04x}")));
    }
    ascii
}

/// The text of a value as Python's `str` writes it.
pub(super) fn text(value: &Value) -> String {
    match float(value) {
        Some(x) if x.is_nan() => "nan".into(),
        Some(x) if x.is_infinite() => if x > 0.0 { "inf" } else { "-inf" }.into(),
        Some(x) => finite(x),
        None if is_container(value) => repr(value),
        None => value.to_string(),
    }
}

/// Tells whether a value is a list or a map.
pub(super) fn is_container(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable | ValueKind::Map)
}

/// The text of a value as Python's `repr` writes it.
fn repr(value: &Value) -> String {
    let of = |items: minijinja::value::ValueIter| items.map(|item| repr(&item)).collect::<Vec<_>>().join(", ");
    match (value.kind(), value.try_iter()) {
        (ValueKind::Number, _) => text(value),
        (ValueKind::Seq, Ok(items)) if value.is_tuple() => {
            let comma = if value.len() == Some(1) { "," } else { "" };
            format!("({}{comma})", of(items))
        }
        (ValueKind::Seq | ValueKind::Iterable, Ok(items)) => format!("[{}]", of(items)),
        (ValueKind::Map, Ok(keys)) => {
            let entry = |key: Value| {
                format!("{}: {}", repr(&key), value.get_item(&key).map_or_else(|_| String::new(), |item| repr(&item)))
            };
            format!("{{{}}}", keys.map(entry).collect::<Vec<_>>().join(", "))
        }
        _ => format!("{value:?}"),
    }
}

/// The number in a value, unless it is an integer.
fn float(value: &Value) -> Option<f64> {
    let is_float = value.kind() == ValueKind::Number && !value.is_integer();
    is_float.then(|| f64::try_from(value.clone()).ok()).flatten()
}

/// The shortest digits of a number, with an exponent below 10⁻⁴ and from 10¹⁶ on.
fn finite(x: f64) -> String {
    let digits = format!("{x:e}");
    match digits.split_once('e').map(|(digits, exponent)| (digits, exponent.parse::<i32>())) {
        Some((digits, Ok(exponent))) if x != 0.0 && !(-4..16).contains(&exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.abs())
        }
        _ => format!("{x:?}"),
    }
}

fn dump(value: &Value, indent: Option<usize>, depth: usize, out: &mut String) -> Result<(), Error> {
    match value.kind() {
        ValueKind::Undefined | ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Map => {
            let keys: Vec<Value> = value.try_iter()?.collect();
            list(keys, ['{', '}'], indent, depth, out, |key, out| {
                quote(&key.to_string(), out);
                out.push_str(": ");
                dump(&value.get_item(key)?, indent, depth + 1, out)
            })?;
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = value.try_iter()?.collect();
            list(items, ['[', ']'], indent, depth, out, |item, out| dump(item, indent, depth + 1, out))?;
        }
        ValueKind::Number => out.push_str(match &*text(value) {
            "nan" => "NaN",
            "inf" => "Infinity",
            "-inf" => "-Infinity",
            number => number,
        }),
        _ => quote(&value.to_string(), out),
    }
    Ok(())
}

fn list(
    items: Vec<Value>,
    [open, close]: [char; 2],
    indent: Option<usize>,
    depth: usize,
    out: &mut String,
    mut write: impl FnMut(&Value, &mut String) -> Result<(), Error>,
) -> Result<(), Error> {
    let line = |out: &mut String, depth: usize| {
        if let Some(indent) = indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    };
    out.push(open);
    for (i, item) in items.iter().enumerate() {
        if i > 0 {
            out.push_str(if indent.is_some() { "," } else { ", " });
        }
        line(out, depth + 1);
        write(item, out)?;
    }
    if !items.is_empty() {
        line(out, depth);
    }
    out.push(close);
    Ok(())
}

fn quote(text: &str, out: &mut String) {
    out.push('"');
    for letter in text.chars() {
        match letter {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if (c as u32) < 0x20 => drop(write!(out, "\\u{:04x}", c as u32)),
            c => out.push(c),
        }
    }
    out.push('"');
}
