//! Worker threads that share one kernel at a time with the thread that launched it.
//!
//! A launch must cost about a microsecond, so this is no general pool. Workers spin and then yield for a moment before
//! they sleep. The launching thread does its share of the work and never waits for a worker that has not begun. (Waking
//! a sleeping thread takes 13–23 µs; a general pool makes the launcher sleep and be woken, too.)
//!
//! A region that finds the workers busy, because it is nested or they serve another queue, runs on its own thread.
//! Results never depend on which thread computes them.
//!
//! Each thread begins with a chunk of adjacent tasks, the same in every region, and then helps others. Kernels
//! partition rows alike, so a thread mostly reads what it wrote itself. (With one counter for all threads, a decoder's
//! training step took 1.02 times as long.)
//!
//! `threads.md` in this folder describes the protocol: its states, its invariants, and why the memory orderings
//! suffice.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::*},
    },
    thread::JoinHandle,
};

use parking_lot::{Condvar, Mutex};

/// The number of times that a worker polls the gate in a spin loop before it yields its CPU: about 30 µs.
const SPIN_POLLS: u32 = 1 << 10;
/// The number of further polls, with a yield after each, before a worker sleeps: some tenths of a millisecond. The
/// launcher is seldom busy alone for longer. (Without, a step of a small network takes 1.13 times as long, because
/// workers are woken again and again.)
const YIELD_POLLS: u32 = 1 << 10;
/// The number of times that the launcher polls for the end of the workers before it yields its CPU to them.
const LAUNCHER_SPIN_POLLS: u32 = 1 << 12;

/// The flag in `Shared::gate`: a region is open for workers to join.
const OPEN: u64 = 1 << 16;
/// The unit of the region counter in `Shared::gate`: the counter is stored above the flag.
const REGION: u64 = 1 << 17;
/// The bits of `Shared::gate` below the flag, which count the workers inside the region.
const INSIDE: u64 = OPEN - 1;

/// A fixed number of threads, the launching one included.
pub(crate) struct Threads {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

struct Shared {
    /// The counter of the last region, the flag `OPEN`, and the number of workers inside.
    gate: AtomicU64,
    /// True while some thread launches a region.
    busy: AtomicBool,
    job: Mutex<Option<ParallelJob>>,
    shares: Vec<TaskShare>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// The number of workers that sleep, or are about to.
    sleepers: AtomicUsize,
    sleep_lock: Mutex<()>,
    wakeup: Condvar,
    stop: AtomicBool,
}

/// The next task of one thread's chunk of a region. Each share has a cache line of its own.
#[derive(Default)]
#[repr(align(64))]
struct TaskShare(AtomicUsize);

/// A region's work, with the lifetime of its body erased.
#[derive(Clone, Copy)]
struct ParallelJob {
    body: *const (dyn Fn(usize) + Sync),
    tasks: usize,
    shares: usize,
}

impl ParallelJob {
    /// The first task of a chunk, which is the end of the previous one.
    fn first(self, share: usize) -> usize {
        share * self.tasks / self.shares
    }
}

// SAFETY: the body is `Sync`, and `Threads::run` keeps it alive until the region is closed and empty.
unsafe impl Send for ParallelJob {}

impl Threads {
    pub(crate) fn new(count: usize) -> Threads {
        let shared = Arc::new(Shared {
            gate: AtomicU64::new(0),
            busy: AtomicBool::new(false),
            job: Mutex::new(None),
            shares: (0..count.clamp(1, INSIDE as usize)).map(|_| TaskShare::default()).collect(),
            panic: Mutex::new(None),
            sleepers: AtomicUsize::new(0),
            sleep_lock: Mutex::new(()),
            wakeup: Condvar::new(),
            stop: AtomicBool::new(false),
        });
        let start = |i: usize| {
            let shared = shared.clone();
            std::thread::Builder::new().name(format!("cpu-worker-{i}")).spawn(move || shared.work(i)).ok()
        };
        // A system that refuses a thread leaves fewer of them.
        let workers = (1..count.min(INSIDE as usize)).map_while(start).collect();
        Threads { shared, workers }
    }

    /// The number of threads that share a region.
    pub(crate) fn count(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `body(0)` … `body(tasks - 1)`, each once, on any of the threads; returns when all are done.
    pub(crate) fn run(&self, tasks: usize, body: impl Fn(usize) + Sync) {
        let inline = self.workers.is_empty() || tasks < 2;
        if inline || self.shared.busy.swap(true, Acquire) {
            return (0..tasks).for_each(body);
        }
        let erased: *const (dyn Fn(usize) + Sync + '_) = &body;
        // SAFETY: only the lifetime changes. The region is closed and empty before `body` is dropped: `ParallelRegion`
        // waits for that also when a task panics.
        let body =
            unsafe { std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const (dyn Fn(usize) + Sync)>(erased) };
        let job = ParallelJob { body, tasks, shares: self.count().min(tasks) };
        let region = ParallelRegion::open(&self.shared, job);
        self.shared.take_part(0, job);
        drop(region);
        if let Some(panic) = self.shared.panic.lock().take() {
            resume_unwind(panic);
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        self.shared.wake();
        self.workers.drain(..).for_each(|w| drop(w.join()));
    }
}

/// An open region; closing it waits until no worker is inside.
struct ParallelRegion<'a>(&'a Shared);

impl<'a> ParallelRegion<'a> {
    fn open(shared: &'a Shared, job: ParallelJob) -> Self {
        *shared.job.lock() = Some(job);
        *shared.panic.lock() = None;
        (0..job.shares).for_each(|i| shared.shares[i].0.store(job.first(i), Relaxed));
        shared.gate.fetch_add(REGION + OPEN, SeqCst);
        if shared.sleepers.load(SeqCst) > 0 {
            shared.wake();
        }
        ParallelRegion(shared)
    }
}

impl Drop for ParallelRegion<'_> {
    fn drop(&mut self) {
        self.0.gate.fetch_sub(OPEN, AcqRel);
        let mut polls = 0;
        while self.0.gate.load(Acquire) & INSIDE != 0 {
            polls += 1;
            if polls < LAUNCHER_SPIN_POLLS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        self.0.busy.store(false, Release);
    }
}

impl Shared {
    fn work(&self, me: usize) {
        let mut done = 0;
        while let Some(region) = self.next_region(done) {
            done = region;
            if let Some(job) = self.enter(region) {
                if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.take_part(me, job))) {
                    *self.panic.lock() = Some(panic);
                }
                self.gate.fetch_sub(1, AcqRel);
            }
        }
    }

    /// The counter of an open region other than `done`; `None` when the pool stops.
    fn next_region(&self, done: u64) -> Option<u64> {
        let open = || {
            let gate = self.gate.load(SeqCst);
            (gate & OPEN != 0 && gate / REGION != done).then_some(gate / REGION)
        };
        loop {
            for polls in 0..SPIN_POLLS + YIELD_POLLS {
                if let Some(region) = open() {
                    return Some(region);
                }
                if polls < SPIN_POLLS { std::hint::spin_loop() } else { std::thread::yield_now() }
            }
            if self.stop.load(SeqCst) {
                return None;
            }
            let mut sleep_lock = self.sleep_lock.lock();
            self.sleepers.fetch_add(1, SeqCst);
            if open().is_none() && !self.stop.load(SeqCst) {
                self.wakeup.wait(&mut sleep_lock);
            }
            self.sleepers.fetch_sub(1, SeqCst);
        }
    }

    /// Joins a region, if it is still open.
    fn enter(&self, region: u64) -> Option<ParallelJob> {
        let still = |gate: u64| (gate & OPEN != 0 && gate / REGION == region).then_some(gate + 1);
        self.gate.fetch_update(AcqRel, Acquire, still).ok()?;
        *self.job.lock()
    }

    /// Runs the tasks of this thread's chunk, then the remaining tasks of other threads' chunks.
    fn take_part(&self, me: usize, job: ParallelJob) {
        for share in (0..job.shares).map(|i| (me + i) % job.shares) {
            let (next, end) = (&self.shares[share].0, job.first(share + 1));
            while next.load(Relaxed) < end {
                let task = next.fetch_add(1, Relaxed);
                if task < end {
                    // SAFETY: this thread is inside the region, which does not end before it has left, and the body
                    // lives as long.
                    unsafe { (*job.body)(task) };
                }
            }
        }
    }

    fn wake(&self) {
        drop(self.sleep_lock.lock());
        self.wakeup.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sums(threads: &Threads, tasks: usize) -> Vec<usize> {
        let hits: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
        threads.run(tasks, |i| {
            hits[i].fetch_add(i + 1, Relaxed);
        });
        hits.into_iter().map(AtomicUsize::into_inner).collect()
    }

    #[test]
    fn every_task_runs_once() {
        for count in [1, 2, 3, 8] {
            let threads = Threads::new(count);
            for tasks in (0..50).chain([1000]) {
                assert_eq!(sums(&threads, tasks), (1..=tasks).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn threads_keep_their_shares() {
        let (threads, barrier) = (Threads::new(4), std::sync::Barrier::new(4));
        let who = || {
            let ran: Vec<Mutex<Vec<_>>> = (0..4).map(|_| Mutex::default()).collect();
            threads.run(8, |i| {
                ran[i / 2].lock().push(std::thread::current().id());
                if i % 2 == 0 {
                    barrier.wait();
                }
            });
            ran.into_iter().map(|r| r.into_inner()[0]).collect::<Vec<_>>()
        };
        let first = who();
        (0..50).for_each(|_| assert_eq!(who(), first, "who begins where"));
    }

    #[test]
    fn nested_and_concurrent_regions_run() {
        let threads = Threads::new(3);
        let total = AtomicUsize::new(0);
        threads.run(10, |_| threads.run(10, |_| _ = total.fetch_add(1, Relaxed)));
        assert_eq!(total.load(Relaxed), 100);
        std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| (0..200).for_each(|n| assert_eq!(sums(&threads, n), (1..=n).collect::<Vec<_>>())));
            }
        });
    }

    #[test]
    fn a_panic_reaches_the_launcher_and_the_pool_lives_on() {
        let threads = Threads::new(2);
        for _ in 0..20 {
            let caught = catch_unwind(AssertUnwindSafe(|| threads.run(100, |i| assert!(i != 57, "task 57"))));
            assert!(caught.is_err());
            assert_eq!(sums(&threads, 100), (1..=100).collect::<Vec<_>>());
        }
    }
}
