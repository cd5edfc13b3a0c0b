//! The cache of lowered kernels. A hit never changes a result, so the order of the table does not matter.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use numcore::{Result, pointwise::Program};
use parking_lot::RwLock;

use super::{form::Form, kernel::Kernel, lower::lower};
use crate::Simd;

/// The most kernels in the cache.
const CAPACITY: usize = 2048;

/// Kernels by program, types and form; the least recently used go first.
#[derive(Default)]
pub(crate) struct Cache {
    kernels: RwLock<HashMap<u64, CachedKernel, BuildHasherDefault<Ready>>>,
    /// Counts insertions: a coarse clock.
    clock: AtomicU64,
}

struct CachedKernel {
    program: Program,
    form: Form,
    kernel: Arc<Kernel>,
    used: AtomicU64,
}

impl Cache {
    /// The kernel of a program in this form, lowered if it is not cached.
    pub(crate) fn get(&self, program: &Program, form: &Form, simd: Simd) -> Result<Arc<Kernel>> {
        let key = key(program, form);
        if let Some(entry) = self.kernels.read().get(&key).filter(|e| e.form == *form && e.program == *program) {
            let now = self.clock.load(Relaxed);
            if entry.used.load(Relaxed) != now {
                entry.used.store(now, Relaxed);
            }
            return Ok(entry.kernel.clone());
        }
        let outputs: smallvec::SmallVec<[_; 4]> =
            form.outputs.iter().map(|o| (!form.converts).then_some(o.dtype())).collect();
        let typed = program.resolve(&form.inputs, &outputs)?;
        let kernel = Arc::new(lower(program, &typed, form, simd)?);
        self.keep(
            key,
            CachedKernel {
                program: program.clone(),
                form: form.clone(),
                kernel: kernel.clone(),
                used: AtomicU64::new(0),
            },
        );
        Ok(kernel)
    }

    fn keep(&self, key: u64, entry: CachedKernel) {
        entry.used.store(self.clock.fetch_add(1, Relaxed) + 1, Relaxed);
        let mut kernels = self.kernels.write();
        kernels.insert(key, entry);
        if kernels.len() > CAPACITY {
            let mut ages: Vec<u64> = kernels.values().map(|e| e.used.load(Relaxed)).collect();
            let middle = ages.len() / 2;
            let limit = *ages.select_nth_unstable(middle).1;
            kernels.retain(|_, e| e.used.load(Relaxed) >= limit);
        }
    }
}

fn key(program: &Program, form: &Form) -> u64 {
    let mut hash = program.hash();
    hash ^= u64::from(form.converts);
    let mut mix = |x: u64| hash = (hash ^ x).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    form.inputs.iter().zip(&form.own).for_each(|(d, own)| mix(*d as u64 | own.map_or(0, |k| u64::from(k) + 1) << 8));
    form.outputs.iter().for_each(|o| mix(1 << 32 | o.code()));
    hash
}

/// A hasher that passes keys through, because they are hashes already.
#[derive(Default)]
struct Ready(u64);

impl Hasher for Ready {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|b| self.0 = self.0.rotate_left(8) ^ u64::from(*b));
    }

    fn write_u64(&mut self, x: u64) {
        self.0 = x;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
