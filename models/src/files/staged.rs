//! Staging of files, which get their final names in a folder together, once all are on disk.

use std::{
    fs,
    path::{Path, PathBuf},
};

use numcore::{Error, Result};

/// Weights' files under temporary names. They are removed unless [`commit`](Staged::commit) is reached.
pub(super) struct Staged<'a> {
    folder: &'a Path,
    name: &'a str,
    count: usize,
    /// The written files, each with its temporary and its final name.
    files: Vec<(PathBuf, PathBuf)>,
}

impl<'a> Staged<'a> {
    /// Begins without a file, of `count` that are to be staged.
    pub(super) fn new(folder: &'a Path, name: &'a str, count: usize) -> Self {
        Staged { folder, name, count, files: Vec::new() }
    }

    /// The final name of the `i`-th file.
    pub(super) fn file(&self, i: usize) -> String {
        match self.count {
            1 => format!("{}.safetensors", self.name),
            count => format!("{}-{:05}-of-{count:05}.safetensors", self.name, i + 1),
        }
    }

    /// The temporary path at which the `i`-th file is to be written.
    pub(super) fn add(&mut self, i: usize) -> PathBuf {
        let file = self.file(i);
        let temporary = self.folder.join(format!("{file}.partial"));
        self.files.push((temporary.clone(), self.folder.join(file)));
        temporary
    }

    /// Gives all files their final names, and removes files and the index of earlier saves. Until a new index is
    /// written, a folder of several files cannot be read, and never as a mixture of two saves.
    ///
    /// # Errors
    /// Fails if a file cannot be renamed or removed.
    pub(super) fn commit(mut self) -> Result<()> {
        remove(&self.folder.join(format!("{}.safetensors.index.json", self.name)))?;
        let kept: Vec<PathBuf> = self.files.iter().map(|(_, place)| place.clone()).collect();
        for entry in fs::read_dir(self.folder).map_err(|e| Error::io(self.folder, e))? {
            let path = entry.map_err(|e| Error::io(self.folder, e))?.path();
            if self.is_weights(&path) && !kept.contains(&path) {
                remove(&path)?;
            }
        }
        for (temporary, place) in std::mem::take(&mut self.files) {
            let renamed = fs::rename(&temporary, &place).map_err(|e| Error::io(&place, e));
            if renamed.is_err() {
                // The error of the rename is the one to report.
                let _ = fs::remove_file(&temporary);
            }
            renamed?;
        }
        Ok(())
    }

    /// Tells whether a file has the name of a save: `NAME.safetensors` or `NAME-00001-of-00003.safetensors`.
    fn is_weights(&self, path: &Path) -> bool {
        let Some(file) = path.file_name().and_then(|file| file.to_str()) else { return false };
        let Some(rest) = file.strip_prefix(self.name).and_then(|rest| rest.strip_suffix(".safetensors")) else {
            return false;
        };
        let is_number = |text: &str| text.len() >= 5 && text.bytes().all(|b| b.is_ascii_digit());
        let numbers = rest.strip_prefix('-').and_then(|rest| rest.split_once("-of-"));
        rest.is_empty() || numbers.is_some_and(|(i, count)| is_number(i) && is_number(count))
    }
}

impl Drop for Staged<'_> {
    fn drop(&mut self) {
        for (temporary, _) in &self.files {
            // The earlier error is the one to report. A file that was not begun does not exist.
            let _ = fs::remove_file(temporary);
        }
    }
}

fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io(path, e)),
        _ => Ok(()),
    }
}
