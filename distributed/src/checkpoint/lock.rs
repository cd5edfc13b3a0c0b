//! Locks on checkpoint folders: one run at a time in each.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Write},
    path::PathBuf,
    thread::sleep,
    time::{Duration, Instant},
};

use numcore::{Error, Result, Runtime};

use super::{Folder, folder::create_all};
use crate::comm::{Collectives, Comm, Communicator, all_ok};

/// The name of the locked file. It is never removed: a run waiting for a removed file would lock another file than
/// later runs.
const LOCK: &str = "lock";
/// The time for which a run of one rank waits for a folder by default.
const ALONE: Duration = Duration::from_secs(5);
/// The interval at which a taken folder is tried again.
const POLL: Duration = Duration::from_millis(50);

/// A lock on a folder, held until this is dropped or the process ends in any way.
#[derive(Debug)]
pub struct FolderLock {
    _file: File,
}

impl Folder {
    /// Sets the longest time that [`lock`](Folder::lock) and [`lock_of_all`](Folder::lock_of_all) wait for another run
    /// to release the folder's lock. With 0 they try once.
    ///
    /// By default one rank waits 5 seconds. Several ranks wait twice their communicator's timeout: a rank of a failed
    /// job may wait that long for the others before it ends. A file server may keep the lock of a dead host for its
    /// lease, usually 90 seconds.
    pub fn lock_wait(mut self, most: Duration) -> Self {
        self.lock_wait = Some(most);
        self
    }

    /// Locks the folder for one run: two runs that save in one folder would remove each other's files. The lock is the
    /// operating system's, so a killed process leaves none. On a shared file system it excludes processes of other
    /// hosts too; the server may keep the lock of a dead host for its lease. On a file system without locks, nothing is
    /// excluded.
    ///
    /// # Errors
    /// Names process and host of another run that has the lock and does not leave [in time](Folder::lock_wait). Fails
    /// too if no file can be made in the folder.
    pub fn lock(&self) -> Result<FolderLock> {
        let most = self.lock_wait.unwrap_or(ALONE);
        self.try_lock(most)?.ok_or_else(|| self.is_taken(most))
    }

    /// Locks the folder for a run of several ranks: rank 0 takes the [lock](Folder::lock), and gets it returned.
    /// Collective: all ranks call it, and wait together.
    ///
    /// # Errors
    /// The errors of [`lock`](Folder::lock), on all ranks.
    pub fn lock_of_all<R: Runtime>(&self, comm: &Comm<R>) -> Result<Option<FolderLock>> {
        let is_mine = comm.rank() == 0;
        if comm.size() == 1 {
            return self.lock().map(Some);
        }
        let most = self.lock_wait.unwrap_or_else(|| comm.timeout().saturating_mul(2));
        let begun = Instant::now();
        loop {
            // The other ranks wait in a collective call meanwhile, which must not time out.
            let part = most.saturating_sub(begun.elapsed()).min(comm.timeout() / 4);
            let tried = if is_mine { self.try_lock(part) } else { Ok(None) };
            let waits = is_mine && matches!(tried, Ok(None)) && begun.elapsed() < most;
            if comm.exchange_equal([u8::from(waits)])?.first() == Some(&[1]) {
                continue;
            }
            let locked = match tried {
                Ok(None) if is_mine => Err(self.is_taken(most)),
                tried => tried,
            };
            return all_ok(comm, "Checkpoints", locked);
        }
    }

    fn lock_path(&self) -> PathBuf {
        self.path().join(LOCK)
    }

    /// Takes the lock; none if another run still has it after `most`.
    fn try_lock(&self, most: Duration) -> Result<Option<FolderLock>> {
        create_all(self.path())?;
        let (path, begun) = (self.lock_path(), Instant::now());
        let opened = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
        let mut file = opened.map_err(|e| Error::io(&path, e))?;
        while let Err(TryLockError::WouldBlock) = file.try_lock() {
            let left = most.saturating_sub(begun.elapsed());
            if left.is_zero() {
                return Ok(None);
            }
            sleep(POLL.min(left));
        }
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let holder = format!("process {} on `{}`", std::process::id(), host.trim());
        file.set_len(0).and_then(|()| file.write_all(holder.as_bytes())).map_err(|e| Error::io(&path, e))?;
        Ok(Some(FolderLock { _file: file }))
    }

    fn is_taken(&self, waited: Duration) -> Error {
        let holder = fs::read_to_string(self.lock_path()).unwrap_or_default();
        let holder = if holder.is_empty() { "another process".into() } else { holder };
        let why = format!(
            "{holder} saves checkpoints in this folder, and still does after {waited:.0?}: wait for it or end it, or save in another folder"
        );
        Error::io(self.path(), io::Error::new(io::ErrorKind::ResourceBusy, why))
    }
}
