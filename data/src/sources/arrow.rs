//! Rows of Arrow's IPC files (feature `arrow`).

use std::{io::Cursor, path::Path, sync::Arc};

use arrow_array::{
    Array as _, ArrayRef, RecordBatch,
    cast::AsArray,
    types::{
        Float16Type, Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type, UInt8Type, UInt16Type,
        UInt32Type, UInt64Type,
    },
};
use arrow_ipc::{MessageHeader, reader::StreamReader, root_as_message};
use arrow_schema::{DataType, Field, Fields, Schema};
use numcore::{Error, Result, Within};
use serde_json::Value;

use super::{Cell, TableRow, groups::Groups};
use crate::{Dataset, files::PositionedFile, loader::caught};

/// The rows of Arrow's IPC files, streams or not: what `save_to_disk` of Hugging Face's `datasets` writes. Reading a
/// row reads its record batch, often of 1000 rows; the last four batches are kept.
///
/// ```no_run
/// use data::{Dataset, Loader, sources::{Arrow, image::Image}};
/// # fn main() -> numcore::Result<()> {
/// let photos = Arrow::open("photos/train")?; // a folder with a `state.json`
/// let photos = photos.map(|row| {
///     let image = Image::decode("photo", row.bytes("image.bytes")?)?;
///     Ok((image, row.number("label")? as i64))
/// });
/// # Ok(())
/// # }
/// ```
#[doc(alias("load_from_disk"))]
#[doc(alias("save_to_disk"))]
#[doc(alias("feather"))]
pub struct Arrow {
    files: Vec<ArrowFile>,
    groups: Groups<RecordBatch>,
    /// The numbers of the columns to read; `None` for all.
    projection: Option<Vec<usize>>,
}

struct ArrowFile {
    file: PositionedFile,
    name: Arc<str>,
    /// The message of the schema, which begins a stream.
    head: Vec<u8>,
    schema: Arc<Schema>,
    batches: Vec<ArrowBatch>,
}

/// The message of a record batch.
struct ArrowBatch {
    offset: u64,
    len: u64,
    rows: i64,
}

/// The bytes with which files begin that are no streams. A stream follows them.
const FILE: &[u8] = b"ARROW1\0\0";

/// The bytes before the length of a message, in files of version 0.15 and later.
const MESSAGE: [u8; 4] = [0xff; 4];

impl Arrow {
    /// Opens a file `*.arrow`, or the folder of a data set that `save_to_disk` wrote.
    ///
    /// # Errors
    /// Fails if the folder has no `state.json`, as that of several splits has none; otherwise as
    /// [`open_all`](Arrow::open_all).
    #[track_caller]
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let folder = path.as_ref();
        if !folder.is_dir() {
            return Arrow::open_all([folder]);
        }
        let path = folder.join("state.json");
        let wrong = |why: &str| Error::format(path.display().to_string(), why);
        let state = std::fs::read(&path).map_err(|e| Error::io(&path, e)).at_caller()?;
        let state: Value = serde_json::from_slice(&state).map_err(|e| wrong(&e.to_string())).at_caller()?;
        let files = state.get("_data_files").and_then(Value::as_array);
        let name = |file: &Value| Some(folder.join(file.get("filename")?.as_str()?));
        let files = files.and_then(|files| files.iter().map(name).collect::<Option<Vec<_>>>());
        let files = files.ok_or_else(|| wrong("it has no list `_data_files` of objects with a `filename`"));
        Arrow::open_all(files.at_caller()?)
    }

    /// Opens files one after another, and finds their record batches.
    ///
    /// # Errors
    /// Fails if a file cannot be read, is no such file, or has other columns than the first. Columns by a dictionary,
    /// and batches that are compressed, are refused.
    #[track_caller]
    pub fn open_all<P: AsRef<Path>>(paths: impl IntoIterator<Item = P>) -> Result<Self> {
        let mut files = Vec::<ArrowFile>::new();
        for path in paths {
            let file = PositionedFile::open(path.as_ref()).at_caller()?;
            let opened = caught(|| index(file)).at_caller()?;
            if let Some(first) = files.first().filter(|first| first.schema.fields() != opened.schema.fields()) {
                let why = format!("its columns are not those of {}", first.name);
                return Err(opened.file.malformed(why)).at_caller();
            }
            files.push(opened);
        }
        let rows = |file: &ArrowFile| file.batches.iter().map(|batch| batch.rows).collect();
        let groups = Groups::of(files.iter().map(|file| (&*file.name, rows(file)))).at_caller()?;
        Ok(Arrow { files, groups, projection: None })
    }

    /// Reads only these columns.
    ///
    /// # Errors
    /// Fails if the files have no such column.
    #[track_caller]
    pub fn columns(mut self, columns: &[&str]) -> Result<Self> {
        let Some(file) = self.files.first() else { return Ok(self) };
        let fields = file.schema.fields();
        let names = || fields.iter().map(|field| field.name().as_str()).collect::<Vec<_>>().join(", ");
        let wrong = |column: &str| file.file.malformed(format!("there is no column `{column}` among {}", names()));
        let find = |column: &&str| fields.iter().position(|field| field.name() == column).ok_or_else(|| wrong(column));
        self.projection = Some(columns.iter().map(find).collect::<Result<_>>().at_caller()?);
        Ok(self)
    }

    /// The string in one column of every row: the text of a corpus.
    ///
    /// # Errors
    /// Fails if the files have no such column.
    #[track_caller]
    pub fn texts(self, column: &str) -> Result<impl Dataset<Example = String> + use<>> {
        let name = column.to_owned();
        Ok(self.columns(&[column]).at_caller()?.map(move |row| Ok(row.text(&name)?.to_owned())))
    }

    fn batch(&self, file: &ArrowFile, &ArrowBatch { offset, len, .. }: &ArrowBatch) -> Result<RecordBatch> {
        let bytes = [&file.head[..], &file.file.bytes(offset, len)?].concat();
        let wrong = |why: String| file.file.malformed(format!("the record batch at byte {offset}: {why}"));
        let mut reader =
            StreamReader::try_new(Cursor::new(bytes), self.projection.clone()).map_err(|e| wrong(e.to_string()))?;
        reader.next().ok_or_else(|| wrong("it is none".into()))?.map_err(|e| wrong(e.to_string()))
    }
}

impl Dataset for Arrow {
    type Example = TableRow;

    fn len(&self) -> usize {
        self.groups.len()
    }

    fn get(&self, index: usize) -> Result<TableRow> {
        crate::dataset::check_index("Arrow", index, self.len())?;
        let [at, group, row, number] = self.groups.place(index);
        let (file, of_file) = (&self.files[at], &self.files[at].batches[group]);
        let batch = self.groups.get(at, group, || caught(|| self.batch(file, of_file)))?;
        if row >= batch.num_rows() {
            let why = format!("the record batch at byte {} has only {} rows", of_file.offset, batch.num_rows());
            return Err(file.file.malformed(why));
        }
        let cell = fields(batch.schema_ref().fields(), batch.columns(), row);
        let cell = cell.map_err(|why| file.file.malformed(format!("row {number}: {why}")))?;
        Ok(TableRow::new(cell, &file.name, ("row", number as u64)))
    }
}

/// Finds the messages of a file, without reading what the batches hold.
fn index(file: PositionedFile) -> Result<ArrowFile> {
    let begins = file.bytes(0, file.len().min(FILE.len() as u64))?;
    let mut offset = if begins == FILE { FILE.len() as u64 } else { 0 };
    let (mut head, mut batches) = (None, Vec::new());
    while offset < file.len() {
        let wrong = |why: &str| file.malformed(format!("the message at byte {offset}: {why}"));
        let start = file.bytes(offset, 8)?;
        let (marker, len) = start.split_at(4);
        if marker != MESSAGE {
            return Err(wrong("it does not begin as messages of Arrow do"));
        }
        let len = len.first_chunk().map_or(0, |len| u32::from_le_bytes(*len)).into();
        if len == 0 {
            break;
        }
        let bytes = file.bytes(offset + 8, len)?;
        let message = root_as_message(&bytes).map_err(|e| wrong(&e.to_string()))?;
        let body = u64::try_from(message.bodyLength()).map_err(|_| wrong("its length is negative"))?;
        let whole = body + 8 + len;
        match (message.header_type(), message.header_as_record_batch()) {
            (MessageHeader::Schema, _) if head.is_none() => head = Some([&start[..], &bytes].concat()),
            (MessageHeader::RecordBatch, Some(batch)) if batch.compression().is_some() => {
                return Err(wrong("compressed batches are not read: write them without compression"));
            }
            (MessageHeader::RecordBatch, Some(_)) if offset.saturating_add(whole) > file.len() => {
                return Err(wrong("the file ends within it"));
            }
            (MessageHeader::RecordBatch, Some(batch)) if head.is_some() => {
                batches.push(ArrowBatch { offset, len: whole, rows: batch.length() });
            }
            (MessageHeader::DictionaryBatch, _) => {
                return Err(wrong("columns by a dictionary are not read: write them as plain values"));
            }
            _ => return Err(wrong("a schema should come first, then record batches alone")),
        }
        offset = offset.saturating_add(whole);
    }
    let head = head.ok_or_else(|| file.malformed("it has no schema, so it is no file of Arrow's"))?;
    let reader = StreamReader::try_new(Cursor::new(&head), None).map_err(|e| file.malformed(e.to_string()))?;
    let name = file.path().display().to_string().into();
    Ok(ArrowFile { name, schema: reader.schema(), head, file, batches })
}

fn fields(fields: &Fields, columns: &[ArrayRef], row: usize) -> Result<Cell, String> {
    let one = |(field, column): (&Arc<Field>, &ArrayRef)| {
        let cell = cell(column, row).map_err(|why| format!("column `{}`: {why}", field.name()))?;
        Ok((field.name().clone(), cell))
    };
    Ok(Cell::Fields(fields.iter().zip(columns).map(one).collect::<Result<_, String>>()?))
}

fn list(values: &ArrayRef) -> Result<Cell, String> {
    Ok(Cell::List((0..values.len()).map(|i| cell(values, i)).collect::<Result<_, _>>()?))
}

fn cell(column: &ArrayRef, row: usize) -> Result<Cell, String> {
    macro_rules! number {
        ($kind:ident, $type:ty) => {
            Cell::$kind(column.as_primitive::<$type>().value(row).into())
        };
    }
    Ok(match column.data_type() {
        _ if column.is_null(row) => Cell::Null,
        DataType::Null => Cell::Null,
        DataType::Boolean => Cell::Bool(column.as_boolean().value(row)),
        DataType::Int8 => number!(Int, Int8Type),
        DataType::Int16 => number!(Int, Int16Type),
        DataType::Int32 => number!(Int, Int32Type),
        DataType::Int64 => number!(Int, Int64Type),
        DataType::UInt8 => number!(Int, UInt8Type),
        DataType::UInt16 => number!(Int, UInt16Type),
        DataType::UInt32 => number!(Int, UInt32Type),
        DataType::UInt64 => number!(Int, UInt64Type),
        DataType::Float16 => number!(Float, Float16Type),
        DataType::Float32 => number!(Float, Float32Type),
        DataType::Float64 => number!(Float, Float64Type),
        DataType::Utf8 => Cell::Text(column.as_string::<i32>().value(row).into()),
        DataType::LargeUtf8 => Cell::Text(column.as_string::<i64>().value(row).into()),
        DataType::Utf8View => Cell::Text(column.as_string_view().value(row).into()),
        DataType::BinaryView => Cell::Bytes(column.as_binary_view().value(row).into()),
        DataType::Binary => Cell::Bytes(column.as_binary::<i32>().value(row).into()),
        DataType::LargeBinary => Cell::Bytes(column.as_binary::<i64>().value(row).into()),
        DataType::FixedSizeBinary(_) => Cell::Bytes(column.as_fixed_size_binary().value(row).into()),
        DataType::List(_) => list(&column.as_list::<i32>().value(row))?,
        DataType::LargeList(_) => list(&column.as_list::<i64>().value(row))?,
        DataType::FixedSizeList(..) => list(&column.as_fixed_size_list().value(row))?,
        DataType::Struct(names) => fields(names, column.as_struct().columns(), row)?,
        other => return Err(format!("values of type {other} are not read: leave it out by `columns`")),
    })
}
