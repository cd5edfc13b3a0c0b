//! One ordered queue of a GPU: its stream, its memory, the staging of copies, and its sticky errors.

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicBool, Ordering},
};

use numcore::{
    Error, Result,
    trace::{self, SpanKind},
};
use parking_lot::Mutex;

use crate::{
    capture::Capture,
    driver::KernelArgs,
    driver::{
        CapturedGraph, CublasGemm, CudaStream, Driver, DriverFailure, DriverFailureKind, Fallible, GemmPlaces, Grid,
        KernelFunction, backend,
    },
    engine::Engine,
    kernel_times::KernelTimes,
    memory::Memory,
    recent::RecentLaunches,
    staging::Staging,
};

/// The state that clones of a `Cuda` handle share.
pub(crate) struct Queue {
    pub engine: Arc<Engine>,
    pub stream: CudaStream,
    pub memory: Arc<Memory>,
    staging: Mutex<Staging>,
    /// The device address of a word in which kernels set a bit per operation that met an index out of range.
    pub flag: u64,
    flagged: AtomicBool,
    /// True if a kernel that may set the flag word was captured in the current capture.
    captured_flag: AtomicBool,
    recent: RecentLaunches,
    failed: Mutex<Option<(&'static str, DriverFailure)>>,
    capturing: AtomicBool,
    /// The step being captured.
    capture: Mutex<Option<Arc<Capture<Queue>>>>,
    /// The device address of the GEMM workspace, allocated at first use. One GEMM runs at a time, since the queue is
    /// ordered.
    workspace: OnceLock<u64>,
    /// The measured times of kernels, since the first recording of spans; `None` where they cannot be measured.
    times: OnceLock<Option<KernelTimes>>,
}

/// Bytes of the GEMM workspace: the size cuBLAS itself uses on Hopper.
const WORKSPACE: usize = 32 << 20;

/// The most blocks of a launch along each axis of the grid, equal on every GPU.
const MOST_BLOCKS: [usize; 3] = [i32::MAX as usize, 65_535, 65_535];

/// The bits of the flag word, and the operation that sets each.
const FLAGS: [(u32, &str); 3] = [(1, "gather"), (2, "scatter_add"), (4, "cross_entropy")];
const FLAG_BYTES: usize = 256;

impl Queue {
    /// Creates a queue on a new stream.
    pub(crate) fn new(engine: Arc<Engine>) -> Result<Queue> {
        let stream = engine.driver.stream().map_err(|e| backend("fork", engine.device, e))?;
        Queue::on(engine, stream)
    }

    /// Creates a queue on a new stream of the highest priority.
    pub(crate) fn with_priority(engine: Arc<Engine>) -> Result<Queue> {
        let stream = engine.driver.priority_stream().map_err(|e| backend("fork", engine.device, e))?;
        Queue::on(engine, stream)
    }

    fn on(engine: Arc<Engine>, stream: CudaStream) -> Result<Queue> {
        let driver = engine.driver.clone();
        let memory = Memory::new(engine.memory.clone(), stream);
        // Taken from the driver, not the pool: it belongs to no tensor.
        let flag = memory.driver_alloc(FLAG_BYTES).and_then(|at| at.ok_or_else(|| DriverFailure::new("out of memory")));
        let flag = flag.map_err(|e| backend("fork", engine.device, e))?;
        // SAFETY: just allocated with this size.
        unsafe { driver.zero(stream, flag, FLAG_BYTES) }.map_err(|e| backend("fork", engine.device, e))?;
        let staging = Staging::new(memory.clone(), driver, stream).map_err(|e| backend("fork", engine.device, e))?;
        Ok(Queue {
            staging: Mutex::new(staging),
            engine,
            stream,
            memory,
            flag,
            flagged: AtomicBool::new(false),
            captured_flag: AtomicBool::new(false),
            recent: RecentLaunches::default(),
            failed: Mutex::new(None),
            capturing: AtomicBool::new(false),
            capture: Mutex::new(None),
            workspace: OnceLock::new(),
            times: OnceLock::new(),
        })
    }

    pub(crate) fn driver(&self) -> &dyn Driver {
        &*self.engine.driver
    }

    /// Returns the sticky error of this queue, if there is one.
    pub(crate) fn check(&self) -> Result<()> {
        match &*self.failed.lock() {
            None => Ok(()),
            Some((op, failure)) => Err(backend(op, self.engine.device, failure.clone())),
        }
    }

    /// Converts a driver's result. A sticky failure is stored in the queue, with the launches before it.
    pub(crate) fn kept<T>(&self, op: &'static str, done: Fallible<T>) -> Result<T> {
        done.map_err(|mut failure| {
            if failure.is_sticky() {
                failure.message.push_str(&self.recent.listing());
                self.failed.lock().get_or_insert_with(|| (op, failure.clone()));
            }
            backend(op, self.engine.device, failure)
        })
    }

    /// Launches a kernel, named `entry` in errors.
    ///
    /// # Safety
    /// The conditions of [`Driver::launch`].
    pub(crate) unsafe fn launch(
        &self,
        op: &'static str,
        entry: &str,
        kernel: KernelFunction,
        grid: Grid,
        args: &mut KernelArgs,
    ) -> Result<()> {
        self.check()?;
        if grid.blocks.iter().zip(MOST_BLOCKS).any(|(b, most)| *b > most) {
            let why =
                format!("kernel {entry}: {:?} blocks are more than {MOST_BLOCKS:?}; use smaller tensors", grid.blocks);
            return Err(Error::unsupported_on(self.engine.device, op, why));
        }
        // SAFETY: the caller's promise.
        let launch = || unsafe { self.driver().launch(self.stream, kernel, grid, args) };
        self.recent.note(op, entry, grid);
        let done = self.measured(op, || entry.to_string(), launch);
        self.kept(op, done.map_err(|e| e.within(&format!("kernel {entry}"))))?;
        // Set after the launch: a reader that came before it would clear the flag, and find nothing.
        if args.reports {
            self.reporting(self.is_capturing()).store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Copies bytes on the device, for operation `op`.
    ///
    /// # Safety
    /// The conditions of [`Driver::copy`].
    // SAFETY: as the section says.
    pub(crate) unsafe fn copy(&self, op: &'static str, from: u64, to: u64, bytes: usize) -> Result<()> {
        self.check()?;
        self.recent.note(op, "a copy", Grid { blocks: [bytes, 1, 1], threads: [1; 2], shared: 0 });
        // SAFETY: the caller's promise.
        let copy = || unsafe { self.driver().copy(self.stream, to, from, bytes) };
        let done = self.measured(op, || format!("copy of {bytes} bytes"), copy);
        self.kept(op, done)
    }

    /// The flag that is set once a kernel that may set the flag word is launched; with `captured`, once it is captured.
    fn reporting(&self, captured: bool) -> &AtomicBool {
        if captured { &self.captured_flag } else { &self.flagged }
    }

    /// Queues a GEMM of cuBLASLt; with `is_tuned`, by its [fastest algorithm](Queue::fastest_algorithm). Returns the
    /// library's failure if it has no algorithm, with a workspace or without; nothing is queued then.
    ///
    /// # Safety
    /// The conditions of [`Driver::gemm`].
    pub(crate) unsafe fn gemm(
        &self,
        gemm: &CublasGemm,
        at: GemmPlaces,
        is_tuned: bool,
    ) -> Result<Option<DriverFailure>> {
        self.check()?;
        let workspace = (self.workspace()?, WORKSPACE);
        // SAFETY: the caller's promise; the workspace is this queue's, which is ordered.
        let candidate = if is_tuned { unsafe { self.fastest_algorithm(gemm, at, workspace)? } } else { None };
        self.recent.note("matmul", "cuBLASLt", Grid { blocks: [gemm.m, gemm.n, gemm.k], threads: [1, 1], shared: 0 });
        // SAFETY: as above.
        let launch = || unsafe { self.driver().gemm(self.stream, gemm, at, workspace, candidate) };
        let refused = |done: &Fallible<()>| matches!(done, Err(e) if e.kind == DriverFailureKind::NotSupported);
        let mut done = self.measured("matmul", || gemm.to_string(), launch);
        if refused(&done) {
            // SAFETY: as above, with no workspace.
            let launch = || unsafe { self.driver().gemm(self.stream, gemm, at, (0, 0), None) };
            done = self.measured("matmul", || gemm.to_string(), launch);
        }
        match done {
            Err(failure) if failure.kind == DriverFailureKind::NotSupported => Ok(Some(failure)),
            done => self.kept("matmul", done).map(|()| None),
        }
    }

    /// Launches a kernel of operation `name`, and measures its time while kernel spans are recorded.
    fn measured(
        &self,
        name: &'static str,
        of: impl FnOnce() -> String,
        launch: impl FnOnce() -> Fallible<()>,
    ) -> Fallible<()> {
        if !trace::is_recorded(SpanKind::Kernel) || self.is_capturing() {
            return launch();
        }
        let new = || {
            let track = format!("{} kernels", self.engine.device);
            KernelTimes::new(self.engine.driver.clone(), self.stream, track).ok()
        };
        match self.times.get_or_init(new) {
            Some(times) => times.around(name, of(), launch),
            None => launch(),
        }
    }

    pub(crate) fn workspace(&self) -> Result<u64> {
        if let Some(at) = self.workspace.get() {
            return Ok(*at);
        }
        let device = self.engine.device;
        let at = self.memory.driver_alloc(WORKSPACE).map_err(|e| backend("matmul", device, e))?;
        let at = at.ok_or_else(|| self.memory.exhausted(WORKSPACE))?;
        if self.workspace.set(at).is_err() {
            // SAFETY: another thread was first; this one was not used.
            unsafe { self.memory.driver_free(&[at]) };
        }
        Ok(*self.workspace.get().unwrap_or(&at))
    }

    /// Runs calls of another library on this thread, with the device's context current.
    pub(crate) fn enter(&self, op: &'static str, work: &mut dyn FnMut()) -> Result<()> {
        self.check()?;
        self.recent.note(op, "another library", Grid { blocks: [1; 3], threads: [1; 2], shared: 0 });
        self.kept(op, self.driver().bind())?;
        work();
        Ok(())
    }

    /// Blocks until all queued work is done, then reports an index out of range.
    pub(crate) fn synchronize(&self) -> Result<()> {
        self.check()?;
        self.refuse_while_capturing("synchronize")?;
        self.kept("synchronize", self.driver().synchronize(self.stream))?;
        self.times.get().into_iter().flatten().for_each(KernelTimes::drain);
        self.check_flag()
    }

    pub(crate) fn upload(&self, from: &[u8], to: u64) -> Result<()> {
        self.check()?;
        self.refuse_while_capturing("upload")?;
        // SAFETY: the caller hands on an output of exactly this size.
        let done = self.staged(|staging| unsafe { staging.upload(from, to) });
        self.kept("upload", done)
    }

    pub(crate) fn download(&self, from: u64, to: &mut [u8]) -> Result<()> {
        self.check()?;
        self.refuse_while_capturing("download")?;
        // SAFETY: the caller hands on a view of exactly this size.
        let done = self.staged(|staging| unsafe { staging.download(from, to) });
        self.kept("download", done)?;
        self.check_flag()
    }

    /// Copies through page-locked memory. After a copy that fails half-way, its chunks are free again once this
    /// returns.
    fn staged(&self, copy: impl FnOnce(&mut Staging) -> Fallible<()>) -> Fallible<()> {
        let mut staging = self.staging.lock();
        copy(&mut staging).inspect_err(|_| staging.drain())
    }

    /// Reports an index out of range once. The kernel that met it wrote nothing for it, and the queue continues.
    fn check_flag(&self) -> Result<()> {
        if !self.flagged.swap(false, Ordering::AcqRel) {
            return Ok(());
        }
        // After a failed read the flag stays set, so that the next call reads the word.
        self.read_flag().inspect_err(|_| self.flagged.store(true, Ordering::Release))?.map_or(Ok(()), Err)
    }

    /// Reads the flag word and clears it; returns the error it stands for, if any.
    fn read_flag(&self) -> Result<Option<Error>> {
        let mut word = [0u8; 4];
        // SAFETY: the flag has 4 bytes.
        let done = self.staged(|staging| unsafe { staging.download(self.flag, &mut word) });
        self.kept("download", done)?;
        let bits = u32::from_le_bytes(word);
        if bits == 0 {
            return Ok(None);
        }
        // SAFETY: the flag has this size.
        let cleared = unsafe { self.driver().zero(self.stream, self.flag, FLAG_BYTES) };
        self.kept("download", cleared)?;
        let (_, op) = FLAGS.into_iter().find(|(bit, _)| bits & bit != 0).unwrap_or(FLAGS[0]);
        Ok(Some(Error::late_index(op, None)))
    }

    pub(crate) fn refuse_while_capturing(&self, op: &'static str) -> Result<()> {
        if !self.is_capturing() {
            return Ok(());
        }
        let why = "the host cannot take part in a captured step; read and write tensors outside of it";
        Err(Error::unsupported_on(self.engine.device, op, why))
    }

    /// Returns the device address at which a captured kernel reads this key of random bits; 0 outside of captures.
    pub(crate) fn stored_key(&self, op: &'static str, key: u64) -> Result<u64> {
        self.capture().map_or(Ok(0), |capture| capture.keys.address(op, key))
    }

    /// Makes the queue a part of a step that is being captured.
    pub(crate) fn begin_capture(&self, capture: &Arc<Capture<Queue>>) {
        self.memory.begin_capture(capture.held.clone());
        self.captured_flag.store(false, Ordering::Release);
        *self.capture.lock() = Some(capture.clone());
        self.capturing.store(true, Ordering::Release);
    }

    pub(crate) fn is_capturing(&self) -> bool {
        self.capturing.load(Ordering::Acquire)
    }

    /// The step being captured, if there is one.
    pub(crate) fn capture(&self) -> Option<Arc<Capture<Queue>>> {
        if self.is_capturing() { self.capture.lock().clone() } else { None }
    }

    /// Ends the queue's part of the capture. Returns true if a captured kernel may report an index out of range.
    pub(crate) fn end_capture(&self) -> bool {
        self.memory.end_capture();
        *self.capture.lock() = None;
        self.capturing.store(false, Ordering::Release);
        self.captured_flag.swap(false, Ordering::AcqRel)
    }

    /// Launches a recording. `reports` is true if it has kernels that may report an index out of range.
    pub(crate) fn replay(&self, recording: CapturedGraph, reports: bool) -> Result<()> {
        self.check()?;
        self.refuse_while_capturing("launch")?;
        self.recent.note("launch", "a captured step", Grid { blocks: [1; 3], threads: [1; 2], shared: 0 });
        self.kept("launch", self.driver().replay(recording, self.stream))?;
        self.may_report(reports);
        Ok(())
    }

    /// Notes that a launched recording has kernels of this queue that may report an index out of range.
    pub(crate) fn may_report(&self, reports: bool) {
        self.flagged.fetch_or(reports, Ordering::AcqRel);
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let own: Vec<u64> = self.workspace.get().copied().into_iter().chain([self.flag]).collect();
        // Copies still read host memory: it must not be freed before they are done, for which this waits.
        // SAFETY: allocated in `on` and in `workspace`, for this queue.
        unsafe { self.memory.driver_free(&own) };
    }
}
