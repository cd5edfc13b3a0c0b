//! Panics as failures: one wrong kernel must not hide later failures.

use std::{
    fmt::Display,
    panic::{AssertUnwindSafe, catch_unwind},
};

/// Runs `f`; its error or its panic becomes text.
pub(crate) fn caught<T, E: Display>(f: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    // A value that a panic left half done is dropped with `f`, and no code sees it afterwards.
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(result) => result.map_err(|e| e.to_string()),
        Err(panic) => {
            let text = panic.downcast_ref::<&str>().map(|s| (*s).to_string());
            let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
            Err(format!("panicked: {}", text.unwrap_or_default()))
        }
    }
}
