//! The library's `sync` over a scheduler that decides what runs next: `parking_lot`'s ways, Shuttle's primitives, and a clock that the
//! scheduler moves.

use std::{
    cell::{Cell, RefCell},
    io,
    ops::{Deref, DerefMut},
    sync::{Arc, PoisonError},
    time::Duration,
};

use shuttle::{sync as under, thread};
pub use shuttle::{
    sync::mpsc,
    thread::{Scope, ScopedJoinHandle, scope},
};

std::thread_local! {
    /// Nanoseconds since the beginning of the schedule. All of a schedule's threads are one of the system's.
    static NOW: Cell<u64> = const { Cell::new(0) };
    /// Whether deadlines may pass.
    static PASSES: Cell<bool> = const { Cell::new(false) };
    static THREADS: RefCell<Vec<thread::JoinHandle<()>>> = const { RefCell::new(Vec::new()) };
}

/// Before a schedule: whether time passes in it.
pub fn begin(time: bool) {
    NOW.set(0);
    PASSES.set(time);
    THREADS.take();
}

/// After a schedule: waits until all threads that were spawned have ended.
pub fn end() {
    for thread in THREADS.take() {
        assert!(thread.join().is_ok(), "a worker thread panicked");
    }
}

pub fn spawn(_: String, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let thread = thread::spawn(run);
    THREADS.with_borrow_mut(|threads| threads.push(thread));
    Ok(())
}

pub fn spawn_in<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    _: String,
    run: impl FnOnce() -> T + Send + 'scope,
) -> io::Result<ScopedJoinHandle<'scope, T>> {
    Ok(scope.spawn(run))
}

#[derive(Default)]
pub struct Mutex<T>(under::Mutex<T>);

impl<T> Mutex<T> {
    pub fn new(value: T) -> Self {
        Mutex(under::Mutex::new(value))
    }

    pub fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard(Some(self.0.lock().unwrap_or_else(PoisonError::into_inner)))
    }
}

/// Empty only while it is waited with.
pub struct MutexGuard<'a, T>(Option<under::MutexGuard<'a, T>>);

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        self.0.as_ref().unwrap()
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_mut().unwrap()
    }
}

pub struct Condvar(Arc<under::Condvar>);

impl Condvar {
    pub fn new() -> Self {
        Condvar(Arc::new(under::Condvar::new()))
    }

    pub fn notify_all(&self) {
        self.0.notify_all();
    }

    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        guard.0 = guard.0.take().map(|held| self.0.wait(held).unwrap_or_else(PoisonError::into_inner));
    }

    /// Where time passes, a thread beside the others lets it pass whenever the scheduler runs it.
    pub fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, deadline: Instant) -> TimedOut {
        if !PASSES.get() {
            self.wait(guard);
            return TimedOut(false);
        }
        let over = Arc::new(under::atomic::AtomicBool::new(false));
        let (woken, changed) = (over.clone(), self.0.clone());
        let clock = thread::spawn(move || {
            NOW.set(NOW.get().max(deadline.0));
            // Until the waiter has heard it: it may not wait yet.
            while !woken.load(under::atomic::Ordering::SeqCst) {
                changed.notify_all();
                thread::yield_now();
            }
        });
        THREADS.with_borrow_mut(|threads| threads.push(clock));
        self.wait(guard);
        over.store(true, under::atomic::Ordering::SeqCst);
        TimedOut(NOW.get() >= deadline.0)
    }
}

pub struct TimedOut(bool);

impl TimedOut {
    pub fn timed_out(&self) -> bool {
        self.0
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Instant(u64);

impl Instant {
    pub fn now() -> Self {
        Instant(NOW.get())
    }

    pub fn elapsed(&self) -> Duration {
        Duration::from_nanos(NOW.get() - self.0)
    }

    pub fn checked_add(self, time: Duration) -> Option<Self> {
        self.0.checked_add(u64::try_from(time.as_nanos()).ok()?).map(Instant)
    }
}
