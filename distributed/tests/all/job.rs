//! The processes that run these tests together: this one alone, where ranks are threads.

/// What names of files that they share begin with.
pub fn id() -> u32 {
    std::process::id()
}

/// Returns when all of them have come here.
pub fn meet() {}
