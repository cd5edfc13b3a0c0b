//! One run at a time in a folder.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::Write,
};

use numcore::{Error, Result};

use super::{Folder, folder::create_all};

/// The file that is locked. It stays: who waits for one that was removed would hold another than who comes later.
const LOCK: &str = "lock";

/// A folder that is taken, until this is dropped, or the process has ended in whatever way.
#[derive(Debug)]
pub struct FolderLock {
    _file: File,
}

impl Folder {
    /// Takes the folder for one run: two that save in one would remove what the other writes. The lock is the operating system's, so none is left of a process that was
    /// killed, and on a shared file system it keeps processes of other hosts out; of a host that died, the server may keep it for its lease. Where a file system has
    /// no locks, nobody is kept out.
    ///
    /// # Errors
    /// If another run has taken it, with its process; or no file can be made there.
    pub fn lock(&self) -> Result<FolderLock> {
        create_all(self.path())?;
        let path = self.path().join(LOCK);
        let opened = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
        let mut file = opened.map_err(|e| Error::io(&path, e))?;
        if let Err(TryLockError::WouldBlock) = file.try_lock() {
            let holder = fs::read_to_string(&path).unwrap_or_default();
            let holder = if holder.is_empty() { "another process".into() } else { holder };
            let why = format!(
                "{holder} saves checkpoints in {}: wait for it or end it, or save in another folder",
                self.path().display()
            );
            return Err(Error::argument("Folder::lock", why));
        }
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let said = format!("process {} on `{}`", std::process::id(), host.trim());
        file.set_len(0).and_then(|()| file.write_all(said.as_bytes())).map_err(|e| Error::io(&path, e))?;
        Ok(FolderLock { _file: file })
    }
}
