//! What the kernels of the CPU compute, at every instruction set and number of threads.
#![allow(missing_docs)]

mod attention;
mod bits;
mod common;
mod float8;
mod gemv;
mod hot;
mod index;
mod linear;
mod linear4bit;
mod memory;
mod norms;
mod scored_attention;
mod streamed;
mod windows;
