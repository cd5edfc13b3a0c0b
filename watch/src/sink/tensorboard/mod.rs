//! [`TensorBoard`]: event files.
//!
//! An event file is a sequence of records, each a protocol buffer between two checksums. `frame` writes the records,
//! `message` the messages, `data::protobuf` the fields of messages. The file is written by a thread of its own,
//! `thread`.

mod frame;
mod message;
mod thread;

use std::{
    fs::{self, File, OpenOptions},
    io::ErrorKind::AlreadyExists,
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicU64, Ordering},
    time::{SystemTime, UNIX_EPOCH},
};

use numcore::{Error, Result, Within};
use thread::EventThread;

use super::{Record, Sink};

/// Writes an event file that TensorBoard reads: numbers, texts, histograms and pictures. NaN and infinities are written
/// as they are.
///
/// Every run writes a file of its own, also one that is resumed. TensorBoard reads all files of a folder as one run,
/// and stops at the first damaged record of a file. Numbers in it are `f32`. In a folder with earlier files, the first
/// record begins a session. TensorBoard then drops the record's step and later ones from the earlier files.
///
/// A thread writes the file, at least every 2 seconds. It is at most 1 000 records behind: then [`write`](Sink::write)
/// waits, so nothing is dropped. An error of the thread comes out of the next `write` or `flush`.
#[derive(Debug)]
pub struct TensorBoard {
    writer: EventThread,
    /// True if the next record goes on after earlier files.
    resumes: bool,
}

impl TensorBoard {
    /// Begins a file in a folder, which is made if it does not exist.
    ///
    /// # Errors
    /// An error if the folder cannot be made, or the file cannot be written.
    #[track_caller]
    pub fn in_folder(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        fs::create_dir_all(folder).map_err(|e| Error::io(folder, e)).at_caller()?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let resumes = has_events(folder).at_caller()?;
        let (file, path) = fresh_file(folder, now.as_secs()).at_caller()?;
        let writer = EventThread::start(file, path).at_caller()?;
        writer.put(frame::of(&message::version(now.as_secs_f64()))).at_caller()?;
        Ok(TensorBoard { writer, resumes })
    }

    /// The event file.
    pub fn path(&self) -> &Path {
        self.writer.path()
    }
}

impl Sink for TensorBoard {
    fn write(&mut self, record: &Record) -> Result<()> {
        if std::mem::take(&mut self.resumes) {
            self.writer.put(frame::of(&message::session_start(record)))?;
        }
        self.writer.put(frame::of(&message::event(record)))
    }

    fn flush(&mut self) -> Result<()> {
        self.writer.flush()
    }
}

/// The prefix of the names of event files.
const EVENTS: &str = "events.out.tfevents.";

/// Tells whether a folder has event files.
fn has_events(folder: &Path) -> Result<bool> {
    for entry in fs::read_dir(folder).map_err(|e| Error::io(folder, e))? {
        let name = entry.map_err(|e| Error::io(folder, e))?.file_name();
        if name.to_str().is_some_and(|name| name.starts_with(EVENTS)) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Creates a file with an unused name: TensorBoard orders files by the seconds in their names.
fn fresh_file(folder: &Path, seconds: u64) -> Result<(File, PathBuf)> {
    static FILES: AtomicU64 = AtomicU64::new(0);
    loop {
        let n = FILES.fetch_add(1, Ordering::Relaxed);
        let name = format!("{EVENTS}{seconds:010}.{}.{}.{n}", host(), process::id());
        let path = folder.join(name);
        match OpenOptions::new().write(true).create_new(true).open(&path) {
            Ok(file) => return Ok((file, path)),
            Err(e) if e.kind() == AlreadyExists => {}
            Err(e) => return Err(Error::io(path, e)),
        }
    }
}

/// The name of this machine, of characters that file names may have everywhere.
fn host() -> String {
    let known = fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let known = known.or_else(|| std::env::var("HOSTNAME").ok()).unwrap_or_default();
    let plain: String = known.trim().chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    if plain.is_empty() { "localhost".into() } else { plain }
}
