//! [`Jsonl`]: measurements as lines of JSON, for scripts and for tests.

mod line;
pub(crate) mod read;
mod summary;

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    thread::sleep,
    time::{Duration, Instant},
};

use numcore::{Error, Result, Within};
pub use read::read_jsonl;
use summary::Summary;

use super::{Record, Sink};

/// Writes `metrics.jsonl`, one object per record, and `summary.json`: the last, least and greatest value of every
/// number.
///
/// ```json
/// {"step":12,"epoch":0,"time":1700000000.25,"values":{"loss":0.5,"grad_norm":"NaN","sample":{"text":"To be"}}}
/// ```
///
/// JSON has no word for NaN and infinities: they are the strings `"NaN"`, `"Infinity"` and `"-Infinity"`. Texts,
/// histograms and pictures are objects, so nothing is mistaken for them. Of a picture only the sizes are written.
///
/// A resumed run goes on in the file of the earlier run. Steps after the checkpoint are measured again then;
/// [`read_jsonl`] keeps the later lines. A line that a kill cut short is removed. One run at a time writes into a file.
/// The first line of another one is an error, unless the file is released within 5 seconds. An elastic run takes [no
/// lock](Jsonl::unlocked).
///
/// Each line is handed to the operating system as it is written; it is on the disk when the system puts it there.
#[derive(Debug)]
pub struct Jsonl {
    file: File,
    path: PathBuf,
    summary: Summary,
    summary_path: PathBuf,
    /// True if the first line is to replace the file's contents.
    replaces: bool,
    /// True if this sink has the lock of the file, which the operating system releases with it, or needs none.
    has_lock: bool,
    /// True if a line was written.
    has_written: bool,
}

/// The longest wait for a run before to release the file.
const LOCK_WAIT: Duration = Duration::from_secs(5);

impl Jsonl {
    /// Writes into a folder as [`in_folder`](Jsonl::in_folder) does, for a new run: its first line replaces all that an
    /// earlier run left in the file. Until then the old lines stay, so a run that cannot begin removes nothing.
    ///
    /// # Errors
    /// An error if the folder cannot be made, or the file cannot be written.
    #[track_caller]
    pub fn replacing(folder: impl AsRef<Path>) -> Result<Self> {
        let (file, path, summary_path) = open(folder.as_ref()).at_caller()?;
        Ok(Jsonl {
            file,
            path,
            summary: Summary::default(),
            summary_path,
            replaces: true,
            has_lock: false,
            has_written: false,
        })
    }

    /// Writes into a folder, which is made if it does not exist.
    ///
    /// # Errors
    /// An error if the folder cannot be made, the file cannot be written, or an earlier run's lines in it are
    /// malformed.
    #[track_caller]
    pub fn in_folder(folder: impl AsRef<Path>) -> Result<Self> {
        let mut sink = Self::replacing(folder)?;
        sink.replaces = false;
        // Malformed lines of an earlier run are an error before this one trains.
        sink.read_again().at_caller()?;
        Ok(sink)
    }

    /// Takes no lock on the file. For an elastic run, where the process of a lost rank may live on and hold it.
    pub fn unlocked(mut self) -> Self {
        self.has_lock = true;
        self
    }

    /// The file of lines.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Locks the file for this run. A file system without locks excludes nobody.
    fn lock(&mut self) -> Result<()> {
        let begun = Instant::now();
        while let Err(TryLockError::WouldBlock) = self.file.try_lock() {
            if begun.elapsed() >= LOCK_WAIT {
                let why = "another run writes measurements here: wait for it or end it, or write into another folder";
                return Err(Error::io(&self.path, io::Error::new(io::ErrorKind::ResourceBusy, why)));
            }
            sleep(Duration::from_millis(50));
        }
        self.has_lock = true;
        // The run before has perhaps written lines since the file was opened, or was killed in one.
        if self.replaces { Ok(()) } else { self.read_again() }
    }

    /// Removes a torn line, and summarizes all others.
    fn read_again(&mut self) -> Result<()> {
        cut_torn_line(&mut self.file).map_err(|e| Error::io(&self.path, e))?;
        self.summary = Summary::default();
        read_jsonl(&self.path)?.iter().for_each(|record| self.summary.add(record));
        Ok(())
    }
}

/// The file of lines in a folder, its path, and the path of the summary.
fn open(folder: &Path) -> Result<(File, PathBuf, PathBuf)> {
    fs::create_dir_all(folder).map_err(|e| Error::io(folder, e))?;
    let path = folder.join("metrics.jsonl");
    let file = OpenOptions::new().create(true).read(true).append(true).open(&path).map_err(|e| Error::io(&path, e))?;
    Ok((file, path, folder.join("summary.json")))
}

impl Sink for Jsonl {
    fn write(&mut self, record: &Record) -> Result<()> {
        if !self.has_lock {
            self.lock()?;
        }
        if std::mem::take(&mut self.replaces) {
            self.file.set_len(0).map_err(|e| Error::io(&self.path, e))?;
        }
        // In one call, so that two lines are never mixed.
        self.file.write_all((line::of(record) + "\n").as_bytes()).map_err(|e| Error::io(&self.path, e))?;
        self.summary.add(record);
        self.has_written = true;
        Ok(())
    }

    /// Replaces `summary.json`, once a line was written.
    fn flush(&mut self) -> Result<()> {
        if !self.has_written {
            return Ok(());
        }
        let part = self.summary_path.with_extension("json.part");
        fs::write(&part, self.summary.to_json()).map_err(|e| Error::io(&part, e))?;
        fs::rename(&part, &self.summary_path).map_err(|e| Error::io(&self.summary_path, e))
    }
}

impl Drop for Jsonl {
    fn drop(&mut self) {
        // Errors are returned only by a call of `flush`.
        let _ = self.flush();
    }
}

/// Removes the bytes after the last complete line.
fn cut_torn_line(file: &mut File) -> io::Result<()> {
    const STEP: u64 = 4096;
    let length = file.seek(SeekFrom::End(0))?;
    let mut end = length;
    while end > 0 {
        let start = end.saturating_sub(STEP);
        let mut bytes = vec![0; (end - start) as usize];
        file.seek(SeekFrom::Start(start))?;
        io::Read::read_exact(file, &mut bytes)?;
        if let Some(at) = bytes.iter().rposition(|&b| b == b'\n') {
            end = start + at as u64 + 1;
            break;
        }
        end = start;
    }
    if end < length { file.set_len(end) } else { Ok(()) }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn one_run_at_a_time_writes_into_a_file() {
        let folder = std::env::temp_dir().join(format!("weftgrad-watch-{}-lock", std::process::id()));
        let write = |sink: &mut Jsonl| sink.write(&Record::new(1, 0));
        let (mut first, mut second) = (Jsonl::in_folder(&folder).unwrap(), Jsonl::replacing(&folder).unwrap());
        write(&mut first).unwrap();
        write(&mut Jsonl::in_folder(&folder).unwrap().unlocked()).unwrap();
        let error = write(&mut second).unwrap_err().to_string();
        assert!(error.contains("another run writes measurements here"), "{error}");
        assert!(fs::read_to_string(first.path()).unwrap().lines().count() == 2, "nothing is replaced");
        drop(first);
        write(&mut second).unwrap();
        drop(second);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_full_disk_is_an_error_with_the_path() {
        let file = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let here = std::env::temp_dir().join(format!("weftgrad-train-{}-summary.json", std::process::id()));
        let (path, summary) = ("metrics.jsonl".into(), Summary::default());
        let mut sink = Jsonl {
            file,
            path,
            summary,
            summary_path: here.clone(),
            replaces: false,
            has_lock: true,
            has_written: false,
        };
        let error = sink.write(&Record::new(1, 0)).unwrap_err().to_string();
        assert!(error.contains("metrics.jsonl: No space left"), "{error}");
        drop(sink);
        let _ = fs::remove_file(here);
    }
}
