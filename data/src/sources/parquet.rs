//! Rows of Parquet files (feature `parquet`).

use std::{
    io::{self, BufReader, Read},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use bytes::Bytes;
use numcore::{Error, Result, Within};
use parquet::{
    errors::ParquetError,
    file::reader::{ChunkReader, FileReader, Length, SerializedFileReader},
    record::{Field, Row},
    schema::types::Type,
};
use serde_json::{Map, Value};

use crate::{Dataset, files::PositionedFile};

/// The number of decoded row groups kept.
const KEPT: usize = 4;

/// The rows of a Parquet file. Reading a row decodes its complete row group, and the last four groups are kept. Read
/// rows in order, or in an order that stays within a few groups ([`Stream::shuffle`](crate::stream::Stream::shuffle)),
/// or convert the file to tokens first.
pub struct Parquet {
    path: PathBuf,
    reader: SerializedFileReader<Chunks>,
    /// The columns to read; `None` for all.
    projection: Option<Type>,
    /// The end of each row group: the index after its last row.
    ends: Vec<usize>,
    /// The kept groups with their numbers, the last used one last.
    kept: Mutex<Vec<(usize, Group)>>,
}

type Group = Arc<Vec<Map<String, Value>>>;

/// A row: JSON values by column. Types that JSON lacks are text: bytes, dates, NaN, infinities and others.
#[derive(Clone, Debug, PartialEq)]
pub struct ParquetRow {
    /// The values by column.
    pub values: Map<String, Value>,
    file: PathBuf,
    row: usize,
}

impl Parquet {
    /// Opens a file and reads its schema.
    ///
    /// # Errors
    /// Fails if the file cannot be read, or is no Parquet file.
    #[track_caller]
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let chunks = Chunks(Arc::new(PositionedFile::open(path).at_caller()?));
        let reader = SerializedFileReader::new(chunks)
            .map_err(|e| Error::format(path.display().to_string(), e.to_string()))
            .at_caller()?;
        let rows = reader.metadata().row_groups().iter().map(|group| usize::try_from(group.num_rows()).ok());
        let add = |end: &mut usize, rows: Option<usize>| {
            *end = rows.and_then(|rows| end.checked_add(rows)).unwrap_or(usize::MAX);
            Some(*end)
        };
        let ends: Vec<usize> = rows.scan(0, add).collect();
        if ends.last() == Some(&usize::MAX) {
            return Err(Error::format(path.display().to_string(), "its numbers of rows make no sense")).at_caller();
        }
        Ok(Parquet { path: path.into(), reader, projection: None, ends, kept: Mutex::new(Vec::new()) })
    }

    /// Reads only these columns.
    ///
    /// # Errors
    /// Fails if the file has no such column.
    #[track_caller]
    pub fn columns(mut self, columns: &[&str]) -> Result<Self> {
        let schema = self.reader.metadata().file_metadata().schema();
        let find = |&column: &&str| {
            let names = || schema.get_fields().iter().map(|field| field.name()).collect::<Vec<_>>().join(", ");
            let found = schema.get_fields().iter().find(|field| field.name() == column);
            found.cloned().ok_or_else(|| self.malformed(format!("there is no column `{column}` among {}", names())))
        };
        let fields = columns.iter().map(find).collect::<Result<Vec<_>>>().at_caller()?;
        let projection = Type::group_type_builder(schema.name()).with_fields(fields).build();
        self.projection = Some(projection.map_err(|e| self.malformed(e.to_string())).at_caller()?);
        Ok(self)
    }

    /// The string in one column of every row: the text of a corpus.
    ///
    /// # Errors
    /// Fails if the file has no such column.
    #[track_caller]
    pub fn texts(self, column: &str) -> Result<impl Dataset<Example = String> + use<>> {
        let name = column.to_owned();
        Ok(self.columns(&[column]).at_caller()?.map(move |row| Ok(row.text(&name)?.to_owned())))
    }

    fn group(&self, number: usize) -> Result<Group> {
        let lock = || self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let mut kept = lock();
        if let Some(at) = kept.iter().position(|(n, _)| *n == number) {
            let entry = kept.remove(at);
            kept.push(entry);
            return Ok(Arc::clone(&kept[kept.len() - 1].1));
        }
        // Decoded without the lock: other threads go on with the groups they have.
        drop(kept);
        let rows = self.decoded(number).map_err(|e| self.malformed(format!("row group {number}: {e}")))?;
        let (rows, mut kept) = (Arc::new(rows), lock());
        kept.push((number, Arc::clone(&rows)));
        let surplus = kept.len().saturating_sub(KEPT);
        kept.drain(..surplus);
        Ok(rows)
    }

    fn decoded(&self, number: usize) -> Result<Vec<Map<String, Value>>, ParquetError> {
        let group = self.reader.get_row_group(number)?;
        let rows = group.get_row_iter(self.projection.clone())?;
        rows.map(|row| Ok(object(&row?))).collect()
    }

    fn malformed(&self, why: String) -> Error {
        Error::format(self.path.display().to_string(), why)
    }
}

impl Dataset for Parquet {
    type Example = ParquetRow;

    fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    fn get(&self, index: usize) -> Result<ParquetRow> {
        crate::dataset::check_index("Parquet", index, self.len())?;
        let number = self.ends.partition_point(|&end| end <= index);
        let start = if number == 0 { 0 } else { self.ends[number - 1] };
        let group = self.group(number)?;
        let values = group.get(index - start).cloned();
        let values =
            values.ok_or_else(|| self.malformed(format!("row group {number} has only {} rows", group.len())))?;
        Ok(ParquetRow { values, file: self.path.clone(), row: index })
    }
}

impl ParquetRow {
    /// The string in a column.
    ///
    /// # Errors
    /// Fails if there is no such column, or its value is no string.
    #[track_caller]
    pub fn text(&self, column: &str) -> Result<&str> {
        let text = self.values.get(column).and_then(Value::as_str);
        text.ok_or_else(|| self.wrong(column, "string")).at_caller()
    }

    /// The number in a column; NaN and infinities too.
    ///
    /// # Errors
    /// Fails if there is no such column, or its value is no number.
    #[track_caller]
    pub fn number(&self, column: &str) -> Result<f64> {
        let number = self.values.get(column).and_then(|value| match value {
            Value::String(text) => NOT_FINITE.contains(&text.as_str()).then(|| text.parse().ok())?,
            value => value.as_f64(),
        });
        number.ok_or_else(|| self.wrong(column, "number")).at_caller()
    }

    fn wrong(&self, column: &str, kind: &str) -> Error {
        let found = self.values.get(column).map_or("missing".into(), Value::to_string);
        let why = format!("row {}: column `{column}` is {found}, no {kind}", self.row);
        Error::format(self.file.display().to_string(), why)
    }
}

fn object(row: &Row) -> Map<String, Value> {
    row.get_column_iter().map(|(name, field)| (name.clone(), value(field))).collect()
}

/// The text of numbers that JSON does not have.
const NOT_FINITE: [&str; 3] = ["NaN", "inf", "-inf"];

fn float(x: f64) -> Value {
    if x.is_finite() { x.into() } else { x.to_string().into() }
}

fn value(field: &Field) -> Value {
    match field {
        Field::Null => Value::Null,
        Field::Bool(x) => (*x).into(),
        Field::Byte(x) => (*x).into(),
        Field::Short(x) => (*x).into(),
        Field::Int(x) => (*x).into(),
        Field::Long(x) => (*x).into(),
        Field::UByte(x) => (*x).into(),
        Field::UShort(x) => (*x).into(),
        Field::UInt(x) => (*x).into(),
        Field::ULong(x) => (*x).into(),
        Field::Float16(x) => float((*x).into()),
        Field::Float(x) => float((*x).into()),
        Field::Double(x) => float(*x),
        Field::Str(x) => x.as_str().into(),
        Field::Group(row) => object(row).into(),
        Field::ListInternal(list) => list.elements().iter().map(value).collect(),
        other => other.to_string().into(),
    }
}

/// A file read by offset. The `parquet` crate's own reader of files shares one position, which threads would move under
/// one another.
struct Chunks(Arc<PositionedFile>);

impl Length for Chunks {
    fn len(&self) -> u64 {
        self.0.len()
    }
}

impl ChunkReader for Chunks {
    type T = BufReader<FileFrom>;

    fn get_read(&self, start: u64) -> Result<Self::T, ParquetError> {
        Ok(BufReader::new(FileFrom { file: Arc::clone(&self.0), offset: start }))
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes, ParquetError> {
        let bytes = self.0.bytes(start, length as u64);
        Ok(bytes.map_err(|e| ParquetError::General(e.to_string()))?.into())
    }
}

/// A reader of a file from an offset on.
struct FileFrom {
    file: Arc<PositionedFile>,
    offset: u64,
}

impl Read for FileFrom {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let left = self.file.len().saturating_sub(self.offset);
        let count = into.len().min(left.try_into().unwrap_or(usize::MAX));
        self.file.read(self.offset, &mut into[..count]).map_err(io::Error::other)?;
        self.offset += count as u64;
        Ok(count)
    }
}
