//! The rendezvous of processes in a folder in which earlier jobs may have left files.
//!
//! 1. Each process draws a unique number and writes it to `rank-R`, beside the list that it agrees to.
//! 2. Process 0 writes the list of the numbers it finds to `job`, and again when one changes.
//! 3. A process that finds its own number in the list makes its logs and agrees.
//! 4. Once all agree to its list, process 0 writes the list to `start`.
//!
//! Files of another job never agree to a list with a new number in it. A list with a process's own number was written
//! by a process 0 that is running now.

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

/// The interval between polls of the folder.
const PAUSE: Duration = Duration::from_millis(2);

/// The numbers of all processes, by rank; 0 for a process that has written none.
type List = Vec<u64>;

/// The contents of a process's file `rank-R`.
#[derive(Debug, Default, PartialEq, Eq)]
struct Registration {
    number: u64,
    /// The list that the process agrees to.
    agrees: List,
}

struct FolderRendezvous<'a> {
    folder: &'a Path,
    rank: usize,
    own: Registration,
    begun: Instant,
    timeout: Duration,
}

/// Waits for all processes, and opens the logs of their job.
pub(super) fn join(folder: &Path, rank: usize, size: usize, timeout: Duration) -> Result<FolderTransport> {
    let own = Registration { number: random_id(), agrees: List::new() };
    let mut rendezvous = FolderRendezvous { folder, rank, own, begun: Instant::now(), timeout };
    rendezvous.run(size).map_err(|failure| match failure {
        Failure::Io(error) => Error::io(folder, error).on_rank(rank),
        Failure::Other(error) => error.on_rank(rank),
    })
}

enum Failure {
    Io(io::Error),
    Other(Error),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Failure::Io(error)
    }
}

impl FolderRendezvous<'_> {
    fn run(&mut self, size: usize) -> Result<FolderTransport, Failure> {
        fs::create_dir_all(self.folder)?;
        self.register()?;
        let mut made: Option<(List, FolderTransport)> = None;
        loop {
            let list = if self.rank == 0 { self.coordinate(size)? } else { self.list("job") };
            if list.get(self.rank) == Some(&self.own.number) && !list.contains(&0) {
                self.check_size(size, list.len())?;
                if made.as_ref().is_none_or(|(of, _)| *of != list) {
                    made = Some((list.clone(), FolderTransport::create(self.job(&list), self.rank, size)?));
                }
                if self.own.agrees != list {
                    self.own.agrees = list.clone();
                    self.register()?;
                }
            }
            let started = !self.own.agrees.is_empty() && self.list("start") == self.own.agrees;
            match made.take_if(|_| started) {
                Some((list, mut transport)) => {
                    self.clear(&self.job(&list));
                    transport.has_started = true;
                    return Ok(transport);
                }
                None => self.wait(size)?,
            }
        }
    }

    fn check_size(&self, own: usize, listed: usize) -> Result<(), Failure> {
        let why = || {
            format!(
                "this process is one of {own}, and process 0 one of {listed}: start all with one number of processes"
            )
        };
        if own == listed { Ok(()) } else { Err(Failure::Other(failed(why()))) }
    }

    /// Coordinates, on process 0: writes the list, and the start once all agree to it.
    fn coordinate(&mut self, size: usize) -> Result<List, Failure> {
        let registrations: Vec<Registration> = (0..size).map(|rank| self.registration_of(rank)).collect();
        let list: List = registrations.iter().map(|registration| registration.number).collect();
        if self.list("job") != list {
            self.write("job", &encode(&list))?;
        }
        if !list.contains(&0) && registrations.iter().all(|registration| registration.agrees == list) {
            self.write("start", &encode(&list))?;
        }
        Ok(list)
    }

    /// Pauses before the next poll.
    ///
    /// # Errors
    /// An error if the time is up, or this process's own file was deleted or replaced.
    fn wait(&self, size: usize) -> Result<(), Failure> {
        let (waited, folder) = (self.begun.elapsed(), self.folder.display());
        let failed_as = |why: String| Err(Failure::Other(failed(why)));
        match self.registration_of(self.rank).number {
            0 => {
                return failed_as(format!(
                    "{folder} was deleted while its processes joined, or something else has written to it"
                ));
            }
            other if other != self.own.number => {
                return failed_as(format!(
                    "another process has joined {folder} as rank {} too: two were given one rank, or two jobs one folder",
                    self.rank
                ));
            }
            _ => {}
        }
        if waited <= self.timeout {
            thread::sleep(PAUSE);
            return Ok(());
        }
        if self.rank != 0 {
            return failed_as(format!(
                "not all processes joined {folder} in {waited:?}; process 0, if it did, names the missing ones"
            ));
        }
        // Every process that is there agrees to a list without missing numbers.
        let registrations: Vec<Registration> = (1..size).map(|rank| self.registration_of(rank)).collect();
        let is_full = registrations.iter().all(|registration| registration.number != 0);
        let list = self.list("job");
        let is_missing =
            |registration: &Registration| registration.number == 0 || (is_full && registration.agrees != list);
        let missing: Vec<usize> = (1..size).filter(|rank| is_missing(&registrations[rank - 1])).collect();
        let calls = format!("they did not join {folder}, or joined with another number of processes");
        Err(Failure::Other(ErrorKind::Timeout { op: OP, waited, missing, called: false, calls }.into()))
    }

    /// Deletes, on process 0, files of jobs that were killed or never started.
    fn clear(&self, own: &Path) {
        let Ok(entries) = fs::read_dir(self.folder) else { return };
        for entry in entries.filter_map(|entry| entry.ok().filter(|_| self.rank == 0)) {
            let (path, name) = (entry.path(), entry.file_name());
            let name = name.to_string_lossy();
            // Files that cannot be deleted are left to the next job.
            let _ = match (name.starts_with(JOB), name.starts_with(UNWRITTEN)) {
                (true, _) if path != own => fs::remove_dir_all(path),
                (_, true) => fs::remove_file(path),
                _ => Ok(()),
            };
        }
    }

    /// The folder of the logs of exactly these processes. A process that was replaced by another writes elsewhere.
    fn job(&self, list: &List) -> PathBuf {
        let all = list.iter().fold(0u64, |all, number| all.rotate_left(1) ^ number);
        self.folder.join(format!("{JOB}{all:016x}"))
    }

    fn register(&self) -> io::Result<()> {
        let mut w = Writer::default();
        w.u64(self.own.number).bytes(&encode(&self.own.agrees));
        self.write(&format!("rank-{}", self.rank), &w.finish())
    }

    /// The contents of a process's file; the default if it has none, or another program wrote it.
    fn registration_of(&self, rank: usize) -> Registration {
        let read = || {
            let bytes = fs::read(self.folder.join(format!("rank-{rank}"))).ok()?;
            let mut r = WireReader::new(&bytes);
            Some(Registration { number: r.u64().ok()?, agrees: decode(r.bytes().ok()?)? })
        };
        read().unwrap_or_default()
    }

    fn list(&self, name: &str) -> List {
        fs::read(self.folder.join(name)).ok().and_then(|bytes| decode(&bytes)).unwrap_or_default()
    }

    /// Writes a file atomically: under another name, then renamed.
    fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let new = self.folder.join(format!("{UNWRITTEN}{name}-{:016x}", self.own.number));
        fs::write(&new, bytes)?;
        fs::rename(new, self.folder.join(name))
    }
}

const OP: &str = "SharedFolder::join";
/// Prefixes of the names of job folders, and of files that are being written.
const JOB: &str = "job-";
const UNWRITTEN: &str = "new-";

fn failed(why: String) -> Error {
    Error::argument(OP, why)
}

/// Draws a number that no other process has; never 0.
fn random_id() -> u64 {
    let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    RandomState::new().hash_one((process::id(), time, thread::current().id())).max(1)
}

fn encode(list: &[u64]) -> Vec<u8> {
    let mut w = Writer::default();
    list.iter().for_each(|&number| {
        w.u64(number);
    });
    w.finish()
}

fn decode(bytes: &[u8]) -> Option<List> {
    let mut r = WireReader::new(bytes);
    (0..bytes.len().div_ceil(8)).map(|_| r.u64().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Channel, Request, Test, Transport, folder::tests::Scratch};

    /// Runs all processes of a job as threads, each with its transport.
    fn job(folder: &Path, size: usize, each: impl Fn(FolderTransport) + Sync) {
        thread::scope(|scope| {
            for rank in 0..size {
                let each = &each;
                scope.spawn(move || each(join(folder, rank, size, Duration::from_secs(60)).unwrap()));
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

    /// Sends the own rank to every process, and receives theirs.
    fn exchange(own: &mut FolderTransport) {
        let (rank, size) = (own.rank(), own.size());
        let mut received = vec![[0u8; 8]; size];
        let mut requests: Vec<Request> = Vec::new();
        for other in (0..size).filter(|&other| other != rank) {
            let bytes = (rank as u64).to_le_bytes();
            // SAFETY: the bytes are there until the call has ended, after which this transport does not use them.
            unsafe { own.send(Channel::Data, bytes.as_ptr(), 8, other, 3) }.unwrap();
            // SAFETY: nothing else uses the bytes until the request has ended, below.
            requests.push(unsafe { own.receive(Channel::Data, received[other].as_mut_ptr(), 8, other, 3) }.unwrap());
        }
        for request in &mut requests {
            while own.test(request) == Test::Pending {
                thread::yield_now();
            }
        }
        for (other, bytes) in received.iter().enumerate().filter(|(other, _)| *other != rank) {
            assert_eq!(u64::from_le_bytes(*bytes), other as u64);
        }
    }

    #[test]
    fn processes_meet_whatever_earlier_jobs_have_left() {
        let folder = Scratch::new("meet");
        for size in [2, 1, 3, 3, 5, 2] {
            // A killed process leaves all of its files.
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
        let late = |rank| join(folder.path(), rank, 4, Duration::from_millis(200)).map(drop).unwrap_err();
        let (first, second) = thread::scope(|scope| {
            let (first, second) = (scope.spawn(move || late(0)), scope.spawn(move || late(2)));
            (first.join().unwrap(), second.join().unwrap())
        });
        let ErrorKind::Timeout { missing, .. } = first.kind() else { panic!("{first}") };
        assert_eq!(missing[..], [1, 3], "{first}");
        assert!(second.to_string().contains("process 0, if it did, names the missing ones"), "{second}");
    }

    /// The errors of processes with these ranks and sizes.
    fn errors(folder: &Path, all: &[(usize, usize)]) -> Vec<Option<String>> {
        thread::scope(|scope| {
            let outcome = |rank, size| join(folder, rank, size, Duration::from_secs(3)).map(drop).err();
            let threads = all.iter().map(|&(rank, size)| {
                thread::sleep(Duration::from_millis(100));
                scope.spawn(move || outcome(rank, size).map(|error| error.to_string()))
            });
            threads.collect::<Vec<_>>().into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn two_processes_of_one_rank_are_an_error_at_once() {
        for rank in [0, 1] {
            let folder = Scratch::new("twice");
            let outcomes = errors(folder.path(), &[(rank, 3), (rank, 3)]);
            let first = outcomes[0].as_ref().expect("an error");
            assert!(first.contains(&format!("as rank {rank} too")), "{first}");
        }
    }

    #[test]
    fn numbers_of_processes_that_differ_are_an_error() {
        let folder = Scratch::new("sizes");
        let outcomes = errors(folder.path(), &[(1, 3), (0, 2)]);
        assert!(
            outcomes[0].as_ref().is_some_and(|why| why.contains("one of 3, and process 0 one of 2")),
            "{outcomes:?}"
        );
    }

    #[test]
    fn a_folder_that_is_deleted_is_an_error() {
        let folder = Scratch::new("gone");
        thread::scope(|scope| {
            let waits = scope.spawn(|| join(folder.path(), 1, 2, Duration::from_secs(60)).map(drop));
            while !folder.path().join("rank-1").exists() {
                thread::yield_now();
            }
            fs::remove_dir_all(folder.path()).unwrap();
            let error = waits.join().unwrap().unwrap_err().to_string();
            assert!(error.contains("was deleted while its processes joined"), "{error}");
        });
    }

    #[test]
    fn one_that_was_replaced_while_all_met_does_no_harm_later() {
        let folder = Scratch::new("replaced");
        let wait = Duration::from_secs(60);
        thread::scope(|scope| {
            let other = scope.spawn(|| {
                let mut own = join(folder.path(), 0, 2, wait).unwrap();
                (0..2).for_each(|_| exchange(&mut own));
            });
            let own = Registration { number: random_id(), agrees: List::new() };
            let stopped =
                FolderRendezvous { folder: folder.path(), rank: 1, own, begun: Instant::now(), timeout: wait };
            stopped.register().unwrap();
            while stopped.list("job").get(1) != Some(&stopped.own.number) {
                thread::yield_now();
            }
            // The process was stopped at this point, and another takes its place.
            let list = stopped.list("job");
            let mut own = join(folder.path(), 1, 2, wait).unwrap();
            exchange(&mut own);
            drop(FolderTransport::create(stopped.job(&list), 1, 2).unwrap());
            exchange(&mut own);
            other.join().unwrap();
        });
    }

    #[test]
    fn a_process_that_comes_again_is_waited_for_by_those_that_leave() {
        let folder = Scratch::new("retry");
        job(folder.path(), 2, std::mem::forget);
        let again = || {
            let _ = join(folder.path(), 1, 2, Duration::ZERO);
        };
        again();
        job(folder.path(), 2, |mut own| exchange(&mut own));
        assert_eq!(jobs(folder.path()), 0);
    }
}
