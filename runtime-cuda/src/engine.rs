//! The state that all queues of one GPU share: its driver, the kernels compiled so far, and its properties.

use std::{
    collections::{BTreeMap, HashMap},
    hash::Hash,
    sync::{Arc, Weak},
};

use numcore::{
    Capabilities, DType, DeviceId, DeviceKind, Result,
    pointwise::{Program, Typed},
};
use parking_lot::Mutex;

use crate::{
    codegen::{KernelSource, form::ElementBody, pointwise, reduce},
    driver::{CudaDriver, Driver, Fallible, KernelFunction, backend},
    handwritten::HandwrittenKernel,
    memory::DeviceMemory,
    tuned::TunedProducts,
};

/// One GPU, shared by all of its queues.
pub(crate) struct Engine {
    pub driver: Arc<dyn Driver>,
    pub memory: Arc<DeviceMemory>,
    pub device: DeviceId,
    pub capabilities: Capabilities,
    pub tuned: TunedProducts,
    generated: Mutex<HashMap<KernelKey, Arc<Generated>>>,
    written: Mutex<HashMap<HandwrittenKernel, KernelFunction>>,
}

/// The cache key of a generated kernel.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) enum KernelKey {
    Pointwise(Program, pointwise::PointwiseSpec),
    Reduce(Program, reduce::ReduceSpec),
}

impl KernelKey {
    fn source(&self, typed: &Typed) -> Result<(KernelSource, ElementBody)> {
        match self {
            KernelKey::Pointwise(program, form) => pointwise::source(program, typed, form),
            KernelKey::Reduce(map, form) => reduce::source(map, typed, form),
        }
    }
}

/// A kernel generated around a program, and the parameters it takes besides operands.
pub(crate) struct Generated {
    pub function: KernelFunction,
    pub entry: String,
    pub body: ElementBody,
}

/// A weak reference to the engine of a GPU that is or was in use, so that an unused device is closed. The thread that
/// opens the device holds the lock; other GPUs can be opened meanwhile.
type EngineSlot = Arc<Mutex<Weak<Engine>>>;

/// Engines by the index of their GPU. Tensors of two handles of one GPU may be used together, so the handles must share
/// its context.
static OPEN: Mutex<BTreeMap<u32, EngineSlot>> = Mutex::new(BTreeMap::new());

impl Engine {
    /// Returns the engine of GPU `index`, which is opened once per process.
    pub(crate) fn open(index: u32) -> Result<Arc<Engine>> {
        let device = DeviceId { kind: DeviceKind::Cuda, index };
        Self::shared(device, || CudaDriver::new(index).map(|d| Arc::new(d) as Arc<dyn Driver>))
    }

    /// Returns the engine of a device; opens the device with `driver` if it is not open yet.
    pub(crate) fn shared(device: DeviceId, driver: impl FnOnce() -> Fallible<Arc<dyn Driver>>) -> Result<Arc<Engine>> {
        let slot = OPEN.lock().entry(device.index).or_default().clone();
        let mut open = slot.lock();
        if let Some(engine) = open.upgrade() {
            return Ok(engine);
        }
        let driver = driver().map_err(|e| backend("Cuda::new", device, e))?;
        let engine = Arc::new(Engine::new(driver, device));
        *open = Arc::downgrade(&engine);
        Ok(engine)
    }

    /// Creates an engine on `driver`, which no other handle shares.
    pub(crate) fn new(driver: Arc<dyn Driver>, device: DeviceId) -> Engine {
        let about = driver.about();
        let capabilities = Capabilities {
            name: about.name.clone(),
            storage: DType::ALL.into_iter().filter(|d| !d.is_storage()).collect(),
            compute: DType::ALL.iter().copied().filter(|d| d.compute() == *d).collect(),
            parallelism: about.processors,
            max_binding: about.memory,
            // The weight's gradient is read and written once for each chunk of logits.
            piece: 512 << 20,
        };
        let memory = DeviceMemory::new(driver.clone(), device);
        let (generated, written) = (Mutex::default(), Mutex::default());
        Engine { driver, memory, device, capabilities, tuned: TunedProducts::default(), generated, written }
    }

    /// Returns the generated kernel of this key, with its program typed by `typed`; compiles it at first use.
    pub(crate) fn generated(&self, key: KernelKey, typed: &Typed) -> Result<Arc<Generated>> {
        if let Some(kernel) = self.generated.lock().get(&key) {
            return Ok(kernel.clone());
        }
        // The lock is not held here: compiling takes a tenth of a second. Two threads may both compile; both results
        // are right.
        let (source, body) = key.source(typed)?;
        let function = self.load(&source, 0)?;
        let kernel = Arc::new(Generated { function, entry: source.entry, body });
        self.generated.lock().insert(key, kernel.clone());
        Ok(kernel)
    }

    /// Returns a hand-written kernel, compiled and loaded at first use. `shared` is its dynamic shared memory in bytes.
    pub(crate) fn written(&self, kernel: &HandwrittenKernel, shared: u32) -> Result<KernelFunction> {
        if let Some(function) = self.written.lock().get(kernel) {
            return Ok(*function);
        }
        let function = self.load(&kernel.source()?, shared)?;
        self.written.lock().insert(kernel.clone(), function);
        Ok(function)
    }

    /// Descriptions of the hand-written kernels that were loaded, in order.
    pub(crate) fn loaded_kernels(&self) -> Vec<String> {
        let mut loaded: Vec<String> = self.written.lock().keys().map(HandwrittenKernel::describe).collect();
        loaded.sort();
        loaded
    }

    fn load(&self, source: &KernelSource, shared: u32) -> Result<KernelFunction> {
        self.driver.load(source, shared).map_err(|e| backend("compile", self.device, e))
    }
}
