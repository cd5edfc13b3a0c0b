//! JSON Lines: one JSON value per line.

use std::{path::Path, sync::Arc};

use numcore::{Result, Within};
use serde_json::Value;

use super::TableRow;
use crate::{
    Dataset,
    files::{PositionedFile, Records, lines},
};

/// A file with a JSON value in every line that is not blank. Opening finds its lines; reading parses them.
#[derive(Debug)]
pub struct JsonLines {
    records: Records,
    file: Arc<str>,
}

impl JsonLines {
    /// Opens a file and finds its lines.
    ///
    /// # Errors
    /// Fails if the file cannot be read.
    #[track_caller]
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let file = PositionedFile::open(path.as_ref()).at_caller()?;
        let records = Records::new(file, lines).at_caller()?;
        Ok(JsonLines { file: records.name().into(), records })
    }

    /// The string in one field of every line: the text of a corpus. A line without it is an error when it is read.
    pub fn texts(self, field: &str) -> impl Dataset<Example = String> + use<> {
        let field = field.to_owned();
        self.map(move |line| Ok(line.text(&field)?.to_owned()))
    }
}

impl Dataset for JsonLines {
    type Example = TableRow;

    fn len(&self) -> usize {
        self.records.len()
    }

    fn get(&self, index: usize) -> Result<TableRow> {
        crate::dataset::check_index("JsonLines", index, self.len())?;
        let value: serde_json::Result<Value> = serde_json::from_str(&self.records.text(index)?);
        let value = value.map_err(|e| self.records.malformed(index, format!("is no JSON: {e}")))?;
        Ok(TableRow::new(value.into(), &self.file, ("line", self.records.line(index))))
    }
}
