//! What a test asks of a driver that checks order, and what it makes the driver do.

use std::{fmt, sync::Arc, time::Duration};

use parking_lot::Mutex;

use super::{EmulatedMemory, candidates::GemmCandidates, ordered::OrderState, refusal::GemmRefusal};

/// The findings: the number of checked operations, and a line for each unordered access.
#[derive(Clone)]
pub struct AccessOrder(Arc<Mutex<OrderState>>, EmulatedMemory);

impl AccessOrder {
    pub(super) fn new(state: Arc<Mutex<OrderState>>, memory: EmulatedMemory) -> AccessOrder {
        AccessOrder(state, memory)
    }

    /// The number of operations so far.
    pub fn operations(&self) -> usize {
        self.0.lock().operations
    }

    /// Unordered accesses, since the last call.
    pub fn complaints(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().complaints)
    }

    /// From here on the library refuses what `refusal` says.
    pub fn refuse_gemms(&self, refusal: GemmRefusal) {
        self.0.lock().refusal = refusal;
    }

    /// From here on the library offers algorithms for every product that take so long.
    pub fn offer_gemms(&self, times: impl Into<Vec<Duration>>) {
        self.0.lock().candidates = GemmCandidates::taking(times.into());
    }

    /// What was asked of the library since the last offer.
    pub fn gemm_candidates(&self) -> GemmCandidates {
        self.0.lock().candidates.clone()
    }

    /// Makes one copy from the host fail: the one after so many others.
    pub fn fail_copy_after(&self, copies: usize) {
        self.0.lock().copies_left = Some(copies);
    }

    /// The memory of the device, which can be limited.
    pub fn memory(&self) -> &EmulatedMemory {
        &self.1
    }

    /// Makes every later call fail, as when a device is lost.
    pub fn unplug(&self) {
        self.0.lock().gone = true;
    }
}

impl fmt::Debug for AccessOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Order({} operations)", self.operations())
    }
}
