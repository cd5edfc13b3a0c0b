//! Datasets, loaders and formats of files.

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
