//! [`TableRow`]: an example with fields by name, of JSON Lines, Parquet and Arrow.

use std::{collections::BTreeMap, fmt, sync::Arc};

use numcore::{Error, Result, Within};
use serde_json::Value;

/// The value of a field of a [`TableRow`].
#[derive(Clone, Debug, PartialEq)]
pub enum Cell {
    /// No value: JSON's `null`, a missing value of a column.
    Null,
    /// A truth value.
    Bool(bool),
    /// A whole number of at most 64 bits.
    Int(i128),
    /// Another number, which may be NaN or infinite.
    Float(f64),
    /// Text, and values of types that are none of these, as text: dates, decimals.
    Text(String),
    /// Bytes: an encoded image, a sound.
    Bytes(Vec<u8>),
    /// A list: tokens, an embedding.
    List(Vec<Cell>),
    /// Values by name: an object, a struct.
    Fields(BTreeMap<String, Cell>),
}

/// A row of a table, or a line of JSON. Errors of its methods name file, row and field.
///
/// A name may go into structs: in data sets of images, `image.bytes` is usually the encoded image.
///
/// ```
/// use data::{Dataset, sources::JsonLines};
/// # fn main() -> numcore::Result<()> {
/// let path = std::env::temp_dir().join("weftgrad-doc-rows.jsonl");
/// std::fs::write(&path, r#"{"text": "warp", "answers": {"start": [3, 5]}}"#).unwrap();
/// let row = JsonLines::open(&path)?.get(0)?;
/// assert_eq!((row.text("text")?, row.numbers("answers.start")?), ("warp", vec![3.0, 5.0]));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct TableRow {
    /// The row: [`Cell::Fields`], except in JSON Lines that hold other values than objects.
    pub cell: Cell,
    file: Arc<str>,
    /// The kind and the number of the place: `line`, 3.
    place: (&'static str, u64),
}

impl TableRow {
    pub(super) fn new(cell: Cell, file: &Arc<str>, place: (&'static str, u64)) -> Self {
        TableRow { cell, file: Arc::clone(file), place }
    }

    /// The value of a field.
    ///
    /// # Errors
    /// Fails if there is no such field.
    #[track_caller]
    pub fn field(&self, name: &str) -> Result<&Cell> {
        self.cell.find(name).ok_or_else(|| self.wrong(format!("has no field `{name}`"))).at_caller()
    }

    /// The text in a field.
    ///
    /// # Errors
    /// Fails if there is no such field, or it is no text.
    #[track_caller]
    pub fn text(&self, name: &str) -> Result<&str> {
        match self.field(name)? {
            Cell::Text(text) => Ok(text),
            other => Err(self.no(name, other, "text")).at_caller(),
        }
    }

    /// The number in a field; NaN and infinities too.
    ///
    /// # Errors
    /// Fails if there is no such field, or it is no number.
    #[track_caller]
    pub fn number(&self, name: &str) -> Result<f64> {
        let cell = self.field(name)?;
        cell.number().ok_or_else(|| self.no(name, cell, "number")).at_caller()
    }

    /// The list of numbers in a field.
    ///
    /// # Errors
    /// Fails if there is no such field, or it is no list of numbers alone.
    #[track_caller]
    pub fn numbers(&self, name: &str) -> Result<Vec<f64>> {
        let cell = self.field(name)?;
        let numbers = if let Cell::List(list) = cell { list.iter().map(Cell::number).collect() } else { None };
        numbers.ok_or_else(|| self.no(name, cell, "list of numbers")).at_caller()
    }

    /// The bytes in a field.
    ///
    /// # Errors
    /// Fails if there is no such field, or it is no bytes.
    #[track_caller]
    pub fn bytes(&self, name: &str) -> Result<&[u8]> {
        match self.field(name)? {
            Cell::Bytes(bytes) => Ok(bytes),
            other => Err(self.no(name, other, "bytes")).at_caller(),
        }
    }

    fn no(&self, name: &str, found: &Cell, kind: &str) -> Error {
        self.wrong(format!("field `{name}` is {found}, no {kind}"))
    }

    pub(crate) fn wrong(&self, why: String) -> Error {
        let (kind, number) = self.place;
        Error::format(&*self.file, format!("{kind} {number}: {why}"))
    }
}

impl Cell {
    fn number(&self) -> Option<f64> {
        match *self {
            Cell::Int(x) => Some(x as f64),
            Cell::Float(x) => Some(x),
            _ => None,
        }
    }

    /// The value of this name, or else the value within the struct before one of its dots.
    fn find(&self, name: &str) -> Option<&Cell> {
        let Cell::Fields(fields) = self else { return None };
        let within = |(at, _): (usize, &str)| fields.get(&name[..at])?.find(&name[at + 1..]);
        fields.get(name).or_else(|| name.match_indices('.').find_map(within))
    }
}

/// The value, in short.
impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cell::Null => f.write_str("null"),
            Cell::Bool(x) => write!(f, "{x}"),
            Cell::Int(x) => write!(f, "{x}"),
            Cell::Float(x) => write!(f, "{x}"),
            Cell::Text(text) if text.chars().count() > 60 => {
                write!(f, "{:?} and more", text.chars().take(60).collect::<String>())
            }
            Cell::Text(text) => write!(f, "{text:?}"),
            Cell::Bytes(bytes) => write!(f, "{} bytes", bytes.len()),
            Cell::List(list) => write!(f, "a list of {}", list.len()),
            Cell::Fields(fields) => write!(f, "a struct of {} fields", fields.len()),
        }
    }
}

impl From<Value> for Cell {
    fn from(value: Value) -> Self {
        match value {
            Value::Null => Cell::Null,
            Value::Bool(x) => Cell::Bool(x),
            Value::Number(x) => match (x.as_i64(), x.as_u64()) {
                (Some(x), _) => Cell::Int(x.into()),
                (_, Some(x)) => Cell::Int(x.into()),
                _ => Cell::Float(x.as_f64().unwrap_or(f64::NAN)),
            },
            Value::String(text) => Cell::Text(text),
            Value::Array(list) => Cell::List(list.into_iter().map(Cell::from).collect()),
            Value::Object(fields) => Cell::Fields(fields.into_iter().map(|(name, x)| (name, x.into())).collect()),
        }
    }
}
