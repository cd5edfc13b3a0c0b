//! How processes find each other in a folder in which earlier jobs may have left anything.
//!
//! Each process draws a number that no other has and writes it to `rank-R`, beside the list that it agrees to. Process 0 writes the list of the numbers it finds to
//! `job`, and again when one changes. A process whose own number is in there makes its logs and agrees. Once all agree to its list, process 0 writes the list to `start`. What is left of another
//! job never agrees to a list that has a new number in it, and a list that has a process's own number was written by a process 0 that is there now.

use std::{
    fs,
    hash::{BuildHasher, RandomState},
    io,
    path::{Path, PathBuf},
    process, thread,
    time::{Duration, Instant, SystemTime},
};

use comm::engine::{WireReader, Writer};
use numcore::{Error, ErrorKind, Result};

use super::transport::FolderTransport;

/// Between looks at the folder.
const PAUSE: Duration = Duration::from_millis(2);

/// The numbers of all processes, by rank; 0 for those that have written none.
type List = Vec<u64>;

/// What a process writes of itself.
#[derive(Debug, Default, PartialEq, Eq)]
struct Sign {
    number: u64,
    /// The list that it agrees to.
    agrees: List,
}

struct Meeting<'a> {
    folder: &'a Path,
    rank: usize,
    own: Sign,
    begun: Instant,
    timeout: Duration,
}

/// Waits for all processes, and opens the logs of their job.
pub(super) fn meet(folder: &Path, rank: usize, size: usize, timeout: Duration) -> Result<FolderTransport> {
    let own = Sign { number: draw(), agrees: List::new() };
    let mut meeting = Meeting { folder, rank, own, begun: Instant::now(), timeout };
    meeting.run(size).map_err(|failure| match failure {
        Failure::Io(error) => failed(format!("{} cannot be used: {error}", folder.display())).on_rank(rank),
        Failure::Late(error) => error.on_rank(rank),
    })
}

enum Failure {
    Io(io::Error),
    Late(Error),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Failure::Io(error)
    }
}

impl Meeting<'_> {
    fn run(&mut self, size: usize) -> Result<FolderTransport, Failure> {
        fs::create_dir_all(self.folder)?;
        self.sign()?;
        let before = self.list("job");
        let mut made: Option<(u64, FolderTransport)> = None;
        loop {
            let list = if self.rank == 0 { self.lead(size)? } else { self.list("job") };
            if list.get(self.rank) == Some(&self.own.number) && list.len() == size && !list.contains(&0) {
                if made.as_ref().is_none_or(|(number, _)| *number != list[0]) {
                    made = Some((list[0], FolderTransport::create(self.job(list[0]), self.rank, size)?));
                }
                if self.own.agrees != list {
                    self.own.agrees = list.clone();
                    self.sign()?;
                }
            }
            let started = !self.own.agrees.is_empty() && self.list("start") == self.own.agrees;
            match made.take_if(|_| started) {
                Some((_, transport)) => {
                    self.clear(&before);
                    return Ok(transport);
                }
                None => self.wait(size)?,
            }
        }
    }

    /// Process 0's part: the list, and the start once all agree to it.
    fn lead(&mut self, size: usize) -> Result<List, Failure> {
        let signs: Vec<Sign> = (0..size).map(|rank| self.sign_of(rank)).collect();
        let list: List = signs.iter().map(|sign| sign.number).collect();
        if self.list("job") != list {
            self.write("job", &written(&list))?;
        }
        if !list.contains(&0) && signs.iter().all(|sign| sign.agrees == list) {
            self.write("start", &written(&list))?;
        }
        Ok(list)
    }

    fn wait(&self, size: usize) -> Result<(), Failure> {
        if self.begun.elapsed() <= self.timeout {
            thread::sleep(PAUSE);
            return Ok(());
        }
        let (waited, folder) = (self.begun.elapsed(), self.folder.display());
        if self.rank != 0 {
            let why = match self.sign_of(self.rank).number == self.own.number {
                true => format!("the others did not come to {folder} in {waited:?}, or process 0 did not; it says who"),
                false => format!("another process has come to {folder} as rank {} too", self.rank),
            };
            return Err(Failure::Late(failed(why)));
        }
        // Whoever is there agrees to a list in which nobody is missing.
        let list = self.list("job");
        let stays_away = |rank: &usize| self.sign_of(*rank).number == 0;
        let disagrees = |rank: &usize| self.sign_of(*rank).agrees != list;
        let absent: Vec<usize> = (1..size).filter(stays_away).collect();
        let missing = if absent.is_empty() { (1..size).filter(disagrees).collect() } else { absent };
        let calls = format!("they did not come to {folder}");
        Err(Failure::Late(ErrorKind::Timeout { op: OP, waited, missing, called: false, calls }.into()))
    }

    /// Deletes what a job that has ended early has left.
    fn clear(&self, before: &[u64]) {
        if let Some(first) = before.first().filter(|&&first| self.rank == 0 && first != self.own.number) {
            let _ = fs::remove_dir_all(self.job(*first));
        }
    }

    fn job(&self, number: u64) -> PathBuf {
        self.folder.join(format!("job-{number:016x}"))
    }

    fn sign(&self) -> io::Result<()> {
        let mut w = Writer::default();
        w.u64(self.own.number).bytes(&written(&self.own.agrees));
        self.write(&format!("rank-{}", self.rank), &w.finish())
    }

    /// What a process has written; nothing where it has not, or another program did.
    fn sign_of(&self, rank: usize) -> Sign {
        let read = || {
            let bytes = fs::read(self.folder.join(format!("rank-{rank}"))).ok()?;
            let mut r = WireReader::new(&bytes);
            Some(Sign { number: r.u64().ok()?, agrees: list_of(r.bytes().ok()?)? })
        };
        read().unwrap_or_default()
    }

    fn list(&self, name: &str) -> List {
        fs::read(self.folder.join(name)).ok().and_then(|bytes| list_of(&bytes)).unwrap_or_default()
    }

    /// Writes a file as a whole.
    fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let new = self.folder.join(format!("{name}.{:016x}", self.own.number));
        fs::write(&new, bytes)?;
        fs::rename(new, self.folder.join(name))
    }
}

const OP: &str = "SharedFolder::join";

fn failed(why: String) -> Error {
    Error::argument(OP, why)
}

/// A number that no other process has; never 0.
fn draw() -> u64 {
    let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    RandomState::new().hash_one((process::id(), time, thread::current().id())).max(1)
}

fn written(list: &[u64]) -> Vec<u8> {
    let mut w = Writer::default();
    list.iter().for_each(|&number| {
        w.u64(number);
    });
    w.finish()
}

fn list_of(bytes: &[u8]) -> Option<List> {
    let mut r = WireReader::new(bytes);
    (0..bytes.len().div_ceil(8)).map(|_| r.u64().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Channel, Request, Test, Transport, folder::tests::Scratch};

    /// All processes of a job, as threads, each of which does this with what it has got.
    fn job(folder: &Path, size: usize, each: impl Fn(FolderTransport) + Sync) {
        thread::scope(|scope| {
            for rank in 0..size {
                let each = &each;
                scope.spawn(move || each(meet(folder, rank, size, Duration::from_secs(60)).unwrap()));
            }
        });
    }

    fn jobs(folder: &Path) -> usize {
        let is_job = |name: &str| name.starts_with("job-");
        fs::read_dir(folder)
            .unwrap()
            .filter(|entry| is_job(entry.as_ref().unwrap().file_name().to_str().unwrap()))
            .count()
    }

    /// Each tells each its rank.
    fn exchange(own: &mut FolderTransport) {
        let (rank, size) = (own.rank(), own.size());
        let mut told = vec![[0u8; 8]; size];
        let mut requests: Vec<Request> = Vec::new();
        for other in (0..size).filter(|&other| other != rank) {
            let bytes = (rank as u64).to_le_bytes();
            // SAFETY: the bytes are there until the call has ended, after which this transport does not use them.
            unsafe { own.send(Channel::Data, bytes.as_ptr(), 8, other, 3) }.unwrap();
            // SAFETY: nothing else uses the bytes until the request has ended, below.
            requests.push(unsafe { own.receive(Channel::Data, told[other].as_mut_ptr(), 8, other, 3) }.unwrap());
        }
        for request in &mut requests {
            while own.test(request) == Test::Pending {
                thread::yield_now();
            }
        }
        for (other, bytes) in told.iter().enumerate().filter(|(other, _)| *other != rank) {
            assert_eq!(u64::from_le_bytes(*bytes), other as u64);
        }
    }

    #[test]
    fn processes_meet_whatever_earlier_jobs_have_left() {
        let folder = Scratch::new("meet");
        for size in [2, 1, 3, 3, 5, 2] {
            // One that was killed leaves everything.
            job(folder.path(), size, |mut own| {
                exchange(&mut own);
                std::mem::forget(own);
            });
            assert_eq!(jobs(folder.path()), 1, "what the job before has left is deleted");
        }
        job(folder.path(), 3, |mut own| exchange(&mut own));
        assert_eq!(jobs(folder.path()), 0, "the last to leave deletes the job");
    }

    #[test]
    fn files_of_something_else_do_no_harm() {
        let folder = Scratch::new("strange");
        for name in ["rank-0", "rank-1", "job", "start"] {
            fs::write(folder.path().join(name), b"neither of these").unwrap();
        }
        job(folder.path(), 2, |mut own| exchange(&mut own));
    }

    #[test]
    fn those_that_do_not_come_are_named() {
        let folder = Scratch::new("late");
        let late = |rank| meet(folder.path(), rank, 4, Duration::from_millis(200)).map(drop).unwrap_err();
        let (first, second) = thread::scope(|scope| {
            let (first, second) = (scope.spawn(move || late(0)), scope.spawn(move || late(2)));
            (first.join().unwrap(), second.join().unwrap())
        });
        let ErrorKind::Timeout { missing, .. } = first.kind() else { panic!("{first}") };
        assert_eq!(missing[..], [1, 3], "{first}");
        assert!(second.to_string().contains("process 0 did not; it says who"), "{second}");
    }

    #[test]
    fn two_processes_of_one_rank_are_an_error() {
        let folder = Scratch::new("twice");
        let outcome = |rank| meet(folder.path(), rank, 2, Duration::from_millis(300)).map(drop);
        let errors: Vec<String> = thread::scope(|scope| {
            let threads = [1, 1].map(|rank| scope.spawn(move || outcome(rank).unwrap_err().to_string()));
            threads.map(|thread| thread.join().unwrap()).into()
        });
        assert!(errors.iter().any(|error| error.contains("as rank 1 too")), "{errors:?}");
    }
}
