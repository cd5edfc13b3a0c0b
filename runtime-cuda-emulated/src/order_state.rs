//! The happens-before order of a device's work, by vector clocks of its streams, its marks and the host.

use std::{collections::HashMap, ops::Range, time::Duration};

use runtime_cuda::driver::{CudaStream, DriverFailure, Fallible};

use crate::{
    candidates::GemmCandidates,
    gpu::LAUNCH_FAILED,
    refusal::GemmRefusal,
    tracked_block::Access,
    tracked_memory::TrackedMemory,
    vector_clock::{Moment, VectorClock, join},
};

/// The history of a device's work, and the complaints about it.
#[derive(Default)]
pub(crate) struct OrderState {
    pub(crate) streams: HashMap<u64, VectorClock>,
    pub(crate) marks: HashMap<u64, VectorClock>,
    pub(crate) host: VectorClock,
    pub(crate) memory: TrackedMemory,
    /// The access of every kernel to each of its arguments; `None` for one that is no pointer.
    pub(crate) kernels: HashMap<u64, Vec<Option<Access>>>,
    pub(crate) captured: Option<Vec<(Range<u64>, Access)>>,
    pub(crate) recordings: HashMap<u64, Vec<(Range<u64>, Access)>>,
    pub(crate) complaints: Vec<String>,
    pub(crate) operations: usize,
    pub(crate) refusal: GemmRefusal,
    pub(crate) candidates: GemmCandidates,
    /// The total duration of the product candidates run so far.
    pub(crate) spent: Duration,
    /// The number of copies from the host that succeed before one fails.
    pub(crate) copies_left: Option<usize>,
    pub(crate) gone: bool,
}

impl OrderState {
    pub(crate) fn there(&self) -> Fallible<()> {
        if self.gone { Err(DriverFailure::of_code(LAUNCH_FAILED, "the device is gone")) } else { Ok(()) }
    }

    /// Advances a stream's clock to its next operation.
    pub(crate) fn step(&mut self, stream: CudaStream) -> Moment {
        self.operations += 1;
        let host = self.host.clone();
        let clock = self.streams.entry(stream.0).or_default();
        join(clock, &host);
        let time = clock.entry(stream.0).or_default();
        *time += 1;
        Moment { stream: stream.0, time: *time }
    }

    pub(crate) fn access(&mut self, what: &'static str, moment: Moment, range: Range<u64>, how: Access) {
        let clock = self.streams.get(&moment.stream).cloned().unwrap_or_default();
        let wrong = self.memory.conflicts(&range, &clock, how);
        self.memory.note(&range, moment, what, how);
        let (stream, start) = (moment.stream, range.start);
        self.captured.iter_mut().for_each(|all| all.push((range.clone(), how)));
        self.complain(
            wrong.map(|w| format!("{what} ({how:?}, stream {stream}) is not ordered after {w}, at {start:x}")),
        );
    }

    /// Checks a write to, or a freeing of, `range` by the host.
    pub(crate) fn host_takes(&mut self, what: &str, range: Option<Range<u64>>) {
        let Some(range) = range else { return };
        let wrong = self.memory.conflicts(&range, &self.host, Access::Write);
        self.complain(wrong.map(|w| format!("{what} by the host, which has not waited for {w}, at {:x}", range.start)));
    }

    fn complain(&mut self, line: Option<String>) {
        // The first complaints suffice.
        self.complaints.extend(line.filter(|_| self.complaints.len() < 100));
    }

    /// Checks a call in which the driver waits for all work of the device, under its locks: a stream's kernel may wait
    /// for that of another rank, which the locks keep from being launched.
    fn waits_for_the_device(&mut self, what: &str) {
        // In a captured step the call is put off.
        if self.gone || self.captured.is_some() {
            return;
        }
        let last =
            self.streams.iter().filter_map(|(&stream, clock)| Some(Moment { stream, time: *clock.get(&stream)? }));
        let behind = last.filter(|moment| !moment.seen_by(&self.host)).map(|moment| moment.stream).min();
        self.complain(behind.map(|stream| format!("{what} while the host has not waited for stream {stream}")));
    }

    /// Advances the host's clock to one that it has waited for.
    pub(crate) fn host_sees(&mut self, clock: &VectorClock) {
        join(&mut self.host, clock);
    }

    pub(crate) fn forget(&mut self, what: &str, address: u64) {
        self.host_takes(what, self.memory.allocation(address));
        self.waits_for_the_device(what);
        self.memory.freed(address);
    }
}
