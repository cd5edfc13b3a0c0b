//! Datasets, orders and loaders: batches that depend on nothing but a seed and an epoch.
//!
//! A [`Dataset`] reads examples by index. An [order] gives the example at each position of an epoch. A [`Loader`] cuts
//! positions into batches, shares them among ranks, and makes them ahead in worker threads.
//!
//! ```
//! use data::{Array, Dataset, Loader, Rows};
//! use runtime_cpu::Cpu;
//! # fn main() -> numcore::Result<()> {
//! let inputs = Rows::new(Array::new([100, 3], vec![0.5f32; 300])?)?;
//! let labels = Rows::new(Array::from_vec(vec![1i64; 100]))?;
//! let cpu = Cpu::new();
//! let loader = Loader::new(inputs.zip(labels)?).batch(32).shuffle(7).workers(2).stack().on(&cpu);
//! for batch in loader.epoch(0)? {
//!     let (x, y) = batch?.data;
//!     assert_eq!(x.dims()[0], y.dims()[0]);
//! }
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

mod array;
pub mod calendar;
mod collate;
pub mod columns;
mod dataset;
mod files;
pub mod gguf;
mod loader;
pub mod mel;
pub mod mix;
pub mod order;
pub mod pack;
pub mod protobuf;
pub mod random;
pub mod sources;
pub mod split;
pub mod stream;
pub mod tokens;

pub use array::Array;
pub use collate::{Padded, Stack, ToDevice, pad};
pub use dataset::{Concat, Dataset, InMemory, Map, Rows, Subset, Zip};
pub use loader::{Batch, Batches, Last, Loader, Share, State};
