//! Lines of ranks: passed on behind the number of the rank, written to files, and the last ones kept.

use std::{
    collections::VecDeque,
    fs::{self, File},
    io::{self, BufRead, BufReader, Read, Write},
    path::Path,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// The bytes after which an unfinished line is passed on as a whole one.
const LONGEST: usize = 64 << 10;
/// The number of last lines that are kept, and the most bytes of one.
const KEPT: (usize, usize) = (20, 1 << 10);

/// The stream of a rank that a line came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stream {
    Out,
    Error,
}

/// The lines of one rank.
pub(crate) struct RankLines {
    rank: usize,
    state: Mutex<State>,
}

struct State {
    file: Option<File>,
    last: VecDeque<(Stream, Vec<u8>)>,
}

impl RankLines {
    /// Makes the lines of a rank, which are appended to a file `rank-R.log` in `log_dir` too.
    pub(crate) fn new(rank: usize, log_dir: Option<&Path>) -> io::Result<Self> {
        let make = |folder: &Path| {
            let path = folder.join(format!("rank-{rank}.log"));
            let made = fs::create_dir_all(folder).and_then(|()| File::options().append(true).create(true).open(&path));
            made.map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
        };
        let file = log_dir.map(make).transpose()?;
        Ok(RankLines { rank, state: Mutex::new(State { file, last: VecDeque::new() }) })
    }

    /// Passes on the lines of a stream until its end.
    pub(crate) fn pass_on(&self, from: impl Read, stream: Stream) {
        let (mut from, mut line) = (BufReader::with_capacity(LONGEST, from), Vec::new());
        loop {
            let read = match from.fill_buf() {
                Ok(read) if !read.is_empty() => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Ok(_) | Err(_) => break,
            };
            let end = read.iter().position(|&byte| byte == b'\n');
            let count = end.map_or(read.len(), |end| end + 1).min(LONGEST - line.len());
            line.extend_from_slice(&read[..count]);
            from.consume(count);
            if line.ends_with(b"\n") || line.len() == LONGEST {
                self.write(&line, stream);
                line.clear();
            }
        }
        if !line.is_empty() {
            self.write(&line, stream);
        }
    }

    fn write(&self, line: &[u8], stream: Stream) {
        let line = line.strip_suffix(b"\n").unwrap_or(line);
        let mut state = self.state();
        if state.last.len() == KEPT.0 {
            state.last.pop_front();
        }
        state.last.push_back((stream, line[..line.len().min(KEPT.1)].to_vec()));
        // A full disk or a closed terminal ends no training.
        if let Some(file) = &mut state.file {
            let _ = file.write_all(&[line, b"\n"].concat());
        }
        // A terminal may hold output up; the last lines can be read meanwhile.
        drop(state);
        let whole = [format!("[{}] ", self.rank).as_bytes(), line, b"\n"].concat();
        let _ = match stream {
            Stream::Out => written(io::stdout().lock(), &whole),
            Stream::Error => written(io::stderr().lock(), &whole),
        };
    }

    /// The last lines: those of the error stream, if there are some.
    pub(crate) fn last_words(&self) -> Vec<u8> {
        let mut state = self.state();
        let has_errors = state.last.iter().any(|(stream, _)| *stream == Stream::Error);
        let chosen = state.last.drain(..).filter(|(stream, _)| !has_errors || *stream == Stream::Error);
        chosen.flat_map(|(_, line)| [b"  ", &line[..], b"\n"].concat()).collect()
    }

    /// Forgets the last lines, before a rank starts again.
    pub(crate) fn forget(&self) {
        self.state().last.clear();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn written(mut to: impl Write, bytes: &[u8]) -> io::Result<()> {
    to.write_all(bytes).and_then(|()| to.flush())
}
