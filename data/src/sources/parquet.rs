//! Rows of Parquet files (feature `parquet`).

use std::{
    io::{self, BufReader, Read},
    path::{Path, PathBuf},
    sync::Arc,
};

use bytes::Bytes;
use numcore::{Error, Result, Within};
use parquet::{
    errors::ParquetError,
    file::reader::{ChunkReader, FileReader, Length, SerializedFileReader},
    record::{Field, Row},
    schema::types::Type,
};

use super::{Cell, TableRow, groups::Groups};
use crate::{Dataset, files::PositionedFile, loader::caught};

/// The rows of Parquet files. Reading a row decodes its complete row group, and the last four groups are kept. Read
/// rows in order, or in an order that stays within a few groups ([`Stream::shuffle`](crate::stream::Stream::shuffle)),
/// or convert the files to tokens first.
///
/// ```no_run
/// use data::{Dataset, sources::Parquet};
/// # fn main() -> numcore::Result<()> {
/// let texts = Parquet::open("corpus/")?.texts("text")?; // train-00000-of-00002.parquet, …
/// # Ok(())
/// # }
/// ```
pub struct Parquet {
    files: Vec<ParquetFile>,
    groups: Groups<Vec<Cell>>,
    /// The columns to read; `None` for all.
    projection: Option<Type>,
}

struct ParquetFile {
    name: Arc<str>,
    reader: SerializedFileReader<Chunks>,
}

impl Parquet {
    /// Opens a file, or the files `*.parquet` of a folder one after another in the order of their names.
    ///
    /// # Errors
    /// Fails if the folder has no such file; otherwise as [`open_all`](Parquet::open_all).
    #[track_caller]
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        if !path.is_dir() {
            return Parquet::open_all([path]);
        }
        let files = std::fs::read_dir(path).and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect());
        let mut files: Vec<PathBuf> = files.map_err(|e| Error::io(path, e)).at_caller()?;
        files.retain(|file| file.extension().is_some_and(|end| end == "parquet"));
        files.sort_unstable();
        if files.is_empty() {
            return Err(Error::format(path.display().to_string(), "there is no file *.parquet")).at_caller();
        }
        Parquet::open_all(files)
    }

    /// Opens files one after another, and reads their schemas.
    ///
    /// # Errors
    /// Fails if a file cannot be read, is no Parquet file, or has other columns than the first.
    #[track_caller]
    pub fn open_all<P: AsRef<Path>>(paths: impl IntoIterator<Item = P>) -> Result<Self> {
        let open = |path: P| {
            let name: Arc<str> = path.as_ref().display().to_string().into();
            let reader = SerializedFileReader::new(Chunks(Arc::new(PositionedFile::open(path.as_ref())?)));
            let reader = reader.map_err(|e| Error::format(&*name, e.to_string()))?;
            Ok(ParquetFile { name, reader })
        };
        let files: Vec<ParquetFile> = paths.into_iter().map(open).collect::<Result<_>>().at_caller()?;
        if let Some(other) = files.iter().find(|file| file.columns() != files[0].columns()) {
            let why = format!("its columns are not those of {}", files[0].name);
            return Err(Error::format(&*other.name, why)).at_caller();
        }
        let rows =
            |file: &ParquetFile| file.reader.metadata().row_groups().iter().map(|group| group.num_rows()).collect();
        let groups = Groups::of(files.iter().map(|file| (&*file.name, rows(file)))).at_caller()?;
        Ok(Parquet { files, groups, projection: None })
    }

    /// Reads only these columns.
    ///
    /// # Errors
    /// Fails if the files have no such column.
    #[track_caller]
    pub fn columns(mut self, columns: &[&str]) -> Result<Self> {
        let Some(file) = self.files.first() else { return Ok(self) };
        let schema = file.reader.metadata().file_metadata().schema();
        let find = |&column: &&str| {
            let names = || file.columns().iter().map(|field| field.name()).collect::<Vec<_>>().join(", ");
            let found = file.columns().iter().find(|field| field.name() == column);
            let why = || format!("there is no column `{column}` among {}", names());
            found.cloned().ok_or_else(|| Error::format(&*file.name, why()))
        };
        let fields = columns.iter().map(find).collect::<Result<Vec<_>>>().at_caller()?;
        let projection = Type::group_type_builder(schema.name()).with_fields(fields).build();
        self.projection = Some(projection.map_err(|e| Error::format(&*file.name, e.to_string())).at_caller()?);
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

    fn decoded(&self, file: &ParquetFile, group: usize) -> Result<Vec<Cell>, ParquetError> {
        let rows = file.reader.get_row_group(group)?;
        let rows = rows.get_row_iter(self.projection.clone())?;
        rows.map(|row| Ok(fields(&row?))).collect()
    }
}

impl ParquetFile {
    fn columns(&self) -> &[Arc<Type>] {
        self.reader.metadata().file_metadata().schema().get_fields()
    }
}

impl Dataset for Parquet {
    type Example = TableRow;

    fn len(&self) -> usize {
        self.groups.len()
    }

    fn get(&self, index: usize) -> Result<TableRow> {
        crate::dataset::check_index("Parquet", index, self.len())?;
        let [at, group, row, number] = self.groups.place(index);
        let file = &self.files[at];
        let wrong = |why: String| Error::format(&*file.name, format!("row group {group}: {why}"));
        // The crate panics at dates that no calendar has.
        let decoded = || caught(|| self.decoded(file, group).map_err(Error::other)).map_err(|e| wrong(e.to_string()));
        let rows = self.groups.get(at, group, decoded)?;
        let cell = rows.get(row).cloned().ok_or_else(|| wrong(format!("it has only {} rows", rows.len())))?;
        Ok(TableRow::new(cell, &file.name, ("row", number as u64)))
    }
}

fn fields(row: &Row) -> Cell {
    Cell::Fields(row.get_column_iter().map(|(name, field)| (name.clone(), cell(field))).collect())
}

fn cell(field: &Field) -> Cell {
    match field {
        Field::Null => Cell::Null,
        Field::Bool(x) => Cell::Bool(*x),
        Field::Byte(x) => Cell::Int((*x).into()),
        Field::Short(x) => Cell::Int((*x).into()),
        Field::Int(x) => Cell::Int((*x).into()),
        Field::Long(x) => Cell::Int((*x).into()),
        Field::UByte(x) => Cell::Int((*x).into()),
        Field::UShort(x) => Cell::Int((*x).into()),
        Field::UInt(x) => Cell::Int((*x).into()),
        Field::ULong(x) => Cell::Int((*x).into()),
        Field::Float16(x) => Cell::Float((*x).into()),
        Field::Float(x) => Cell::Float((*x).into()),
        Field::Double(x) => Cell::Float(*x),
        Field::Str(x) => Cell::Text(x.clone()),
        Field::Bytes(x) => Cell::Bytes(x.data().to_vec()),
        Field::Group(row) => fields(row),
        Field::ListInternal(list) => Cell::List(list.elements().iter().map(cell).collect()),
        other => Cell::Text(other.to_string()),
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
