//! Shards of examples in tar files, with WebDataset's names.
//!
//! Files that share a path up to the first dot of their name are one example; the rest of the name is the field.
//! `a/17.jpg` and `a/17.cls` are the fields `jpg` and `cls` of the example `a/17`. The files of an example stand one
//! after another.

use std::{
    collections::BTreeMap,
    io::BufReader,
    path::{Path, PathBuf},
};

use numcore::{Error, Result, Within};

use crate::{
    Dataset,
    files::{GZIP, PositionedFile},
};

/// The number of bytes in a block of a tar file.
const BLOCK: u64 = 512;

/// The examples of tar files, in the order of the files. Opening reads the positions of all files within; reading an
/// example reads its contents.
#[derive(Debug)]
pub struct TarShards {
    shards: Vec<PositionedFile>,
    examples: Vec<Example>,
    /// The errors that ended the reading of shards early.
    torn: Vec<Error>,
}

/// An example of [`TarShards`]: fields by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TarExample {
    /// The path that the files share.
    pub key: String,
    /// The contents of each file, by the part of its name after the first dot.
    pub fields: BTreeMap<String, Vec<u8>>,
}

#[derive(Debug)]
struct Example {
    shard: usize,
    key: String,
    /// The name, the offset and the size of each field.
    fields: Vec<(String, u64, u64)>,
}

impl TarShards {
    /// Opens tar files that are not compressed. Archives concatenated into one file are read to its end.
    ///
    /// # Errors
    /// Fails if a file cannot be read, is compressed, or is damaged before its first complete example. In a file
    /// damaged or cut later, the examples before that stay readable; [`torn`](TarShards::torn) has the error.
    #[track_caller]
    pub fn open<P: AsRef<Path>>(paths: impl IntoIterator<Item = P>) -> Result<Self> {
        let mut all = TarShards { shards: Vec::new(), examples: Vec::new(), torn: Vec::new() };
        for path in paths {
            let file = PositionedFile::open(path.as_ref()).at_caller()?;
            let before = all.examples.len();
            match index(&file, all.shards.len(), &mut all.examples) {
                Ok(()) => {}
                Err(error) if all.examples.len() == before => return Err(error).at_caller(),
                Err(error) => all.torn.push(error),
            }
            all.shards.push(file);
        }
        Ok(all)
    }

    /// The errors that ended the reading of shards early; empty if all are complete.
    pub fn torn(&self) -> &[Error] {
        &self.torn
    }

    /// The key of an example, without reading it; `None` if the index is out of range.
    pub fn key(&self, index: usize) -> Option<&str> {
        self.examples.get(index).map(|example| example.key.as_str())
    }
}

/// Appends the examples of a shard. In a damaged one, an example that may lack a field is left out.
fn index(file: &PositionedFile, shard: usize, examples: &mut Vec<Example>) -> Result<()> {
    if file.bytes(0, file.len().min(2))? == GZIP {
        return Err(file.malformed("it is compressed by gzip, and read at any place: unpack it first"));
    }
    let (mut open, mut end) = (None, 0);
    let read = entries(file, shard, examples, &mut open, &mut end);
    // A file cut between two entries looks complete, except for the missing end mark.
    let mark = end.checked_add(BLOCK).filter(|&mark| mark <= file.len());
    if mark.is_none() || file.bytes(end, BLOCK)?.iter().any(|&byte| byte != 0) {
        let why = "it ends without the blocks of zeros that end a tar file, so something is missing";
        return read.and(Err(file.malformed(why)));
    }
    examples.extend(open);
    read
}

/// Appends all examples but the last, which goes to `open`; `end` receives the end of the last entry.
fn entries(
    file: &PositionedFile,
    shard: usize,
    examples: &mut Vec<Example>,
    open: &mut Option<Example>,
    end: &mut u64,
) -> Result<()> {
    let mut archive = tar::Archive::new(BufReader::new(file.file()));
    archive.set_ignore_zeros(true);
    let entries = archive.entries_with_seek().map_err(|e| Error::io(file.path(), e))?;
    for (number, entry) in entries.enumerate() {
        let broken = |e: std::io::Error| file.malformed(format!("entry {number}: {e}"));
        let entry = entry.map_err(broken)?;
        *end = entry.raw_file_position().saturating_add(entry.size()).next_multiple_of(BLOCK);
        if !entry.header().entry_type().is_file() {
            continue;
        }
        let path = entry.path().map_err(broken)?.into_owned();
        let (offset, size) = (entry.raw_file_position(), entry.size());
        if offset.checked_add(size).is_none_or(|end| end > file.len()) {
            let why = format!("entry {number}: `{}` of {size} bytes ends past the end of the file", path.display());
            return Err(file.malformed(why));
        }
        let Some((key, field)) = key_and_field(&path) else { continue };
        if open.as_ref().is_some_and(|example| example.key != key) {
            examples.extend(open.take());
        }
        let example = open.get_or_insert_with(|| Example { shard, key, fields: Vec::new() });
        example.fields.push((field, offset, size));
    }
    Ok(())
}

/// Splits a path at the first dot of its name. A name without a dot, or with nothing on one side of it, is no field.
fn key_and_field(path: &Path) -> Option<(String, String)> {
    let name = path.file_name()?.to_str()?;
    let (stem, field) = name.split_once('.')?;
    if stem.is_empty() || field.is_empty() {
        return None;
    }
    let key: PathBuf = path.with_file_name(stem);
    Some((key.to_str()?.to_owned(), field.to_owned()))
}

impl Dataset for TarShards {
    type Example = TarExample;

    fn len(&self) -> usize {
        self.examples.len()
    }

    fn get(&self, index: usize) -> Result<TarExample> {
        crate::dataset::check_index("TarShards", index, self.len())?;
        let Example { shard, key, fields } = &self.examples[index];
        let read =
            |(name, offset, size): &(String, u64, u64)| Ok((name.clone(), self.shards[*shard].bytes(*offset, *size)?));
        let read: Result<Vec<_>> = fields.iter().map(read).collect();
        let named = read.map_err(|e| e.with_operands(|| format!("`{key}`")))?;
        let (count, fields) = (named.len(), named.into_iter().collect::<BTreeMap<_, _>>());
        if fields.len() != count {
            return Err(self.shards[*shard].malformed(format!("`{key}` has two files for one field")));
        }
        Ok(TarExample { key: key.clone(), fields })
    }
}

impl TarExample {
    /// The contents of a field.
    ///
    /// # Errors
    /// Fails if there is no such field.
    #[track_caller]
    pub fn field(&self, name: &str) -> Result<&[u8]> {
        let names = || self.fields.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
        let field = self.fields.get(name).map(Vec::as_slice);
        field
            .ok_or_else(|| Error::format(&*self.key, format!("there is no field `{name}` among {}", names())))
            .at_caller()
    }

    /// The contents of a field as text.
    ///
    /// # Errors
    /// Fails if there is no such field, or it is no UTF-8.
    #[track_caller]
    pub fn text(&self, name: &str) -> Result<&str> {
        let text = std::str::from_utf8(self.field(name)?);
        text.map_err(|e| Error::format(&*self.key, format!("field `{name}` is no UTF-8 text ({e})"))).at_caller()
    }
}
