//! Datasets in files. A malformed record is an error that names the file and the line or record. Other records stay
//! readable.

mod csv;
mod idx;
#[cfg(feature = "image")]
pub mod image;
mod jsonl;
mod npy;
#[cfg(feature = "parquet")]
mod parquet;
mod safetensors;
mod tar;
mod text;
#[cfg(feature = "text")]
mod tokenizer;

pub use csv::{Csv, CsvRow};
pub use idx::read_idx;
pub use jsonl::{JsonLine, JsonLines};
pub use npy::{NpyRows, read_npy, read_npz};
#[cfg(feature = "parquet")]
pub use parquet::{Parquet, ParquetRow};
pub use safetensors::SafetensorsRows;
pub use tar::{TarExample, TarShards};
pub use text::{Characters, TextFile, TextFolder, TextLines};
#[cfg(feature = "text")]
pub use tokenizer::Tokenizer;
