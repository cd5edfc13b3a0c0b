//! The thread-local state of a forward pass: whether it records, and where its random seeds come from. Ranks in threads
//! never share it.

use std::{
    any::Any,
    cell::{Cell, RefCell},
    sync::Arc,
};

use numcore::{DType, ErrorKind, Result, Runtime, rng::philox4x32_10};

use crate::{
    Leaf,
    autocast::{at_autocast, autocast_dtype},
    node::Edge,
    rematerialize::{at_recomputation, recomputation},
};

thread_local! {
    static GRAD: Cell<bool> = const { Cell::new(true) };
    static RANDOM: Cell<RandomState> = const { Cell::new(RandomState { seed: 0, drawn: 0, stream: 0 }) };
    static READS: RefCell<Option<Box<dyn Any>>> = const { RefCell::new(None) };
    static VERSIONS: RefCell<Option<Box<dyn Any>>> = const { RefCell::new(None) };
}

/// The leaves whose values were read, and the version of each at its first reading.
pub(crate) type Versions<R> = Vec<(Arc<Leaf<R>>, u64)>;

/// Sets a thread-local for the length of a scope, also when it panics.
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

/// Whether this thread records operations.
pub fn is_grad_enabled() -> bool {
    GRAD.get()
}

pub(crate) fn with_grad<T>(f: impl FnOnce() -> T) -> T {
    let _restore = Restore::set(&GRAD, true);
    f()
}

/// The position of a thread in its random seeds: save it to resume exactly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RandomState {
    /// The seed that the stream is derived from.
    pub seed: u64,
    /// The number of seeds drawn so far.
    pub drawn: u64,
    /// The index among the independent streams of a seed.
    pub stream: u32,
}

/// Restarts this thread's random seeds (dropout masks) from `seed`, in its present stream.
pub fn manual_seed(seed: u64) {
    RANDOM.set(RandomState { seed, drawn: 0, ..RANDOM.get() });
}

/// Switches to another stream of this thread's random seeds. Threads with one seed and different streams draw different
/// dropout masks, those with one stream the same. A thread begins in stream 0; a data-parallel trainer puts its thread
/// into the stream of its rank among the ranks that have different data, so ranks that have the same data, because
/// they compute the same values (tensor parallelism), are in one stream.
pub fn set_random_stream(stream: u32) {
    RANDOM.set(RandomState { stream, ..RANDOM.get() });
}

/// The position of this thread in its stream of random seeds.
pub fn random_state() -> RandomState {
    RANDOM.get()
}

/// Moves to a position in a stream of random seeds.
pub fn set_random_state(state: RandomState) {
    RANDOM.set(state);
}

/// The next seed of this thread's stream, for one random operation.
pub fn next_seed() -> u64 {
    let RandomState { seed, drawn, stream } = RANDOM.get();
    RANDOM.set(RandomState { seed, drawn: drawn + 1, stream });
    let counter = [drawn as u32, (drawn >> 32) as u32, u32::MAX, stream];
    let [a, b, ..] = philox4x32_10(counter, [seed as u32, (seed >> 32) as u32]);
    u64::from(a) | u64::from(b) << 32
}

/// What the values of a forward pass, and what is kept of them, depend on in addition to its inputs, so that a part of it can be recomputed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ForwardContext {
    random: RandomState,
    autocast: Option<DType>,
    recomputation: Option<bool>,
}

impl ForwardContext {
    /// Where this thread is.
    pub(crate) fn here() -> Self {
        ForwardContext { random: random_state(), autocast: autocast_dtype(), recomputation: recomputation() }
    }

    /// Runs `f` as it would have run there, then goes back.
    pub(crate) fn run<T>(self, f: impl FnOnce() -> T) -> T {
        let _restore = Restore::set(&RANDOM, self.random);
        at_recomputation(self.recomputation, || at_autocast(self.autocast, f))
    }
}

/// Runs `f` without recording, and returns the leaves it read that need gradients, in order.
pub(crate) fn reading<R: Runtime, T>(f: impl FnOnce() -> Result<T>) -> Result<(T, Vec<Arc<Leaf<R>>>)> {
    let outer = READS.replace(Some(Box::new(Vec::<Arc<Leaf<R>>>::new())));
    let result = no_grad(f);
    let reads = READS.replace(outer).and_then(|b| b.downcast().ok()).map_or(Vec::new(), |b| *b);
    for leaf in &reads {
        note_read(&Edge::Leaf(crate::LeafView::whole(leaf)))?;
    }
    Ok((result?, reads))
}

/// Runs `f`, and returns the leaves whose values it read, whether or not they need gradients.
pub(crate) fn watching<R: Runtime, T>(f: impl FnOnce() -> Result<T>) -> Result<(T, Versions<R>)> {
    let outer = VERSIONS.replace(Some(Box::new(Versions::<R>::new())));
    let result = f();
    let read: Versions<R> = VERSIONS.replace(outer).and_then(|b| b.downcast().ok()).map_or(Vec::new(), |b| *b);
    read.iter().for_each(|(leaf, version)| note_version(leaf, || *version));
    Ok((result?, read))
}

/// Notes that the value of a leaf was read, with its version, which is asked for only where somebody watches.
pub(crate) fn note_version<R: Runtime>(leaf: &Arc<Leaf<R>>, version: impl FnOnce() -> u64) {
    VERSIONS.with_borrow_mut(|read| {
        let Some(read) = read.as_mut().and_then(|b| b.downcast_mut::<Versions<R>>()) else { return };
        if !read.iter().any(|(l, _)| Arc::ptr_eq(l, leaf)) {
            read.push((leaf.clone(), version()));
        }
    });
}

/// Notes that an op in an unrecorded segment read this edge.
pub(crate) fn note_read<R: Runtime>(edge: &Edge<R>) -> Result<()> {
    READS.with_borrow_mut(|reads| {
        let Some(reads) = reads.as_mut().and_then(|b| b.downcast_mut::<Vec<Arc<Leaf<R>>>>()) else { return Ok(()) };
        match edge {
            Edge::Leaf(view) if !reads.iter().any(|l| Arc::ptr_eq(l, view.leaf())) => reads.push(view.leaf().clone()),
            Edge::Leaf(_) => {}
            Edge::Node(..) => {
                let why = "the segment captured a variable that needs gradients; pass it as an input".into();
                return Err(ErrorKind::NoGradient { op: "checkpoint", why }.into());
            }
        }
        Ok(())
    })
}
