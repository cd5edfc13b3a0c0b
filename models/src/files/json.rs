//! JSON files of other programs, read field by field, with errors that name file and field.

use std::{
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

use numcore::{Error, Result, Within};
use serde_json::{Map, Value};

/// The longest JSON file that is read, in bytes: indices of the largest models have a few MB.
const MAX_JSON: u64 = 64 << 20;

/// An object of a JSON file. Methods return `None` for a field that is absent or null, and an error for one of another
/// type.
#[derive(Clone, Debug, PartialEq)]
pub struct JsonObject {
    what: String,
    fields: Map<String, Value>,
}

impl JsonObject {
    /// Reads a file that holds one object.
    ///
    /// # Errors
    /// Fails if it cannot be read, is longer than 64 MiB, or holds something else.
    #[track_caller]
    pub fn open(path: &Path) -> Result<Self> {
        let text = read_bounded(path).at_caller()?;
        let what = path.display().to_string();
        // Some programs begin a file of UTF-8 with a byte order mark.
        let text = text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&text);
        let value = serde_json::from_slice(text)
            .map_err(|e| Error::format(&*what, format!("it is no JSON: {e}")))
            .at_caller()?;
        match value {
            Value::Object(fields) => Ok(JsonObject { what, fields }),
            _ => Err(Error::format(what, "it holds no JSON object")).at_caller(),
        }
    }

    /// Reads a file that holds a list of objects.
    ///
    /// # Errors
    /// Fails if [`open`](JsonObject::open) would fail, or an item is no object.
    #[cfg(feature = "text")]
    #[track_caller]
    pub(crate) fn open_list(path: &Path) -> Result<Vec<Self>> {
        let (text, what) = (read_bounded(path).at_caller()?, path.display().to_string());
        let items: Vec<Map<String, Value>> = serde_json::from_slice(&text)
            .map_err(|e| Error::format(&*what, format!("it holds no list of JSON objects: {e}")))
            .at_caller()?;
        let named = |(k, fields)| JsonObject::of(format!("{what}, item {k}"), fields);
        Ok(items.into_iter().enumerate().map(named).collect())
    }

    /// Wraps fields that are in memory; `what` names them in errors.
    pub fn of(what: impl Into<String>, fields: Map<String, Value>) -> Self {
        JsonObject { what: what.into(), fields }
    }

    /// The map of all fields.
    pub fn fields(&self) -> &Map<String, Value> {
        &self.fields
    }

    /// The value of a field that is there and not null.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.fields.get(name).filter(|value| !value.is_null())
    }

    /// Reads a field that is an unsigned integer literal; `None` if it is absent or null.
    ///
    /// # Errors
    /// Fails for any other value: also for `4.0`, `"4"` and negative numbers.
    #[track_caller]
    pub fn count(&self, name: &str) -> Result<Option<usize>> {
        self.typed(name, "a count", |v| v.as_u64().and_then(|n| usize::try_from(n).ok())).at_caller()
    }

    /// A field that is a finite number.
    #[track_caller]
    pub fn number(&self, name: &str) -> Result<Option<f64>> {
        self.typed(name, "a number", |v| v.as_f64().filter(|x| x.is_finite())).at_caller()
    }

    /// A field that is a boolean.
    #[track_caller]
    pub fn flag(&self, name: &str) -> Result<Option<bool>> {
        self.typed(name, "true or false", Value::as_bool).at_caller()
    }

    /// A field that is a string.
    #[track_caller]
    pub fn text(&self, name: &str) -> Result<Option<&str>> {
        self.typed(name, "a string", Value::as_str).at_caller()
    }

    /// A field that is a list of strings.
    #[track_caller]
    pub fn texts(&self, name: &str) -> Result<Option<Vec<&str>>> {
        self.typed(name, "a list of strings", |v| v.as_array()?.iter().map(Value::as_str).collect()).at_caller()
    }

    /// A field that is a list of counts.
    #[track_caller]
    pub fn counts(&self, name: &str) -> Result<Option<Vec<usize>>> {
        let count = |v: &Value| v.as_u64().and_then(|n| usize::try_from(n).ok());
        self.typed(name, "a list of counts", |v| v.as_array()?.iter().map(count).collect()).at_caller()
    }

    /// A field that is an object.
    #[track_caller]
    pub fn object(&self, name: &str) -> Result<Option<JsonObject>> {
        let fields = self.typed(name, "an object", Value::as_object).at_caller()?;
        Ok(fields.map(|fields| JsonObject::of(format!("{}: `{name}`", self.what), fields.clone())))
    }

    /// Returns the value of a required field, or an error that it is missing.
    #[track_caller]
    pub fn need<T>(&self, name: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| self.wrong(name, "is missing")).at_caller()
    }

    /// An error about a field, which names the file, the field and the reason.
    pub fn wrong(&self, name: &str, why: impl std::fmt::Display) -> Error {
        Error::format(&*self.what, format!("`{name}` {why}"))
    }

    fn typed<'a, T>(&'a self, name: &str, kind: &str, read: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| self.wrong(name, format_args!("is {}, not {kind}", shown(value))))
    }
}

/// Tells whether a value is null, `[]` or `{}`.
pub(crate) fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}

/// Reads a file, unless it is longer than `MAX_JSON`.
fn read_bounded(path: &Path) -> Result<Vec<u8>> {
    let io = |e| Error::io(path, e);
    let (file, mut bytes) = (File::open(path).map_err(io)?, Vec::new());
    file.take(MAX_JSON + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > MAX_JSON {
        return Err(Error::format(path.display().to_string(), format!("it is longer than {MAX_JSON} bytes")));
    }
    Ok(bytes)
}

/// A value as errors show it, cut after 60 characters.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() <= 60 { text } else { text.chars().take(60).chain("…".chars()).collect() }
}

/// Writes an object to a file, all or nothing.
pub(super) fn save_json(path: &PathBuf, fields: &Map<String, Value>) -> Result<()> {
    let text = serde_json::to_string_pretty(fields).map_err(Error::other)?;
    numcore::safetensors::replace_file(path, (text + "\n").as_bytes())
}
