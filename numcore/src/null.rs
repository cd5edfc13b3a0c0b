//! A runtime that computes nothing: shapes and dtypes are inferred, launches are counted. Tests use it to check the
//! order of launches, and programs to check a model's shapes without its memory.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use crate::{
    ArgOp, Bytes, Capabilities, DType, DeviceId, DeviceKind, MemoryCategory, MemoryStats, Out, ProgramOperand,
    ReduceKind, Result, Runtime, Scalar, ScanOp, Shape, Support, View, ViewMut, fused::FusedOp, pointwise::Program,
};

/// The runtime that computes nothing. Downloads return zeros; fused operations count as one launch.
///
/// Queues keep vector clocks, so a test can query whether one queue is ordered after the launches of another
/// ([`NullRuntime::is_ordered_after`]). No result computed on one CPU would show that.
#[derive(Clone, Debug, Default)]
pub struct NullRuntime(Arc<NullState>);

#[derive(Debug, Default)]
struct NullState {
    /// The index of its device.
    index: u32,
    queue: QueueId,
    /// The launches of other queues that this queue is ordered after.
    clock: Mutex<QueueClock>,
    launches: AtomicU64,
    live: Arc<AtomicUsize>,
    peak: AtomicUsize,
    allocations: AtomicU64,
}

/// The number of launches of each queue.
type QueueClock = BTreeMap<u64, u64>;

/// A unique number for every queue.
#[derive(Debug)]
struct QueueId(u64);

impl Default for QueueId {
    fn default() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        QueueId(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// A point in a queue: the launches, of this and of other queues, that come before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NullEvent(QueueClock);

/// Memory of which only the size is kept.
#[derive(Debug)]
pub struct NullBuffer {
    bytes: usize,
    live: Arc<AtomicUsize>,
}

impl Drop for NullBuffer {
    fn drop(&mut self) {
        self.live.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl NullRuntime {
    /// A new runtime with all counts at 0.
    pub fn new() -> Self {
        Self::default()
    }

    /// The number of kernels launched so far.
    pub fn launches(&self) -> u64 {
        self.0.launches.load(Ordering::Relaxed)
    }

    /// A queue on device `index`; tensors of different devices cannot be combined.
    pub fn on_device(index: u32) -> Self {
        NullRuntime(Arc::new(NullState { index, ..Default::default() }))
    }

    /// Tells whether later launches of this queue are ordered after every launch before `event`. This holds for its own
    /// launches, and for queues whose events it has waited for, directly or through a third queue.
    pub fn is_ordered_after(&self, event: &NullEvent) -> bool {
        let own = self.clock();
        event.0.iter().all(|(queue, launches)| own.get(queue).is_some_and(|known| known >= launches))
    }

    fn clock(&self) -> QueueClock {
        let mut clock = self.0.clock.lock().unwrap_or_else(PoisonError::into_inner).clone();
        clock.insert(self.0.queue.0, self.launches());
        clock
    }

    fn launch(&self) -> Result<()> {
        self.0.launches.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

impl Runtime for NullRuntime {
    type Buffer = NullBuffer;
    type Event = NullEvent;

    fn device(&self) -> DeviceId {
        DeviceId { kind: DeviceKind::Null, index: self.0.index }
    }

    fn capabilities(&self) -> &Capabilities {
        static ALL: std::sync::LazyLock<Capabilities> = std::sync::LazyLock::new(|| Capabilities {
            name: "null".into(),
            storage: DType::ALL.to_vec(),
            compute: DType::ALL.to_vec(),
            parallelism: 1,
            max_binding: usize::MAX,
            piece: 128 << 20,
        });
        &ALL
    }

    fn fork(&self) -> Result<Self> {
        Ok(Self::on_device(self.0.index))
    }

    fn with_category(&self, _: MemoryCategory) -> Self {
        self.clone()
    }

    fn record(&self) -> Result<NullEvent> {
        Ok(NullEvent(self.clock()))
    }

    fn wait(&self, event: &NullEvent) -> Result<()> {
        let mut clock = self.0.clock.lock().unwrap_or_else(PoisonError::into_inner);
        for (&queue, &launches) in &event.0 {
            let known = clock.entry(queue).or_default();
            *known = launches.max(*known);
        }
        Ok(())
    }

    fn synchronize(&self) -> Result<()> {
        Ok(())
    }

    fn memory(&self) -> MemoryStats {
        let live = self.0.live.load(Ordering::Relaxed);
        let total = Bytes { live, peak: self.0.peak.load(Ordering::Relaxed) };
        MemoryStats {
            total,
            reserved: live,
            allocations: self.0.allocations.load(Ordering::Relaxed),
            ..Default::default()
        }
    }

    fn reset_peak(&self) {
        self.0.peak.store(self.0.live.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    fn alloc(&self, bytes: usize) -> Result<NullBuffer> {
        let live = self.0.live.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.0.peak.fetch_max(live, Ordering::Relaxed);
        self.0.allocations.fetch_add(1, Ordering::Relaxed);
        Ok(NullBuffer { bytes, live: self.0.live.clone() })
    }

    fn upload(&self, _: &[u8], _: ViewMut<'_, Self>) -> Result<()> {
        Ok(())
    }

    fn download(&self, _: View<'_, Self>, to: &mut [u8]) -> Result<()> {
        to.fill(0);
        Ok(())
    }

    fn pointwise(
        &self,
        _: &Program,
        _: &[ProgramOperand<'_, Self>],
        _: &[Scalar],
        _: &mut [Out<'_, Self>],
    ) -> Result<()> {
        self.launch()
    }

    fn reduce(
        &self,
        _: &Program,
        _: &[View<'_, Self>],
        _: &[Scalar],
        _: &Shape,
        _: ReduceKind,
        _: Out<'_, Self>,
    ) -> Result<()> {
        self.launch()
    }

    fn arg_reduce(&self, _: ArgOp, _: View<'_, Self>, _: usize, _: ViewMut<'_, Self>) -> Result<()> {
        self.launch()
    }

    fn matmul(&self, _: View<'_, Self>, _: View<'_, Self>, _: Out<'_, Self>) -> Result<()> {
        self.launch()
    }

    fn gather(&self, _: View<'_, Self>, _: usize, _: View<'_, Self>, _: Out<'_, Self>) -> Result<()> {
        self.launch()
    }

    fn scatter_add(&self, _: View<'_, Self>, _: usize, _: View<'_, Self>, _: ViewMut<'_, Self>) -> Result<()> {
        self.launch()
    }

    fn scan(
        &self,
        _: ScanOp,
        _: View<'_, Self>,
        _: Option<View<'_, Self>>,
        _: usize,
        _: bool,
        _: ViewMut<'_, Self>,
    ) -> Result<()> {
        self.launch()
    }

    fn sort(&self, _: View<'_, Self>, _: usize, _: bool, _: ViewMut<'_, Self>, _: ViewMut<'_, Self>) -> Result<()> {
        self.launch()
    }

    fn fused(&self, _: &FusedOp, _: &[View<'_, Self>], _: &mut [Out<'_, Self>]) -> Result<Support> {
        self.launch()?;
        Ok(Support::Done)
    }
}
