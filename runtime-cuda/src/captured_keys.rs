//! The keys of random bits that a captured step draws. A kernel's parameters are frozen at the capture, so the keys are
//! in device memory, which is filled before every launch.

use std::sync::Arc;

use numcore::{DeviceId, Error, Result};
use parking_lot::Mutex;

use crate::{driver::backend, memory::Memory};

/// The most keys of one captured step; each draw, such as a dropout, takes one.
const MOST: usize = 8192;
const BYTES: usize = MOST * size_of::<u64>();

/// A captured step's distinct keys, in the order of first use.
pub(crate) struct CapturedKeys {
    device: DeviceId,
    memory: Arc<Memory>,
    /// The device address of the keys. Allocated outside of the pool, whose free blocks are for the step.
    table: u64,
    keys: Mutex<Vec<u64>>,
}

impl CapturedKeys {
    pub(crate) fn new(device: DeviceId, memory: &Arc<Memory>) -> Result<CapturedKeys> {
        let table = memory.driver_alloc(BYTES).map_err(|e| backend("capture", device, e))?;
        let table = table.ok_or_else(|| memory.exhausted(BYTES))?;
        Ok(CapturedKeys { device, memory: memory.clone(), table, keys: Mutex::default() })
    }

    /// Returns the address at which kernels find a key. Equal keys share an address, so a mask that backward draws
    /// again equals that of forward.
    ///
    /// # Errors
    ///
    /// The step has more than `MOST` distinct keys.
    pub(crate) fn address(&self, op: &'static str, key: u64) -> Result<u64> {
        let mut keys = self.keys.lock();
        let at = keys.iter().position(|k| *k == key).unwrap_or(keys.len());
        if at == MOST {
            let why = format!("a captured step draws random values with more than {MOST} keys");
            return Err(Error::unsupported_on(self.device, op, why));
        }
        if at == keys.len() {
            keys.push(key);
        }
        Ok(self.table + (at * size_of::<u64>()) as u64)
    }

    pub(crate) fn count(&self) -> usize {
        self.keys.lock().len()
    }

    /// The device address of the keys, which lie one after another.
    pub(crate) fn table(&self) -> u64 {
        self.table
    }
}

impl Drop for CapturedKeys {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`. Only kernels of the captured step read it, on this queue.
        unsafe { self.memory.driver_free(&[self.table]) };
    }
}
