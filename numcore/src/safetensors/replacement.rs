//! Files that are written completely or not at all: a temporary file in the same folder is renamed to the final path at
//! the end.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use crate::{Error, Result};

/// The largest number of symbolic links that are followed one after another: Linux's own limit.
const MAX_LINKS: usize = 40;

/// A temporary file that replaces another once it is complete and on disk, and is removed otherwise.
pub struct Replacement {
    file: File,
    temporary: PathBuf,
    path: PathBuf,
    done: bool,
}

impl Replacement {
    /// Creates the temporary file. If `path` is a symbolic link, the link stays and its target is replaced.
    ///
    /// # Errors
    /// Fails if `path` is something other than a regular file, or if its folder cannot be written to.
    pub fn new(path: &Path) -> Result<Self> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let path = replaceable(path)?;
        let Some(name) = path.file_name() else {
            return Err(unsuitable(&path, "does not name a file"));
        };
        let unique = format!(".{}.{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        hidden.push(unique);
        let temporary = path.with_file_name(hidden);
        // Errors name the requested file, not the temporary one.
        let file = File::create_new(&temporary).map_err(|e| Error::io(&path, without_folder(&path, e)))?;
        Ok(Replacement { file, temporary, path, done: false })
    }

    /// Appends bytes.
    ///
    /// # Errors
    /// Fails if they cannot be written.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(|e| Error::io(&self.path, e))
    }

    /// Waits until the file is on disk, then renames it to its path.
    ///
    /// # Errors
    /// Fails if the file cannot be written to disk, or cannot be renamed.
    pub fn commit(mut self) -> Result<()> {
        self.file.sync_all().map_err(|e| Error::io(&self.path, e))?;
        fs::rename(&self.temporary, &self.path).map_err(|e| Error::io(&self.path, e))?;
        self.done = true;
        sync_folder(&self.path)
    }
}

impl Drop for Replacement {
    fn drop(&mut self) {
        if !self.done {
            // Nothing more can be done about a temporary file that cannot be removed.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

/// Adds to a not-found error that the folder of the file is missing, if it is.
fn without_folder(path: &Path, error: io::Error) -> io::Error {
    match path.parent() {
        Some(folder) if error.kind() == io::ErrorKind::NotFound && !folder.is_dir() => {
            io::Error::new(error.kind(), format!("there is no folder {}", folder.display()))
        }
        _ => error,
    }
}

/// The file that is replaced when `path` is written: `path` itself, or the target of a symbolic link, even if the
/// target does not exist.
fn replaceable(path: &Path) -> Result<PathBuf> {
    let mut path = path.to_path_buf();
    for _ in 0..MAX_LINKS {
        let what = match fs::symlink_metadata(&path) {
            Ok(what) => what,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(path),
            Err(e) => return Err(Error::io(path, e)),
        };
        if what.is_symlink() {
            let target = fs::read_link(&path).map_err(|e| Error::io(&path, e))?;
            // An absolute target replaces the whole path.
            path.pop();
            path.push(target);
        } else if what.is_file() {
            return Ok(path);
        } else {
            return Err(unsuitable(&path, "is not a regular file; nothing else is overwritten"));
        }
    }
    Err(unsuitable(&path, format!("is a symbolic link in a chain of more than {MAX_LINKS}")))
}

fn unsuitable(path: &Path, why: impl Into<String>) -> Error {
    Error::io(path, io::Error::new(io::ErrorKind::InvalidInput, why.into()))
}

/// Synchronizes the folder of a renamed file, which makes the rename durable.
#[cfg(unix)]
fn sync_folder(path: &Path) -> Result<()> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder).and_then(|f| f.sync_all()).map_err(|e| Error::io(folder, e))
}

#[cfg(not(unix))]
fn sync_folder(_: &Path) -> Result<()> {
    Ok(())
}
