//! Values in place of others in this thread, by the identity of what they replace.

use std::{
    any::Any,
    cell::{Cell, RefCell},
};

/// A value of any type, with the identity of the one that it replaces.
pub(crate) type Replacement = (usize, Box<dyn Any>);

thread_local! {
    /// The replacements; of one identity, the last one counts.
    static REPLACED: RefCell<Vec<Replacement>> = const { RefCell::new(Vec::new()) };
    /// True if there are any.
    static REPLACES: Cell<bool> = const { Cell::new(false) };
}

/// Runs `f` with these replacements in addition to those of the caller.
pub(crate) fn with_replaced<T>(values: Vec<Replacement>, f: impl FnOnce() -> T) -> T {
    struct Restore {
        before: usize,
        replaces: bool,
    }
    impl Drop for Restore {
        fn drop(&mut self) {
            REPLACES.set(self.replaces);
            REPLACED.with_borrow_mut(|all| all.truncate(self.before));
        }
    }
    let _restore = Restore { before: REPLACED.with_borrow(Vec::len), replaces: REPLACES.replace(true) };
    REPLACED.with_borrow_mut(|all| all.extend(values));
    f()
}

/// The value in place of the one with this identity.
pub(crate) fn replaced<T: Clone + 'static>(id: usize) -> Option<T> {
    if !REPLACES.get() {
        return None;
    }
    REPLACED.with_borrow(|all| all.iter().rev().find(|(of, _)| *of == id)?.1.downcast_ref::<T>().cloned())
}
