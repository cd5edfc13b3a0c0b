//! Logs: files to which one process appends messages that another reads.
//!
//! A log exists before any process opens it, and is opened anew at each poll. A network file system shows closed writes
//! to a later open, but may cache for half a minute that a name does not exist. A long log is continued in another
//! file, and the reader deletes the files it has read. A reader may also see the new length of a file before its bytes,
//! so each message has a checksum. The checksum covers the names of the log and of the job, so bytes written for
//! another log are not taken for a message.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use crate::Channel;

/// The bytes after which a log is continued in another file. A file is deleted once read, so a log holds its unread
/// bytes and at most this and one message of read ones.
const SEGMENT: u64 = 4 << 20;
/// The bytes before a message: length (4), tag (4), kind (1) and checksum (4).
const HEAD: usize = 13;

/// The kind of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Message(Channel),
    /// The log is continued in the next file.
    Next,
}

impl Kind {
    fn number(self) -> u8 {
        match self {
            Kind::Message(Channel::Control) => 0,
            Kind::Message(Channel::Data) => 1,
            Kind::Next => 2,
        }
    }

    fn of(number: u8) -> Option<Kind> {
        [Kind::Message(Channel::Control), Kind::Message(Channel::Data), Kind::Next].into_iter().nth(number.into())
    }
}

/// A message that was read from a log.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Arrived {
    pub(super) on: Channel,
    pub(super) tag: u32,
    pub(super) bytes: Vec<u8>,
}

/// The writing end of a log.
pub(super) struct LogWriter {
    path: PathBuf,
    segment: u64,
    written: u64,
    limit: u64,
}

/// The reading end of a log.
pub(super) struct LogReader {
    path: PathBuf,
    segment: u64,
    /// The number of bytes of the current file that were read: whole messages.
    taken: u64,
}

impl LogWriter {
    /// Creates the log.
    pub(super) fn create(path: PathBuf) -> io::Result<Self> {
        File::create(segment(&path, 0))?;
        Ok(LogWriter { path, segment: 0, written: 0, limit: SEGMENT })
    }

    pub(super) fn append(&mut self, on: Channel, tag: u32, bytes: &[u8]) -> io::Result<()> {
        self.write(Kind::Message(on), tag, bytes)?;
        if self.written < self.limit {
            return Ok(());
        }
        // The next file exists before the reader learns of it.
        File::create(segment(&self.path, self.segment + 1))?;
        self.write(Kind::Next, 0, &[])?;
        (self.segment, self.written) = (self.segment + 1, 0);
        Ok(())
    }

    fn write(&mut self, kind: Kind, tag: u32, bytes: &[u8]) -> io::Result<()> {
        let path = segment(&self.path, self.segment);
        let mut file = OpenOptions::new().append(true).open(&path)?;
        let whole = file.write_all(&head(&path, kind, tag, bytes)).and_then(|()| file.write_all(bytes));
        if whole.is_err() {
            // The half-written message is cut off, so that later messages, perhaps with the reason, do not follow it.
            let _ = file.set_len(self.written);
        }
        whole?;
        self.written += (HEAD + bytes.len()) as u64;
        Ok(())
    }
}

impl LogReader {
    /// Opens a log that exists or will exist.
    pub(super) fn new(path: PathBuf) -> Self {
        LogReader { path, segment: 0, taken: 0 }
    }

    /// The messages that have arrived since the last poll. An incomplete message is read again at the next poll: its
    /// bytes may be visible before they are valid, and may be truncated.
    pub(super) fn poll(&mut self) -> io::Result<Vec<Arrived>> {
        let path = segment(&self.path, self.segment);
        let mut file = File::open(&path)?;
        if file.metadata()?.len() <= self.taken {
            return Ok(Vec::new());
        }
        let mut bytes = Vec::new();
        file.seek(SeekFrom::Start(self.taken))?;
        file.read_to_end(&mut bytes)?;
        let (mut arrived, mut rest) = (Vec::new(), &bytes[..]);
        while let Some((kind, tag, message)) = record(&path, rest) {
            rest = &rest[HEAD + message.len()..];
            match kind {
                Kind::Message(on) => arrived.push(Arrived { on, tag, bytes: message.to_vec() }),
                Kind::Next => {
                    // No other process reads the file. A file that cannot be deleted goes with its folder.
                    let _ = fs::remove_file(&path);
                    (self.segment, self.taken) = (self.segment + 1, 0);
                    return Ok(arrived);
                }
            }
        }
        self.taken += (bytes.len() - rest.len()) as u64;
        Ok(arrived)
    }
}

fn segment(log: &Path, number: u64) -> PathBuf {
    log.with_extension(number.to_string())
}

/// The head of a record that is written to `file`.
fn head(file: &Path, kind: Kind, tag: u32, bytes: &[u8]) -> [u8; HEAD] {
    let mut head = [0; HEAD];
    head[..4].copy_from_slice(&(bytes.len() as u32).to_le_bytes());
    head[4..8].copy_from_slice(&tag.to_le_bytes());
    head[8] = kind.number();
    let sum = checksum(file, &head[..9], bytes);
    head[9..].copy_from_slice(&sum.to_le_bytes());
    head
}

/// The first record in bytes that were read from `file`, if it is complete and valid.
fn record<'a>(file: &Path, bytes: &'a [u8]) -> Option<(Kind, u32, &'a [u8])> {
    let (head, rest) = bytes.split_first_chunk::<HEAD>()?;
    let number = |at: usize| u32::from_le_bytes(std::array::from_fn(|k| head[at + k]));
    let bytes = rest.get(..number(0) as usize)?;
    let kind = Kind::of(head[8])?;
    (checksum(file, &head[..9], bytes) == number(9)).then_some((kind, number(4), bytes))
}

/// The checksum of a record. It includes the names of its file and of that file's folder, which is the job's.
fn checksum(file: &Path, head: &[u8], bytes: &[u8]) -> u32 {
    let mut sum = crc32fast::Hasher::new();
    file.iter().rev().take(2).for_each(|name| sum.update(name.as_encoded_bytes()));
    sum.update(head);
    sum.update(bytes);
    sum.finalize()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folder::tests::Scratch;

    fn message(tag: u32, bytes: &[u8]) -> Arrived {
        Arrived { on: Channel::Data, tag, bytes: bytes.to_vec() }
    }

    #[test]
    fn messages_arrive_in_order_over_many_files() {
        let folder = Scratch::new("log");
        let mut to = LogWriter::create(folder.path().join("0-1")).unwrap();
        to.limit = 100;
        let mut from = LogReader::new(folder.path().join("0-1"));
        assert_eq!(from.poll().unwrap(), []);
        for round in 0..9u8 {
            let sent: Vec<Vec<u8>> = (0..round).map(|k| vec![k; 40 * k as usize]).collect();
            for (tag, bytes) in sent.iter().enumerate() {
                to.append(Channel::Data, tag as u32, bytes).unwrap();
            }
            // A poll ends at the end of a file.
            let arrived: Vec<Arrived> = (0..20).flat_map(|_| from.poll().unwrap()).collect();
            let expected: Vec<Arrived> = sent.iter().enumerate().map(|(k, bytes)| message(k as u32, bytes)).collect();
            assert_eq!(arrived, expected, "round {round}");
        }
        assert!(to.segment > 5);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "what was read is deleted");
    }

    #[test]
    fn a_message_is_there_when_all_of_it_is() {
        let folder = Scratch::new("parts");
        let log = folder.path().join("0-1");
        LogWriter::create(log.clone()).unwrap();
        let whole = [&head(&segment(&log, 0), Kind::Message(Channel::Data), 7, b"abc")[..], b"abc"].concat();
        for cut in 0..whole.len() {
            // The end reads as zeros at first, or is missing.
            for shown in [&[&whole[..cut], &vec![0; whole.len() - cut][..]].concat(), &whole[..cut].to_vec()] {
                let mut from = LogReader::new(log.clone());
                fs::write(segment(&log, 0), shown).unwrap();
                assert_eq!(from.poll().unwrap(), [], "cut at {cut}");
                fs::write(segment(&log, 0), &whole).unwrap();
                assert_eq!(from.poll().unwrap(), [message(7, b"abc")], "cut at {cut}");
                assert_eq!(from.poll().unwrap(), []);
            }
        }
    }

    #[test]
    fn half_a_message_that_is_taken_back_hides_none() {
        let folder = Scratch::new("torn");
        let mut to = LogWriter::create(folder.path().join("0-1")).unwrap();
        let mut from = LogReader::new(folder.path().join("0-1"));
        to.append(Channel::Data, 1, b"first").unwrap();
        // The disk is full in the middle of the second message.
        let path = segment(&to.path, 0);
        let file = OpenOptions::new().append(true).open(&path);
        file.and_then(|mut file| file.write_all(&head(&path, Kind::Message(Channel::Data), 2, &[7; 1000]))).unwrap();
        assert_eq!(from.poll().unwrap(), [message(1, b"first")]);
        OpenOptions::new().write(true).open(segment(&to.path, 0)).unwrap().set_len(to.written).unwrap();
        for tag in 3..9 {
            to.append(Channel::Data, tag, b"why").unwrap();
            assert_eq!(from.poll().unwrap(), [message(tag, b"why")]);
        }
    }

    #[test]
    fn records_of_other_logs_and_jobs_are_no_messages() {
        let (job, earlier) = (Scratch::new("job"), Scratch::new("earlier"));
        LogWriter::create(job.path().join("0-1")).unwrap();
        for other in [earlier.path().join("0-1"), job.path().join("1-0")] {
            let mut to = LogWriter::create(other.clone()).unwrap();
            to.append(Channel::Control, 0, b"not for here").unwrap();
            fs::copy(segment(&other, 0), job.path().join("0-1.0")).unwrap();
            let poll = |log| LogReader::new(log).poll().unwrap().len();
            assert_eq!((poll(other), poll(job.path().join("0-1"))), (1, 0));
        }
    }

    #[test]
    fn a_log_that_was_deleted_is_an_error() {
        let folder = Scratch::new("deleted");
        assert!(LogReader::new(folder.path().join("0-1")).poll().is_err());
        let mut to = LogWriter::create(folder.path().join("0-1")).unwrap();
        fs::remove_file(folder.path().join("0-1.0")).unwrap();
        assert!(to.append(Channel::Control, 0, b"x").is_err());
    }
}
