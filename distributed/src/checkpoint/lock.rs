//! One run at a time in a folder.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::Write,
    path::PathBuf,
    thread::sleep,
    time::{Duration, Instant},
};

use numcore::{Error, Result, Runtime};

use super::{Folder, folder::create_all};
use crate::comm::{Collectives, Comm, Communicator, all_ok};

/// The file that is locked. It stays: who waits for one that was removed would hold another than who comes later.
const LOCK: &str = "lock";
/// The time for which one rank alone waits for a folder by default.
const ALONE: Duration = Duration::from_secs(5);
/// The interval at which a taken folder is tried again.
const POLL: Duration = Duration::from_millis(50);

/// A folder that is taken, until this is dropped, or the process has ended in whatever way.
#[derive(Debug)]
pub struct FolderLock {
    _file: File,
}

impl Folder {
    /// Sets the time for which a run waits until another one has [left](Folder::lock) the folder. By default several
    /// ranks wait twice as long as their calls may take, since a rank of a job that has failed may wait so long for the
    /// others before it ends; one rank waits 5 seconds. A file server may keep the lock of a host that died for its
    /// lease: 90 seconds are usual.
    pub fn lock_wait(mut self, most: Duration) -> Self {
        self.lock_wait = Some(most);
        self
    }

    /// Takes the folder for one run: two that save in one would remove what the other writes. The lock is the operating system's, so none is left of a process that was
    /// killed, and on a shared file system it keeps processes of other hosts out; of a host that died, the server may keep it for its lease. Where a file system has
    /// no locks, nobody is kept out.
    ///
    /// # Errors
    /// If another run has taken it, with its process and host, and does not leave it [in time](Folder::lock_wait); or no file can be made there.
    pub fn lock(&self) -> Result<FolderLock> {
        let most = self.lock_wait.unwrap_or(ALONE);
        self.try_lock(most)?.ok_or_else(|| self.is_taken(most))
    }

    /// Takes the folder for a run of several ranks: the first [locks](Folder::lock) it. All ranks call it, and wait
    /// together.
    ///
    /// # Errors
    /// Those of [`lock`](Folder::lock), on all ranks.
    pub fn lock_of_all<R: Runtime>(&self, comm: &Comm<R>) -> Result<Option<FolderLock>> {
        let is_mine = comm.rank() == 0;
        if comm.size() == 1 {
            return self.lock().map(Some);
        }
        let most = self.lock_wait.unwrap_or_else(|| comm.timeout().saturating_mul(2));
        let begun = Instant::now();
        loop {
            // Others wait in a call meanwhile.
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

    /// Takes the folder; none if another run still has it after so long.
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
        let said = format!("process {} on `{}`", std::process::id(), host.trim());
        file.set_len(0).and_then(|()| file.write_all(said.as_bytes())).map_err(|e| Error::io(&path, e))?;
        Ok(Some(FolderLock { _file: file }))
    }

    fn is_taken(&self, waited: Duration) -> Error {
        let holder = fs::read_to_string(self.lock_path()).unwrap_or_default();
        let holder = if holder.is_empty() { "another process".into() } else { holder };
        let why = format!(
            "{holder} saves checkpoints in {}, and still does after {waited:.0?}: wait for it or end it, or save in another folder",
            self.path().display()
        );
        Error::argument("Folder::lock", why)
    }
}
