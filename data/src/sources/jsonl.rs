//! JSON Lines: one JSON value per line.

use std::path::Path;

use numcore::{Error, Result, Within};
use serde_json::Value;

use crate::{
    Dataset,
    files::{PositionedFile, Records, lines},
};

/// A file with a JSON value in every line that is not blank. Opening finds its lines; reading parses them.
#[derive(Debug)]
pub struct JsonLines {
    records: Records,
}

/// A line of a [`JsonLines`]. Its fields are read by name, with errors that name file, line and field.
#[derive(Clone, Debug, PartialEq)]
pub struct JsonLine {
    /// The parsed value.
    pub value: Value,
    file: String,
    line: u64,
}

impl JsonLines {
    /// Opens a file and finds its lines.
    ///
    /// # Errors
    /// Fails if the file cannot be read.
    #[track_caller]
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let file = PositionedFile::open(path.as_ref()).at_caller()?;
        Ok(JsonLines { records: Records::new(file, lines).at_caller()? })
    }

    /// The string in one field of every line: the text of a corpus. A line without it is an error when it is read.
    pub fn texts(self, field: &str) -> impl Dataset<Example = String> + use<> {
        let field = field.to_owned();
        self.map(move |line| Ok(line.text(&field)?.to_owned()))
    }
}

impl Dataset for JsonLines {
    type Example = JsonLine;

    fn len(&self) -> usize {
        self.records.len()
    }

    fn get(&self, index: usize) -> Result<JsonLine> {
        crate::dataset::check_index("JsonLines", index, self.len())?;
        let value = serde_json::from_str(&self.records.text(index)?);
        let value = value.map_err(|e| self.records.malformed(index, format!("is no JSON: {e}")))?;
        Ok(JsonLine { value, file: self.records.name(), line: self.records.line(index) })
    }
}

impl JsonLine {
    /// The value of a field.
    ///
    /// # Errors
    /// Fails if the line is no object, or has no such field.
    #[track_caller]
    pub fn field(&self, name: &str) -> Result<&Value> {
        self.value.get(name).ok_or_else(|| self.wrong(format!("has no field `{name}`"))).at_caller()
    }

    /// The string in a field.
    ///
    /// # Errors
    /// Fails if there is no such field, or it is no string.
    #[track_caller]
    pub fn text(&self, name: &str) -> Result<&str> {
        let value = self.field(name)?;
        value.as_str().ok_or_else(|| self.wrong(format!("field `{name}` is {value}, no string"))).at_caller()
    }

    /// The number in a field.
    ///
    /// # Errors
    /// Fails if there is no such field, or it is no number.
    #[track_caller]
    pub fn number(&self, name: &str) -> Result<f64> {
        let value = self.field(name)?;
        value.as_f64().ok_or_else(|| self.wrong(format!("field `{name}` is {value}, no number"))).at_caller()
    }

    fn wrong(&self, why: String) -> Error {
        Error::format(&*self.file, format!("line {}: {why}", self.line))
    }
}
