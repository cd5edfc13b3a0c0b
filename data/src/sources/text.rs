//! Text: folders of files, lines of a file, and characters as tokens.

use std::{
    fs,
    path::{Path, PathBuf},
};

use numcore::{Error, Result, Within};

use crate::{
    Dataset,
    files::{PositionedFile, Records, lines, without_mark},
};

/// A dataset of the files with one extension in a folder and its subfolders, sorted by path. An example is a full file,
/// a [`TextFile`], read on access.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextFolder {
    paths: Vec<PathBuf>,
}

/// A file of a [`TextFolder`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextFile {
    /// The path of the file.
    pub path: PathBuf,
    /// The contents of the file: UTF-8, without a byte order mark.
    pub text: String,
}

impl TextFolder {
    /// Finds the files with this extension, such as `txt`.
    ///
    /// # Errors
    /// Fails if a folder cannot be read, or there is no such file.
    #[track_caller]
    pub fn open(folder: impl AsRef<Path>, extension: &str) -> Result<Self> {
        let mut paths = files_within(folder.as_ref()).at_caller()?;
        paths.retain(|path| path.extension().is_some_and(|end| end == extension));
        if paths.is_empty() {
            return Err(Error::format(
                folder.as_ref().display().to_string(),
                format!("there is no file *.{extension}"),
            ))
            .at_caller();
        }
        Ok(TextFolder { paths })
    }

    /// The paths of all files, sorted.
    pub fn paths(&self) -> &[PathBuf] {
        &self.paths
    }
}

impl Dataset for TextFolder {
    type Example = TextFile;

    fn len(&self) -> usize {
        self.paths.len()
    }

    fn get(&self, index: usize) -> Result<TextFile> {
        crate::dataset::check_index("TextFolder", index, self.len())?;
        let path = self.paths[index].clone();
        let text = read_text(&path)?;
        Ok(TextFile { path, text })
    }
}

/// Finds every file of a folder and its subfolders, sorted: the order of a directory is undefined.
pub(super) fn files_within(folder: &Path) -> Result<Vec<PathBuf>> {
    let (mut found, mut open) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(folder) = open.pop() {
        let entries = fs::read_dir(&folder).map_err(|e| Error::io(&folder, e))?;
        for entry in entries {
            let entry = entry.map_err(|e| Error::io(&folder, e))?;
            // Links to folders are not followed: they can lead in circles.
            let kind = entry.file_type().map_err(|e| Error::io(entry.path(), e))?;
            if kind.is_dir() { open.push(entry.path()) } else { found.push(entry.path()) }
        }
    }
    found.sort();
    Ok(found)
}

/// The names of the folders in a folder, sorted. Names that begin with a dot are hidden.
#[cfg(feature = "image")]
pub(super) fn folders_in(folder: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(|e| Error::io(folder, e))? {
        let entry = entry.map_err(|e| Error::io(folder, e))?;
        let is_folder = entry.file_type().map_err(|e| Error::io(entry.path(), e))?.is_dir();
        let name = entry.file_name().into_string();
        names.extend(name.ok().filter(|name| is_folder && !name.starts_with('.')));
    }
    names.sort_unstable();
    Ok(names)
}

fn read_text(path: &Path) -> Result<String> {
    let mut bytes = fs::read(path).map_err(|e| Error::io(path, e))?;
    bytes.drain(..bytes.len() - without_mark(&bytes).len());
    String::from_utf8(bytes).map_err(|e| {
        let valid = e.utf8_error().valid_up_to();
        let line = 1 + e.as_bytes()[..valid].iter().filter(|&&byte| byte == b'\n').count();
        Error::format(path.display().to_string(), format!("line {line}: no UTF-8 text from byte {valid} on"))
    })
}

/// The lines of a text file that are not blank.
#[derive(Debug)]
pub struct TextLines {
    records: Records,
}

impl TextLines {
    /// Opens a file and finds its lines.
    ///
    /// # Errors
    /// Fails if the file cannot be read.
    #[track_caller]
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let file = PositionedFile::open(path.as_ref()).at_caller()?;
        Ok(TextLines { records: Records::new(file, lines).at_caller()? })
    }
}

impl Dataset for TextLines {
    type Example = String;

    fn len(&self) -> usize {
        self.records.len()
    }

    fn get(&self, index: usize) -> Result<String> {
        crate::dataset::check_index("TextLines", index, self.len())?;
        self.records.text(index)
    }
}

/// The characters of a text as tokens: the vocabulary of a character-level model.
///
/// ```
/// use data::sources::Characters;
/// # fn main() -> numcore::Result<()> {
/// let vocabulary = Characters::of("hello");
/// assert_eq!(vocabulary.len(), 4);
/// let tokens = vocabulary.encode("hole")?;
/// assert_eq!(vocabulary.decode(&tokens)?, "hole");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Characters {
    characters: Vec<char>,
}

impl Characters {
    /// Collects the characters that occur in a text, in the order of their code points.
    pub fn of(text: &str) -> Self {
        let mut characters: Vec<char> = text.chars().collect();
        characters.sort_unstable();
        characters.dedup();
        Characters { characters }
    }

    /// The number of characters: the size of the vocabulary.
    pub fn len(&self) -> usize {
        self.characters.len()
    }

    /// Tells whether the vocabulary has no character.
    pub fn is_empty(&self) -> bool {
        self.characters.is_empty()
    }

    /// The characters; a token is an index into this list.
    pub fn characters(&self) -> &[char] {
        &self.characters
    }

    /// The token of a character; `None` if it is not in the vocabulary.
    pub fn token(&self, character: char) -> Option<u32> {
        self.characters.binary_search(&character).ok().map(|at| at as u32)
    }

    /// The tokens of a text, one per character.
    ///
    /// # Errors
    /// Fails if a character is not in the vocabulary.
    #[track_caller]
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let unknown = |c: char| Error::argument("Characters::encode", format!("{c:?} is not in the vocabulary"));
        text.chars().map(|c| self.token(c).ok_or_else(|| unknown(c))).collect::<Result<_>>().at_caller()
    }

    /// The text of tokens.
    ///
    /// # Errors
    /// Fails if a token is past the end of the vocabulary.
    #[track_caller]
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        let unknown = |token: u32| Error::range("Characters::decode", "token", token, format!("in 0..{}", self.len()));
        tokens
            .iter()
            .map(|&t| self.characters.get(t as usize).copied().ok_or_else(|| unknown(t)))
            .collect::<Result<_>>()
            .at_caller()
    }
}
