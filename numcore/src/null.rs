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
    Accumulate, ArgOp, Bytes, Capabilities, DType, DeviceId, DeviceKind, Layout, MemoryCategory, MemoryStats, Out,
    ProgramOperand, ReduceKind, Result, Runtime, Scalar, ScanOp, Shape, Support, View, ViewMut,
    fused::FusedOp,
    ops::{Spec, Specs},
    pointwise::Program,
};

/// The runtime that computes nothing. Downloads return zeros; fused operations count as one launch. Values that other
/// runtimes draw on the host are not drawn, so models of any size are made in no time.
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
    keeps: bool,
    launches: AtomicU64,
    work: WorkCounts,
    live: Arc<AtomicUsize>,
    peak: AtomicUsize,
    allocations: AtomicU64,
}

/// The work of kernels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelWork {
    /// The number of kernels.
    pub launches: u64,
    /// Floating-point operations of matrix products, attention and convolutions, as [`FusedOp::flops`] counts them.
    pub flops: u64,
    /// Bytes that these products read and write.
    pub product_bytes: u64,
    /// Bytes that all other kernels read and write. An element that is broadcast counts once.
    pub bytes: u64,
}

impl KernelWork {
    /// The work since an earlier count.
    pub fn since(self, earlier: KernelWork) -> KernelWork {
        KernelWork {
            launches: self.launches - earlier.launches,
            flops: self.flops - earlier.flops,
            product_bytes: self.product_bytes - earlier.product_bytes,
            bytes: self.bytes - earlier.bytes,
        }
    }
}

impl std::ops::AddAssign for KernelWork {
    fn add_assign(&mut self, other: KernelWork) {
        self.launches += other.launches;
        self.flops += other.flops;
        self.product_bytes += other.product_bytes;
        self.bytes += other.bytes;
    }
}

/// The counts of [`KernelWork`] but the launches.
#[derive(Debug, Default)]
struct WorkCounts {
    flops: AtomicU64,
    product_bytes: AtomicU64,
    bytes: AtomicU64,
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

    /// A new runtime with this answer to [`Runtime::recomputes_in_backward`]: that of a runtime whose memory is of
    /// interest. GPUs keep values.
    pub fn recomputing(recomputes: bool) -> Self {
        NullRuntime(Arc::new(NullState { keeps: !recomputes, ..Default::default() }))
    }

    /// The work of all kernels so far.
    pub fn work(&self) -> KernelWork {
        let WorkCounts { flops, product_bytes, bytes } = &self.0.work;
        let [flops, product_bytes, bytes] = [flops, product_bytes, bytes].map(|count| count.load(Ordering::Relaxed));
        KernelWork { launches: self.launches(), flops, product_bytes, bytes }
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

    fn launch(&self, flops: u64, bytes: u64) -> Result<()> {
        let WorkCounts { flops: all, product_bytes, bytes: others } = &self.0.work;
        all.fetch_add(flops, Ordering::Relaxed);
        if flops > 0 { product_bytes } else { others }.fetch_add(bytes, Ordering::Relaxed);
        self.0.launches.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

fn reads(views: &[View<'_, NullRuntime>]) -> u64 {
    views.iter().map(|view| bytes_of(view.layout, view.dtype)).sum()
}

/// The bytes of an output, twice where it is accumulated into.
fn writes(out: &Out<'_, NullRuntime>) -> u64 {
    bytes_of(out.view.layout, out.view.dtype) * if out.how == Accumulate::Add { 2 } else { 1 }
}

/// The bytes of the elements of a layout, of which broadcast ones count once.
fn bytes_of(layout: &Layout, dtype: DType) -> u64 {
    let sizes = layout.dims().iter().zip(layout.strides());
    sizes.map(|(&n, &stride)| if stride == 0 { n.min(1) } else { n } as u64).product::<u64>() * dtype.size() as u64
}

fn spec_of(layout: &Layout, dtype: DType) -> Spec {
    Spec { shape: *layout.shape(), dtype }
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
        Ok(NullRuntime(Arc::new(NullState { index: self.0.index, keeps: self.0.keeps, ..Default::default() })))
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

    fn recomputes_in_backward(&self) -> bool {
        !self.0.keeps
    }

    fn pointwise(
        &self,
        _: &Program,
        ins: &[ProgramOperand<'_, Self>],
        _: &[Scalar],
        outs: &mut [Out<'_, Self>],
    ) -> Result<()> {
        let read = |operand: &ProgramOperand<'_, Self>| match operand {
            ProgramOperand::View(view) => bytes_of(view.layout, view.dtype),
            ProgramOperand::Own(k) => bytes_of(outs[*k].view.layout, outs[*k].view.dtype),
        };
        self.launch(0, ins.iter().map(read).sum::<u64>() + outs.iter().map(writes).sum::<u64>())
    }

    fn reduce(
        &self,
        _: &Program,
        ins: &[View<'_, Self>],
        _: &[Scalar],
        _: &Shape,
        _: ReduceKind,
        out: Out<'_, Self>,
    ) -> Result<()> {
        self.launch(0, reads(ins) + writes(&out))
    }

    fn arg_reduce(&self, _: ArgOp, x: View<'_, Self>, _: usize, out: ViewMut<'_, Self>) -> Result<()> {
        self.launch(0, reads(&[x]) + bytes_of(out.layout, out.dtype))
    }

    fn matmul(&self, a: View<'_, Self>, b: View<'_, Self>, out: Out<'_, Self>) -> Result<()> {
        let inner = a.layout.dims().last().copied().unwrap_or(0);
        let flops = 2 * (out.view.layout.numel() as u64) * inner as u64;
        self.launch(flops, reads(&[a, b]) + writes(&out))
    }

    fn gather(&self, _: View<'_, Self>, _: usize, index: View<'_, Self>, out: Out<'_, Self>) -> Result<()> {
        // A gather reads as many elements as it writes.
        self.launch(0, reads(&[index]) + bytes_of(out.view.layout, out.view.dtype) + writes(&out))
    }

    fn scatter_add(&self, src: View<'_, Self>, _: usize, index: View<'_, Self>, _: ViewMut<'_, Self>) -> Result<()> {
        // Sums are read and written.
        self.launch(0, 3 * reads(&[src]) + reads(&[index]))
    }

    fn scan(
        &self,
        _: ScanOp,
        x: View<'_, Self>,
        a: Option<View<'_, Self>>,
        _: usize,
        _: bool,
        out: ViewMut<'_, Self>,
    ) -> Result<()> {
        self.launch(0, reads(&[x]) + reads(a.as_slice()) + bytes_of(out.layout, out.dtype))
    }

    fn sort(
        &self,
        x: View<'_, Self>,
        _: usize,
        _: bool,
        values: ViewMut<'_, Self>,
        index: ViewMut<'_, Self>,
    ) -> Result<()> {
        let out = bytes_of(values.layout, values.dtype) + bytes_of(index.layout, index.dtype);
        self.launch(0, reads(&[x]) + out)
    }

    fn fused(&self, op: &FusedOp, ins: &[View<'_, Self>], outs: &mut [Out<'_, Self>]) -> Result<Support> {
        let inputs: Specs = ins.iter().map(|view| spec_of(view.layout, view.dtype)).collect();
        let outputs: Specs = outs.iter().map(|out| spec_of(out.view.layout, out.view.dtype)).collect();
        self.launch(op.flops(&inputs, &outputs), reads(ins) + outs.iter().map(writes).sum::<u64>())?;
        Ok(Support::Done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Tensor,
        fused::NnOps,
        ops::{MatmulOps, PointwiseOps},
    };

    /// The work of `f`.
    fn work(f: impl FnOnce(&NullRuntime) -> Result<Tensor<NullRuntime>>) -> KernelWork {
        let rt = NullRuntime::new();
        f(&rt).unwrap();
        rt.work()
    }

    fn zeros(rt: &NullRuntime, shape: &[usize]) -> Tensor<NullRuntime> {
        Tensor::normal(rt, shape, DType::F32, 0.0, 1.0, 0).unwrap()
    }

    #[test]
    fn products_and_other_kernels_are_counted_apart() {
        let product = work(|rt| zeros(rt, &[2, 3]).matmul(&zeros(rt, &[3, 4])));
        let counted = KernelWork { launches: 1, flops: 2 * 2 * 3 * 4, product_bytes: (6 + 12 + 8) * 4, bytes: 0 };
        assert_eq!(product, counted);
        // A broadcast row is read once.
        let sum = work(|rt| zeros(rt, &[5, 4]).add(&zeros(rt, &[4])));
        assert_eq!(sum, KernelWork { launches: 1, bytes: (20 + 4 + 20) * 4, ..KernelWork::default() });
        assert_eq!(sum.since(sum), KernelWork::default());
    }

    #[test]
    fn attention_counts_as_its_two_products() {
        let [b, h, t, s, d, e] = [2, 3, 5, 7, 4, 6];
        let attention = work(|rt| {
            let (q, k) = (zeros(rt, &[b, h, t, d]), zeros(rt, &[b, h, s, d]));
            q.attention(&k, &zeros(rt, &[b, h, s, e]))
        });
        assert_eq!(attention.flops as usize, 2 * b * h * t * s * (d + e));
    }

    #[test]
    fn large_values_are_made_in_no_time() {
        let rt = NullRuntime::new();
        let huge = zeros(&rt, &[1 << 20, 1 << 20]);
        assert_eq!(rt.memory().total.live, huge.memory_bytes());
        assert_eq!(rt.work(), KernelWork::default());
    }
}
