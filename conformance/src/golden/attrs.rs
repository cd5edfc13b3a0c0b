//! A case's attributes, read with PyTorch's defaults; an attribute that is never read is an error.

use std::{cell::RefCell, collections::BTreeSet};

use numcore::{Error, Result};
use serde_json::{Map, Value};

/// The attributes of one case. Reads are recorded, so that an unknown attribute is an error and not a silent default.
#[derive(Clone, Debug, Default)]
pub struct Attrs {
    values: Map<String, Value>,
    read: RefCell<BTreeSet<String>>,
}

impl Attrs {
    /// The attributes of a JSON object; any other value has none.
    pub fn new(value: &Value) -> Attrs {
        Attrs { values: value.as_object().cloned().unwrap_or_default(), read: RefCell::default() }
    }

    /// The first of several names that is present and not null.
    fn find(&self, names: &[&str]) -> Option<&Value> {
        self.read.borrow_mut().extend(names.iter().map(|n| (*n).to_string()));
        names.iter().find_map(|n| self.values.get(*n)).filter(|v| !v.is_null())
    }

    fn typed<'a, T>(&'a self, names: &[&str], what: &str, read: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.find(names) else { return Ok(None) };
        let wrong = || Error::format("golden", format!("attribute `{}` is {value}, it must be {what}", names[0]));
        read(value).map(Some).ok_or_else(wrong)
    }

    /// The attribute as a real scalar; `default` if it is absent.
    pub fn f64(&self, name: &str, default: f64) -> Result<f64> {
        Ok(self.maybe_f64(name)?.unwrap_or(default))
    }

    /// The attribute as a real scalar; `None` if it is absent. `Infinity` may be a string.
    pub fn maybe_f64(&self, name: &str) -> Result<Option<f64>> {
        let read = |v: &Value| v.as_f64().or_else(|| v.as_str()?.parse().ok());
        self.typed(&[name], "a number", read)
    }

    /// The attribute as a count, under any of these names; `default` if it is absent.
    pub fn usize(&self, names: &[&str], default: usize) -> Result<usize> {
        Ok(self.maybe_usize(names)?.unwrap_or(default))
    }

    /// The attribute as a count, under any of these names; `None` if it is absent.
    pub fn maybe_usize(&self, names: &[&str]) -> Result<Option<usize>> {
        self.typed(names, "a count", |v| v.as_u64().map(|n| n as usize))
    }

    /// The attribute as a count; an error if it is missing.
    pub fn need(&self, names: &[&str]) -> Result<usize> {
        self.maybe_usize(names)?.ok_or_else(|| missing(names[0]))
    }

    /// The attribute as a signed integer: an axis, a shift or a diagonal; `default` if it is absent.
    pub fn isize(&self, names: &[&str], default: isize) -> Result<isize> {
        Ok(self.maybe_isize(names)?.unwrap_or(default))
    }

    /// The attribute as a signed integer; `None` if it is absent.
    pub fn maybe_isize(&self, names: &[&str]) -> Result<Option<isize>> {
        self.typed(names, "a whole number", |v| v.as_i64().map(|n| n as isize))
    }

    /// The attribute as a list of integers; a scalar counts as a list of one. Empty if it is absent.
    pub fn list(&self, names: &[&str]) -> Result<Vec<isize>> {
        Ok(self.typed(names, "a list of whole numbers", whole_numbers)?.unwrap_or_default())
    }

    /// The attribute as a value for each of two axes, given as one value for both or one for each.
    pub fn pair(&self, names: &[&str], default: usize) -> Result<[usize; 2]> {
        match self.list(names)?[..] {
            [] => Ok([default; 2]),
            [a] if a >= 0 => Ok([a as usize; 2]),
            [a, b] if a >= 0 && b >= 0 => Ok([a as usize, b as usize]),
            _ => Err(Error::format("golden", format!("attribute `{}` must be one or two counts", names[0]))),
        }
    }

    /// Accepts an attribute only with the value `known`, at which it has no effect. Any other value is an error.
    pub fn only(&self, name: &str, known: &Value) -> Result<()> {
        match self.find(&[name]) {
            Some(value) if value != known => {
                Err(Error::format("golden", format!("attribute `{name}` is {value}, only {known} is known")))
            }
            _ => Ok(()),
        }
    }

    /// Marks attributes as read that repeat the shapes, or do not affect the compared values.
    pub fn skip(&self, names: &[&str]) {
        self.find(names);
    }

    /// The attribute as a `bool`, under any of these names; `default` if it is absent.
    pub fn bool(&self, names: &[&str], default: bool) -> Result<bool> {
        Ok(self.typed(names, "true or false", Value::as_bool)?.unwrap_or(default))
    }

    /// The attribute as a string; `default` if it is absent.
    pub fn str(&self, name: &str, default: &'static str) -> Result<&str> {
        Ok(self.typed(&[name], "a text", Value::as_str)?.unwrap_or(default))
    }

    /// The attribute as any JSON value.
    pub fn raw(&self, name: &str) -> Option<&Value> {
        self.find(&[name])
    }

    /// Returns an error that lists the attributes that were not read. A note is for human readers and may be unread.
    pub fn all_read(&self) -> Result<()> {
        let read = self.read.borrow();
        let unread: Vec<&str> =
            self.values.keys().map(String::as_str).filter(|k| *k != "note" && !read.contains(*k)).collect();
        if unread.is_empty() {
            return Ok(());
        }
        Err(Error::format("golden", format!("attributes this op does not know: {}", unread.join(", "))))
    }
}

fn whole_numbers(value: &Value) -> Option<Vec<isize>> {
    match value {
        Value::Array(items) => items.iter().map(|v| v.as_i64().map(|n| n as isize)).collect(),
        _ => value.as_i64().map(|n| vec![n as isize]),
    }
}

fn missing(name: &str) -> Error {
    Error::format("golden", format!("attribute `{name}` is missing"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attrs(json: &str) -> Attrs {
        Attrs::new(&serde_json::from_str(json).unwrap())
    }

    #[test]
    fn defaults_aliases_and_lists() {
        let a = attrs(r#"{"dims": 1, "stride": [2, 3], "p": "inf", "eps": null}"#);
        assert_eq!(a.list(&["dims", "dim"]).unwrap(), [1]);
        assert_eq!(a.pair(&["stride"], 1).unwrap(), [2, 3]);
        assert_eq!(a.f64("p", 2.0).unwrap(), f64::INFINITY);
        assert_eq!(a.f64("eps", 1e-5).unwrap(), 1e-5);
        assert!(a.all_read().is_ok());
    }

    #[test]
    fn an_attribute_nobody_reads_is_an_error() {
        let a = attrs(r#"{"ceil_mode": true, "note": "said"}"#);
        assert!(a.all_read().unwrap_err().to_string().contains("ceil_mode"));
        assert!(a.f64("ceil_mode", 0.0).unwrap_err().to_string().contains("ceil_mode"));
    }
}
