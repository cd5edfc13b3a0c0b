//! Interning of names as numbers, so that a span is a few words of memory.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

/// The number that stands for no name.
pub(super) const NONE: u32 = u32::MAX;

/// All names ever used, in the order of their first use.
#[derive(Default)]
struct Names {
    numbers: HashMap<Arc<str>, u32>,
    names: Vec<Arc<str>>,
}

static NAMES: Mutex<Option<Names>> = Mutex::new(None);

/// The number of a name, which stays the same in this process.
pub(super) fn intern(name: &str) -> u32 {
    let mut all = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    let all = all.get_or_insert_default();
    if let Some(&number) = all.numbers.get(name) {
        return number;
    }
    let (name, number) = (Arc::<str>::from(name), all.names.len() as u32);
    all.names.push(Arc::clone(&name));
    all.numbers.insert(name, number);
    number
}

/// The name of a number that [`intern`] returned.
pub(super) fn name_of(number: u32) -> Option<Arc<str>> {
    let all = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    all.as_ref()?.names.get(number as usize).cloned()
}

/// The numbers of a thread's recent names, looked up by the address of the name: no lock for a name used before.
pub(super) struct NameCache([(usize, usize, u32); NameCache::SLOTS]);

impl NameCache {
    const SLOTS: usize = 64;

    pub(super) const fn new() -> Self {
        NameCache([(0, 0, NONE); Self::SLOTS])
    }

    /// The number of a name. A `'static` string never changes, so its address and length identify it.
    #[inline]
    pub(super) fn number(&mut self, name: &'static str) -> u32 {
        let (at, length) = (name.as_ptr() as usize, name.len());
        let slot = &mut self.0[(at ^ at >> 6 ^ length) % Self::SLOTS];
        if (slot.0, slot.1) != (at, length) {
            *slot = (at, length, intern(name));
        }
        slot.2
    }
}
