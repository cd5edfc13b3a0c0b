//! CSV by RFC 4180: fields that begin with a quote may hold separators, quotes and line ends. A quote within another
//! field is a plain character.

use std::{path::Path, str::FromStr, sync::Arc};

use numcore::{Error, Result, Within};

use super::{Cell, TableRow};
use crate::{
    Array, Dataset,
    files::{Cutter, PositionedFile, Records},
};

/// A CSV file. Opening finds its records; reading parses them.
///
/// ```
/// use data::{Dataset, sources::Csv};
/// # fn main() -> numcore::Result<()> {
/// let path = std::env::temp_dir().join("weftgrad-doc.csv");
/// std::fs::write(&path, "species,length\niris,5.1\n\"rose, red\",4.9\n").unwrap();
/// let flowers = Csv::open(&path)?;
/// assert_eq!(flowers.get(1)?.text("species")?, "rose, red");
/// assert_eq!(flowers.get(1)?.number::<f32>("length")?, 4.9);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Csv {
    records: Records,
    separator: u8,
    columns: Arc<[String]>,
    /// The number of records before the first example: 1 for a header.
    skipped: usize,
}

/// A record of a [`Csv`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CsvRow {
    /// The fields, without quotes.
    pub fields: Vec<String>,
    columns: Arc<[String]>,
    file: String,
    line: u64,
}

impl Csv {
    /// Opens a file with commas whose first record names the columns.
    ///
    /// # Errors
    /// Fails if the file cannot be read, or has no header.
    #[track_caller]
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Csv::separated_by(path, b',')
    }

    /// Opens a file with another separator, such as `b'\t'`, whose first record names the columns.
    ///
    /// # Errors
    /// Fails if the file cannot be read, or has no header.
    #[track_caller]
    pub fn separated_by(path: impl AsRef<Path>, separator: u8) -> Result<Self> {
        let mut csv = Csv::with_columns(path, separator, &[])?;
        if csv.records.len() == 0 {
            return Err(csv.records.file().malformed("it has no record, so no names of columns")).at_caller();
        }
        csv.columns = csv.parse(0).at_caller()?.into();
        csv.skipped = 1;
        Ok(csv)
    }

    /// Opens a file without a header, and names its columns.
    ///
    /// # Errors
    /// Fails if the file cannot be read.
    #[track_caller]
    pub fn with_columns(path: impl AsRef<Path>, separator: u8, columns: &[&str]) -> Result<Self> {
        let file = PositionedFile::open(path.as_ref()).at_caller()?;
        let columns = columns.iter().map(|&column| column.to_owned()).collect();
        let records = Records::new(file, |cutter| quoted(cutter, separator)).at_caller()?;
        Ok(Csv { records, separator, columns, skipped: 0 })
    }

    /// The names of the columns.
    pub fn columns(&self) -> &[String] {
        &self.columns
    }

    fn parse(&self, record: usize) -> Result<Vec<String>> {
        let text = self.records.text(record)?;
        fields(&text, self.separator as char).map_err(|why| self.records.malformed(record, why))
    }
}

impl Dataset for Csv {
    type Example = CsvRow;

    fn len(&self) -> usize {
        self.records.len() - self.skipped
    }

    fn get(&self, index: usize) -> Result<CsvRow> {
        crate::dataset::check_index("Csv", index, self.len())?;
        let record = index + self.skipped;
        let fields = self.parse(record)?;
        if fields.len() != self.columns.len() {
            let why = format!("has {} fields, and there are {} columns", fields.len(), self.columns.len());
            return Err(self.records.malformed(record, why));
        }
        let (file, line) = (self.records.name(), self.records.line(record));
        Ok(CsvRow { fields, columns: Arc::clone(&self.columns), file, line })
    }
}

impl CsvRow {
    /// The text in a column.
    ///
    /// # Errors
    /// Fails if there is no such column, or several.
    #[track_caller]
    pub fn text(&self, column: &str) -> Result<&str> {
        let mut places = self.columns.iter().enumerate().filter(|(_, name)| *name == column);
        match (places.next(), places.next()) {
            (Some((at, _)), None) => Ok(&self.fields[at]),
            (None, _) => Err(self.wrong(format!("there is no column `{column}` among {:?}", self.columns))).at_caller(),
            _ => Err(self.wrong(format!("there are several columns `{column}`: read `fields` by number"))).at_caller(),
        }
    }

    /// Parses the number in a column.
    ///
    /// # Errors
    /// Fails if the column is missing or ambiguous, or its text is no number of this type.
    #[track_caller]
    pub fn number<T: FromStr>(&self, column: &str) -> Result<T> {
        let text = self.text(column)?;
        text.trim()
            .parse()
            .map_err(|_| self.wrong(format!("column `{column}` is `{text}`, no number of this type")))
            .at_caller()
    }

    /// Parses the numbers in `N` columns, as an array `[N]` of `f32`.
    ///
    /// # Errors
    /// Fails if [`number`](CsvRow::number) fails for a column.
    #[track_caller]
    pub fn numbers(&self, columns: &[&str]) -> Result<Array> {
        Ok(Array::from_vec(columns.iter().map(|column| self.number::<f32>(column)).collect::<Result<_>>().at_caller()?))
    }

    fn wrong(&self, why: String) -> Error {
        Error::format(&*self.file, format!("line {}: {why}", self.line))
    }
}

/// The row as text by column. Columns that share a name are left out.
impl From<CsvRow> for TableRow {
    fn from(row: CsvRow) -> Self {
        let named = |(name, text): (&String, String)| {
            let alone = row.columns.iter().filter(|other| *other == name).count() == 1;
            alone.then(|| (name.clone(), Cell::Text(text)))
        };
        let fields = row.columns.iter().zip(row.fields).filter_map(named).collect();
        TableRow::new(Cell::Fields(fields), &row.file.into(), ("line", row.line))
    }
}

/// The position of a byte within a record.
#[derive(Clone, Copy, PartialEq)]
enum At {
    FieldStart,
    /// In a field without quotes.
    Bare,
    Quoted,
    /// After a quote in a quoted field: the second of two, or the end.
    Quote,
}

impl At {
    fn after(self, byte: u8, separator: u8) -> At {
        match (self, byte) {
            (At::FieldStart | At::Quote, b'"') => At::Quoted,
            (At::Quoted, b'"') => At::Quote,
            (At::Quoted, _) => At::Quoted,
            (_, byte) if byte == separator => At::FieldStart,
            _ => At::Bare,
        }
    }
}

/// Finds the records. Line ends within quotes end no record. A quote that is never closed takes the rest of the file
/// into its record.
fn quoted(cutter: &mut Cutter<'_>, separator: u8) -> Result<()> {
    loop {
        let place = cutter.place();
        let (mut end, mut at) = (place.0, At::FieldStart);
        let at_end = loop {
            let Some(byte) = cutter.next()? else { break true };
            if at != At::Quoted && cutter.ends_line(byte)? {
                break false;
            }
            at = at.after(byte, separator);
            end = cutter.place().0;
        };
        if end > place.0 {
            cutter.record(place, end)?;
        }
        if at_end {
            return Ok(());
        }
    }
}

/// The fields of a record.
fn fields(text: &str, separator: char) -> Result<Vec<String>, String> {
    let (mut fields, mut rest) = (Vec::new(), text);
    loop {
        let (field, after) = match rest.strip_prefix('"') {
            Some(inside) => quoted_field(inside).ok_or("a quote is opened and never closed")?,
            None => {
                let end = rest.find(separator).unwrap_or(rest.len());
                (rest[..end].to_owned(), &rest[end..])
            }
        };
        let number = fields.len() + 1;
        fields.push(field);
        match after.strip_prefix(separator) {
            Some(next) => rest = next,
            None if after.is_empty() => return Ok(fields),
            None => return Err(format!("field {number} goes on after its closing quote")),
        }
    }
}

/// A quoted field up to its closing quote, and the text after it. Two quotes stand for one.
fn quoted_field(inside: &str) -> Option<(String, &str)> {
    let (mut field, mut rest) = (String::new(), inside);
    loop {
        let (before, after) = rest.split_once('"')?;
        field.push_str(before);
        match after.strip_prefix('"') {
            Some(next) => {
                field.push('"');
                rest = next;
            }
            None => return Some((field, after)),
        }
    }
}
