//! [`FollowedRun`]: the numbers of a run while its file grows.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, ErrorKind, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
};

use numcore::{Error, Result};

use crate::{
    report::{Chart, curves::GrowingCharts},
    sink::{Record, jsonl::read::parsed},
};

/// Reads the numbers of a `metrics.jsonl` as it grows, without writing or locking. A line that is not complete yet is
/// read later; a malformed one is left out. A file that was cut or replaced is read again from its beginning.
#[derive(Debug)]
pub(super) struct FollowedRun {
    path: PathBuf,
    contents: Contents,
}

/// The contents of the file so far.
#[derive(Debug, Default)]
struct Contents {
    exists: bool,
    charts: GrowingCharts,
    /// The last record, without its values.
    last: Option<Record>,
    /// The numbers of complete lines and of their bytes.
    lines: u64,
    bytes: u64,
    /// The first bytes, by which a replaced file is known: the first line has a time.
    head: Vec<u8>,
    /// The number of malformed lines, and what is wrong with the last one.
    malformed: Option<(u64, String)>,
}

/// The number of bytes that identify a file.
const HEAD: usize = 256;

impl FollowedRun {
    pub(super) fn of(path: PathBuf) -> Self {
        FollowedRun { path, contents: Contents::default() }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// False while there is no file.
    pub(super) fn exists(&self) -> bool {
        self.contents.exists
    }

    /// The curves of all numbers so far; steps that were measured again count once.
    pub(super) fn charts(&self) -> &[Chart] {
        self.contents.charts.charts()
    }

    /// The last record, without its values.
    pub(super) fn last(&self) -> Option<&Record> {
        self.contents.last.as_ref()
    }

    /// The number of malformed lines, and what is wrong with the last one.
    pub(super) fn malformed(&self) -> Option<(u64, &str)> {
        self.contents.malformed.as_ref().map(|(count, why)| (*count, why.as_str()))
    }

    /// Reads what is new.
    ///
    /// # Errors
    /// An error if the file cannot be read. The curves stay.
    pub(super) fn read(&mut self) -> Result<()> {
        self.read_new().map_err(|e| Error::io(&self.path, e))
    }

    fn read_new(&mut self) -> io::Result<()> {
        let file = match File::open(&self.path) {
            Err(e) if e.kind() == ErrorKind::NotFound => {
                self.contents = Contents::default();
                return Ok(());
            }
            file => file?,
        };
        let length = file.metadata()?.len();
        let mut file = BufReader::new(file);
        let mut head = Vec::new();
        file.by_ref().take(self.contents.head.len() as u64).read_to_end(&mut head)?;
        if length < self.contents.bytes || head != self.contents.head {
            self.contents = Contents::default();
        }
        self.contents.exists = true;
        file.seek(SeekFrom::Start(self.contents.bytes))?;
        self.contents.read(file)
    }
}

impl Contents {
    /// Reads complete lines.
    fn read(&mut self, mut file: impl BufRead) -> io::Result<()> {
        let mut line = Vec::new();
        while file.read_until(b'\n', &mut line)? > 0 && line.ends_with(b"\n") {
            self.lines += 1;
            self.bytes += line.len() as u64;
            self.head.extend(line.iter().take(HEAD - self.head.len()));
            match parsed(&line) {
                Ok(record) => self.add(record),
                Err(why) => {
                    let count = self.malformed.as_ref().map_or(0, |(count, _)| *count);
                    self.malformed = Some((count + 1, format!("line {}: {why}", self.lines)));
                }
            }
            line.clear();
        }
        Ok(())
    }

    fn add(&mut self, record: Record) {
        if self.last.as_ref().is_some_and(|last| last.step > record.step) {
            self.charts.go_back(record.step);
        }
        self.charts.add(&record);
        self.last = Some(Record { values: Vec::new(), ..record });
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, OpenOptions},
        io::Write,
    };

    use super::*;

    fn line(step: u64, loss: &str) -> String {
        format!(
            "{{\"step\":{step},\"epoch\":0,\"time\":{step}.5,\"values\":{{\"loss\":{loss},\"text\":{{\"text\":\"a\"}}}}}}\n"
        )
    }

    fn read(of: &mut FollowedRun) -> Vec<(u64, f64)> {
        of.read().unwrap();
        let lines: Vec<_> = of.charts().iter().flat_map(|chart| &chart.lines).collect();
        assert!(lines.iter().all(|line| line.name == "loss"), "texts are left out");
        lines.iter().flat_map(|line| &line.points).map(|(step, loss)| (*step as u64, *loss)).collect()
    }

    #[test]
    fn a_file_is_followed_through_all_that_a_run_does_to_it() {
        let path = std::env::temp_dir().join(format!("weftgrad-watch-{}-follow.jsonl", std::process::id()));
        let add = |text: &[u8]| {
            let file = OpenOptions::new().append(true).create(true).open(&path);
            file.unwrap().write_all(text).unwrap();
        };
        let mut of = FollowedRun::of(path.clone());
        assert!(read(&mut of).is_empty() && !of.exists());
        add(b"");
        assert!(read(&mut of).is_empty() && of.exists() && of.last().is_none());
        // A line in two pieces, cut within its number.
        let (first, second) = (line(1, "4.25"), line(2, "3"));
        let cut = first.find("4.2").unwrap() + 3;
        add(&first.as_bytes()[..cut]);
        assert!(read(&mut of).is_empty());
        add(&first.as_bytes()[cut..]);
        add(second.as_bytes());
        assert_eq!(read(&mut of), [(1, 4.25), (2, 3.0)]);
        assert_eq!(read(&mut of), [(1, 4.25), (2, 3.0)]);
        // A resumed run removes a torn line, and measures steps again.
        let whole = fs::metadata(&path).unwrap().len();
        add(b"{\"step\":3,\"ep");
        assert_eq!(read(&mut of).len(), 2);
        OpenOptions::new().write(true).open(&path).unwrap().set_len(whole).unwrap();
        add([line(3, "2"), line(4, "1")].concat().as_bytes());
        assert_eq!(read(&mut of).len(), 4);
        // Numbers that are not measured again are those of steps that are undone.
        add(b"{\"step\":2,\"epoch\":5,\"time\":1,\"values\":{}}\n");
        assert_eq!(read(&mut of), [(1, 4.25), (2, 3.0)]);
        assert_eq!(of.last().map(|last| (last.step, last.epoch)), Some((2, 5)));
        add(line(3, "2.5").as_bytes());
        assert_eq!(read(&mut of), [(1, 4.25), (2, 3.0), (3, 2.5)]);
        // Malformed lines, also such as are no text, are counted and left out.
        add(b"nonsense\n{\"step\":-1}\n\xff\xfe\n");
        add(line(4, "\"NaN\"").as_bytes());
        assert!(read(&mut of)[3].1.is_nan());
        let (count, why) = of.malformed().unwrap();
        assert!(count == 3 && why.starts_with("line 9: "), "{why}");
        // A new run replaces the lines, and has written more than there was before it is looked at.
        fs::write(&path, (11..40).map(|step| line(step, "7")).collect::<String>()).unwrap();
        let again = read(&mut of);
        assert_eq!((again.len(), again[0], of.malformed()), (29, (11, 7.0), None));
        fs::write(&path, line(1, "5")).unwrap();
        assert_eq!(read(&mut of), [(1, 5.0)]);
        // Someone cuts the file, whose first lines stay.
        add((2..20).map(|step| line(step, "4")).collect::<String>().as_bytes());
        assert_eq!(read(&mut of).len(), 19);
        OpenOptions::new().write(true).open(&path).unwrap().set_len(9 * line(1, "5").len() as u64).unwrap();
        assert_eq!(read(&mut of).len(), 9);
        fs::remove_file(&path).unwrap();
        assert!(read(&mut of).is_empty() && !of.exists());
        // A folder in its place cannot be read.
        fs::create_dir(&path).unwrap();
        assert!(of.read().unwrap_err().to_string().contains("follow.jsonl"));
        fs::remove_dir(&path).unwrap();
    }
}
