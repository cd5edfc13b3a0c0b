//! The thread-local state of a forward pass: the recording mode and the stream of random seeds. Ranks in threads never
//! share it.

use std::cell::Cell;

use numcore::{DType, rng::philox4x32_10};

use crate::autocast::{at_autocast, autocast_dtype};

thread_local! {
    static GRAD: Cell<bool> = const { Cell::new(true) };
    static RANDOM: Cell<RandomState> = const { Cell::new(RandomState { seed: 0, drawn: 0, stream: 0 }) };
    /// True if a seed was drawn since [`take_draws`] was called.
    static DRAWS: Cell<bool> = const { Cell::new(false) };
}

/// A guard that sets a thread-local for a scope and restores it on drop, also after a panic.
pub(crate) struct Restore<T: Copy + 'static>(&'static std::thread::LocalKey<Cell<T>>, T);

impl<T: Copy + 'static> Restore<T> {
    pub(crate) fn set(key: &'static std::thread::LocalKey<Cell<T>>, value: T) -> Self {
        Restore(key, key.replace(value))
    }
}

impl<T: Copy + 'static> Drop for Restore<T> {
    fn drop(&mut self) {
        self.0.set(self.1);
    }
}

/// Runs `f` without recording: its results have no gradient history.
pub fn no_grad<T>(f: impl FnOnce() -> T) -> T {
    let _restore = Restore::set(&GRAD, false);
    f()
}

/// Tells whether this thread records operations.
pub fn is_grad_enabled() -> bool {
    GRAD.get()
}

pub(crate) fn with_grad<T>(f: impl FnOnce() -> T) -> T {
    let _restore = Restore::set(&GRAD, true);
    f()
}

/// The position of a thread in its stream of random seeds. A job that saves and restores it resumes exactly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RandomState {
    /// The seed from which the stream is derived.
    pub seed: u64,
    /// The number of seeds drawn so far.
    pub drawn: u64,
    /// The index among the independent streams of `seed`.
    pub stream: u32,
}

/// Restarts this thread's random seeds (dropout masks) from `seed`, in its present stream.
pub fn manual_seed(seed: u64) {
    RANDOM.set(RandomState { seed, drawn: 0, ..RANDOM.get() });
}

/// Switches to another stream of this thread's random seeds.
///
/// Threads with one seed draw different dropout masks in different streams, and equal masks in one stream. A thread
/// begins in stream 0. A data-parallel trainer uses the rank's index among the ranks with different data.
/// Tensor-parallel ranks, which have the same data and compute the same values, therefore share a stream.
pub fn set_random_stream(stream: u32) {
    RANDOM.set(RandomState { stream, ..RANDOM.get() });
}

/// The position of this thread in its stream of random seeds.
pub fn random_state() -> RandomState {
    RANDOM.get()
}

/// Moves this thread to a position in a stream of random seeds.
pub fn set_random_state(state: RandomState) {
    RANDOM.set(state);
}

/// Draws the next seed of this thread's stream, for one random operation.
pub fn next_seed() -> u64 {
    let RandomState { seed, drawn, stream } = RANDOM.get();
    RANDOM.set(RandomState { seed, drawn: drawn + 1, stream });
    DRAWS.set(true);
    let counter = [drawn as u32, (drawn >> 32) as u32, u32::MAX, stream];
    let [a, b, ..] = philox4x32_10(counter, [seed as u32, (seed >> 32) as u32]);
    u64::from(a) | u64::from(b) << 32
}

/// Tells whether this thread drew a seed since the call before.
pub(crate) fn take_draws() -> bool {
    DRAWS.take()
}

/// The thread-local state on which the outputs of a function depend, in addition to its inputs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ForwardContext {
    random: RandomState,
    autocast: Option<DType>,
}

impl ForwardContext {
    /// The present state of this thread.
    pub(crate) fn here() -> Self {
        ForwardContext { random: random_state(), autocast: autocast_dtype() }
    }

    /// Runs `f` under this state, then restores the state of the thread.
    pub(crate) fn run<T>(self, f: impl FnOnce() -> T) -> T {
        let _restore = Restore::set(&RANDOM, self.random);
        at_autocast(self.autocast, f)
    }
}
