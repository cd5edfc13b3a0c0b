//! One ordered queue of a GPU: its stream, its memory, the staging of copies, and its sticky errors.

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicBool, Ordering},
};

use numcore::{
    Error, ErrorKind, Result,
    trace::{self, SpanKind},
};
use parking_lot::Mutex;

use crate::{
    args::Args,
    driver::{CublasGemm, Driver, DriverFailure, Fallible, Grid, KernelFunction, Mark, Stream},
    engine::{Engine, backend},
    kernel_times::KernelTimes,
    memory::Memory,
    staging::Staging,
};

/// The state that clones of a handle share.
pub(crate) struct Queue {
    pub engine: Arc<Engine>,
    pub stream: Stream,
    pub memory: Arc<Memory>,
    staging: Mutex<Staging>,
    /// A word that kernels set where an index is out of range, and whether one that may do so was launched.
    flag: u64,
    flagged: AtomicBool,
    failed: Mutex<Option<(&'static str, String)>>,
    capturing: AtomicBool,
    /// The workspace of GEMM, one at a time, since the queue is ordered. Allocated at first use.
    workspace: OnceLock<u64>,
    /// When kernels ran, since the first recording; `None` where that cannot be measured.
    times: OnceLock<Option<KernelTimes>>,
}

/// Bytes of the GEMM workspace: the size cuBLAS itself uses on Hopper.
const WORKSPACE: usize = 32 << 20;

/// Most blocks of a launch along each axis, of every GPU.
const MOST_BLOCKS: [usize; 3] = [i32::MAX as usize, 65_535, 65_535];

/// The bits of the flag word, and what they say.
const FLAGS: [(u32, &str); 3] = [(1, "gather"), (2, "scatter_add"), (4, "cross_entropy")];
const FLAG_BYTES: usize = 256;

impl Queue {
    pub(crate) fn new(engine: Arc<Engine>) -> Result<Queue> {
        let driver = engine.driver.clone();
        let stream = driver.stream().map_err(|e| backend("fork", engine.device, e))?;
        let memory = Memory::new(driver.clone(), engine.device, stream);
        // Not from the pool: it is no tensor's.
        let flag = driver.alloc(FLAG_BYTES).and_then(|at| at.ok_or_else(|| DriverFailure::new("out of memory")));
        let flag = flag.map_err(|e| backend("fork", engine.device, e))?;
        // SAFETY: just allocated with this size.
        unsafe { driver.zero(stream, flag, FLAG_BYTES) }.map_err(|e| backend("fork", engine.device, e))?;
        let staging = Staging::new(driver, stream).map_err(|e| backend("fork", engine.device, e))?;
        Ok(Queue {
            staging: Mutex::new(staging),
            engine,
            stream,
            memory,
            flag,
            flagged: AtomicBool::new(false),
            failed: Mutex::new(None),
            capturing: AtomicBool::new(false),
            workspace: OnceLock::new(),
            times: OnceLock::new(),
        })
    }

    pub(crate) fn driver(&self) -> &dyn Driver {
        &*self.engine.driver
    }

    /// The error this queue has failed with, if it has.
    pub(crate) fn check(&self) -> Result<()> {
        match &*self.failed.lock() {
            None => Ok(()),
            Some((op, message)) => Err(backend(op, self.engine.device, DriverFailure::new(message.clone()))),
        }
    }

    /// Hands a result on; a failure stays with the queue.
    pub(crate) fn kept<T>(&self, op: &'static str, done: Fallible<T>) -> Result<T> {
        done.map_err(|failure| {
            self.failed.lock().get_or_insert_with(|| (op, failure.message.clone()));
            backend(op, self.engine.device, failure)
        })
    }

    /// Launches a kernel by the name `entry`.
    ///
    /// # Safety
    /// As for [`Driver::launch`].
    pub(crate) unsafe fn launch(
        &self,
        op: &'static str,
        entry: &str,
        kernel: KernelFunction,
        grid: Grid,
        args: &mut Args,
    ) -> Result<()> {
        self.check()?;
        if grid.blocks.iter().zip(MOST_BLOCKS).any(|(b, most)| *b > most) {
            let why =
                format!("kernel {entry}: {:?} blocks are more than {MOST_BLOCKS:?}; use smaller tensors", grid.blocks);
            return Err(ErrorKind::Unsupported { op, device: self.engine.device, why }.into());
        }
        // SAFETY: the caller's promise.
        let launch = || unsafe { self.driver().launch(self.stream, kernel, grid, &mut args.pointers()) };
        let done = self.measured(op, launch);
        self.kept(op, done.map_err(|e| DriverFailure::new(format!("kernel {entry}: {e}"))))
    }

    /// A GEMM by cuBLASLt.
    ///
    /// # Safety
    /// As for [`Driver::gemm`].
    pub(crate) unsafe fn gemm(&self, gemm: &CublasGemm, at: [u64; 3]) -> Result<()> {
        self.check()?;
        let workspace = (self.workspace()?, WORKSPACE);
        // SAFETY: the caller's promise; the workspace is this queue's, which is ordered.
        let launch = || unsafe { self.driver().gemm(self.stream, gemm, at, workspace) };
        let done = self.measured("matmul", launch);
        self.kept("matmul", done)
    }

    /// Launches a kernel, and measures when it runs if such spans are recorded.
    fn measured(&self, name: &'static str, launch: impl FnOnce() -> Fallible<()>) -> Fallible<()> {
        if !trace::is_recorded(SpanKind::Kernel) || self.capturing.load(Ordering::Acquire) {
            return launch();
        }
        let new = || {
            let track = format!("{} kernels", self.engine.device);
            KernelTimes::new(self.engine.driver.clone(), self.stream, track).ok()
        };
        match self.times.get_or_init(new) {
            Some(times) => times.around(name, launch),
            None => launch(),
        }
    }

    pub(crate) fn workspace(&self) -> Result<u64> {
        if let Some(at) = self.workspace.get() {
            return Ok(*at);
        }
        let device = self.engine.device;
        let at = self.driver().alloc(WORKSPACE).map_err(|e| backend("matmul", device, e))?;
        let live = self.memory.stats().total.live;
        let at = at.ok_or(ErrorKind::OutOfMemory { device, requested: WORKSPACE, live })?;
        if self.workspace.set(at).is_err() {
            // SAFETY: another thread was first; this one was not used.
            unsafe { self.driver().free(at) };
        }
        Ok(*self.workspace.get().unwrap_or(&at))
    }

    /// The word in which kernels report an index out of range; it will be checked.
    pub(crate) fn flag(&self) -> u64 {
        self.flagged.store(true, Ordering::Release);
        self.flag
    }

    /// Blocks until all queued work is done.
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
        let done = unsafe { self.staging.lock().upload(from, to) };
        self.kept("upload", done)
    }

    pub(crate) fn download(&self, from: u64, to: &mut [u8]) -> Result<()> {
        self.check()?;
        self.refuse_while_capturing("download")?;
        // SAFETY: the caller hands on a view of exactly this size.
        let done = unsafe { self.staging.lock().download(from, to) };
        self.kept("download", done)?;
        self.check_flag()
    }

    /// Reports an index out of range once: the kernel that met it wrote nothing there, and the queue continues.
    fn check_flag(&self) -> Result<()> {
        if !self.flagged.swap(false, Ordering::AcqRel) {
            return Ok(());
        }
        let mut word = [0u8; 4];
        // SAFETY: the flag has 4 bytes.
        let done = unsafe { self.staging.lock().download(self.flag, &mut word) };
        self.kept("download", done)?;
        let bits = u32::from_le_bytes(word);
        if bits == 0 {
            return Ok(());
        }
        // SAFETY: the flag has this size.
        let cleared = unsafe { self.driver().zero(self.stream, self.flag, FLAG_BYTES) };
        self.kept("download", cleared)?;
        let (_, op) = FLAGS.into_iter().find(|(bit, _)| bits & bit != 0).unwrap_or(FLAGS[0]);
        Err(Error::argument(
            op,
            "an index is out of range; it was found when results were read, so look at the ops before",
        ))
    }

    pub(crate) fn refuse_while_capturing(&self, op: &'static str) -> Result<()> {
        if !self.capturing.load(Ordering::Acquire) {
            return Ok(());
        }
        let why = "the host cannot take part in a captured step; read and write tensors outside of it".into();
        Err(ErrorKind::Unsupported { op, device: self.engine.device, why }.into())
    }

    /// Sets whether work is captured from here on; returns the old setting.
    pub(crate) fn set_capturing(&self, on: bool) -> bool {
        self.capturing.swap(on, Ordering::AcqRel)
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // Host memory that copies still read must not be freed.
        let _ = self.driver().synchronize(self.stream);
        // SAFETY: allocated in `new`; the queue has passed.
        unsafe { self.driver().free(self.flag) };
        if let Some(at) = self.workspace.get() {
            // SAFETY: as above.
            unsafe { self.driver().free(*at) };
        }
    }
}

/// A point in a queue.
pub struct CudaEvent {
    engine: Arc<Engine>,
    mark: Mark,
}

impl CudaEvent {
    pub(crate) fn record(queue: &Queue) -> Result<CudaEvent> {
        queue.check()?;
        let mark = queue.kept("record", queue.driver().mark())?;
        let event = CudaEvent { engine: queue.engine.clone(), mark };
        queue.kept("record", queue.driver().record(mark, queue.stream))?;
        Ok(event)
    }

    pub(crate) fn wait(&self, queue: &Queue) -> Result<()> {
        queue.check()?;
        if self.engine.device != queue.engine.device {
            return Err(ErrorKind::Device { op: "wait", devices: vec![self.engine.device, queue.engine.device] }.into());
        }
        queue.kept("wait", queue.driver().wait(queue.stream, self.mark))
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        self.engine.driver.destroy_mark(self.mark);
    }
}
