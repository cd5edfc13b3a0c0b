//! Streams that run behind the host: work is done when the host waits for it, or when a stream holds much of it.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    thread,
    time::Duration,
};

use parking_lot::Mutex;
use runtime_cuda::driver::{
    CublasGemm, CudaStream, DriverFailure, Fallible, GemmPlaces, Grid, KernelArgs, KernelFunction, Mark,
};

use crate::live::Blocks;

/// The most work that a stream holds: beyond it the host waits, as for a driver whose queue is full.
const MOST_HELD: usize = 1024;

/// One piece of a stream's work.
#[derive(Clone)]
pub(crate) enum StreamWork {
    Launch(KernelFunction, Grid, Box<KernelArgs>),
    Gemm(CublasGemm, GemmPlaces),
    Copy { to: u64, from: u64, bytes: usize },
    Zero { at: u64, bytes: usize },
    Foreign(ForeignCall),
}

/// A call of another library on a stream. The stream begins it when it comes to it; the result tells, whenever it is
/// asked, whether the call has ended.
pub type ForeignCall = Arc<dyn Fn() -> ForeignProgress + Send + Sync>;

/// The progress of a call that was begun: true once it has ended.
pub type ForeignProgress = Box<dyn Fn() -> bool + Send>;

/// A point in a stream: the work before it.
#[derive(Clone, Copy)]
struct StreamPoint {
    stream: u64,
    work: u64,
}

enum Held {
    /// Work, on the blocks that there were when it was queued.
    Work(StreamWork, Arc<Blocks>),
    Wait(StreamPoint),
    /// A call of another library that was begun.
    Begun(ForeignProgress),
}

#[derive(Default)]
struct StreamQueue {
    held: VecDeque<Held>,
    /// The number of pieces queued so far, and of those done; one may be under way, neither held nor done.
    queued: u64,
    done: u64,
}

impl StreamQueue {
    fn push(&mut self, held: Held) {
        self.held.push_back(held);
        self.queued += 1;
    }
}

#[derive(Default)]
struct StreamsState {
    queues: HashMap<u64, StreamQueue>,
    marks: HashMap<u64, StreamPoint>,
    /// The failure of earlier work, which every later call returns.
    lost: Option<DriverFailure>,
}

impl StreamsState {
    fn check(&self) -> Fallible<()> {
        self.lost.clone().map_or(Ok(()), Err)
    }

    fn is_done(&self, point: StreamPoint) -> bool {
        self.queues.get(&point.stream).is_none_or(|queue| queue.done >= point.work)
    }
}

/// The queued work of all streams.
#[derive(Default)]
pub(crate) struct Streams {
    state: Mutex<StreamsState>,
    /// Held while work is done: one piece at a time.
    doing: Mutex<()>,
}

/// The function that does work on the blocks that it was queued with.
pub(crate) type Perform<'a> = &'a dyn Fn(&StreamWork, &Blocks) -> Fallible<()>;

impl Streams {
    /// Returns the failure of earlier work, if there is one.
    pub(crate) fn check(&self) -> Fallible<()> {
        self.state.lock().check()
    }

    /// Queues work.
    pub(crate) fn push(
        &self,
        stream: CudaStream,
        work: StreamWork,
        blocks: Arc<Blocks>,
        perform: Perform<'_>,
    ) -> Fallible<()> {
        let is_full = {
            let mut state = self.state.lock();
            state.check()?;
            let queue = state.queues.entry(stream.0).or_default();
            queue.push(Held::Work(work, blocks));
            queue.held.len() > MOST_HELD
        };
        if is_full { self.finish(stream, perform) } else { Ok(()) }
    }

    /// Notes that a mark is the end of what the stream holds now.
    pub(crate) fn record(&self, mark: Mark, stream: CudaStream) {
        let mut state = self.state.lock();
        let work = state.queues.get(&stream.0).map_or(0, |queue| queue.queued);
        state.marks.insert(mark.0, StreamPoint { stream: stream.0, work });
    }

    pub(crate) fn forget(&self, mark: Mark) {
        self.state.lock().marks.remove(&mark.0);
    }

    /// Queues a wait of a stream for a mark.
    pub(crate) fn wait(&self, stream: CudaStream, mark: Mark) -> Fallible<()> {
        let mut state = self.state.lock();
        state.check()?;
        let point = state.marks.get(&mark.0).copied().filter(|point| !state.is_done(*point));
        if let Some(point) = point {
            state.queues.entry(stream.0).or_default().push(Held::Wait(point));
        }
        Ok(())
    }

    /// Tells whether a mark is reached. Where it is not, its stream goes on by one piece of work.
    pub(crate) fn is_reached(&self, mark: Mark, perform: Perform<'_>) -> Fallible<bool> {
        let (point, next) = {
            let state = self.state.lock();
            state.check()?;
            let Some(point) = state.marks.get(&mark.0).copied().filter(|point| !state.is_done(*point)) else {
                return Ok(true);
            };
            (point, state.queues.get(&point.stream).map_or(0, |queue| queue.done + 1))
        };
        // A query does not wait: neither for a thread that does work, nor for other libraries. What has just been done
        // is seen by the next query.
        if let Some(_doing) = self.doing.try_lock() {
            self.advance(StreamPoint { work: next, ..point }, perform, false)?;
        }
        Ok(false)
    }

    /// Does the work before a mark.
    pub(crate) fn await_mark(&self, mark: Mark, perform: Perform<'_>) -> Fallible<()> {
        let point = self.state.lock().marks.get(&mark.0).copied();
        point.map_or_else(|| self.check(), |point| self.run(point, perform))
    }

    /// Does all work that a stream holds.
    pub(crate) fn finish(&self, stream: CudaStream, perform: Perform<'_>) -> Fallible<()> {
        let work = self.state.lock().queues.get(&stream.0).map_or(0, |queue| queue.queued);
        self.run(StreamPoint { stream: stream.0, work }, perform)
    }

    fn run(&self, point: StreamPoint, perform: Perform<'_>) -> Fallible<()> {
        let _doing = self.doing.lock();
        self.advance(point, perform, true)
    }

    /// Does the work before a point, and what that waits for. A call of another library that has not ended is waited
    /// for, or the stream stops at it. Returns at the point, or where the stream stops.
    fn advance(&self, point: StreamPoint, perform: Perform<'_>, waits: bool) -> Fallible<()> {
        loop {
            let held = {
                let mut state = self.state.lock();
                state.check()?;
                // A stream that was destroyed had done its work.
                let queue = state.queues.get_mut(&point.stream).filter(|queue| queue.done < point.work);
                queue.and_then(|queue| queue.held.pop_front())
            };
            let done = match held {
                None => return Ok(()),
                Some(Held::Wait(other)) => {
                    let done = self.advance(other, perform, waits);
                    if done.is_ok() && !self.state.lock().is_done(other) {
                        self.put_back(point, Held::Wait(other));
                        return Ok(());
                    }
                    done
                }
                Some(Held::Work(StreamWork::Foreign(call), _)) => {
                    self.put_back(point, Held::Begun(call()));
                    continue;
                }
                Some(Held::Begun(progress)) => {
                    while waits && !progress() {
                        thread::sleep(Duration::from_micros(20));
                    }
                    if !progress() {
                        self.put_back(point, Held::Begun(progress));
                        return Ok(());
                    }
                    Ok(())
                }
                Some(Held::Work(work, blocks)) => perform(&work, &blocks),
            };
            let mut state = self.state.lock();
            if let Err(failure) = &done {
                // The context is lost, and what it had to do is not done.
                state.queues.clear();
                state.lost.get_or_insert_with(|| failure.clone());
            }
            done?;
            if let Some(queue) = state.queues.get_mut(&point.stream) {
                queue.done += 1;
            }
        }
    }

    /// Holds the first piece of a stream's work again.
    fn put_back(&self, point: StreamPoint, held: Held) {
        if let Some(queue) = self.state.lock().queues.get_mut(&point.stream) {
            queue.held.push_front(held);
        }
    }

    /// Forgets a stream whose work is done.
    pub(crate) fn destroy(&self, stream: CudaStream) {
        self.state.lock().queues.remove(&stream.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copy(number: usize) -> StreamWork {
        StreamWork::Copy { to: 0, from: 0, bytes: number }
    }

    #[test]
    fn work_is_done_when_the_host_waits_and_after_what_it_waits_for() {
        let (streams, seen) = (Streams::default(), Mutex::new(Vec::new()));
        let perform = |work: &StreamWork, _: &Blocks| {
            if let StreamWork::Copy { bytes, .. } = work {
                seen.lock().push(*bytes);
            }
            Ok(())
        };
        let [first, second] = [CudaStream(1), CudaStream(2)];
        let push = |stream, number| streams.push(stream, copy(number), Arc::default(), &perform).unwrap();
        push(first, 10);
        streams.record(Mark(7), first);
        push(first, 11);
        streams.wait(second, Mark(7)).unwrap();
        push(second, 20);
        assert!(seen.lock().is_empty());
        streams.finish(second, &perform).unwrap();
        assert_eq!(*seen.lock(), [10, 20]);
        // A query goes on by one piece, and tells what was done before it.
        streams.record(Mark(7), first);
        assert!(!streams.is_reached(Mark(7), &perform).unwrap() && streams.is_reached(Mark(7), &perform).unwrap());
        assert_eq!(*seen.lock(), [10, 20, 11]);
        // A mark that was never recorded orders nothing.
        streams.wait(second, Mark(9)).unwrap();
        assert!(streams.is_reached(Mark(9), &perform).unwrap());
        // A full queue is worked off.
        (0..=MOST_HELD).for_each(|number| push(second, number));
        assert_eq!(seen.lock().len(), 3 + MOST_HELD + 1);
    }

    /// Work that is queued, and a mark that is recorded, while a piece of the stream is under way.
    #[test]
    fn a_piece_under_way_counts_as_queued() {
        let (streams, seen) = (Streams::default(), Mutex::new(Vec::new()));
        let count = |work: &StreamWork| {
            if let StreamWork::Copy { bytes, .. } = work {
                seen.lock().push(*bytes);
            }
        };
        let later = |work: &StreamWork, _: &Blocks| {
            count(work);
            Ok(())
        };
        let first = |work: &StreamWork, _: &Blocks| {
            count(work);
            streams.push(CudaStream(1), copy(11), Arc::default(), &later)?;
            streams.record(Mark(7), CudaStream(1));
            Ok(())
        };
        streams.push(CudaStream(1), copy(10), Arc::default(), &first).unwrap();
        streams.finish(CudaStream(1), &first).unwrap();
        assert_eq!(*seen.lock(), [10]);
        streams.await_mark(Mark(7), &later).unwrap();
        assert_eq!(*seen.lock(), [10, 11]);
    }

    #[test]
    fn marks_of_a_destroyed_stream_are_reached() {
        let streams = Streams::default();
        let perform = |_: &StreamWork, _: &Blocks| Ok(());
        streams.push(CudaStream(1), copy(1), Arc::default(), &perform).unwrap();
        streams.record(Mark(7), CudaStream(1));
        streams.finish(CudaStream(1), &perform).unwrap();
        streams.destroy(CudaStream(1));
        streams.await_mark(Mark(7), &perform).unwrap();
        assert!(streams.is_reached(Mark(7), &perform).unwrap());
    }

    #[test]
    fn a_failure_is_that_of_the_next_call() {
        let streams = Streams::default();
        let perform = |_: &StreamWork, _: &Blocks| Err(DriverFailure::of_code(700, "an illegal address"));
        let push = || streams.push(CudaStream(1), copy(1), Arc::default(), &perform);
        push().unwrap();
        push().unwrap();
        assert!(streams.finish(CudaStream(1), &perform).unwrap_err().is_sticky());
        assert!(push().unwrap_err().to_string().contains("illegal"));
        assert!(streams.finish(CudaStream(2), &perform).is_err() && streams.is_reached(Mark(3), &perform).is_err());
    }
}
