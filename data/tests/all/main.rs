//! Datasets, loaders and formats of files.

mod audio;
mod augment;
mod columns;
#[path = "../common/mod.rs"]
mod common;
mod formats;
mod gguf;
mod loader;
mod numpy;
mod pack;
mod sampling;
mod sources;
mod stream;
mod tokens;

/// The folder of what others computed or wrote; `conformance/against` has the scripts.
fn references() -> std::path::PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/references")
}
