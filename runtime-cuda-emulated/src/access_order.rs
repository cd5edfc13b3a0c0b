//! The interface of tests to a driver that checks the order of accesses: its findings, and failures to inject.

use std::{fmt, sync::Arc, time::Duration};

use parking_lot::Mutex;

use crate::{
    candidates::GemmCandidates, memory::EmulatedMemory, order_state::OrderState, ordered::Ordered, refusal::GemmRefusal,
};

/// The findings of the race detector: the number of checked operations, and a line for each unordered access.
#[derive(Clone)]
pub struct AccessOrder(Arc<Mutex<OrderState>>, EmulatedMemory);

impl AccessOrder {
    pub(crate) fn of(driver: &Ordered) -> AccessOrder {
        AccessOrder(driver.state.clone(), driver.inner.memory.clone())
    }

    /// The number of operations checked so far.
    pub fn operations(&self) -> usize {
        self.0.lock().operations
    }

    /// Unordered accesses since the last call, at most 100.
    pub fn complaints(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().complaints)
    }

    /// Makes the emulated library refuse the products of `refusal` from now on.
    pub fn refuse_gemms(&self, refusal: GemmRefusal) {
        self.0.lock().refusal = refusal;
    }

    /// Makes the library offer, for every product from now on, one algorithm for each of `times`, which is its
    /// duration.
    pub fn offer_gemms(&self, times: impl Into<Vec<Duration>>) {
        self.0.lock().candidates = GemmCandidates::taking(times.into());
    }

    /// The requests to the library since the last offer.
    pub fn gemm_candidates(&self) -> GemmCandidates {
        self.0.lock().candidates.clone()
    }

    /// Makes one copy from the host fail, after `copies` that succeed.
    pub fn fail_copy_after(&self, copies: usize) {
        self.0.lock().copies_left = Some(copies);
    }

    /// The memory of the device, which can be limited.
    pub fn memory(&self) -> &EmulatedMemory {
        &self.1
    }

    /// Makes later calls fail, as when a device is lost.
    pub fn unplug(&self) {
        self.0.lock().gone = true;
    }
}

impl fmt::Debug for AccessOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Order({} operations)", self.operations())
    }
}
