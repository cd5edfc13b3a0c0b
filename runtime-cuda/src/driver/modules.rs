//! Modules by the text that they were compiled from: kernels of one text are in one module.

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;

use super::{Fallible, KernelSource, compile::hash};

/// A hash of a text, and whether its products and sums are contracted.
type TextKey = ([u64; 2], bool);

/// The modules that a driver has loaded. None is unloaded: kernels are kept for good.
#[derive(Debug)]
pub struct LoadedModules<M> {
    /// The thread that loads a module holds its lock; others load other texts meanwhile.
    slots: Mutex<HashMap<TextKey, Arc<Mutex<Option<M>>>>>,
}

impl<M> Default for LoadedModules<M> {
    fn default() -> Self {
        LoadedModules { slots: Mutex::default() }
    }
}

impl<M: Clone> LoadedModules<M> {
    /// Returns the module of a text, by `load` if it is new. A failure is not kept.
    pub fn get_or_load(&self, source: &KernelSource, load: impl FnOnce() -> Fallible<M>) -> Fallible<M> {
        let key = ([0, 1].map(|seed| hash(source.text.as_bytes(), seed)), source.contracts);
        let slot = self.slots.lock().entry(key).or_default().clone();
        let mut slot = slot.lock();
        if let Some(module) = &*slot {
            return Ok(module.clone());
        }
        let module = load()?;
        *slot = Some(module.clone());
        Ok(module)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{
            Barrier,
            atomic::{AtomicU32, Ordering},
        },
        thread,
        time::Duration,
    };

    use super::*;
    use crate::driver::DriverFailure;

    fn source(text: &str, entry: &str, contracts: bool) -> KernelSource {
        KernelSource { text: text.into(), entry: entry.into(), contracts }
    }

    #[test]
    fn entries_of_one_text_share_a_module() {
        let modules = LoadedModules::default();
        let module = |text, entry, contracts, number| {
            modules.get_or_load(&source(text, entry, contracts), || Ok(number)).unwrap()
        };
        assert_eq!([module("a", "x", true, 1), module("a", "y", true, 2)], [1, 1]);
        assert_eq!([module("b", "x", true, 3), module("a", "x", false, 4), module("b", "y", true, 5)], [3, 4, 3]);
    }

    #[test]
    fn threads_that_load_one_text_at_once_load_it_once() {
        let (modules, loads, barrier) = (LoadedModules::default(), AtomicU32::new(0), Barrier::new(8));
        let load = || {
            barrier.wait();
            modules.get_or_load(&source("a", "x", true), || {
                thread::sleep(Duration::from_millis(20));
                Ok(loads.fetch_add(1, Ordering::Relaxed))
            })
        };
        let found: Vec<u32> = thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(load)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap().unwrap()).collect()
        });
        assert_eq!((found, loads.into_inner()), (vec![0; 8], 1));
    }

    #[test]
    fn a_text_that_failed_to_load_is_tried_again() {
        let modules = LoadedModules::default();
        let failed = modules.get_or_load(&source("a", "x", true), || Err::<u32, _>(DriverFailure::new("no memory")));
        assert!(failed.is_err());
        assert_eq!(modules.get_or_load(&source("a", "x", true), || Ok(7)).unwrap(), 7);
    }
}
